"""Recipes: the shipped ones, and clear errors for bad ones."""

import pytest

from covon_avalanche.experiment.recipe import (
    RecipeError,
    choose,
    load_recipe,
    shipped_recipes,
    validate,
)
from covon_avalanche.experiment.recipe_text import recipe_text

GOOD = """
name = "tiny"
title = "Tiny"
epochs = 1
train_mb_size = 64
final_lr_factor = 0.5
seeds = [0]
stream = { name = "PermutedDigits", n_experiences = 2 }
model = { hidden_size = 8, hidden_layers = 1 }
[strategies.finetune]
kind = "finetune"
lr = 1e-3
[strategies.mine]
kind = "covon"
lr = 0.1
ess = 1000.0
hess_init = 0.1
later_hess_init = 0.1
gamma = 0.8
beta2 = 0.99
clip_radius = 0.1
"""


def write(tmp_path, text):
    path = tmp_path / "recipe.toml"
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_all_shipped_recipes_are_valid_and_named_as_their_file():
    assert "permuted-digits" in shipped_recipes()
    for name in shipped_recipes():
        assert load_recipe(name).name == name


def test_the_main_recipe_compares_what_it_says():
    recipe = load_recipe("permuted-digits")
    assert list(recipe.strategies) == [
        "finetune",
        "ewc",
        "ewc-star",
        "ada-reg",
        "vcl",
        "covon-nom",
        "covon",
        "joint",
    ]
    assert recipe.strategies["covon-nom"].gamma == 1
    assert recipe.stream.n_experiences == 5
    assert len(recipe.seeds) == 3


@pytest.mark.parametrize("name", shipped_recipes())
def test_shipped_recipes_written_as_text_are_the_same(name, tmp_path):
    recipe = load_recipe(name)
    written = load_recipe(write(tmp_path, recipe_text(recipe, {})))
    assert written == recipe.model_copy(update={"search": {}})


def test_names_and_keys_that_need_quotes_are_written_with_them(tmp_path):
    arguments = {"with space": [1, {"é": 'a "b"\x7f'}], "plain": True}
    mine = {"kind": "custom", "lr": 0.1, "implementation": "m:C", "arguments": arguments}
    recipe = load_recipe(write(tmp_path, GOOD))
    data = recipe.model_dump() | {"strategies": {"mine.1+": mine}}
    recipe = validate(data, "here")
    text = recipe_text(recipe, {"mine.1+": "the best"})
    assert '[strategies."mine.1+"]  # the best' in text
    assert load_recipe(write(tmp_path, text)) == recipe


def test_strategies_whose_names_have_dots_are_set_too(tmp_path):
    path = write(tmp_path, GOOD.replace("strategies.mine", 'strategies."mine-0.5"'))
    changes = ["strategies.mine-0.5.lr=0.25", "strategies.finetune.lr=0.5"]
    strategies = load_recipe(path, changes).strategies
    assert (strategies["mine-0.5"].lr, strategies["finetune"].lr) == (0.25, 0.5)
    whole = load_recipe(path, ['strategies.mine-0.5={kind = "finetune", lr = 1}']).strategies
    assert whole["mine-0.5"].kind == "finetune"


@pytest.mark.parametrize("value", ["nan", "inf", "[1, { a = -inf }]", "1979-05-27"])
def test_arguments_are_what_results_can_hold(tmp_path, value):
    own = '[strategies.own]\nkind = "custom"\nlr = 0.1\nimplementation = "m:C"\n'
    own += f"arguments = {{ x = {value} }}"
    with pytest.raises(RecipeError, match=r"arguments: must be finite numbers, texts"):
        load_recipe(write(tmp_path, GOOD + own))


