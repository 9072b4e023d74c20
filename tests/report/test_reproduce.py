"""The commands of a report repeat its runs."""

import re
import shlex

import pytest
from made_up_results import made_up

from covon_avalanche.experiment.recipe import load_recipe
from covon_avalanche.experiment.recipe_text import recipe_text
from covon_avalanche.experiment.run_folder import settings_of
from covon_avalanche.report import comparisons, results_frame, write_report
from covon_avalanche.report.reproduce import command


def run_of(recipe, strategy, changes=(), name=None, **more):
    settings = settings_of(load_recipe(recipe, changes), strategy)
    run = made_up(strategy, 2, [[0.9]], recipe=name or recipe, **more)
    return run.model_copy(update={"settings": settings})


def test_commands_can_be_pasted_into_a_shell():
    runs = results_frame([made_up("it's; rm", seed, [[0.9]]) for seed in (0, 4)])
    assert command(runs) == """covon run r.toml --strategies 'it'"'"'s; rm' --seeds 0,4"""


@pytest.mark.parametrize(
    ("recipe", "strategy", "changes"),
    [
        ("permuted-digits", "covon", []),
        ("permuted-digits", "finetune", ["epochs=3", "strategies.finetune.lr=0.5"]),
        ("permuted-digits", "finetune", ["stream.n_experiences=2", 'device="mps"']),
        ("pacs", "finetune", ['model.weights=""']),
        ("domainnet", "covon-paper", ['stream.domains=["clipart", "it\'s"]']),
        ("core50", "covon-authors", ["strategies.covon-authors.schedule=[{lr = 1e-3}, {}]"]),
        ("permuted-digits", "mine", ['strategies.mine={kind = "joint", lr = 0.5}']),
    ],
)
def test_commands_make_the_same_run(recipe, strategy, changes):
    run = run_of(recipe, strategy, changes)
    words = shlex.split(command(results_frame([run])))
    assert words[:7] == ["covon", "run", recipe, "--strategies", strategy, "--seeds", "2"]
    assert words[7::2] == ["--set"] * len(words[7::2])
    assert settings_of(load_recipe(recipe, words[8::2]), strategy) == run.settings
    assert len(words[8::2]) == len(changes) or strategy == "mine"


def test_commands_tell_different_settings_of_one_file_apart(tmp_path):
    """Rows of one comparison and of others, of the same strategy."""
    file = tmp_path / "mine.toml"
    file.write_text(recipe_text(load_recipe("permuted-digits"), {}), encoding="utf-8")
    every = ([], ["strategies.covon.lr=0.5"], ["strategies.covon.lr=0.5", "epochs=3"])
    runs = results_frame(run_of(str(file), "covon", changes, name="mine") for changes in every)
    rows = [row for _, row in runs.iterrows()]
    for i, run in enumerate(rows):
        words = shlex.split(command(runs.iloc[[i]], rows))
        assert words[:5] == ["covon", "run", "mine.toml", "--strategies", "covon"]
        assert settings_of(load_recipe(str(file), words[8::2]), "covon") == run["settings"]
    page = write_report(runs, tmp_path / "report").read_text(encoding="utf-8")
    assert len(set(re.findall("<code>covon run (.*)</code>", page))) == 3


def test_a_run_that_no_setting_makes_of_the_shipped_recipe_is_one_of_a_file():
    run = run_of("permuted-digits", "covon")
    del run.settings["strategy"]["hess_init"]
    (comparison,) = comparisons(results_frame([run]))
    text = command(comparison.runs_of("covon"))
    assert text == "covon run permuted-digits.toml --strategies covon --seeds 2"
