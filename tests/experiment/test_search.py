"""Searches: resumable, on validation images only, with a budget that counts."""

import os
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import optuna
import pytest
from optuna.storages.journal import JournalFileSymlinkLock
from optuna.trial import TrialState
from small_recipes import STRATEGIES, small_recipe
from terminal import in_a_terminal
from typer.testing import CliRunner

from covon_avalanche import cli_search
from covon_avalanche.cli import app
from covon_avalanche.experiment import run
from covon_avalanche.experiment.recipe import Range, Recipe, RecipeError, load_recipe
from covon_avalanche.experiment.recipe_text import recipe_text
from covon_avalanche.experiment.searching import (
    BelowMedian,
    _sampler,
    best_settings,
    open_study,
    search_strategy,
    space_of,
    with_settings,
)

STREAM = {"name": "PermutedDigits", "n_experiences": 3, "validation_size": 300}


def recipe_of(*names, **changes) -> Recipe:
    strategies = {name: STRATEGIES[name] for name in names}
    return small_recipe(strategies, epochs=1, stream=STREAM, **changes)


@pytest.fixture
def runs(monkeypatch):
    """The settings of all runs, which take no time and learn better from one to the next."""
    made = []

    def fake(recipe, strategy, *arguments, **options):
        made.append(recipe.strategies[strategy])
        return SimpleNamespace(average_accuracy=0.5 + len(made) / 100)

    monkeypatch.setattr(run, "run_strategy", fake)
    return made


def stop_runs(monkeypatch, error):
    def fake(*arguments, **options):
        raise error

    monkeypatch.setattr(run, "run_strategy", fake)


def test_trials_are_kept_and_only_the_missing_are_made(tmp_path):
    recipe, journal, lines = recipe_of("finetune"), tmp_path / "trials.journal", []
    options = dict(seed=1000, notify=lines.append)
    study = open_study(journal, recipe, "finetune", 1000)
    search_strategy(recipe, "finetune", journal, trials=2, **options)
    first = study.get_trials()
    assert len(first) == len(lines) == 2
    assert first[0].params == {"lr": 0.01}  # the recipe's own settings come first
    search_strategy(recipe, "finetune", journal, trials=3, **options)
    again = study.get_trials()
    assert [t.params for t in again[:2]] == [t.params for t in first]
    assert len(again) == len(lines) == 3
    settings, value = best_settings(journal, recipe, "finetune", 3, seed=1000)
    assert value == max(t.value for t in again if t.state.name == "COMPLETE")
    assert settings in [t.params for t in again]
    first, _ = best_settings(journal, recipe, "finetune", 1, seed=1000)
    assert first == {"lr": 0.01}  # what was made beyond the budget does not count


def test_processes_that_search_together_draw_different_settings(tmp_path, runs):
    recipe, journal = recipe_of("finetune"), tmp_path / "j"
    study = open_study(journal, recipe, "finetune", 7)
    others = [study.ask() for _ in range(3)]  # other processes began at the same moment
    search_strategy(recipe, "finetune", journal, trials=3, seed=7)
    drawn = []
    for trial in others:
        study.sampler = _sampler(study, trial.number, 7, {"lr": 0.01}, last=False)
        drawn.append(trial.suggest_float("lr", 1e-3, 1e-1, log=True))
    *first, last = [settings.lr for settings in runs]
    assert drawn[0] == 0.01  # the recipe's own
    assert last == 0.01  # again, as nobody knows whether the first trial will end
    assert len(set(drawn + first)) == 5


def test_a_search_alone_is_reproducible_and_interruptions_do_not_change_it(tmp_path, runs):
    recipe = recipe_of("finetune")
    search_strategy(recipe, "finetune", tmp_path / "whole", trials=8, seed=7)
    whole = [settings.lr for settings in runs]
    runs.clear()
    for trials in (3, 8):
        search_strategy(recipe, "finetune", tmp_path / "parts", trials=trials, seed=7)
    assert [settings.lr for settings in runs] == whole


def test_interrupted_and_dead_trials_do_not_count(tmp_path, runs, monkeypatch):
    recipe, journal = recipe_of("finetune"), tmp_path / "j"
    with monkeypatch.context() as patch:
        stop_runs(patch, KeyboardInterrupt())
        for _ in range(2):
            with pytest.raises(KeyboardInterrupt):
                search_strategy(recipe, "finetune", journal, trials=2, seed=0)
    study = open_study(journal, recipe, "finetune", 0)
    study.ask()  # its process is killed
    search_strategy(recipe, "finetune", journal, trials=2, seed=0)
    states = [trial.state for trial in study.get_trials()]
    expected = [TrialState.FAIL] * 2 + [TrialState.RUNNING] + [TrialState.COMPLETE] * 2
    assert states == expected
    assert [settings.lr for settings in runs].count(0.01) == 1  # the recipe's own after all
    assert best_settings(journal, recipe, "finetune", 2, seed=0)[1] == 0.52


