"""Searches: resumable, on validation images only, with a budget that counts."""

import math
import re
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from optuna.storages.journal import JournalFileSymlinkLock
from optuna.trial import TrialState
from small_recipes import CLOSED_FORM, STRATEGIES, small_recipe

from covon_avalanche.experiment import run
from covon_avalanche.experiment.recipe import Recipe, RecipeError, validate
from covon_avalanche.experiment.search import (
    Search,
    run_searches,
    space_of,
    with_settings,
)
from covon_avalanche.experiment.search_journal import read_trials, search_summary
from covon_avalanche.experiment.search_space import Searched, Space

COUNTED = (TrialState.COMPLETE, TrialState.PRUNED)
STREAM = {"name": "PermutedDigits", "n_experiences": 3, "validation_size": 300}


def recipe_of(*names, **changes) -> Recipe:
    strategies = {name: STRATEGIES[name] for name in names}
    return small_recipe(strategies, **({"epochs": 1, "stream": STREAM} | changes))


def settings_of(search: Search) -> list[dict]:
    trials = search.study.get_trials(states=COUNTED)
    return [trial.user_attrs["settings"] for trial in trials]


@pytest.fixture
def runs(monkeypatch):
    """The settings of all runs, which take no time and learn better from one to the next."""
    made = []

    def fake(recipe, strategy, *arguments, **options):
        made.append(recipe.strategies[strategy])
        return SimpleNamespace(average_accuracy=0.5 + len(made) / 100)

    monkeypatch.setattr(run, "run_strategy", fake)
    return made


def test_arguments_of_a_merge_rule_can_be_searched(tmp_path, runs):
    space = {"merge.gamma": Space(low=0.1, high=1.0)}
    recipe = recipe_of("cofima", search={"cofima": space})
    search = Search(recipe, "cofima", tmp_path / "journal", 0)
    run_searches([search], 3)
    assert runs[0] == recipe.strategies["cofima"]
    assert runs[-1].merge.gamma == search.best(3)[0]["merge.gamma"] != runs[0].merge.gamma
    with pytest.raises(ValueError, match=r"finetune\.merge\.gamma: finetune has no such"):
        recipe_of("finetune", search={"finetune": space})


def test_trials_are_kept_and_only_the_missing_are_run_on_validation_images(tmp_path, monkeypatch):
    seen, lines, whole = [], [], run.run_strategy

    def spy(*arguments, **options):
        result = whole(*arguments, **options)
        seen.append((result.stream, result.counts, result.seed))
        return result

    monkeypatch.setattr(run, "run_strategy", spy)
    search = Search(recipe_of("finetune"), "finetune", tmp_path / "journal", 1000)
    run_searches([search], 2, notify=lines.append)
    first = settings_of(search)
    assert first[0] == {"lr": 0.01}  # the recipe's own settings come first
    run_searches([search], 3, notify=lines.append)
    again = settings_of(search)
    assert again[:2] == first
    assert len(again) == len(lines) == 3
    assert seen == [("valid", [300] * 3, 1000)] * 3
    settings, found = search.best(3)
    values = [trial.value for trial in search.study.get_trials() if trial.value]
    assert found.accuracy == max(values)
    assert settings == again[[t.value for t in search.study.get_trials()].index(max(values))]
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
        list(pool.map(lambda search: run_searches([search], 3), searches))
    assert len(drawn) == len(set(drawn)) == 3
    assert drawn.count(0.01) == 1  # the recipe's own settings
    states = [trial.state.name for trial in searches[0].study.get_trials()]
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
        done = Search(recipe, "finetune", journal, 7).study.get_trials(states=COUNTED)
        return [(trial.user_attrs["settings"], trial.value) for trial in done]

    run_searches([Search(recipe, "finetune", tmp_path / "whole", 7)], 9)
    calls.clear()
    killed += [1, 2, 6, 10]
    for _ in killed:
        with pytest.raises(SystemExit):
            run_searches([Search(recipe, "finetune", tmp_path / "parts", 7)], 9)
        Search(recipe, "finetune", tmp_path / "parts", 7).study.ask()  # killed before it ran
    for budget in (7, 9):
        run_searches([Search(recipe, "finetune", tmp_path / "parts", 7)], budget)
    assert len(calls) == 9 + 4
    assert calls[:3] == [0.01] * 3  # the recipe's own settings until their trial is done
    assert trials(tmp_path / "parts") == trials(tmp_path / "whole")


