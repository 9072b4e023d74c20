"""The registry of strategies: facts, the preset, merge rules, optimizers."""

import sys
from typing import get_args

import pytest
import torch
from small_recipes import CLOSED_FORM, NEWTON, STRATEGIES, small_recipe
from torch import nn
from toy_merging import RULES

from covon_avalanche import BayesByBackprop, CoVONPlugin, MergePlugin, merging
from covon_avalanche import CoVON as Optimizer
from covon_avalanche.experiment.recipe import load_recipe, shipped_recipes
from covon_avalanche.experiment.registry import KINDS, merge_rules, stored_strategy
from covon_avalanche.experiment.registry.bayesian import CoVON
from covon_avalanche.experiment.registry.merge_rules import Mergeable
from covon_avalanche.experiment.run_settings import run_hash
from covon_avalanche.optim.covon import SlowStep
from covon_avalanche.plugins import ClassifierAlignmentPlugin, SchedulePlugin
from covon_avalanche.presets import PERCEPTRON

BASE = {"kind": "covon", "lr": 0.1, "ess": 10.0, "hess_init": 0.1, "gamma": 0.9, "clip_radius": 1.0}
HASHES = {
    "cddb-hard": "eda0205631",
    "cddb-hard-clip": "a944c70b1e",
    "cddb-hard-vit": "af68cda482",
    "core50": "0eacbb61ca",
    "core50-clip": "b6137489c2",
    "core50-vit": "d1343e3c8e",
    "domainnet": "80bfd90802",
    "domainnet-clip": "f31144135f",
    "domainnet-vit": "785f4883c9",
    "pacs": "24bfa4e30e",
    "pacs-vit": "800f53f781",
    "permuted-digits": "31547c46cb",
    "permuted-mnist-hard": "c92439273a",
}
"""Hashes of seed 0 and the last CoVON of each shipped recipe: changed ones would be run again."""
FINETUNE_HASH = "47b4c433e1"
"""Hash of fine-tuning in the small recipe."""
MERGEABLE = [kind for kind, cls in KINDS.items() if issubclass(cls, Mergeable)]


def covon(**changes):
    return CoVON(**(BASE | changes))


def settings(name, **changes):
    own = STRATEGIES[name] | changes
    return KINDS[own["kind"]](**own)


def test_runs_of_shipped_recipes_keep_their_folders():
    found = {}
    for name in shipped_recipes():
        recipe = load_recipe(name)
        *_, last = (key for key, own in recipe.strategies.items() if own.kind == "covon")
        chosen = "covon-adapter" if "covon-adapter" in recipe.strategies else last
        found[name] = run_hash(recipe, chosen, 0)
    assert found == HASHES


@pytest.mark.parametrize(
    ("recipe", "name", "published"),
    [
        ("domainnet-vit", "ranpac-adapter", dict(adapter=64, epochs=20)),
        ("domainnet-vit", "duct", dict(epochs=15, final_lr_factor=1.0, lr=0.1, retrain_lr=0.1)),
        ("cddb-hard-vit", "duct", dict(epochs=15, alpha=0.5)),
        ("core50-vit", "duct", dict(epochs=10, backbone_lr_factor=0.001)),
        ("domainnet-vit", "l2p", dict(top_k=5, key_weight=0.1, lr=0.03 * 128 / 256)),
        ("domainnet-vit", "dualprompt", dict(lr=0.005 * 128 / 256)),
        ("core50-vit", "l2p", dict(top_k=4, key_weight=1.0, lr=0.03 * 128 / 256, optimizer="sgd")),
        ("cddb-hard-vit", "soyo", dict(bottleneck=16, lr=0.001)),
        ("cddb-hard-clip", "soyo", dict(bottleneck=64, lr=0.01, context=16)),
        ("cddb-hard-clip", "pina", dict(bottleneck=64, lr=0.01, context=16)),
        ("domainnet-vit", "coma", dict(kind="slca", merge="ema", backbone_lr_factor=0.01)),
        ("domainnet-vit", "cofima", dict(kind="slca", merge="cofima", backbone_lr_factor=0.01)),
    ],
)
def test_shipped_recipes_have_the_settings_of_the_authors(recipe, name, published):
    own = load_recipe(recipe).strategies[name].model_dump(mode="json")
    assert published.items() <= own.items()


