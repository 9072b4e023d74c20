"""Searches: resumable, on validation images only, with a budget that counts."""

import json
import math
import random
from collections import Counter
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from made_up_results import made_up
from small_recipes import CLOSED_FORM, STRATEGIES, reproducible, run_strategy, small_recipe

from covon_avalanche.experiment import grid, run
from covon_avalanche.experiment.recipe import Recipe, RecipeError, validate
from covon_avalanche.experiment.result import Result, ResultError
from covon_avalanche.experiment.run_folder import RunFolder, Status
from covon_avalanche.experiment.search import (
    Search,
    run_searches,
    searches_in,
    space_of,
    trials_in,
    with_settings,
)
from covon_avalanche.experiment.search_space import Searched, Space
from covon_avalanche.experiment.trial import Pruned

STREAM = {"name": "PermutedDigits", "n_experiences": 3, "validation_size": 300}


def recipe_of(*names, **changes) -> Recipe:
    strategies = {name: STRATEGIES[name] for name in names}
    return small_recipe(strategies, **({"epochs": 1, "stream": STREAM} | changes))


def search_of(tmp_path, number, name="finetune", seed=7, **changes) -> Search:
    return Search(recipe_of(name, **changes), name, tmp_path / "s", seed, number)


@pytest.fixture
def scores(monkeypatch):
    """Sets the score of each trial by a function of its strategy's settings."""

    def set_to(accuracy):
        def score(search, settings):
            recipe = with_settings(search.recipe, search.strategy, settings)
            return accuracy(recipe.strategies[search.strategy])

        monkeypatch.setattr(Search, "score", score)

    return set_to


@pytest.fixture
def runs(monkeypatch, in_this_process):
    """Runs that take no time: their settings and accuracies, better from one run to the next."""
    made = SimpleNamespace(settings=[], curve=lambda n, settings: [0.5 + n / 100] * 3, ended=[])

    def fake(folder, options):
        made.settings.append(folder.recipe.strategies[folder.strategy])
        with folder.opened():
            folder.write_start({})
            curve = made.curve(len(made.settings), made.settings[-1])
            for domains, accuracy in enumerate(curve, start=1):
                made.ended.append(domains)
                folder.on_domain(domains, accuracy)
            rows = [[accuracy] * len(curve) for accuracy in curve]
            result = made_up(folder.strategy, folder.seed, rows, run_hash=folder.hash)
            folder.write_result(result.model_copy(update={"stream": folder.evaluated_on}))
        return result

    monkeypatch.setattr(run, "run_in_folder", fake)
    return made


def test_arguments_of_a_merge_rule_can_be_searched(tmp_path, runs):
    space = {"merge.gamma": Space(low=0.1, high=1.0)}
    recipe = recipe_of("cofima", search={"cofima": space})
    search = Search(recipe, "cofima", tmp_path, 0, 3)
    run_searches([search])
    first, *_, last = runs.settings
    assert first == recipe.strategies["cofima"]
    assert last.merge.gamma == search.best()[0]["merge.gamma"] != first.merge.gamma
    with pytest.raises(ValueError, match=r"finetune\.merge\.gamma: finetune has no such"):
        recipe_of("finetune", search={"finetune": space})


@pytest.mark.usefixtures("in_this_process")
def test_trials_are_kept_and_only_the_missing_are_run_on_validation_images(tmp_path):
    run_searches([search_of(tmp_path, 2)])
    before = {path: path.read_bytes() for path in tmp_path.rglob("result.json")}
    assert len(before) == 2
    search = search_of(tmp_path, 3)
    run_searches([search])
    trials = [search.trial(settings) for settings in search.plan()]
    results = [trial.result() for trial in trials]
    assert [(r.stream, r.counts, r.seed) for r in results] == [("valid", [300] * 3, 7)] * 3
    assert results[0].settings["strategy"]["lr"] == 0.01  # the recipe's own settings come first
    assert all(path.read_bytes() == content for path, content in before.items())
    whole = run_strategy(search.recipe, "finetune", 7, stream="valid")
    assert reproducible(whole) == reproducible(results[0])
    settings, found = search.best()
    values = [result.average_accuracy for result in results]
    assert found.accuracy == max(values)
    assert settings == search.plan()[values.index(max(values))]
    # What was made beyond the budget does not count.
    assert search_of(tmp_path, 1).best()[0] == {"lr": 0.01}
    # A run of the same settings on test images is another one.
    with pytest.raises(ResultError, match=r"of another run \(finetune, seed 7, valid, hash"):
        RunFolder(search.folder, trials[0].recipe, "finetune", 7).result()