@pytest.mark.parametrize("index", [0, 1])
def test_settings_that_end_the_process_count_as_failed_after_three_attempts(
    tmp_path, runs, monkeypatch, index
):
    search = Search(recipe_of("finetune"), "finetune", tmp_path / "j", 0)
    if index:
        run_searches([search], index)
    tried = []

    def dies(recipe, *arguments, **options):
        tried.append(recipe.strategies["finetune"].lr)
        raise SystemExit

    monkeypatch.setattr(run, "run_strategy", dies)
    for _ in range(3):
        with pytest.raises(SystemExit):
            run_searches([search], index + 1)
    assert len(tried) == 3
    assert len({*tried}) == 1
    run_searches([search], index + 1)
    assert len(tried) == 3
    assert search.scores()[index] == 0.0


@pytest.mark.parametrize(
    "tear", [lambda line: line[:-25], lambda line: line[:-1], lambda line: b"\0" * 9 + line[9:]]
)
def test_an_incomplete_last_record_is_dropped_and_its_trial_is_repeated(tmp_path, runs, tear):
    journal = tmp_path / "trials.journal"
    search = Search(recipe_of("finetune"), "finetune", journal, 7)
    other_process = Search(recipe_of("finetune"), "finetune", journal, 7).study
    run_searches([search], 2)
    content = journal.read_bytes().splitlines(keepends=True)
    assert b"values" in content[-1]  # the result of the second trial
    journal.write_bytes(b"".join([*content[:-1], tear(content[-1])]))
    other_process.set_user_attr("reads", "and appends")
    run_searches([Search(recipe_of("finetune"), "finetune", journal, 7)], 3)
    assert len(runs) == 4
    done = other_process.get_trials(states=COUNTED)
    assert [trial.user_attrs["settings"]["lr"] for trial in done] == [runs[i].lr for i in (0, 2, 3)]
    assert runs[2] == runs[1]
    assert [trial.number for trial in done] == [0, 2, 3]


@pytest.mark.parametrize("bad", [b'{"op_code":6,"wor', b"5", b"[]", b"\xff{}", b"{}"])
def test_a_damaged_record_is_named_with_file_and_line(tmp_path, runs, bad):
    journal = tmp_path / "trials.journal"
    run_searches([Search(recipe_of("finetune"), "finetune", journal, 7)], 1)
    lines = journal.read_bytes().splitlines()
    journal.write_bytes(b"\n".join([*lines[:2], bad, *lines[3:], b""]))
    with pytest.raises(RecipeError, match=r"trials\.journal, line 3, is damaged: remove"):
        run_searches([Search(recipe_of("finetune"), "finetune", journal, 7)], 1)


def test_a_search_leaves_no_links_where_it_may_be_killed(tmp_path, runs, monkeypatch):
    search = Search(recipe_of("finetune"), "finetune", tmp_path / "trials.journal", 7)
    monkeypatch.setattr("os.rename", None)  # a kill after a renaming would leave another one
    run_searches([search], 1)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".claims", "trials.journal"]


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
    space = {"finetune": {"weight_decay": {"low": 0.01, "high": 0.1}}}
    lines, recipe = [], recipe_of("finetune", stream=stream, search=space)
    run_searches([Search(recipe, "finetune", tmp_path / "j", 0)], 7, notify=lines.append)
    assert stopped == [1, 2, 3] * 4 + [1, 2] + [1, 2, 3] * 2
    assert lines[4] == "finetune, trial 5: pruned"


