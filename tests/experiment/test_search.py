"""Searches: resumable, on validation images only, with a budget that counts."""

from pathlib import Path

import pytest
from small_recipes import STRATEGIES, small_recipe
from typer.testing import CliRunner

from covon_avalanche.cli import app
from covon_avalanche.experiment import run
from covon_avalanche.experiment.recipe import Range, Recipe, RecipeError, load_recipe
from covon_avalanche.experiment.searching import (
    best_settings,
    open_study,
    recipe_text,
    search_strategy,
    space_of,
    with_settings,
)

STREAM = {"name": "PermutedDigits", "n_experiences": 3, "validation_size": 300}


def recipe_of(*names, **changes) -> Recipe:
    strategies = {name: STRATEGIES[name] for name in names}
    return small_recipe(strategies, epochs=1, stream=STREAM, **changes)


def test_trials_are_kept_and_only_the_missing_are_made(tmp_path):
    recipe, journal, lines = recipe_of("finetune"), tmp_path / "trials.journal", []
    options = dict(seed=1000, notify=lines.append)
    search_strategy(recipe, "finetune", journal, trials=2, **options)
    first = open_study(journal, recipe, "finetune", 0).get_trials()
    assert len(first) == len(lines) == 2
    assert first[0].params == {"lr": 0.01}  # the recipe's own settings come first
    search_strategy(recipe, "finetune", journal, trials=3, **options)
    again = open_study(journal, recipe, "finetune", 0).get_trials()
    assert [t.params for t in again[:2]] == [t.params for t in first]
    assert len(again) == len(lines) == 3
    settings, value = best_settings(journal, recipe, "finetune", 3)
    assert value == max(t.value for t in again if t.state.name == "COMPLETE")
    assert settings in [t.params for t in again]
    first, _ = best_settings(journal, recipe, "finetune", 1)
    assert first == {"lr": 0.01}  # what was made beyond the budget does not count


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


def test_spaces():
    recipe = recipe_of("covon")
    space = space_of(recipe, "covon")
    assert space["lr"] == Range(low=0.01, high=1.0)
    assert not {"gamma", "beta2"} & set(space)  # they have scales of their own
    given = {"covon": {"lr": {"low": 0.1, "high": 0.2}, "hess_approx": {"choices": ["gradsq"]}}}
    own = recipe_of("covon", search=given)
    assert list(space_of(own, "covon")) == ["lr", "hess_approx"]
    wrong = recipe_of("covon", search={"covon": {"rate": {"low": 0.1, "high": 0.2}}})
    with pytest.raises(RecipeError, match=r"search\.covon\.rate: covon has no such setting"):
        space_of(wrong, "covon")


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
    recipe = tmp_path / "mine.toml"
    recipe.write_text(recipe_text(recipe_of("finetune", "ewc-star"), {}), encoding="utf-8")
    arguments = ["search", str(recipe), "--trials", "2", "--out", str(tmp_path / "out")]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    best = load_recipe(str(tmp_path / "out" / "best.toml"))
    for name in ("finetune", "ewc-star"):
        journal = tmp_path / "out" / "trials.journal"
        settings, value = best_settings(journal, best, name, 2)
        assert f"{name}: validation A_T {100 * value:.2f} %" in done.stdout
        found = best.strategies[name].model_dump()
        assert {key: found[key] for key in settings} == settings
    assert CliRunner().invoke(app, arguments).exit_code == 0  # nothing is left to do