def test_settings_do_not_depend_on_which_trials_have_ended(tmp_path, monkeypatch):
    """Nor on kills, therefore, on the number of processes, and on the order of trials."""
    known = {}
    monkeypatch.setattr(Search, "score", lambda _, settings: known.get(json.dumps(settings)))
    search, whole = search_of(tmp_path, 9, "ewc-star"), []
    rng = random.Random(0)
    while None in (plan := search.plan()):
        missing = [json.dumps(settings) for settings in plan if settings is not None]
        some = rng.choice([text for text in missing if text not in known])
        known[some] = 1 / (1 + abs(json.loads(some)["lr"] - 0.5))
        whole.append(plan)
    assert len(whole) > 5
    for before in whole:
        assert all(a == b for a, b in zip(before, plan, strict=False) if a is not None)


def test_a_trial_whose_process_is_killed_counts_as_failed_after_three_starts(tmp_path):
    search = search_of(tmp_path, 1)
    trial, killed = search.trial(search.plan()[0]), BrokenProcessPool()
    for start in (1, 2, 3):
        with trial.opened():
            trial.write_start({})
        assert trial.gives_up(killed) == ("failed" if start == 3 else None)
        trial.write_failure("its process was killed", trial.gives_up(killed))
        assert search.score({"lr": 0.01}) == (0.0 if start == 3 else None)
    assert search.missing() == []
    assert trial.gives_up(ValueError("the data are gone")) is None


def test_the_state_of_a_killed_trial_that_another_process_runs_now_is_not_written(tmp_path):
    search = search_of(tmp_path, 1)
    trial = search.trial(search.plan()[0])
    with trial.opened():  # by the other process
        for _ in range(3):
            trial.write_start({})
        assert "its process was killed" in grid._killed(trial).error
        assert trial.status() == Status()
    grid._killed(trial)
    assert trial.status().given_up == "failed"


def test_a_draw_that_can_hardly_become_the_best_is_pruned(tmp_path, runs):
    others = [(0.9, 0.8, 0.7)] * 4
    curves = [*others, (0.95, 0.65, 0.9), (0.1, 0.75, 0.75), (0.1, 0.8, 0.7)]
    runs.curve = lambda n, _: curves[n - 1]
    stream = STREAM | {"n_experiences": 6}  # pruned after the second domain at the earliest
    space = {"finetune": {"weight_decay": {"low": 0.01, "high": 0.1}}}
    search, ended = search_of(tmp_path, 7, stream=stream, search=space), []
    run_searches([search], on_end=ended.append)
    assert runs.ended == [1, 2, 3] * 4 + [1, 2] + [1, 2, 3] * 2
    says = (
        "Pruned: 65.00 % after domain 2, below the median of 4 other trials, 80.00 %, and their "
        "best A_T, 70.00 %"
    )
    assert [outcome.error for outcome in ended] == [None] * 4 + [says] + [None] * 2
    ended[4].folder.searched, drawn = {}, ended[4].folder.searched
    assert ended[4].folder.title == "finetune, trial 5 (as in the recipe)"
    ended[4].folder.searched = drawn
    assert ended[4].folder.title.startswith("finetune, trial 5 (weight_decay 0.0")
    assert [row["state"] for row in search.rows()].count("pruned") == 1
    assert search.best()[1].trials == 7
    assert search.missing() == []
    ended[4].folder.on_domain(6, 0.0)  # after the last nothing is left to be saved
    with pytest.raises(Pruned):
        ended[4].folder.on_domain(2, 0.0)
    for rates in (runs.ended, runs.settings):
        rates.clear()
    runs.curve = lambda n, _: (1 - n / 10, 0.8, 0.7)  # the grid of learning rates is not pruned
    run_searches([search_of(tmp_path, 5, "ewc-star", stream=stream)])
    assert runs.ended == [1, 2, 3] * len(runs.settings)


