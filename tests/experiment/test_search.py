"""Searches: resumable, on validation images only, with a budget that counts."""

import re
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from optuna.storages.journal import JournalFileSymlinkLock
from optuna.trial import TrialState
from small_recipes import CLOSED_FORM, STRATEGIES, small_recipe

from covon_avalanche.experiment import run
from covon_avalanche.experiment.recipe import Recipe, RecipeError, Space
from covon_avalanche.experiment.search import Search, space_of, with_settings

COUNTED = (TrialState.COMPLETE, TrialState.PRUNED)
STREAM = {"name": "PermutedDigits", "n_experiences": 3, "validation_size": 300}


def recipe_of(*names, **changes) -> Recipe:
    strategies = {name: STRATEGIES[name] for name in names}
    return small_recipe(strategies, **({"epochs": 1, "stream": STREAM} | changes))


@pytest.fixture
def runs(monkeypatch):
    """The settings of all runs, which take no time and learn better from one to the next."""
    made = []

    def fake(recipe, strategy, *arguments, **options):
        made.append(recipe.strategies[strategy])
        return SimpleNamespace(average_accuracy=0.5 + len(made) / 100)

    monkeypatch.setattr(run, "run_strategy", fake)
    return made


def test_trials_are_kept_and_only_the_missing_are_run_on_validation_images(tmp_path, monkeypatch):
    seen, lines, whole = [], [], run.run_strategy

    def spy(*arguments, **options):
        result = whole(*arguments, **options)
        seen.append((result.stream, result.counts, result.seed))
        return result

    monkeypatch.setattr(run, "run_strategy", spy)
    search = Search(recipe_of("finetune"), "finetune", tmp_path / "journal", 1000)
    search.run(2, notify=lines.append)
    first = search.study().get_trials()
    assert first[0].params == {"lr": 0.01}  # the recipe's own settings come first
    search.run(3, notify=lines.append)
    again = search.study().get_trials()
    assert [t.params for t in again[:2]] == [t.params for t in first]
    assert len(again) == len(lines) == 3
    assert seen == [("valid", [300] * 3, 1000)] * 3
    settings, value = search.best(3)
    assert value == max(t.value for t in again if t.state.name == "COMPLETE")
    assert settings in [t.params for t in again]
    assert search.best(1)[0] == {"lr": 0.01}  # what was made beyond the budget does not count


def test_processes_that_search_together_run_as_many_different_trials_as_asked(
    tmp_path, monkeypatch
):
    drawn = []

    def slow(recipe, strategy, *arguments, **options):
        drawn.append(recipe.strategies[strategy].lr)
        time.sleep(0.3)  # so that all have looked for missing trials before one is done
        return SimpleNamespace(average_accuracy=0.5)

    monkeypatch.setattr(run, "run_strategy", slow)
    recipe = recipe_of("finetune")
    with ThreadPoolExecutor(4) as pool:
        searches = [Search(recipe, "finetune", tmp_path / "j", 7) for _ in range(4)]
        list(pool.map(lambda search: search.run(3), searches))
    assert len(drawn) == len(set(drawn)) == 3
    assert drawn.count(0.01) == 1  # the recipe's own settings
    states = [trial.state.name for trial in searches[0].study().get_trials()]
    assert states == ["COMPLETE"] * 3


def test_a_search_alone_is_reproducible_and_interruptions_do_not_change_it(tmp_path, monkeypatch):
    calls, killed = [], []

    def fake(recipe, strategy, *arguments, **options):
        lr = recipe.strategies[strategy].lr
        calls.append(lr)
        if len(calls) in killed:
            raise SystemExit  # leaves what a kill does: a running trial without a lock
        return SimpleNamespace(average_accuracy=1 / (1 + abs(lr - 0.03)))

    monkeypatch.setattr(run, "run_strategy", fake)
    recipe = recipe_of("finetune")

    def trials(journal):
        done = Search(recipe, "finetune", journal, 7).study().get_trials(states=COUNTED)
        return [(trial.params, trial.value) for trial in done]

    Search(recipe, "finetune", tmp_path / "whole", 7).run(9)
    calls.clear()
    killed += [1, 2, 6, 10]
    for _ in killed:
        with pytest.raises(SystemExit):
            Search(recipe, "finetune", tmp_path / "parts", 7).run(9)
        Search(recipe, "finetune", tmp_path / "parts", 7).study().ask()  # killed before it ran
    for budget in (7, 9):
        Search(recipe, "finetune", tmp_path / "parts", 7).run(budget)
    assert len(calls) == 9 + 4
    assert calls[:3] == [0.01] * 3  # the recipe's own settings until their trial is done
    assert trials(tmp_path / "parts") == trials(tmp_path / "whole")


@pytest.mark.parametrize("index", [0, 1])
def test_settings_that_end_the_process_are_replaced_after_three_attempts(
    tmp_path, runs, monkeypatch, index
):
    search = Search(recipe_of("finetune"), "finetune", tmp_path / "j", 0)
    search.run(index)
    tried = []

    def dies(recipe, *arguments, **options):
        tried.append(recipe.strategies["finetune"].lr)
        raise SystemExit

    monkeypatch.setattr(run, "run_strategy", dies)
    for _ in range(5):
        with pytest.raises(SystemExit):
            search.run(index + 1)
    assert len({*tried[:3]}) == 1
    assert len({*tried}) == 3


