"""Recipes: the shipped ones, and clear errors for bad ones."""

import json

import pytest

from covon_avalanche.experiment.recipe import (
    RecipeError,
    choose,
    load_recipe,
    parse_seeds,
    read_recipe,
    recipe_text,
    shipped_recipes,
    validate,
)

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
[strategies.own]
kind = "custom"
lr = 0.1
implementation = "m:C"
"""


def write(tmp_path, text):
    path = tmp_path / "recipe.toml"
    path.write_text(text, encoding="utf-8-sig")  # as Windows' editors do
    return str(path)


@pytest.mark.parametrize("name", shipped_recipes())
def test_shipped_recipes_are_named_as_their_file_and_the_same_written_as_text(name, tmp_path):
    recipe = load_recipe(name)
    assert recipe.name == name
    written = load_recipe(write(tmp_path, recipe_text(recipe)))
    assert written == recipe.model_copy(update={"search": {}})


def test_a_recipe_extends_another_with_its_own_keys(tmp_path):
    ranges = "[search]\nmine.gamma.choices = [1.0]\nown.lr = { low = 1e-5, high = 0.1 }\n"
    (tmp_path / "base.toml").write_text(f"# Base.\n{GOOD}\n{ranges}", encoding="utf-8")
    child = """# Child.
        extends = "base.toml"
        remove = ["strategies.own", "strategies.mine.beta2"]
        epochs = 3
        stream.n_experiences = 4
        [strategies]
        mine.lr = 0.2
        finetune = { kind = "ewc", lr = 1, ewc_lambda = 2 }
        new = { kind = "ncm" }
        [search.mine]
        gamma = { low = 0.1, high = 1 }
    """
    path = tmp_path / "recipe.toml"
    path.write_text(child.replace("        ", ""), encoding="utf-8")
    base = load_recipe(str(tmp_path / "base.toml")).model_dump(exclude_none=True)
    recipe = load_recipe(str(path), ["strategies.mine.gamma=0.7"])
    del base["strategies"]["own"], base["strategies"]["mine"]["beta2"]
    del base["search"]["own"]  # without its strategy
    base["strategies"]["mine"] |= {"lr": 0.2, "gamma": 0.7}
    base["strategies"]["finetune"] = {"kind": "ewc", "lr": 1, "ewc_lambda": 2}
    base["strategies"]["new"] = {"kind": "ncm"}
    base["stream"]["n_experiences"] = 4
    base["search"]["mine"]["gamma"] = {"low": 0.1, "high": 1}
    assert recipe == validate(base | {"epochs": 3}, "expected")
    text, _ = read_recipe(path)
    assert text.startswith("# Child.\nname = ")
    (tmp_path / "again.toml").write_text(text, encoding="utf-8")
    assert load_recipe(str(tmp_path / "again.toml")) == load_recipe(str(path))


@pytest.mark.parametrize("own", ["", "search.mine.alpha = { low = 0.1, high = 1.0 }\n"])
def test_a_strategy_of_another_kind_has_no_range_of_the_extended_recipe(tmp_path, own):
    ranges = "[search]\nmine.gamma.choices = [1.0]\nown.lr = { low = 1e-5, high = 0.1 }\n"
    base = write(tmp_path, f"{GOOD}\n{ranges}")
    other = 'strategies.mine = { kind = "lwf", lr = 1e-3, alpha = 1 }\n'
    (tmp_path / "child.toml").write_text(f'extends = "{base}"\n{own}{other}', encoding="utf-8")
    found = load_recipe(str(tmp_path / "child.toml")).search
    assert {name: [*keys] for name, keys in found.items()} == (
        {"own": ["lr"], "mine": ["alpha"]} if own else {"own": ["lr"]}
    )


@pytest.mark.parametrize("searched", ['["mine", "own"]', "{ mine = { trials = 3 }, own = {} }"])
def test_a_strategy_with_changed_settings_is_no_longer_called_searched(tmp_path, searched):
    base = write(tmp_path, f"searched = {searched}\n{GOOD}")
    assert [*load_recipe(base).searched] == ["mine", "own"]
    changes = ["strategies.own.lr=0.2", "stream.validation_size=0.1", "title=Other"]
    assert [*load_recipe(base, changes).searched] == ["mine"]
    stream = 'stream={ name="PermutedMNIST", n_experiences=2 }'
    for other in ("epochs=3", "model.hidden_size=7", stream):
        assert load_recipe(base, [other]).searched == {}
    whole = load_recipe(base, ["strategies.own.epochs=3"])
    whole = whole.model_copy(update={"searched": load_recipe(base).searched})
    assert choose(whole, epochs=3).searched == {}
    assert [*choose(whole, epochs=whole.epochs).searched] == ["mine"]  # the other had its own
    again = ["strategies.own.lr=0.2", "searched={ own = { trials = 5 } }"]
    assert load_recipe(base, again).searched["own"].trials == 5
    child = tmp_path / "child.toml"
    extends = f'extends = "{base}"\n[strategies]\n'
    child.write_text(f"{extends}own.lr = 0.2\nnew.kind = 'ncm'", encoding="utf-8")
    assert [*load_recipe(str(child)).searched] == ["mine"]
    with child.open("a", encoding="utf-8") as file:
        file.write("\n[searched.own]\ntrials = 5")
    assert load_recipe(str(child)).searched["own"].trials == 5
    child.write_text(f'extends = "{base}"\nremove = ["strategies.mine.beta2"]', encoding="utf-8")
    assert [*load_recipe(str(child)).searched] == ["own"]


def test_a_stream_or_model_of_another_kind_replaces_that_of_the_extended_recipe(tmp_path):
    path = write(tmp_path, 'extends = "domainnet"\nstream = { name = "CDDB" }')
    assert load_recipe(path).stream.domains[0] == "gaugan"
    path = write(tmp_path, 'extends = "permuted-digits"\n[strategies.name]\nkind = "ncm"')
    assert {"name", "finetune"} <= load_recipe(path).strategies.keys()
    network = {"backbone": "squeezenet", "weights": ""}
    perceptron = {"hidden_size": 8, "hidden_layers": 1}
    for parent, model in ("permuted-digits", network), ("pacs", perceptron):
        keys = ", ".join(f"{key} = {json.dumps(value)}" for key, value in model.items())
        path = write(tmp_path, f'extends = "{parent}"\nmodel = {{ {keys} }}')
        assert load_recipe(path).model.model_dump() == model
    path = write(tmp_path, 'extends = "pacs"\nmodel.weights = ""')
    assert load_recipe(path).model.model_dump() == network


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ('extends = "nosuch"', "recipe.toml extends 'nosuch': there is no recipe 'nosuch'; known"),
        ('extends = "no.toml"', r"extends 'no.toml': recipe .*/no.toml cannot be read: No such"),
        ('extends = "recipe.toml"', "extends 'recipe.toml': recipe .*recipe.toml would extend it"),
        ("extends = 3", "recipe.toml extends 3: must be the name or the path of a recipe"),
        ('extends = "pacs"\nremove = "x"', "extends 'pacs': remove = 'x': must be a list"),
        ('extends = "pacs"\nremove = ["stream.nam"]', "'stream.nam'; did you mean name"),
        ('extends = "\\u0000.toml"', "recipe.toml extends .*: embedded null"),
        ('extends = "pacs"\nremove = ["name.x"]', "extends 'pacs': name.x: name is a value"),
    ],
)
def test_recipes_that_cannot_be_extended_are_named(tmp_path, keys, message):
    with pytest.raises(RecipeError, match=message):
        load_recipe(write(tmp_path, keys))


def test_recipes_that_extend_each_other_are_an_error(tmp_path):
    (tmp_path / "other.toml").write_text('extends = "recipe.toml"')
    with pytest.raises(RecipeError, match=r"'other.toml': .*'recipe.toml': .* would extend itself"):
        load_recipe(write(tmp_path, 'extends = "other.toml"'))


def test_names_and_values_that_need_quotes_are_written(tmp_path):
    arguments = {"with space": [1, {"é": 'a "b"'}], "plain": True}
    mine = {"kind": "custom", "lr": 0.1, "implementation": "m:C", "arguments": arguments}
    data = load_recipe(write(tmp_path, GOOD)).model_dump() | {"strategies": {"mine.1+": mine}}
    recipe = validate(data, "here")
    assert load_recipe(write(tmp_path, recipe_text(recipe))) == recipe


def test_ranges_of_arguments_need_no_quotation_marks(tmp_path):
    good = f"{GOOD}arguments.n = 3\n"
    ranges = "arguments.n = { low = 2, high = 9 }\nlr = { low = 1e-3, high = 1.0 }\n"
    recipe = load_recipe(write(tmp_path, f"{good}[search.own]\n{ranges}"))
    assert [*recipe.search["own"]] == ["arguments.n", "lr"]
    changed = load_recipe(write(tmp_path, good), ["search.own.arguments.n.choices=[3, 4]"])
    assert changed.search["own"]["arguments.n"].choices == [3, 4]


def test_strategies_whose_names_have_dots_are_set_too(tmp_path):
    path = write(tmp_path, GOOD.replace("strategies.mine", 'strategies."mine-0.5"'))
    changes = ["strategies.mine-0.5.lr=0.25", "strategies.finetune.lr=.5"]
    strategies = load_recipe(path, changes).strategies
    assert (strategies["mine-0.5"].lr, strategies["finetune"].lr) == (0.25, 0.5)
    whole = load_recipe(path, ['strategies.mine-0.5={kind = "finetune", lr = 1}']).strategies
    assert whole["mine-0.5"].kind == "finetune"


def test_paths_may_begin_at_home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    stream = "stream={ name = 'DomainFolders', folder = '~/mine', domains = ['a'] }"
    model = "model={ backbone = 'squeezenet', weights = '~/w.pth' }"
    recipe = load_recipe(write(tmp_path, GOOD), [stream, model])
    assert recipe.stream.folder == str(tmp_path / "mine")
    assert recipe.model.weights == str(tmp_path / "w.pth")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("strategies.finetune.momentum=0.9", r"momentum = 0\.9: needs optimizer = \"sgd\""),
        ("strategies.finetune.merge=eq8", r"merge\.rule = 'eq8': is unknown; known are none, av"),
        ("strategies.finetune.merge=regmaen", "'regmaen': .*; did you mean regmean\\?$"),
        ("strategies.finetune.kind=ewcc", r"finetune\.kind = 'ewcc': .*; did you mean ewc\?$"),
        ("strategies.finetun.lr=1", r"finetun\.kind: is missing; did you mean finetune\?$"),
        ("strategies.mine.gamma=1.5", r"strategies\.mine\.gamma = 1\.5: .*less than or equal"),
        ("strategies.mine.lrr=0.1", r"mine\.lrr: unknown key; known are .*; did you mean lr\?$"),
        ("strategies.mine.ess_per_example=1.0", "mine: give ess or ess_per_example"),
        ("strategies.mine.schedule=[{}]", r"\.schedule = .*: replaces later_hess_init"),
        ('strategies.x={ kind = "l2p", schedule = [{ ess = 1 }] }', "ess: unknown key; known are "),
        ("strategies.finetune.tuning_size=8", 'size = 8: needs tuning = "adapter" or "prompt"$'),
        ('strategies.mine={kind="finetune", lr=1, tuning="head", tuning_size=8}', ', got "head"$'),
        ("strategies.mine.schedule=[{}, { beta2 = 0.9 }]", r"\.1\.beta2: unknown key; .* lr, "),
        (
            "strategies.mine={kind='covon', lr=1, ess_per_example=2, hess_init=1, gamma=1, clip_radius=1, schedule=[{ess=3}]}",  # noqa: E501
            "cannot set ess together with ess_per_example",
        ),
        ("strategies.mine.preset=paper", "= 'paper': Input should be 'finetune', 'scratch' or"),
        ("strategies.mine.hess_approx=per_example", "'gradsq' or 'reparam'"),
        ("strategies.own.implementation=m.C", "= 'm.C': must look like MODULE:CLASS$"),
        ("strategies.finetune.lr=nan", r"strategies\.finetune\.lr = nan: "),
        ("strategies.finetune.lr=true", r"strategies\.finetune\.lr = True: "),
        ('epochs="3"', "epochs = '3': Input should be a valid integer"),
        ("seeds=[99999999999999999999, 0]", r"seeds\.0 = 9999999"),
        ("stream.n_experiences=1000000000", "n_experiences = 1000"),
        ("name=../tiny", r"name = '\.\./tiny': "),
        ("name=Mine", "name = 'Mine': use at most 100 lower-case letters, digits and -, and begin"),
        ("strategies.mine=3", r"strategies\.mine = 3: must be a table$"),
        ("search.mine.lr=3", r"search\.mine\.lr = 3: must be a table$"),
        ("search.mine.merge={ choices = ['emo'] }", "'emo': merge: is unknown; .* mean ema\\?$"),
        ('stream={ name = "DomainFolders", folder = "" }', r"stream\.folder = '': .*at least 1"),
        ("strategies.own.arguments={ x = [1979-05-27] }", "not a valid JSON value"),
        ("strategies.own.arguments={ x = nan }", r"own\.arguments\.x = nan: .* finite number$"),
        ("strategies.own.arguments={ x = { y = [1, inf] } }", r"arguments\.x\.y\.1 = inf: "),
        ('strategies={ "../x" = {} }', r"'\.\./x' is not a strategy name"),
        ('strategies={ "*x" = {} }', r"'\*x' is not .*, and begin with a letter or digit$"),
        ("device=gpu", "device = 'gpu': known are .*; did you mean cuda\\?$"),
        ("device=x", "device = 'x': known are cpu, cuda, cuda:N and mps$"),
        ("seeds=[]", r"seeds = \[\]: .*at least 1"),
        ("seeds=[0, 0]", r"seeds = \[0, 0\]: .*distinct"),
        ("strategy.mine=1", "strategy: unknown key"),
        ("stream.name=Digits", r"stream\.name = 'Digits': .*did you mean PermutedDigits\?$"),
        ("stream.validation_size=1.5", r"validation_size = 1\.5: must be a fraction in \[0, 1\)"),
        ("stream.n_domains=2", r"stream\.n_domains: unknown key; known are .*permute_first"),
        ('stream={ name = "PACS", domains = ["photo", "photo"] }', "domains must be distinct"),
        ("stream={}", r"stream\.name: is missing; known are PermutedDigits, "),
        ("model={ hidden_layers = 1 }", r"model\.hidden_size: is missing"),
        ("model={ backbone = 'x' }", r'model\.weights: is missing; give "default", .* or "" '),
        ("search.mien={}", "search: there is no strategy 'mien'; .*; did you mean mine\\?$"),
        ("search.mine.lr={ low = 0.2, high = 0.1 }", r"lr: give 0 < low < .*, got 0\.2 and 0\.1"),
        ("search.mine.lr={ low = 0.1, hgih = 2 }", r"lr\.hgih: unknown key; known are low, high"),
        ("search.mine.lr={ low = 0.1 }", "lr: give either low and high, or choices$"),
        ("search.mine.gamma={ low = 0.1, high = 1.0, choices = [1.0] }", "gamma: give either low"),
        ("search.mine.alpha={ low = 0, high = 1 }", r"alpha: give 0 < low < high, .* got 0\.0 and"),
        ("name.mine=1", "name.mine: name is a value, not a table"),
    ],
)
def test_errors_name_key_and_rule(tmp_path, override, message):
    path = write(tmp_path, GOOD)
    with pytest.raises(RecipeError, match=message) as caught:
        load_recipe(path, [override])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('title = "Tiny"', 'title = "Tiny', "is not valid TOML"),
        ("epochs = 1", f"epochs = {'9' * 5000}", "is not valid TOML: "),
        ("gamma = 0.8", "", r"strategies\.mine\.gamma: is missing"),
        ('kind = "covon"', "", r"strategies\.mine\.kind: is missing; known are finetune, .*covon"),
        ("lr = 0.1", "merge = { rule = 'ema', start = 1 }", r"merge\.start: unknown key; .* gamma"),
        ("lr = 0.1", "merge = { gamma = 1 }", r"mine\.merge\.rule: is missing; known are none, "),
        ("later_hess_init = 0.1", 'merge = "ema"\nschedule = [{gamma = 0.5}]', "change gamma"),
    ],
)
def test_errors_name_the_file_too(tmp_path, old, new, message):
    path = write(tmp_path, GOOD.replace(old, new, 1))
    with pytest.raises(RecipeError, match=rf"{path}.*{message}"):
        load_recipe(path)


def test_other_epochs_are_those_of_a_schedule_too(tmp_path):
    schedule = "schedule = [{ epochs = 7, lr = 0.2 }]"
    recipe = load_recipe(write(tmp_path, GOOD.replace("later_hess_init = 0.1", schedule)))
    assert choose(recipe).strategies["mine"].schedule[0].epochs == 7
    (task,) = choose(recipe, epochs=2).strategies["mine"].schedule
    assert (task.epochs, task.lr) == (None, 0.2)


def test_a_choice_of_strategies_has_only_their_spaces(tmp_path):
    space = "[search.{}]\nlr = {{ low = 0.01, high = 1.0 }}\n"
    spaces = "".join(space.format(name) for name in ("mine", "finetune"))
    recipe = choose(load_recipe(write(tmp_path, GOOD + spaces)), "mine")
    assert list(recipe.search) == ["mine"]
    assert validate(recipe.model_dump(), "chosen") == recipe


def test_names_that_are_unknown_have_a_suggestion(tmp_path):
    with pytest.raises(RecipeError, match=r"no recipe 'digits'; .*; did you mean permuted-digits"):
        load_recipe("digits")
    with pytest.raises(RecipeError, match=r"no strategy 'finetun', 'x'; .* did you mean finetune"):
        choose(load_recipe(write(tmp_path, GOOD)), "finetun,x")


def test_tables_of_other_tools_are_not_recipes(tmp_path):
    with pytest.raises(RecipeError, match=r"recipe.toml is not a recipe: it has no name, title"):
        load_recipe(write(tmp_path, "[strategies.finetune]\nlr = 1"))


def test_seeds_are_lists_and_ranges():
    assert parse_seeds("0-3") == [0, 1, 2, 3]
    assert parse_seeds("7, 2-3,0") == [7, 2, 3, 0]