def test_searches_that_differ_do_not_mix(tmp_path, runs):
    def made(seed=0, names=("finetune",), **changes):
        before = len(runs.settings)
        recipe = recipe_of(*names, **changes)
        run_searches([Search(recipe, "finetune", tmp_path / "s", seed, 1)])
        return len(runs.settings) - before

    assert made() == 1
    assert made() == 0
    assert made(names=("finetune", "covon"), name="other", title="Other", seeds=[5]) == 0
    assert made(seed=1) == 1
    assert made(stream={**STREAM, "validation_size": 0.2}) == 1
    assert made(epochs=2) == 1
    assert made(search={"finetune": {"lr": {"low": 0.001, "high": 0.2}}}) == 0  # of the same lr
    with pytest.raises(RecipeError, match="no trial of finetune was completed with these settings"):
        search_of(tmp_path, 1, seed=9).best()


@pytest.mark.parametrize(
    ("error", "changes", "says"),
    [
        (None, {"lr": 1e30}, "FloatingPointError: "),
        (RuntimeError("CUDA out of memory"), {}, "RuntimeError: CUDA out of memory"),
        (MemoryError("9 GiB"), {}, "MemoryError: 9 GiB; try a smaller"),
    ],
)
@pytest.mark.usefixtures("in_this_process")
def test_a_failed_trial_counts_as_nothing_learned(tmp_path, monkeypatch, error, changes, says):
    if error is not None:
        monkeypatch.setattr(run.Run, "finish", lambda *_: (_ for _ in ()).throw(error))
    recipe = with_settings(recipe_of("finetune"), "finetune", changes)
    search, ended = Search(recipe, "finetune", tmp_path, 0, 1), []
    for _ in range(2):
        run_searches([search], on_end=ended.append)
    assert len(ended) == 1  # it is not repeated
    assert ended[0].error.startswith(says)
    (row,) = search.rows()
    assert row["state"] == "failed"
    with pytest.raises(RecipeError, match="all trials of finetune have failed"):
        search.best()


def test_other_errors_leave_a_trial_to_be_repeated(tmp_path, runs):
    def gone(n, _):
        raise FileNotFoundError("the weights are gone")

    working, runs.curve = runs.curve, gone
    search, ended = search_of(tmp_path, 6), []
    run_searches([search], on_end=ended.append)
    assert [outcome.bad_input for outcome in ended] == [True] * 5  # the draws depend on the grid
    assert [row["state"] for row in search.rows()] == ["failed"] * 5
    runs.curve = working
    run_searches([search])
    assert search.missing() == []
    assert search.best()[1].trials >= 6


@pytest.mark.parametrize(
    ("name", "given", "searched"),
    [
        ("covon", {}, {"weight_decay", "ess", "hess_init", "later_hess_init", "clip_radius"}),
        ("avalanche-mas", {"alpha": 0.5}, {"lambda_reg"}),  # as gamma and beta2, alpha is at most 1
        ("avalanche-rwalk", {"ewc_alpha": 0.9}, {"ewc_lambda"}),
        ("rwalk", {"fisher_decay": 0.9}, {"rwalk_lambda"}),
        ("der", {"alpha": 0.1, "beta": 0.5}, {"alpha", "beta"}),
    ],
)
def test_spaces(name, given, searched):
    recipe = small_recipe({name: STRATEGIES[name] | given}, stream=STREAM)
    space = space_of(recipe, name)
    assert space.keys() == {"lr", *searched}
    lr = STRATEGIES[name]["lr"]
    assert space["lr"] == Space(low=lr / 10, high=lr * 10)
    empty = recipe.model_copy(update={"search": {name: {}}})
    assert space_of(empty, name) == space
    own = {"lr": Space(low=0.1, high=0.2), "weight_decay": Space(choices=[0.0])}
    assert space_of(recipe.model_copy(update={"search": {name: own}}), name) == own