@pytest.mark.parametrize("recipe", ["domainnet-clip", "core50-clip", "cddb-hard-clip"])
@pytest.mark.parametrize("name", ["s-liprompts", "s-liprompts-mixture"])
def test_s_liprompts_has_settings_of_its_own_for_the_first_domain(recipe, name):
    tasks = load_recipe(recipe).strategies[name].schedule
    found = [(task.epochs, task.lr, task.weight_decay) for task in tasks]
    steps = [(20, 1e-3), (50, 1e-2)] if recipe == "cddb-hard-clip" else [(None, None)] * 2
    assert found == [(*steps[0], 5e-4), (*steps[1], 2e-4)]


def test_facts_that_tables_need():
    stored = {name: stored_strategy(own) for name, own in STRATEGIES.items()}
    assert {name for name, own in stored.items() if own.offline} == {"joint", "cumulative"}
    memories = {name for name, own in stored.items() if own.stores_examples}
    assert memories == {"replay", "der", "er-ace", "gem", "agem", "icarl", "td-vcl"}
    without = {name for name, own in stored.items() if not own.has_probabilities}
    assert without == {"icarl", *CLOSED_FORM}
    assert stored_strategy({"kind": "custom", "replay": True}).stores_examples
    assert not stored_strategy({"kind": "of a later version"}).stores_examples
    for none in ({"n_steps": 1}, {"replay_tasks": 0}, {"replay_examples": 0}):
        assert not settings("td-vcl", **none).stores_examples


def rule_of(kind, **changes):
    """The rule by which the method merges, if any."""
    method = settings(kind, **changes).build()
    merges = [plugin.rule for plugin in method.plugins if isinstance(plugin, MergePlugin)]
    assert len(merges) <= 1
    if kind == "covon":
        return next(p.merge for p in method.plugins if isinstance(p, CoVONPlugin))
    return merges[0] if merges else None


def test_no_rule_is_left_out():
    classes = (value for value in vars(merging).values() if isinstance(value, type))
    rules = {cls for cls in classes if issubclass(cls, merging.MergeRule)}
    assert {type(make()) for make in RULES.values()} == rules - {merging.MergeRule}
    assert {*merge_rules.RULES} == {*RULES, *get_args(SlowStep)}


@pytest.mark.parametrize("kind", MERGEABLE)
def test_each_rule_merges_after_every_domain(kind):
    for name, make in RULES.items():
        found = rule_of(kind, merge=name)
        assert type(found) is type(make())
        gamma = settings("covon").gamma if kind == "covon" else 0.5
        assert getattr(found, "gamma", gamma) == gamma
    assert rule_of(kind, merge="none") == ("none" if kind == "covon" else None)


@pytest.mark.parametrize("kind", ["finetune", "ada-reg", "covon"])
@pytest.mark.parametrize(
    ("rule", "name"),
    [("regmean", "share"), ("ema", "gamma"), ("cofima", "gamma"), ("magmax", "coefficient")],
)
def test_arguments_of_rules_reach_them_and_are_stored(kind, rule, name):
    chosen = {"rule": rule, name: 0.3}
    assert vars(rule_of(kind, merge=chosen))[name] == 0.3
    own = settings(kind, merge=chosen)
    assert own.model_dump(mode="json")["merge"] == chosen
    assert KINDS[kind].model_validate(own.model_dump()) == own  # as a search does
    alone = settings(kind, merge={"rule": chosen["rule"]})
    assert alone == settings(kind, merge=chosen["rule"])
    assert alone.model_dump(mode="json")["merge"] == chosen["rule"]


