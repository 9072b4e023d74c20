"""The registry of strategies: facts, old keys, the preset, merge rules, optimizers."""

import pytest
import torch
from small_recipes import CLOSED_FORM, NEWTON, STRATEGIES, small_recipe
from torch import nn

from covon_avalanche import BayesByBackprop, MergePlugin, merging
from covon_avalanche import CoVON as Optimizer
from covon_avalanche.experiment.recipe import load_recipe, shipped_recipes
from covon_avalanche.experiment.registry import KINDS, CoVON, stored_strategy
from covon_avalanche.experiment.registry.base import WITH_COEFFICIENT
from covon_avalanche.experiment.run_folder import run_hash, settings_of, upgrade_settings
from covon_avalanche.plugins import ClassifierAlignmentPlugin, InputAnchorPlugin

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
FINETUNE_HASH = "4b6fa2db69"
"""Hash of fine-tuning in the small recipe, before merging and alignment had further settings."""
MERGEABLE = ["finetune", "ewc", "avalanche-ewc", "lwf", "avalanche-lwf", "ada-reg", "covon"]
RULES = {
    "regmean": merging.RegMean,
    "kfac": merging.KFACMerge,
    "average": merging.Average,
    "ema": merging.EMA,
    "fisher": merging.FisherMerge,
    "cofima": merging.CoFiMA,
    "task-arithmetic": merging.TaskArithmetic,
    "magmax": merging.MagMax,
    "ties": merging.TIES,
}


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


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ({"consolidation": "merge"}, {"merge": "eq8"}),
        ({"consolidation": "inputs"}, {"merge": "regmean"}),
        ({"consolidation": "ema"}, {"merge": "ema"}),
        ({"hess_approx": "auto"}, {"hess_approx": "gradsq"}),
        ({}, {"merge": "eq8", "hess_approx": "gradsq"}),
    ],
)
def test_keys_and_values_of_earlier_versions_are_translated(old, new):
    assert covon(**old) == covon(**new)
    stored = settings_of(small_recipe({"covon": STRATEGIES["covon"]}), "covon")
    current = upgrade_settings({**stored, "strategy": {**BASE, **old}})["strategy"]
    assert new.items() <= current.items()


def rule_of(kind, **changes):
    """The rule by which the method merges, if any."""
    method = settings(kind, **changes).build()
    merges = [plugin.rule for plugin in method.plugins if isinstance(plugin, MergePlugin)]
    assert len(merges) <= 1
    return method.arguments.get("merge") if kind == "covon" else merges[0] if merges else None


@pytest.mark.parametrize("kind", MERGEABLE)
def test_each_rule_merges_after_every_domain(kind):
    for name, rule in RULES.items():
        own = {"merge_gamma": 0.3} if name in WITH_COEFFICIENT else {}
        found = rule_of(kind, merge=name, **own)
        assert type(found) is rule
        coefficient = "gamma" if name in ("ema", "cofima") else "coefficient"
        assert not own or getattr(found, coefficient) == 0.3
    assert rule_of(kind, merge="none") is None


def test_covons_gamma_is_the_coefficient_of_its_rule():
    assert rule_of("covon", merge="ema", gamma=0.3).gamma == 0.3
    assert rule_of("covon", merge="eq8") is None  # which the optimizer does itself


@pytest.mark.parametrize("kind", ["finetune", "ada-reg", "covon"])
def test_options_of_rules_reach_them(kind):
    chosen = {"reduction": "mean", "alpha": 0.9, "layerwise": True, "passes": 1}
    own = {f"regmean_{key}": value for key, value in chosen.items()}
    found = rule_of(kind, merge="regmean", **own)
    assert chosen.items() <= vars(found).items()
    assert merging.RegMean().__dict__ == rule_of(kind, merge="regmean").__dict__
    found = rule_of(kind, merge="magmax", merge_start="pretrained", merge_gamma=0.7)
    assert (found.start, found.coefficient) == ("pretrained", 0.7)