def test_the_space_of_every_strategy_has_only_what_it_takes():
    recipe = recipe_of(*STRATEGIES)
    for name in STRATEGIES:
        assert ("lr" in space_of(recipe, name)) == (name not in CLOSED_FORM)  # or an error


@pytest.mark.parametrize(
    ("name", "key", "values", "known"),
    [
        ("covon-gradsq", "later_hess_init", {"low": 0.01, "high": 0.1}, True),  # its own is None
        ("finetune", "lr", {"low": 0.02, "high": 3.0}, False),
        ("finetune", "optimizer", {"choices": ["sgd", "adamw"]}, True),
        ("replay", "mem_size", {"low": 50, "high": 200}, True),
    ],
)
def test_the_first_trial_has_the_recipes_own_settings(tmp_path, runs, name, key, values, known):
    recipe = recipe_of(name, search={name: {key: values}})
    run_searches([Search(recipe, name, tmp_path, 0, 3)])
    own = getattr(recipe.strategies[name], key)
    drawn = [getattr(settings, key) for settings in runs.settings]
    assert (drawn[0] == own) is known
    assert {type(value) for value in drawn} <= {type(own), float if own is None else type(own)}
    if "low" in values:
        assert all(values["low"] <= value <= values["high"] for value in drawn[known:])


def test_the_arguments_of_a_user_defined_class_are_searched_too(tmp_path, runs):
    arguments = {"strength": 0.5, "size": 4, "mode": "a"}
    space = {
        "arguments.strength": {"low": 0.1, "high": 1.0},
        "arguments.size": {"low": 2, "high": 9},
        "arguments.mode": {"choices": ["a", "b"]},
    }
    own = {"own": STRATEGIES["custom"] | {"arguments": arguments}}
    recipe = small_recipe(own, search={"own": space}, epochs=1, stream=STREAM)
    search = Search(recipe, "own", tmp_path, 0, 8)
    run_searches([search])
    first, *others = [settings.arguments for settings in runs.settings]
    assert first == arguments
    assert all(0.1 <= drawn["strength"] <= 1.0 for drawn in others)
    assert all(isinstance(drawn["size"], int) and 2 <= drawn["size"] <= 9 for drawn in others)
    assert {drawn["mode"] for drawn in others} == {"a", "b"}
    best = with_settings(recipe, "own", search.best()[0]).strategies["own"]
    assert best == runs.settings[-1]  # they learn better from one to the next
    assert recipe.strategies["own"].arguments == arguments
    with pytest.raises(ValueError, match=r"own\.arguments\.stren: own has no such setting"):
        small_recipe(own, search={"own": {"arguments.stren": space["arguments.strength"]}})


@pytest.mark.parametrize(
    ("name", "key", "values", "message"),
    [
        ("covon", "rate", {"low": 0.1, "high": 0.2}, "rate: covon has no such setting"),
        ("covon", "gamma", {"low": 0.05, "high": 5.0}, r"gamma: 5\.0: .*less than or equal to 1"),
        ("replay", "mem_size", {"low": 0.5, "high": 9}, r"mem_size: 0\.5: .*valid integer"),
        ("finetune", "optimizer", {"choices": ["sgd", "adam"]}, "optimizer: 'adam': .*'adamw'"),
        ("finetune", "lr", {"low": 0.01, "high": 0.5}, "lr: .* two decades apart, got 0.01 to"),
        ("finetune", "lr", {"choices": [0.1, 0.01]}, "lr: .*low and high, .*, got 0.1, 0.01"),
    ],
)
def test_a_space_that_does_not_fit_the_strategy_is_refused(name, key, values, message):
    own = recipe_of(name).model_dump() | {"search": {name: {key: values}}}
    with pytest.raises(RecipeError, match=rf"search: {name}\.{message}"):
        validate(own, "recipe")