@pytest.mark.parametrize("merge", ["none", "average", "regmean"])
@pytest.mark.parametrize("kind", MERGEABLE)
def test_the_merge_comes_first_then_the_method_and_the_alignment(kind, merge):
    method = settings(kind, merge=merge, align_classifier=True).build()
    *first, alignment = method.plugins
    assert isinstance(alignment, ClassifierAlignmentPlugin)
    merged = merge != "none" and kind != "covon"  # whose own plugin merges
    assert any(isinstance(p, MergePlugin) for p in first[:1]) == merged
    scheduled = kind == "covon" and isinstance(first[0], SchedulePlugin)
    assert len(first) == merged + scheduled + (kind != "finetune")
    without = settings(kind, merge=merge, align_classifier=False).build()
    assert [*map(type, without.plugins)] == [*map(type, first)]


@pytest.mark.parametrize(
    ("kind", "merge", "message"),
    [
        ("finetune", {"rule": "regmean", "gamma": 0.3}, "gamma\n.*not permitted"),
        ("covon", {"rule": "eq8", "gamma": 0.3}, "gamma\n.*not permitted"),
        ("ada-reg", {"rule": "ema", "gamma": 1.5}, "less than or equal to 1"),
        ("finetune", "replace", "'replace'.*does not match"),
        ("slca", "regmean", "'regmean'.*does not match"),
    ],
)
def test_rules_and_arguments_that_do_not_fit_are_errors(kind, merge, message):
    with pytest.raises(ValueError, match=message):
        settings(kind, merge=merge)


def test_settings_that_are_not_used_do_not_change_the_folder():
    for unused in ({}, {"align_classifier": False}, {"merge": "none"}):
        recipe = small_recipe({"own": STRATEGIES["finetune"] | unused})
        assert run_hash(recipe, "own", 0) == FINETUNE_HASH


def test_head_and_backbone_have_their_own_learning_rates():
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    sgd = settings("finetune", optimizer="sgd", lr=0.2, backbone_lr_factor=0.01)
    kinds = ("finetune", "covon", "vcl", "upgd", "ada-reg")
    for own in (sgd, *(settings(kind, lr=0.2, backbone_lr_factor=0.01) for kind in kinds)):
        optimizer = own.make_optimizer(model)
        head, backbone = optimizer.param_groups
        assert [*map(id, head["params"])] == [*map(id, model[1].parameters())]
        assert [*map(id, backbone["params"])] == [*map(id, model[0].parameters())]
        assert (head["lr"], backbone["lr"]) == (0.2, pytest.approx(0.002))
        if isinstance(optimizer, Optimizer | BayesByBackprop):
            assert head["param_names"] == ["1.weight", "1.bias"]
            assert backbone["param_names"] == ["0.weight", "0.bias"]
    with pytest.raises(ValueError, match="cannot set lr together with backbone_lr_factor"):
        settings("covon", later_hess_init=None, backbone_lr_factor=0.1, schedule=[{"lr": 0.1}])


@pytest.mark.parametrize("estimate", ["gradsq", "reparam"])
@pytest.mark.parametrize("preset", ["finetune", "scratch", "perceptron"])
def test_presets_are_those_of_the_optimizer(preset, estimate):
    own = CoVON(kind="covon", preset=preset, lr=0.1, hess_approx=estimate)
    make = Optimizer.finetuning if preset == "finetune" else Optimizer
    extra = PERCEPTRON if preset == "perceptron" else {}
    params = nn.Linear(2, 2).named_parameters()
    settings = {**extra, "hess_approx": estimate}
    if preset == "perceptron" and estimate == "gradsq":
        settings["gamma_precision"] = None
    expected = make(params, lr=0.1, **settings).param_groups[0]
    found = own.make_optimizer(nn.Linear(2, 2)).param_groups[0]
    compared = {"lr", "noise", "prior_width", "data_precision", "gamma", "gamma_precision"}
    compared |= {"clip_radius", "prior_mean", "hess_approx", "betas"}
    assert {key: found[key] for key in compared} == {key: expected[key] for key in compared}