@pytest.mark.parametrize(
    "tear", [lambda line: line[:-25], lambda line: line[:-1], lambda line: b"\0" * 9 + line[9:]]
)
def test_an_incomplete_last_record_is_dropped_and_its_trial_is_repeated(tmp_path, runs, tear):
    journal = tmp_path / "trials.journal"
    search = Search(recipe_of("finetune"), "finetune", journal, 7)
    other_process = search.study()
    search.run(2)
    content = journal.read_bytes().splitlines(keepends=True)
    assert b"values" in content[-1]  # the result of the second trial
    journal.write_bytes(b"".join([*content[:-1], tear(content[-1])]))
    other_process.set_user_attr("reads", "and appends")
    Search(recipe_of("finetune"), "finetune", journal, 7).run(3)
    assert len(runs) == 4
    done = other_process.get_trials(states=COUNTED)
    assert [trial.params["lr"] for trial in done] == [runs[i].lr for i in (0, 2, 3)]
    assert runs[2] == runs[1]
    assert [trial.number for trial in done] == [0, 2, 3]


@pytest.mark.parametrize("bad", [b'{"op_code":6,"wor', b"5", b"[]", b"\xff{}", b"{}"])
def test_a_damaged_record_is_named_with_file_and_line(tmp_path, runs, bad):
    journal = tmp_path / "trials.journal"
    Search(recipe_of("finetune"), "finetune", journal, 7).run(1)
    lines = journal.read_bytes().splitlines()
    journal.write_bytes(b"\n".join([*lines[:2], bad, *lines[3:], b""]))
    with pytest.raises(RecipeError, match=r"trials\.journal, line 3, is damaged: remove"):
        Search(recipe_of("finetune"), "finetune", journal, 7).run(1)


def test_a_search_leaves_no_links_where_it_may_be_killed(tmp_path, runs, monkeypatch):
    search = Search(recipe_of("finetune"), "finetune", tmp_path / "trials.journal", 7)
    monkeypatch.setattr("os.rename", None)  # a kill after a renaming would leave another one
    search.run(1)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".claims", "trials.journal"]


def test_a_search_of_an_earlier_version_is_continued(tmp_path, runs):
    """Its trials have no index."""
    search = Search(recipe_of("finetune"), "finetune", tmp_path / "j", 0)
    for lr in (0.01, 0.02):
        study = search.study()
        study.enqueue_trial({"lr": lr})
        study.optimize(lambda trial: trial.suggest_float("lr", 0.001, 0.1, log=True), 1)
    search.run(3)
    assert len(runs) == 1
    assert search.best(2) == ({"lr": 0.02}, 0.02)


def test_a_trial_below_the_median_is_pruned_though_its_first_accuracy_is_the_best(
    tmp_path, monkeypatch
):
    curves = [(0.9, 0.8, 0.7)] * 4 + [(0.95, 0.7, 0.7), (0.1, 0.8, 0.7), (0.1, 0.9, 0.9)]
    stopped, left = [], iter(curves)

    def fake(*arguments, on_domain, **options):
        curve = next(left)
        for domains, accuracy in enumerate(curve, start=1):
            stopped.append(domains)
            on_domain(domains, accuracy)
        return SimpleNamespace(average_accuracy=curve[-1])

    monkeypatch.setattr(run, "run_strategy", fake)
    stream = STREAM | {"n_experiences": 6}  # pruned after the second domain at the earliest
    lines, recipe = [], recipe_of("finetune", stream=stream)
    Search(recipe, "finetune", tmp_path / "j", 0).run(7, notify=lines.append)
    assert stopped == [1, 2, 3] * 4 + [1, 2] + [1, 2, 3] * 2
    assert lines[4] == "finetune, trial 5: pruned"