def test_settings_that_a_schedule_sets_cannot_be_searched():
    own = recipe_of("covon").model_dump()
    own["strategies"]["covon"] |= {"schedule": [{"lr": 0.1}, {}], "later_hess_init": None}
    assert "lr" not in space_of(validate(own, "recipe"), "covon")
    own["search"] = {"covon": {"lr": {"low": 1e-4, "high": 1e-1}}}
    with pytest.raises(RecipeError, match=r"covon\.lr cannot be searched: the schedule of covon"):
        validate(own, "recipe")


def test_ranges_are_those_of_settings_that_were_tried(tmp_path, runs):
    for number, keys in ((3, {"lr"}), (6, {"lr", "strength"})):
        search = search_of(tmp_path, number, "ewc-star")
        run_searches([search])
        assert search.best()[1].ranges.keys() == keys


def test_draws_that_repeat_are_one_trial(tmp_path, runs):
    space = {"finetune": {"optimizer": {"choices": ["adamw", "sgd"]}}}
    search = search_of(tmp_path, 9, search=space)
    run_searches([search])
    assert [row["optimizer"] for row in search.rows()] == ["adamw", "sgd"]
    assert len(runs.settings) == search.best()[1].trials == 2
    assert search.summary()["trials"] == "2/2"


def test_an_own_value_of_another_type_is_outside_of_a_range(tmp_path):
    own = STRATEGIES["custom"] | {"arguments": {"strength": "auto"}}
    space = {"own": {"arguments.strength": {"low": 0.1, "high": 1.0}}}
    search = Search(small_recipe({"own": own}, search=space, stream=STREAM), "own", tmp_path, 0, 3)
    first, *draws = search.plan()
    assert first == {}
    assert all(0.1 <= settings["arguments.strength"] <= 1.0 for settings in draws)


def test_a_result_of_another_run_completes_no_trial(tmp_path, runs):
    search = search_of(tmp_path, 1)
    run_searches([search])
    (path,) = tmp_path.rglob("result.json")
    result = Result.load(path)
    result.model_copy(update={"stream": "test"}).save(path)
    fresh = search_of(tmp_path, 1)
    assert [row["state"] for row in fresh.rows()] == ["damaged"]
    assert fresh.summary()["trials"] == "0/1"


# The protocol ---------------------------------------------------------------------------------


def test_the_grid_has_the_recipes_rate_and_grows_while_the_best_is_at_an_end(tmp_path, scores):
    def peak(at):
        return lambda settings: 1 / (1 + abs(math.log10(settings.lr / at)))

    space = {"search": {"finetune": {"lr": {"low": 1e-4, "high": 1.0}}}}
    search = search_of(tmp_path, 5, **space)
    scores(peak(0.02))
    assert [settings["lr"] for settings in search.plan()] == [0.01, 1e-3, 0.1, 1e-4, 1.0]
    best = SimpleNamespace(lr=0.01)
    found = Searched(trials=5, accuracy=peak(0.02)(best), ranges={"lr": "0.0001 to 1"})
    assert search.best() == ({"lr": 0.01}, found)
    for at, more, at_end in ((4e-6, [1e-5, 1e-6], []), (1e9, [10, 100, 1e3, 1e4], ["lr"])):
        scores(peak(at))
        assert [settings["lr"] for settings in search.plan()[5:]] == more
        assert search.best()[1].at_end == at_end
        assert search.best()[1].trials == 5 + len(more)
        assert search.best()[1].extensions == len(more)


