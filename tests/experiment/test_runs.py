"""Runs, grids, results and reports, on a tiny recipe with real digits."""

import json
import os
from typing import get_args

import pytest
from small_recipes import STRATEGIES, small_recipe

from covon_avalanche.atomic_write import write_atomically
from covon_avalanche.experiment.grid import Job, run_grid
from covon_avalanche.experiment.recipe import Recipe
from covon_avalanche.experiment.run import run_strategy
from covon_avalanche.experiment.run_folder import RunFolder
from covon_avalanche.experiment.strategy_settings import KINDS


@pytest.fixture(scope="module")
def recipe() -> Recipe:
    """All kinds of strategies on two domains, for one epoch, with a small network."""
    assert {s["kind"] for s in STRATEGIES.values()} == {
        get_args(kind.model_fields["kind"].annotation)[0] for kind in KINDS
    }
    return small_recipe(STRATEGIES, epochs=1, train_mb_size=32, seeds=[0, 1])


@pytest.fixture(scope="module")
def results(recipe, tmp_path_factory):
    """All strategies of the recipe with both seeds, in two processes."""
    folder, events = tmp_path_factory.mktemp("runs"), []
    jobs = [Job(strategy, seed) for seed in (0, 1) for strategy in recipe.strategies]
    found = run_grid(recipe, jobs, folder, processes=2, notify=events.append)
    return folder, jobs, found, events


def test_every_strategy_runs_and_learns_something(recipe, results):
    _, jobs, found, events = results
    assert [(r.strategy, r.seed) for r in found] == [(j.strategy, j.seed) for j in jobs]
    assert not [e.error for e in events if e.error]
    for result in found:
        assert max(result.accuracy[-1]) > 0.25, result.strategy  # chance is 0.1
        assert [e.images for e in result.epochs[:1]] == [1437 * (1 + (result.bwt is None))]
        assert len(result.accuracy) == 2
        assert (result.bwt is None) == (result.strategy == "joint")
        assert result.counts == [360, 360]
        assert all(s > 0 for s in result.train_seconds)
        assert result.calibration.keys() == {"nll", "brier", "ece"}


def test_results_on_disk_are_what_was_returned(recipe, results):
    folder, jobs, found, _ = results
    for job, result in zip(jobs, found, strict=True):
        assert RunFolder(folder, recipe, job.strategy, job.seed).result() == result
    assert len(list(folder.rglob("result.json"))) == len(jobs)
    assert not list(folder.rglob("*.part"))
    assert not list(folder.rglob("*.safetensors"))


def test_progress_is_told_domain_by_domain(results):
    _, jobs, _, events = results
    for job in jobs:
        domains = [e.domains for e in events if e.job == job]
        assert domains == sorted(domains)
        assert domains[-1] == 2


def test_the_same_seed_gives_the_same_result_in_any_process(recipe, results):
    _, jobs, found, _ = results
    for strategy in ("covon", "vcl", "ewc-star"):
        again = run_strategy(recipe, strategy, 1)
        before = found[jobs.index(Job(strategy, 1))]
        assert again.accuracy == before.accuracy
        assert found[jobs.index(Job(strategy, 0))].accuracy != before.accuracy


def test_a_failing_run_is_reported_and_the_others_finish(recipe, tmp_path):
    broken = recipe.model_copy(
        update={
            "strategies": {
                "finetune": recipe.strategies["finetune"],
                "covon": recipe.strategies["covon"].model_copy(
                    update={"lr": 1e30, "clip_radius": 1e30}
                ),
            }
        }
    )
    events = []
    jobs = [Job("covon", 0), Job("finetune", 0)]
    found = run_grid(broken, jobs, tmp_path, processes=1, notify=events.append)
    assert [r.strategy for r in found] == ["finetune"]
    (failure,) = [e for e in events if e.error]
    assert failure.job == Job("covon", 0)
    assert failure.error.startswith("FloatingPointError: ")
    assert not failure.bad_input
    assert [p.parent.parent.name for p in tmp_path.rglob("result.json")] == ["finetune"]