@pytest.mark.filterwarnings("ignore:The value of `grace_period`")
def test_the_lock_of_a_killed_search_is_broken(tmp_path, runs, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(JournalFileSymlinkLock.__init__, "__defaults__", (1,))  # grace period
    recipe, journal = recipe_of("finetune"), Path("searches/trials.journal")
    study = Search(recipe, "finetune", journal, 0).study
    study._storage._backend._lock.acquire()  # and its process is killed
    assert Path("searches/trials.journal.lock").exists()  # else Optuna would wait for ever
    run_searches([Search(recipe, "finetune", journal, 0)], 1)
    assert len(runs) == 1


def test_searches_that_differ_do_not_mix(tmp_path, runs):
    recipe = recipe_of("finetune")

    def made(recipe=recipe, seed=0):
        before = len(runs)
        run_searches([Search(recipe, "finetune", tmp_path / "j", seed)], 1)
        return len(runs) - before

    assert made() == 1
    assert made() == 0
    assert made(recipe_of("finetune", "covon", name="other", title="Other", seeds=[5])) == 0
    assert made(seed=1) == 1
    assert made(recipe_of("finetune", stream={**STREAM, "validation_size": 0.2})) == 1
    assert made(recipe.model_copy(update={"epochs": 2})) == 1
    assert made(with_settings(recipe, "finetune", {"weight_decay": 0.5})) == 1
    space = {"finetune": {"lr": {"low": 0.001, "high": 0.2}}}
    assert made(recipe_of("finetune", search=space)) == 1
    assert Search(recipe, "finetune", tmp_path / "j", 0).best(1)[1].accuracy == 0.51
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
    run_searches([Search(recipe, strategy, tmp_path / "j", 0)], 1)
    (trial,) = Search(recipe, strategy, tmp_path / "j", 0).study.get_trials()
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
        ("covon-gradsq", "later_hess_init", {"low": 0.01, "high": 0.1}, True),  # its own is None
        ("finetune", "lr", {"low": 0.02, "high": 3.0}, False),
        ("finetune", "optimizer", {"choices": ["sgd", "adamw"]}, True),
        ("replay", "mem_size", {"low": 50, "high": 200}, True),
    ],
)
def test_the_first_trial_has_the_recipes_own_settings_where_the_space_has_them(
    tmp_path, runs, name, key, values, known
):
    recipe = recipe_of(name, search={name: {key: values}})
    run_searches([Search(recipe, name, tmp_path / "j", 0)], 3)
    own = getattr(recipe.strategies[name], key)
    drawn = [getattr(settings, key) for settings in runs]
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
    run_searches([Search(recipe, "own", tmp_path / "j", 0)], 8)
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
        ("finetune", "lr", {"low": 0.01, "high": 0.5}, "lr: .* at least two decades, got 0.01 to"),
        ("finetune", "lr", {"choices": [0.1, 0.01]}, "lr: .* at least two decades, got 0.1, 0.01"),
    ],
)
def test_a_space_that_does_not_fit_the_strategy_is_refused(name, key, values, message):
    own = recipe_of(name).model_dump() | {"search": {name: {key: values}}}
    with pytest.raises(RecipeError, match=rf"search: {name}\.{message}"):
        validate(own, "recipe")


# The protocol ---------------------------------------------------------------------------------


def searched(tmp_path, monkeypatch, accuracy, trials, name="finetune", **changes):
    """A search with a given accuracy of settings, and the settings in the order they ran."""
    made = []

    def fake(recipe, strategy, *arguments, **options):
        made.append(recipe.strategies[strategy])
        return SimpleNamespace(average_accuracy=accuracy(made[-1]))

    monkeypatch.setattr(run, "run_strategy", fake)
    search = Search(recipe_of(name, **changes), name, tmp_path / "j", 7)
    run_searches([search], trials)
    return search, made


def test_the_grid_has_the_recipes_own_rate_and_is_extended_while_the_best_is_at_an_end(
    tmp_path, monkeypatch
):
    def peak(at):
        return lambda settings: 1 / (1 + abs(math.log10(settings.lr / at)))

    lr = {"lr": {"low": 1e-4, "high": 1.0}}
    space = {"search": {"finetune": lr}}
    search, made = searched(tmp_path, monkeypatch, peak(0.02), 5, **space)
    assert [settings.lr for settings in made] == [0.01, 1e-4, 1e-3, 0.1, 1.0]
    assert search.best(5)[1] == Searched(
        trials=5, accuracy=peak(0.02)(made[0]), ranges={"lr": "0.0001 to 1"}
    )
    for at, more, at_end in ((4e-6, [1e-5, 1e-6], []), (1e9, [10, 100, 1e3, 1e4], ["lr"])):
        folder = tmp_path / str(at)
        search, made = searched(folder, monkeypatch, peak(at), 5, **space)
        assert [settings.lr for settings in made[5:]] == more
        assert search.best(5)[1].at_end == at_end
        assert search.best(5)[1].trials == 5 + len(more)


def test_later_trials_have_rates_near_the_best_and_fill_the_other_ranges(tmp_path, monkeypatch):
    space = {
        "lr": {"low": 1e-4, "high": 1.0},
        "alpha": {"low": 0.1, "high": 100},
        "temperature": {"low": 1, "high": 3, "log": False},
        "weight_decay": {"choices": [0.0, 0.1]},
    }

    def accuracy(settings):
        return 1 - 0.1 * abs(math.log10(settings.lr / 0.1)) - 0.01 * settings.alpha / 100

    search, made = searched(tmp_path, monkeypatch, accuracy, 21, "lwf", search={"lwf": space})
    own, draws = STRATEGIES["lwf"], made[5:]
    assert len(draws) == 16
    assert all(settings.alpha == own["alpha"] for settings in made[:5])
    assert all(0.01 <= settings.lr <= 1 for settings in draws)
    quarters = Counter(int(4 * math.log(s.alpha / 0.1) / math.log(1000)) for s in draws)
    assert [quarters[i] for i in range(4)] == pytest.approx([4] * 4, abs=1)  # low discrepancy
    assert {settings.weight_decay for settings in draws} == {0.0, 0.1}
    assert {search.best(21)[1].trials, len(made)} == {21}
    other = Search(search.recipe, "lwf", tmp_path / "k", 8)
    assert not {*map(str, search._draws(search.space, 9))} & {
        *map(str, other._draws(other.space, 9))
    }