def test_later_trials_have_rates_near_the_best_and_fill_the_other_ranges(tmp_path, scores):
    space = {
        "lr": {"low": 1e-4, "high": 1.0},
        "alpha": {"low": 0.1, "high": 100},
        "temperature": {"low": 1, "high": 3},
        "weight_decay": {"choices": [0.0, 0.1]},
    }
    scores(lambda s: 1 - 0.1 * abs(math.log10(s.lr / 0.1)) - 0.01 * s.alpha / 100)
    search = search_of(tmp_path, 21, "lwf", search={"lwf": space})
    grid, draws = search.plan()[:5], search.plan()[5:]
    assert len(draws) == 16
    assert all(settings.keys() == {"lr"} for settings in grid)
    assert all(0.01 <= settings["lr"] <= 1 for settings in draws)
    quarters = Counter(int(4 * math.log(s["alpha"] / 0.1) / math.log(1000)) for s in draws)
    assert [quarters[i] for i in range(4)] == pytest.approx([4] * 4, abs=1)  # low discrepancy
    assert {settings["weight_decay"] for settings in draws} == {0.0, 0.1}
    assert search.best()[1].trials == 21
    other = search_of(tmp_path, 21, "lwf", seed=8, search={"lwf": space}).plan()[5:]
    assert not {*map(str, draws)} & {*map(str, other)}


def test_a_best_value_in_the_outer_tenth_of_its_range_is_marked(tmp_path, scores):
    scores(lambda settings: settings.alpha / 200)
    space = {"alpha": {"low": 0.1, "high": 100.0}}
    settings, found = search_of(tmp_path, 30, "lwf", search={"lwf": space}).best()
    assert settings["alpha"] > 50
    accuracy, ranges = settings["alpha"] / 200, {"alpha": "0.1 to 100"}
    assert found == Searched(trials=30, accuracy=accuracy, ranges=ranges, at_end=["alpha"])


@pytest.mark.parametrize("alpha", [{"low": 10.0, "high": 1000.0}, {"choices": [10]}])
def test_a_recipes_own_value_outside_of_the_range_is_marked_if_best(tmp_path, scores, alpha):
    scores(lambda settings: 1 / (1 + settings.alpha))
    own = STRATEGIES["lwf"]
    space = {"lr": {"low": own["lr"] / 100, "high": own["lr"] * 100}, "alpha": alpha}
    settings, found = search_of(tmp_path, 12, "lwf", search={"lwf": space}).best()
    assert settings == {"lr": own["lr"]}
    assert found.at_end == ["alpha"]


def test_a_recipes_own_value_that_is_a_choice_or_unset_is_not_marked(tmp_path, scores):
    scores(lambda settings: 0.5 if settings.lr == 0.01 else 0.25)
    space = {"lr": {"low": 1e-4, "high": 1.0}, "merge": {"choices": ["ema", "none"]}}
    space["epochs"] = {"choices": [1, 5]}
    settings, found = search_of(tmp_path, 6, search={"finetune": space}).best()
    assert (settings, found.at_end) == ({"lr": 0.01}, [])


def test_relative_to_the_weights_rate_and_knob_are_searched():
    own = {"kind": "covon", "preset": "finetune", "lr": 1e-4}
    space = space_of(small_recipe({"own": own}, stream=STREAM), "own")
    assert space == {"lr": Space(low=1e-5, high=1e-3), "gamma": Space(low=0.05, high=1.0)}


def test_settings_need_not_fit_the_recipes_own_ranges(tmp_path, runs):
    space = {"optimizer": {"choices": ["sgd", "adamw"]}, "momentum": {"low": 0.1, "high": 0.9}}
    recipe = small_recipe(
        {"own": {"kind": "finetune", "lr": 0.1, "optimizer": "sgd"}},
        search={"own": {"momentum": space["momentum"], "optimizer": space["optimizer"]}},
        stream=STREAM,
    )
    search = Search(recipe, "own", tmp_path, 0, 8)
    run_searches([search])
    assert {settings.optimizer for settings in runs.settings} == {"sgd"}  # adamw has no momentum
    failed = [row for row in search.rows() if row["state"] == "failed"]
    assert len(failed) == 8 - len(runs.settings) > 0
    assert {row["optimizer"] for row in failed} == {"adamw"}
    assert search.missing() == []