@pytest.mark.parametrize("merge", ["none", "average", "regmean"])
@pytest.mark.parametrize("kind", MERGEABLE)
def test_the_merge_comes_first_then_the_method_the_anchor_and_the_alignment(kind, merge):
    method = settings(kind, merge=merge, input_anchor=0.5, align_classifier=True).build()
    *first, anchor, alignment = method.plugins
    assert isinstance(alignment, ClassifierAlignmentPlugin)
    assert isinstance(anchor, InputAnchorPlugin)
    assert anchor.anchor.strength == 0.5
    merged = merge != "none" and kind != "covon"  # whose own plugin merges
    assert any(isinstance(p, MergePlugin) for p in first[:1]) == merged
    assert len(first) == merged + (kind.endswith(("ewc", "lwf")))
    rule = first[0].rule if merged else method.arguments.get("merge")
    assert anchor.anchor.rule is (rule if merge == "regmean" else None)
    without = settings(kind, merge=merge, input_anchor=0.0, align_classifier=False).build()
    assert [*map(type, without.plugins)] == [*map(type, first)]


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("finetune", {"merge": "ema", "regmean_alpha": 0.9}, "alpha needs .* regmean, got ema"),
        ("covon", {"merge": "ema", "regmean_passes": 1}, "passes needs .* regmean, got ema"),
        ("finetune", {"merge": "regmean", "merge_start": "last"}, "needs .* or ties, got regmean"),
        ("covon", {"merge": "eq8", "merge_gamma": 0.3}, "merge_gamma needs .* ema or .*, got eq8"),
        ("ada-reg", {"merge_gamma": 0.3}, "merge_gamma needs merge = ema or .*, got None"),
        ("slca", {"merge": None, "merge_gamma": 0.3}, "merge_gamma needs merge = ema or cofima"),
    ],
)
def test_options_that_no_rule_would_use_are_errors(kind, options, message):
    with pytest.raises(ValueError, match=message):
        settings(kind, **options)


def test_settings_that_are_not_used_do_not_change_the_folder():
    for unused in ({}, {"align_classifier": False}, {"regmean_alpha": None, "merge_start": None}):
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


def test_the_preset_of_the_paper():
    paper = covon(preset="paper")
    plain = covon(beta2=0.9999, hess_approx="reparam")
    assert paper.model_dump() == plain.model_dump()  # which is what results store
    assert paper == covon(preset="paper", beta2=0.9999)


def test_optimizers_have_the_settings():
    def group(own):
        optimizer = own.make_optimizer(nn.Linear(2, 2))
        return type(optimizer), optimizer.param_groups[0]

    kind, options = group(settings("covon", **NEWTON, merge="replace", gamma_precision="auto"))
    assert kind is Optimizer
    expected = {"lr": 0.1, "ess": 1437.0, "betas": (0.9, 0.99), "hess_approx": "reparam"}
    expected |= {"gamma": 0.9, "gamma_precision": "auto", "consolidation": "replace"}
    assert expected.items() <= options.items()
    for merge, precision in (("regmean", "auto"), ("ema", None)):  # EMA is without curvature
        options = group(covon(merge=merge, gamma_precision="auto"))[1]
        assert (options["consolidation"], options["gamma_precision"]) == ("merge", precision)
        assert options["betas"] == (0.9, None)
    assert group(settings("vcl"))[0] is BayesByBackprop
    assert group(settings("finetune", weight_decay=0.5))[1]["weight_decay"] == 0.5
    for name in ("ada-reg", "ewc-star"):  # there it is the first prior's
        assert group(settings(name, weight_decay=0.5))[1]["weight_decay"] == 0
        assert settings(name, weight_decay=0.5).build().arguments["weight_decay"] == 0.5
    kind, options = group(settings("gem"))
    assert (kind, options["momentum"], options["nesterov"]) == (torch.optim.SGD, 0.9, False)


def test_the_schedule_of_covon_is_that_of_the_recipe():
    assert settings("covon").build().arguments["schedule"] == [{"hess_init": 0.05}] * 2
    own = covon(schedule=[{"lr": 0.2, "epochs": 3}, {}])
    assert own.build().arguments["schedule"] == [{"lr": 0.2, "epochs": 3}, {}]


def test_other_keys_of_avalanches_strategies_are_arguments_of_their_classes():
    assert settings("agem", sample_size=7).build().arguments["sample_size"] == 7
    assert settings("avalanche-rwalk", delta_t=3).build().plugins[0].delta_t == 3
    with pytest.raises(ValueError, match=r"AvalancheRWalkPlugin cannot be created: .*'deltat'"):
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


@pytest.mark.parametrize(("merge", "rule"), [(None, None), ("ema", "EMA"), ("cofima", "CoFiMA")])
def test_slca_coma_and_cofima_have_their_published_settings(merge, rule):
    own = KINDS["slca"](kind="slca", merge=merge)
    assert (own.optimizer, own.momentum, own.lr, own.weight_decay) == ("sgd", 0.9, 0.01, 5e-4)
    assert own.backbone_lr_factor == 0.01
    (plugin,) = own.build().plugins
    assert plugin.per_class
    assert (plugin.rule and (type(plugin.rule).__name__, plugin.rule.gamma)) == (
        rule and (rule, 0.4)
    )
