"""How long runs take, from a few batches."""

import itertools
from types import SimpleNamespace

import pytest
import torch
from small_recipes import STRATEGIES, short_recipe, small_recipe

from covon_avalanche.experiment import estimate
from covon_avalanche.experiment.run import checked_benchmark


@pytest.fixture(scope="module")
def benchmark():
    """The data of all short recipes."""
    return checked_benchmark(short_recipe("finetune"), 0)


def test_the_estimated_time_is_that_of_all_steps_and_the_ends_of_domains(benchmark, monkeypatch):
    """A batch takes a second: 2 epochs of 4 batches in 2 domains; so does the end of a domain."""
    clock = SimpleNamespace(process_time=itertools.count().__next__, monotonic=lambda: 0.0)
    clock.perf_counter = lambda: 99.0  # which depends on what else runs
    monkeypatch.setattr(estimate, "time", clock)
    monkeypatch.setattr(estimate, "_BUDGET", 6 * 64 / 2)
    timed, time_batches, threads = [], estimate._time_batches, []

    def spied(of, *how):
        timed.append((how, time_batches(of, *how)))
        return timed[-1][1]

    monkeypatch.setattr(estimate, "_time_batches", spied)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    monkeypatch.setattr(torch, "set_num_threads", threads.append)
    found = estimate.estimated_seconds(short_recipe("finetune"), "finetune", benchmark)
    assert found == (2 * 4 * 2, 2)
    assert timed == [((2, 3), (1 / 2, 6, 1, 0)), ((64, 6), (1 / 64, 200, 1, 0))]
    assert threads == [1, 3]
    assert len(benchmark.train_stream[0].dataset) == 200


@pytest.mark.parametrize(("name", "merges"), [("ewc", 2), ("joint", 1)])
def test_passes_after_training_are_in_the_estimated_time(name, merges, benchmark, monkeypatch):
    """Such a pass takes 2 seconds an image, and a merge 3 seconds."""
    images = {(2, 3): 6, (64, 6): 384}
    timed = {how: estimate._Timed(1 / 64, n, 2 * n + 3) for how, n in images.items()}
    monkeypatch.setattr(estimate, "_time_batches", lambda _, *how: timed[how])
    monkeypatch.setattr(estimate, "_BUDGET", 6.0)
    found = estimate.estimated_seconds(short_recipe(name), name, benchmark)
    assert found == pytest.approx((2 * 4 * 2, merges * 3 + 2 * 200 * 2))


def test_ridge_regressions_are_estimated_from_fewer_features(benchmark, monkeypatch):
    """With 4 times as many features sums take 16 times as long, each of 18 solutions 64 times."""
    seconds = itertools.count().__next__
    monkeypatch.setattr(estimate, "time", SimpleNamespace(process_time=seconds))
    monkeypatch.setattr(estimate, "_FEATURES", 10)
    recipe = small_recipe({"own": {"kind": "ranpac", "projection": 40, "flip": True}})
    found = estimate.estimated_seconds(recipe, "own", benchmark)
    assert found == (2 * 400 / 2, pytest.approx(2 * 400 * 16 / 10 + 2 * 18 * 64))


def test_evaluations_are_a_third_of_training_images_or_all_in_closed_form():
    recipe = small_recipe({k: STRATEGIES[k] for k in ("finetune", "covon", "joint", "ncm")})
    recipe = recipe.model_copy(update={"epochs": 4, "posterior_samples": 3})
    benchmark = checked_benchmark(recipe, 0)
    trained, tested = 2 * 23 * 64, 2 * 360  # in batches of 64: of 1437 and 360 images a domain

    def images(name, seconds):
        return estimate.evaluation_seconds(recipe, name, benchmark, seconds)

    assert images("finetune", 4.0 * trained * 3) == pytest.approx(2 * tested)
    assert images("covon", 4.0 * trained * 3) == pytest.approx((2 + 3) * tested)
    assert images("joint", 4.0 * trained * 3) == pytest.approx(tested)
    assert images("ncm", 2.0 * 1437) == pytest.approx(2 * tested)


@pytest.mark.parametrize("name", [*STRATEGIES])
def test_a_few_batches_are_trained_to_estimate_the_time(name, benchmark, monkeypatch):
    monkeypatch.setattr(estimate, "_BUDGET", 0.0)
    assert estimate.estimated_seconds(short_recipe(name), name, benchmark).steps > 0