def test_tables_of_rules_are_set_before_their_arguments():
    recipe = recipe_of("finetune")
    settings = {"merge.gamma": 0.2, "merge": {"rule": "ema"}}
    assert with_settings(recipe, "finetune", settings).strategies["finetune"].merge.gamma == 0.2


def test_whole_numbers_that_the_recipe_leaves_unset_can_be_searched(tmp_path, runs):
    space = {"finetune": {"epochs": {"low": 1, "high": 3}}}
    run_searches([search_of(tmp_path, 8, search=space)])
    assert {settings.epochs for settings in runs.settings} == {None, 1, 2, 3}


# What others read -----------------------------------------------------------------------------


def test_the_table_of_trials_shows_what_runs_and_what_is_planned(tmp_path, runs):
    names = ("ewc-star", "finetune")
    searches = [Search(recipe_of(*names), name, tmp_path, 7, 6) for name in names]
    for search in searches:
        search.store()
    run_searches(searches[:1])
    trial = searches[1].missing()[0]
    with trial.opened():
        before = sorted((path, path.stat().st_mtime_ns) for path in tmp_path.rglob("*"))
        table = trials_in(tmp_path)
        first, second = (search.summary() for search in searches_in(tmp_path))
        assert before == sorted((p, p.stat().st_mtime_ns) for p in tmp_path.rglob("*"))
    done = len(runs.settings)
    assert [*table["strategy"]] == ["ewc-star"] * done + ["finetune"] * 5
    assert table["lr"].tolist()[:done] == [settings.lr for settings in runs.settings]
    assert table["accuracy"].max() == searches[0].best()[1].accuracy
    assert [*table["state"]] == ["finished"] * done + ["running"] + ["planned"] * 4
    assert (first["trials"], first["running"]) == (f"{done}/{done}", "0")
    assert first["settings"] == ", ".join(f"{k} {v}" for k, v in searches[0].best()[0].items())
    assert (second["trials"], second["running"], second["best A_T %"]) == ("0/6", "1", "")
    assert trials_in(tmp_path)["state"].iloc[done] == "interrupted"  # its process has ended


def test_of_equal_trials_the_summary_has_the_one_of_best_toml(tmp_path, runs):
    runs.curve = lambda n, _: [0.5] * 3
    search = search_of(tmp_path, 2)
    run_searches([search])
    assert search.best()[0] == search.plan()[0]
    assert search.summary()["settings"] == f"lr {search.plan()[0]['lr']}"


def test_a_damaged_result_is_shown_and_named_and_the_other_trials_go_on(tmp_path, runs):
    search, ended = search_of(tmp_path, 3), []
    first, *_ = search.missing()
    first.path.mkdir(parents=True)
    first.result_file.write_text("{")
    run_searches([search], on_end=ended.append)
    assert [row["state"] for row in search.rows()] == ["damaged", "finished", "finished"]
    (failed,) = [outcome for outcome in ended if outcome.error]
    assert failed.bad_input
    assert failed.error.endswith("remove it to run it again")
    first.result_file.unlink()
    run_searches([search])
    assert search.best()[1].trials == 3


@pytest.mark.parametrize("content", ["", "{", "[]", '{"recipe": {}}'])
def test_a_damaged_file_of_a_search_is_named(tmp_path, content):
    search = search_of(tmp_path, 2)
    search.store()
    assert [s.plan() for s in searches_in(search.folder)] == [search.plan()]
    replace(search, dataset_root=Path("data")).store()  # may be read in another folder
    assert [s.dataset_root for s in searches_in(search.folder)] == [Path("data").absolute()]
    file = search.folder / "finetune/search.json"
    file.write_text(content)
    with pytest.raises(RecipeError, match=r"finetune/search\.json is damaged: run `covon search`"):
        searches_in(search.folder)