def test_optimizers_have_the_settings():
    def group(own):
        optimizer = own.make_optimizer(nn.Linear(2, 2))
        return type(optimizer), optimizer.param_groups[0]

    kind, options = group(settings("covon", **NEWTON))
    assert kind is Optimizer
    expected = {"lr": 0.1, "ess": 1437.0, "betas": (0.9, 0.99), "hess_approx": "reparam"}
    expected |= {"gamma": 0.9, "gamma_precision": None}
    assert expected.items() <= options.items()
    assert group(covon(gamma_precision=2.0))[1]["gamma_precision"] == 2.0
    assert group(covon(ess=None, ess_per_example=3.0))[1]["ess_per_example"] == 3.0
    assert group(covon())[1]["betas"] == (0.9, None)
    assert not group(covon())[1]["bfloat16_prior"]
    assert group(covon(bfloat16_prior=True))[1]["bfloat16_prior"] is True
    assert group(settings("vcl"))[0] is BayesByBackprop
    assert settings("vcl", mc_samples=3).make_optimizer(nn.Linear(2, 2)).mc_samples == 3
    assert group(settings("finetune", weight_decay=0.5))[1]["weight_decay"] == 0.5
    for name in ("ada-reg", "ewc-star"):  # there it is the first prior's
        assert group(settings(name, weight_decay=0.5))[1]["weight_decay"] == 0
        assert settings(name, weight_decay=0.5).build().plugins[0].weight_decay == 0.5
    kind, options = group(settings("gem"))
    assert (kind, options["momentum"], options["nesterov"]) == (torch.optim.SGD, 0.9, False)


def test_gem_without_its_solver_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "quadprog", None)
    with pytest.raises(ValueError, match=r"GEM needs quadprog: pip install .*\[gem\]"):
        settings("gem").build()


def test_the_schedule_of_covon_is_that_of_the_recipe():
    def domains(settings):
        return settings.build().plugins[0].experiences

    assert domains(settings("covon")) == [{"hess_init": 0.05}] * 2
    assert domains(covon(schedule=[{"lr": 0.2, "epochs": 3}, {}])) == [{"lr": 0.2, "epochs": 3}, {}]


def test_other_keys_of_avalanches_strategies_are_arguments_of_their_classes():
    assert settings("agem", sample_size=7).build().arguments["sample_size"] == 7
    assert settings("avalanche-rwalk", delta_t=3).build().plugins[0].delta_t == 3
    with pytest.raises(ValueError, match=r"RWalkPlugin cannot be created: .*'deltat'"):
        settings("avalanche-rwalk", deltat=3).build()
    for name, key, value in (("agem", "sample_size", -1), ("gem", "memory_strength", -0.5)):
        with pytest.raises(ValueError, match="greater than or equal to 0"):
            settings(name, **{key: value})
    for value in (float("nan"), "1 + 1", [1]):
        with pytest.raises(ValueError, match=r"lambda_reg"):
            settings("avalanche-mas", lambda_reg=value)


def test_ducts_momentum_is_that_of_sgd():
    published = KINDS["duct"](kind="duct")
    assert (published.optimizer, published.momentum) == ("sgd", 0.9)
    own = KINDS["duct"](kind="duct", optimizer="adamw")
    assert own.momentum == 0
    assert KINDS["duct"].model_validate(own.model_dump()) == own  # as a search does


@pytest.mark.parametrize(("merge", "rule"), [("none", None), ("ema", "EMA"), ("cofima", "CoFiMA")])
def test_slca_coma_and_cofima_have_their_published_settings(merge, rule):
    own = KINDS["slca"](kind="slca", merge=merge)
    assert (own.optimizer, own.momentum, own.lr, own.weight_decay) == ("sgd", 0.9, 0.01, 5e-4)
    assert own.backbone_lr_factor == 0.01
    (plugin,) = own.build().plugins
    assert plugin.per_class
    found = plugin.rule and (type(plugin.rule).__name__, plugin.rule.gamma)
    assert found == (rule and (rule, 0.4))