def test_a_users_file(tmp_path):
    recipe = load_recipe(write(tmp_path, GOOD))
    assert recipe.strategies["mine"].ess == 1000


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("lr = 1e-3", "lr = inf", r"strategies\.finetune\.lr = inf: "),
        ("lr = 1e-3", 'lr = "fast"', r"strategies\.finetune\.lr = 'fast': "),
        ("lr = 1e-3", "lr = 1e-3\nmomentum = 0.9", r"momentum = 0\.9: needs optimizer = \"sgd\""),
        ("lr = 0.1", "lr = 0.1\ness_per_example = 1.0", "mine: give ess or ess_per_example"),
        ("lr = 0.1", "lr = 0.1\nschedule = [{}]", r"\.schedule = .*: replaces later_hess_init"),
        ("epochs = 1", "epochs = 1.5", r"epochs = 1\.5: "),
        ("epochs = 1", 'epochs = 1\ndevice = "tpu"', "device = 'tpu': "),
        ("epochs = 1", 'epochs = 1\nprecision = "float8"', "precision = 'float8': "),
        ("factor = 0.5", "factor = 2.0", r"final_lr_factor = 2\.0: "),
        ("seeds = [0]", "seeds = [-1]", r"seeds\.0 = -1: "),
        ("[strategies.mine]", '[strategies."../x"]', r"'\.\./x' is no name for a strategy"),
        ("[strategies.mine]", "[strategy.mine]", "strategy: unknown key"),
        ("lr = 0.1", "lrr = 0.1", r"strategies\.mine\.lrr: unknown key; known are .*clip_radius"),
        ("gamma = 0.8", "", r"strategies\.mine\.gamma: is missing"),
        ("gamma = 0.8", "gamma = -1.0", r"strategies\.mine\.gamma = -1\.0: .*greater than 0"),
        ("epochs = 1", "epochs = 0", r"epochs = 0: .*greater than 0"),
        (
            "gamma = 0.8",
            "gamma = 1.5",
            r"strategies\.mine\.gamma = 1\.5: .*less than or equal",
        ),
        ('kind = "covon"', "", r"strategies\.mine\.kind: is missing; known are finetune, .*covon"),
        ('name = "PermutedDigits", ', "", r"stream\.name: is missing; known are PermutedDigits, "),
        ('kind = "covon"', 'kind = "covonn"', r"strategies\.mine: .*'covonn'.*'covon'"),
        ('"PermutedDigits"', '"Digits"', r"stream: .*'Digits'.*'PermutedDigits'"),
        ("seeds = [0]", "seeds = []", r"seeds = \[\]: .*at least 1"),
        ("title = ", "title ", "not valid TOML"),
        ("seeds = [0]", "seeds = [0, 0]", r"seeds = \[0, 0\]: .*distinct"),
        (
            "n_experiences = 2",
            "n_domains = 2",
            r"stream\.n_domains: unknown key; known are .*permute_first",
        ),
        ("hidden_size = 8, ", "", r"model\.hidden_size: is missing"),
        ('name = "PermutedDigits"', 'name = "PACS"', r"stream\.n_experiences: unknown key"),
        ("beta2 = 0.99", "beta2 = 1.0", r"strategies\.mine\.beta2 = 1\.0: .*less than 1"),
        (
            "clip_radius = 0.1",
            "clip_radius = 0.1\n[search.mien]\nlr = { low = 0.1, high = 0.2 }",
            "search: .*no strategy 'mien'; known are finetune, mine",
        ),
        (
            "clip_radius = 0.1",
            "clip_radius = 0.1\n[search.mine]\nlr = { low = 0.2, high = 0.1 }",
            r"search\.mine\.lr: low must be below high, got 0\.2 and 0\.1$",
        ),
        (
            "clip_radius = 0.1",
            "clip_radius = 0.1\n[search.mine]\nlr = { low = 0.1, hgih = 0.2 }",
            r"search\.mine\.lr\.hgih: unknown key; known are low, high, log$",
        ),
        (
            "clip_radius = 0.1",
            "clip_radius = 0.1\nschedule = [{}, { beta2 = 0.9 }]",
            r"strategies\.mine\.schedule\.1\.beta2: unknown key; known are lr, .*epochs$",
        ),
    ],
)
def test_errors_name_file_key_and_rule(tmp_path, old, new, message):
    path = write(tmp_path, GOOD.replace(old, new, 1))
    with pytest.raises(RecipeError, match=message) as caught:
        load_recipe(path)
    assert path in str(caught.value)
    assert "\n" not in str(caught.value).strip()


def test_other_epochs_are_those_of_a_schedule_too(tmp_path):
    schedule = "schedule = [{ epochs = 7, lr = 0.2 }]"
    recipe = load_recipe(write(tmp_path, GOOD.replace("later_hess_init = 0.1", schedule)))
    assert choose(recipe).strategies["mine"].schedule[0].epochs == 7
    (task,) = choose(recipe, epochs=2).strategies["mine"].schedule
    assert (task.epochs, task.lr) == (None, 0.2)


def test_a_choice_of_strategies_has_only_their_spaces(tmp_path):
    spaces = "".join(
        f"[search.{n}]\nlr = {{ low = 0.1, high = 0.2 }}\n" for n in ("mine", "finetune")
    )
    recipe = choose(load_recipe(write(tmp_path, GOOD + spaces)), "mine")
    assert list(recipe.search) == ["mine"]
    assert validate(recipe.model_dump(), "chosen") == recipe


def test_unknown_names_list_the_known_ones_and_missing_files_are_said():
    with pytest.raises(RecipeError, match=r"no recipe 'permuted'; known are .*permuted-digits"):
        load_recipe("permuted")
    with pytest.raises(RecipeError, match="cannot be read: No such file"):
        load_recipe("nowhere/recipe.toml")