@pytest.mark.filterwarnings("ignore:The value of `grace_period`")
def test_the_lock_of_a_killed_search_is_broken(tmp_path, runs, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(JournalFileSymlinkLock.__init__, "__defaults__", (1,))  # grace period
    recipe, journal = recipe_of("finetune"), Path("searches/trials.journal")
    study = Search(recipe, "finetune", journal, 0).study()
    study._storage._backend._lock.acquire()  # and its process is killed
    assert Path("searches/trials.journal.lock").exists()  # else Optuna would wait for ever
    Search(recipe, "finetune", journal, 0).run(1)
    assert len(runs) == 1


def test_searches_that_differ_do_not_mix(tmp_path, runs):
    recipe = recipe_of("finetune")

    def made(recipe=recipe, seed=0):
        before = len(runs)
        Search(recipe, "finetune", tmp_path / "j", seed).run(1)
        return len(runs) - before

    assert made() == 1
    assert made() == 0
    assert made(recipe_of("finetune", "covon", name="other", title="Other", seeds=[5])) == 0
    assert made(seed=1) == 1
    assert made(recipe_of("finetune", stream={**STREAM, "validation_size": 0.2})) == 1
    assert made(recipe.model_copy(update={"epochs": 2})) == 1
    assert made(with_settings(recipe, "finetune", {"weight_decay": 0.5})) == 1
    space = {"finetune": {"lr": {"low": 0.001, "high": 0.01}}}
    assert made(recipe_of("finetune", search=space)) == 1
    assert Search(recipe, "finetune", tmp_path / "j", 0).best(1)[1] == 0.51
    with pytest.raises(RecipeError, match="no trial of finetune was completed"):
        Search(recipe, "finetune", tmp_path / "j", 9).best(1)


@pytest.mark.parametrize(
    ("strategy", "changes", "says"),
    [
        ("finetune", {"lr": 1e30}, "failed: FloatingPointError: "),
        ("replay", {"mem_size": 10**9}, "failed: RuntimeError: .*can't allocate memory"),
    ],
)
def test_a_failed_trial_counts_as_nothing_learned(tmp_path, monkeypatch, strategy, changes, says):
    if strategy == "replay":  # as if its memory were allocated at once
        monkeypatch.setattr(run, "run_strategy", lambda *a, **o: torch.empty(10**15))
    recipe = with_settings(recipe_of(strategy), strategy, changes)
    Search(recipe, strategy, tmp_path / "j", 0).run(1)
    (trial,) = Search(recipe, strategy, tmp_path / "j", 0).study().get_trials()
    assert trial.value == 0.0
    assert re.match(says, trial.user_attrs["error"])
    with pytest.raises(RecipeError, match=f"all trials of {strategy} diverged"):
        Search(recipe, strategy, tmp_path / "j", 0).best(1)


@pytest.mark.parametrize(
    ("name", "given", "searched"),
    [
        ("covon", {}, {"weight_decay", "ess", "hess_init", "later_hess_init", "clip_radius"}),
        (
            "avalanche-mas",
            {"alpha": 0.5},
            {"lambda_reg"},
        ),  # alpha is at most 1, as gamma and beta2 are
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
        ("covon-gradsq", "later_hess_init", {"low": 0.01, "high": 0.1}, False),  # its own is None
        ("finetune", "lr", {"low": 0.02, "high": 0.1}, False),
        ("finetune", "optimizer", {"choices": ["sgd", "adamw"]}, True),
        ("replay", "mem_size", {"low": 50, "high": 200}, True),
    ],
)
def test_the_first_trial_has_the_recipes_own_settings_where_the_space_has_them(
    tmp_path, runs, name, key, values, known
):
    recipe = recipe_of(name, search={name: {key: values}})
    Search(recipe, name, tmp_path / "j", 0).run(3)
    own = getattr(recipe.strategies[name], key)
    drawn = [getattr(settings, key) for settings in runs]
    assert (drawn[0] == own) is known
    assert {type(value) for value in drawn} <= {type(own), float if own is None else type(own)}
    if "low" in values:
        assert all(values["low"] <= value <= values["high"] for value in drawn)


def test_the_arguments_of_a_user_defined_class_are_searched_too(tmp_path, runs):
    arguments = {"strength": 0.5, "size": 4, "mode": "a"}
    space = {
        "arguments.strength": {"low": 0.1, "high": 1.0},
        "arguments.size": {"low": 2, "high": 9},
        "arguments.mode": {"choices": ["a", "b"]},
    }
    own = {"own": STRATEGIES["custom"] | {"arguments": arguments}}
    recipe = small_recipe(own, search={"own": space}, epochs=1, stream=STREAM)
    Search(recipe, "own", tmp_path / "j", 0).run(8)
    first, *others = [settings.arguments for settings in runs]
    assert first == arguments
    assert all(0.1 <= drawn["strength"] <= 1.0 for drawn in others)
    assert all(isinstance(drawn["size"], int) and 2 <= drawn["size"] <= 9 for drawn in others)
    assert {drawn["mode"] for drawn in others} == {"a", "b"}
    settings, _ = Search(recipe, "own", tmp_path / "j", 0).best(8)
    best = with_settings(recipe, "own", settings).strategies["own"]
    assert best == runs[-1]  # they learn better from one to the next
    assert recipe.strategies["own"].arguments == arguments


@pytest.mark.parametrize(
    ("name", "key", "values", "message"),
    [
        ("covon", "rate", {"low": 0.1, "high": 0.2}, "rate: covon has no such setting"),
        ("covon", "gamma", {"low": 0.05, "high": 5.0}, r"gamma: 5\.0: .*less than or equal to 1"),
        ("replay", "mem_size", {"low": 0.5, "high": 9}, r"mem_size: 0\.5: .*valid integer"),
        ("finetune", "optimizer", {"choices": ["sgd", "adam"]}, "optimizer: 'adam': .*'adamw'"),
    ],
)
def test_a_space_that_does_not_fit_the_strategy_is_refused(name, key, values, message, tmp_path):
    recipe = recipe_of(name, search={name: {key: values}})
    with pytest.raises(RecipeError, match=rf"search\.{name}\.{message}"):
        Search(recipe, name, tmp_path / "j", 0)