def test_a_process_that_is_killed_takes_only_its_own_job_along(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "dies.py").write_text(DIES)
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / ".theirs.1.part").write_text("another process writes this")
    custom = dict(kind="custom", lr=0.01, implementation="dies:Dies")
    strategies = {"dies": custom, "finetune": STRATEGIES["finetune"]}
    recipe = small_recipe(strategies, epochs=1, seeds=[0, 1])
    jobs, events = [Job("dies", 0), Job("finetune", 0), Job("finetune", 1)], []
    found = run_grid(recipe, jobs, tmp_path / "runs", processes=2, notify=events.append)
    assert [(r.strategy, r.seed) for r in found] == [("finetune", 0), ("finetune", 1)]
    (failure,) = [e for e in events if e.error]
    assert failure.job == Job("dies", 0)
    assert "its process died twice" in failure.error
    assert [p.name for p in tmp_path.rglob("*.part")] == [".theirs.1.part"]


@pytest.mark.parametrize(
    ("raised", "told", "bad_input"),
    [
        ("Unpleasant(3, 4)", "Unpleasant: 3 of 4", False),
        ("ValueError('no such mixture')", "no such mixture", True),
        ("SystemExit('enough')", "SystemExit: enough", False),
    ],
)
def test_what_the_users_module_raises_is_told(raised, told, bad_input, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "raises.py").write_text(RAISES.format(raised))
    custom = dict(kind="custom", lr=0.01, implementation="raises:Raises")
    strategies = {"raises": custom, "finetune": STRATEGIES["finetune"]}
    recipe = small_recipe(strategies, epochs=1, seeds=[0])
    events = []
    found = run_grid(
        recipe, [Job("raises", 0), Job("finetune", 0)], tmp_path, processes=2, notify=events.append
    )
    assert [r.strategy for r in found] == ["finetune"]
    (failure,) = [e for e in events if e.error]
    assert (failure.error, failure.bad_input) == (told, bad_input)
    assert f"raise {raised}" in failure.log.read_text(encoding="utf-8")


RAISES = """
from avalanche.training.plugins import SupervisedPlugin

class Unpleasant(Exception):
    def __init__(self, some, of):
        super().__init__(str(some) + " of " + str(of))

class Raises(SupervisedPlugin):
    def before_training(self, *args, **kwargs):
        raise {}
"""
DIES = """
import os, pathlib, signal
from avalanche.training.plugins import SupervisedPlugin

class Dies(SupervisedPlugin):
    def before_training(self, *args, **kwargs):
        pathlib.Path("runs", f".mine.{os.getpid()}.part").write_text("half")
        os.kill(os.getpid(), signal.SIGKILL)  # as the kernel does when memory is short
"""


def test_validation_runs_never_touch_the_test_images(recipe):
    result = run_strategy(recipe, "finetune", 0, stream="valid", validation_size=100)
    assert result.counts == [100, 100]
    assert result.stream == "valid"


def test_the_validation_images_of_a_recipe_are_always_held_out(recipe):
    stream = recipe.stream.model_copy(update={"validation_size": 1337, "permute_first": True})
    held_out = recipe.model_copy(update={"stream": stream})
    whole, part = (run_strategy(r, "finetune", 0) for r in (recipe, held_out))
    assert part.counts == whole.counts == [360, 360]
    assert part.average_accuracy < whole.average_accuracy - 0.1  # from 100 images
    assert run_strategy(held_out, "finetune", 0, stream="valid").counts == [1337, 1337]


def test_a_run_of_covon_tells_its_diagnostics(results):
    for result in results[2]:
        if result.strategy.startswith("covon"):
            assert len(result.diagnostics) == 2
            assert all(0 <= d["hess_at_start"] <= 1 for d in result.diagnostics)
        elif result.strategy != "ema":
            assert result.diagnostics == []


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "result.json"
    write_atomically(path, "old")
    plain = tmp_path / "plain"
    plain.write_text("")
    assert path.stat().st_mode == plain.stat().st_mode  # as readable as any file
    plain.unlink()

    def full(*_):
        raise OSError("no space left")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="no space left"):
        write_atomically(path, "new")
    assert [p.name for p in tmp_path.iterdir()] == ["result.json"]
    assert path.read_text() == "old"


def test_results_are_plain_json_with_all_that_decides_them(recipe, results):
    folder, *_ = results
    data = json.loads(RunFolder(folder, recipe, "covon", 1).result_file.read_text())
    assert data["schema_version"] == 2
    assert data["settings"]["strategy"]["kind"] == "covon"
    assert data["peak_memory"] > 50e6
    assert {"torch", "avalanche-lib", "covon_avalanche", "python"} <= data["versions"].keys()
    assert data["machine"]["threads"] == 1