def test_a_best_value_in_the_outer_tenth_of_its_range_is_marked(tmp_path, monkeypatch):
    space = {"alpha": {"low": 0.1, "high": 100.0}}
    search, _ = searched(
        tmp_path, monkeypatch, lambda s: s.alpha / 200, 30, "lwf", search={"lwf": space}
    )
    settings, found = search.best(30)
    assert settings["alpha"] > 50
    assert found == Searched(
        trials=30, accuracy=settings["alpha"] / 200, ranges={"alpha": "0.1 to 100"},
        at_end=["alpha"],
    )  # fmt: skip


def test_relative_to_the_weights_rate_and_knob_are_searched():
    own = {"kind": "covon", "preset": "finetune", "lr": 1e-4}
    space = space_of(small_recipe({"own": own}, stream=STREAM), "own")
    assert space == {"lr": Space(low=1e-5, high=1e-3), "gamma": Space(low=0.05, high=1.0)}


def test_the_table_of_trials_shows_what_runs_and_what_is_planned(tmp_path, runs):
    names = ("finetune", "ewc-star")
    searches = [Search(recipe_of(*names), name, tmp_path / "j", 7) for name in names]
    for search in searches:
        search.announce(6)
    run_searches(searches[:1], 6)
    claim = searches[1].claim(6)
    before = (tmp_path / "j").read_bytes()
    table = read_trials(tmp_path / "j")
    assert (tmp_path / "j").read_bytes() == before
    assert [*table["strategy"]] == ["finetune"] * len(runs) + ["ewc-star"]
    assert table["planned"].tolist() == [len(runs)] * len(runs) + [6]
    assert table["lr"].tolist()[:-1] == [settings.lr for settings in runs]
    assert table["accuracy"].max() == searches[0].best(6)[1].accuracy
    assert [*table["state"]] == ["complete"] * len(runs) + ["running"]
    assert claim is not None
    claim[0].release()  # its process has ended
    assert read_trials(tmp_path / "j")["state"].iloc[-1] == "interrupted"


def test_of_equal_trials_the_summary_has_the_one_of_best_toml(tmp_path):
    """Also if it was interrupted and began again after the other."""
    search = Search(recipe_of("finetune"), "finetune", tmp_path / "j", 0)
    killed, other = search.claim(2), search.claim(2)
    killed[0].release()
    for lock, trial, _ in (search.claim(2), other):
        search.study.tell(trial, 0.5)
        lock.release()
    settings, _ = search.best(2)
    (row,) = search_summary(tmp_path / "j").to_dict("records")
    assert row["settings"] == f"lr {settings['lr']}"


def test_trials_that_the_user_interrupts_are_no_attempts(tmp_path, runs, monkeypatch):
    search = Search(recipe_of("finetune"), "finetune", tmp_path / "j", 0)
    for _ in range(4):
        claim = search.claim(5)
        assert claim is not None
        claim[0].release()  # as if its process had ended
        search.forgive()
    assert search.scores() == {}
    run_searches([search], 5)
    assert runs[0] == search.settings


def test_settings_need_not_fit_the_recipes_own_ranges(tmp_path, runs):
    space = {"optimizer": {"choices": ["sgd", "adamw"]}, "momentum": {"low": 0.1, "high": 0.9}}
    recipe = small_recipe(
        {"own": {"kind": "finetune", "lr": 0.1, "optimizer": "sgd"}},
        search={"own": {"momentum": space["momentum"], "optimizer": space["optimizer"]}},
        stream=STREAM,
    )
    search = Search(recipe, "own", tmp_path / "j", 0)
    run_searches([search], 8)
    assert {settings.optimizer for settings in runs} == {"sgd"}
    errors = [t.user_attrs.get("error", "") for t in search.study.get_trials()]
    unfit = [
        error for error in errors if "momentum = " in error and 'needs optimizer = "sgd"' in error
    ]
    assert len(unfit) == 8 - len(runs) > 0


def test_tables_of_rules_are_set_before_their_arguments(tmp_path):
    recipe = recipe_of("finetune")
    settings = {"merge.gamma": 0.2, "merge": {"rule": "ema"}}
    assert with_settings(recipe, "finetune", settings).strategies["finetune"].merge.gamma == 0.2


def test_whole_numbers_that_the_recipe_leaves_unset_can_be_searched(tmp_path, runs):
    space = {"finetune": {"epochs": {"low": 1, "high": 3, "log": False}}}
    search = Search(recipe_of("finetune", search=space), "finetune", tmp_path / "j", 0)
    run_searches([search], 8)
    assert {settings.epochs for settings in runs} == {None, 1, 2, 3}