def test_the_recipes_own_settings_are_tried_where_the_first_process_was_killed(tmp_path, runs):
    recipe, journal = recipe_of("finetune"), tmp_path / "trials.journal"
    open_study(journal, recipe, "finetune", 1000).ask()  # and is heard of no more
    search_strategy(recipe, "finetune", journal, trials=3, seed=1000)
    assert [settings.lr == 0.01 for settings in runs] == [False, False, True]
    search_strategy(recipe, "finetune", journal, trials=4, seed=1000)
    assert runs[3].lr != 0.01


@pytest.mark.filterwarnings("ignore:The value of `grace_period`")
def test_the_lock_of_a_killed_search_is_broken(tmp_path, runs, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(JournalFileSymlinkLock.__init__, "__defaults__", (1,))  # grace period
    recipe, journal = recipe_of("finetune"), Path("searches/trials.journal")
    study = open_study(journal, recipe, "finetune", 0)
    study._storage._backend._lock.acquire()  # and its process is killed
    assert Path("searches/trials.journal.lock").exists()  # else Optuna would wait for ever
    search_strategy(recipe, "finetune", journal, trials=1, seed=0)
    assert len(runs) == 1


def test_searches_that_differ_do_not_mix(tmp_path, runs):
    recipe, journal = recipe_of("finetune"), tmp_path / "j"

    def made(recipe=recipe, **options):
        before = len(runs)
        search_strategy(recipe, "finetune", journal, **{"trials": 1, "seed": 0} | options)
        return len(runs) - before

    assert made() == 1
    assert made() == 0
    assert made(recipe_of("finetune", "covon", name="other", title="Other", seeds=[5])) == 0
    assert made(validation_size=300) == 0  # the recipe's
    assert made(seed=1) == 1
    assert made(validation_size=0.2) == 1
    assert made(recipe.model_copy(update={"epochs": 2})) == 1
    assert made(with_settings(recipe, "finetune", {"weight_decay": 0.5})) == 1
    space = {"finetune": {"lr": {"low": 0.001, "high": 0.01}}}
    assert made(recipe_of("finetune", search=space)) == 1
    assert best_settings(journal, recipe, "finetune", 1, seed=0)[1] == 0.51
    with pytest.raises(RecipeError, match="no trial of finetune was completed"):
        best_settings(journal, recipe, "finetune", 1, seed=9)


def test_the_test_stream_is_never_looked_at(tmp_path, monkeypatch):
    seen = []
    whole = run.run_strategy

    def spy(*arguments, **options):
        result = whole(*arguments, **options)
        seen.append((options["stream"], result.stream, result.counts, result.seed))
        return result

    monkeypatch.setattr(run, "run_strategy", spy)
    recipe = recipe_of("finetune")
    search_strategy(recipe, "finetune", tmp_path / "j", trials=1, seed=77)
    assert seen == [("valid", "valid", [300] * 3, 77)]


def test_without_validation_images_there_is_no_search(tmp_path):
    stream = {"name": "PermutedDigits", "n_experiences": 2}
    recipe = small_recipe({"finetune": STRATEGIES["finetune"]}, epochs=1, stream=stream)
    with pytest.raises(RecipeError, match="holds out no validation images"):
        search_strategy(recipe, "finetune", tmp_path / "j", trials=1, seed=0)
    search_strategy(recipe, "finetune", tmp_path / "j", trials=1, seed=0, validation_size=100)


def test_a_diverging_trial_counts_as_nothing_learned(tmp_path):
    recipe = with_settings(recipe_of("finetune"), "finetune", {"lr": 1e30})
    search_strategy(recipe, "finetune", tmp_path / "j", trials=1, seed=0)
    (trial,) = open_study(tmp_path / "j", recipe, "finetune", 0).get_trials()
    assert trial.value == 0.0
    with pytest.raises(RecipeError, match="all trials of finetune diverged"):
        best_settings(tmp_path / "j", recipe, "finetune", 1, seed=0)


def test_spaces():
    recipe = recipe_of("covon")
    space = space_of(recipe, "covon")
    assert space["lr"] == Range(low=0.01, high=1.0)
    assert not {"gamma", "beta2"} & set(space)  # they have scales of their own
    given = {"covon": {"lr": {"low": 0.1, "high": 0.2}, "hess_approx": {"choices": ["gradsq"]}}}
    own = recipe_of("covon", search=given)
    assert list(space_of(own, "covon")) == ["lr", "hess_approx"]
    assert space_of(recipe_of("covon", search={"covon": {}}), "covon") == space
    wrong = recipe_of("covon", search={"covon": {"rate": {"low": 0.1, "high": 0.2}}})
    with pytest.raises(RecipeError, match=r"search\.covon\.rate: covon has no such setting"):
        space_of(wrong, "covon")


@pytest.mark.parametrize("name", STRATEGIES)
def test_the_space_of_every_strategy_has_only_what_it_takes(name):
    recipe = recipe_of(name)
    space = space_of(recipe, name)
    assert "lr" in space
    for key, values in space.items():
        for end in (values.low, values.high):
            with_settings(recipe, name, {key: end})


@pytest.mark.parametrize(
    ("name", "key", "values", "known"),
    [
        ("covon-gradsq", "later_hess_init", {"low": 0.01, "high": 0.1}, False),  # its own is None
        ("finetune", "optimizer", {"choices": ["sgd"]}, False),
        ("finetune", "lr", {"low": 0.02, "high": 0.1}, False),
        ("finetune", "optimizer", {"choices": ["sgd", "adamw"]}, True),
        ("replay", "mem_size", {"low": 50, "high": 200}, True),
        ("er-ace", "batch_size_mem", {"low": 2, "high": 20, "log": False}, True),
        ("der", "batch_size_mem", {"low": 2, "high": 20}, True),  # may be None
    ],
)
def test_the_first_trial_has_the_recipes_own_settings_where_the_space_has_them(
    tmp_path, runs, name, key, values, known
):
    recipe = recipe_of(name, search={name: {key: values}})
    search_strategy(recipe, name, tmp_path / "j", trials=3, seed=0)
    own = getattr(recipe.strategies[name], key)
    drawn = [getattr(settings, key) for settings in runs]
    assert (drawn[0] == own) is known
    if "low" in values:
        assert all(values["low"] <= value <= values["high"] for value in drawn)
    assert len(set(drawn)) > 1 or values == {"choices": ["sgd"]}
    if key.endswith("size") or key.startswith("batch"):
        assert all(isinstance(value, int) for value in drawn)


def test_the_arguments_of_a_class_of_the_users_are_searched_too(tmp_path, runs):
    arguments = {"strength": 0.5, "size": 4, "mode": "a"}
    own = STRATEGIES["custom"] | {"arguments": arguments}
    space = {
        "lr": {"low": 0.001, "high": 0.1},
        "arguments.strength": {"low": 0.1, "high": 1.0},
        "arguments.size": {"low": 2, "high": 9},
        "arguments.mode": {"choices": ["a", "b"]},
    }
    common = dict(epochs=1, stream=STREAM)
    recipe = small_recipe({"own": own}, search={"own": space}, **common)
    search_strategy(recipe, "own", tmp_path / "j", trials=8, seed=0)
    first, *others = [settings.arguments for settings in runs]
    assert first == arguments
    assert all(0.1 <= drawn["strength"] <= 1.0 for drawn in others)
    assert all(isinstance(drawn["size"], int) and 2 <= drawn["size"] <= 9 for drawn in others)
    assert {drawn["mode"] for drawn in others} == {"a", "b"}
    settings, _ = best_settings(tmp_path / "j", recipe, "own", 8, seed=0)
    best = with_settings(recipe, "own", settings).strategies["own"]
    assert best == runs[-1]  # they learn better from one to the next
    assert recipe.strategies["own"].arguments == arguments
    for key in ("arguments.stength", "strength"):
        wrong = small_recipe({"own": own}, search={"own": {key: space["lr"]}}, **common)
        with pytest.raises(RecipeError, match=rf"search\.own\.{key}: own has no such setting"):
            space_of(wrong, "own")


@pytest.mark.parametrize(
    ("name", "key", "values", "message"),
    [
        ("mas", "alpha", {"low": 0.05, "high": 5.0}, r"alpha: 5\.0: .*less than or equal to 1"),
        ("replay", "mem_size", {"low": 0.5, "high": 9}, r"mem_size: 0\.5: .*valid integer"),
        ("finetune", "optimizer", {"choices": ["sgd", "adam"]}, "optimizer: 'adam': .*'adamw'"),
    ],
)
def test_a_space_that_a_setting_does_not_take_is_refused(name, key, values, message):
    with pytest.raises(RecipeError, match=rf"search\.{name}\.{message}"):
        space_of(recipe_of(name, search={name: {key: values}}), name)


def test_the_spaces_of_the_pacs_search_fit_its_strategies():
    recipe = load_recipe(str(Path(__file__).parents[2] / "benchmarks" / "pacs.toml"))
    assert recipe.search.keys() == recipe.strategies.keys()
    for name in recipe.strategies:
        own = recipe.strategies[name].model_dump()
        for key, values in space_of(recipe, name).items():
            inside = values.low <= own[key] <= values.high if isinstance(values, Range) else True
            assert inside, (name, key)


@pytest.mark.parametrize("name", ["permuted-digits", "domainnet", "core50"])
def test_a_recipe_survives_being_written(tmp_path, name):
    recipe = load_recipe(name)
    file = tmp_path / "copy.toml"
    file.write_text(recipe_text(recipe, {}), encoding="utf-8")
    assert load_recipe(str(file)) == recipe


def test_the_command_writes_a_recipe_of_the_best(tmp_path):
    recipe, file = recipe_of("finetune", "ewc-star"), tmp_path / "mine.toml"
    file.write_text(recipe_text(recipe, {}), encoding="utf-8")
    arguments = ["search", str(file), "--trials", "2", "--out", str(tmp_path / "out")]
    arguments += ["--seed", "77", "--validation-size", "200"]
    first = CliRunner().invoke(app, [*arguments, "--strategies", "finetune"])
    assert first.exit_code == 0, first.output
    assert list(load_recipe(str(tmp_path / "out" / "best.toml")).strategies) == ["finetune"]
    assert "ewc-star" not in (tmp_path / "out" / "trials.journal").read_text()
    done = CliRunner().invoke(app, [*arguments, "--strategies", "ewc-star"])
    assert done.exit_code == 0, done.output
    best = load_recipe(str(tmp_path / "out" / "best.toml"))  # what was searched before stays
    assert list(best.strategies) == ["finetune", "ewc-star"]
    for name in ("finetune", "ewc-star"):
        journal = tmp_path / "out" / "trials.journal"
        settings, value = best_settings(journal, recipe, name, 2, seed=77, validation_size=200)
        assert f"{name}: validation A_T {100 * value:.2f} %" in done.stdout
        found = best.strategies[name].model_dump()
        assert {key: found[key] for key in settings} == settings
    assert done.stderr == ""
    assert CliRunner().invoke(app, arguments).exit_code == 0  # nothing is left to do


def test_a_seed_that_will_be_reported_is_remarked_upon(tmp_path, monkeypatch):
    def no_pool(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(cli_search, "ProcessPoolExecutor", no_pool)
    for seed, lines in (("0", 1), ("1000", 0)):
        done = CliRunner().invoke(app, ["search", "permuted-digits", "--seed", seed])
        assert len(done.stderr.splitlines()) == lines
        assert ("--seed 0 is one of the recipe's seeds" in done.stderr) == lines


def test_ctrl_c_ends_a_search_and_marks_its_trials(tmp_path):
    names = ("finetune", "ewc-star", "covon")
    recipe = recipe_of(*names).model_copy(update={"epochs": 1000})
    file, journal = tmp_path / "mine.toml", tmp_path / "trials.journal"
    file.write_text(recipe_text(recipe, {}), encoding="utf-8")
    command = [sys.executable, "-m", "covon_avalanche", "search", str(file), "--jobs", "1"]
    command += ["--out", str(tmp_path), "--seed", "0"]
    with in_a_terminal(command) as process:
        deadline = time.monotonic() + 120
        while b"lr" not in _content(journal) and time.monotonic() < deadline:
            time.sleep(0.1)
        os.killpg(process.pid, signal.SIGINT)
        output, errors = process.communicate(timeout=120)
    assert process.returncode == 130, errors
    assert "Interrupted; the same command goes on from here." in output
    states = [t.state for name in names for t in open_study(journal, recipe, name, 0).get_trials()]
    assert states == [TrialState.FAIL]


def _content(file: Path) -> bytes:
    return file.read_bytes() if file.exists() else b""


def test_a_trial_is_pruned_where_it_is_below_the_median_now():
    """Though its first value, its best, was as good as any."""
    study = optuna.create_study(direction="maximize", pruner=BelowMedian(trials=3, domains=2))

    def run(*curve):
        trial = study.ask()
        for domains, accuracy in enumerate(curve, start=1):
            trial.report(accuracy, domains)
            if trial.should_prune():
                study.tell(trial, state=TrialState.PRUNED)
                return domains
        study.tell(trial, curve[-1])
        return None

    assert run(0.9, 0.1, 0.1) is None  # nothing to compare with
    assert run(0.9, 0.8, 0.7) is None
    assert run(0.9, 0.8, 0.6) is None
    assert run(0.1, 0.8, 0.6) is None  # too early, then not below
    assert run(0.99, 0.7, 0.9) == 2
    assert run(0.99, 0.9, 0.5) == 3
