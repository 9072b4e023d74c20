"""The registry of strategies: facts, old keys, the preset, optimizers."""

import pytest
import torch
from small_recipes import NEWTON, STRATEGIES
from torch import nn

from covon_avalanche import BayesByBackprop, MergePlugin
from covon_avalanche import CoVON as Optimizer
from covon_avalanche.experiment.recipe import RecipeError, validate
from covon_avalanche.experiment.registry import KINDS, CoVON, stored_strategy
from covon_avalanche.experiment.run_folder import settings_today
from covon_avalanche.merging import EMA, Average, FisherMerge, RegMean

BASE = {"kind": "covon", "lr": 0.1, "ess": 10.0, "hess_init": 0.1, "gamma": 0.9, "clip_radius": 1.0}


def covon(**changes):
    return CoVON(**(BASE | changes))


def settings(name, **changes):
    own = STRATEGIES[name] | changes
    return KINDS[own["kind"]](**own)


def refused(**own):
    recipe = {"name": "x", "title": "X", "epochs": 1, "train_mb_size": 1, "final_lr_factor": 1.0}
    recipe |= {"stream": {"name": "PermutedDigits", "n_experiences": 1}, "seeds": [0]}
    recipe |= {"model": {"hidden_size": 1, "hidden_layers": 1}, "strategies": {"it": own}}
    with pytest.raises(RecipeError) as caught:
        validate(recipe, "here")
    return str(caught.value)


def test_facts_that_tables_need():
    stored = {name: stored_strategy(own) for name, own in STRATEGIES.items()}
    ceilings = {name for name, own in stored.items() if own.ceiling}
    assert ceilings == {"joint", "cumulative"}
    memories = {name for name, own in stored.items() if own.stores_examples}
    assert memories == {"replay", "der", "er-ace", "gem", "agem", "icarl", "td-vcl"}
    assert [name for name, own in stored.items() if not own.has_probabilities] == ["icarl"]
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
        ({"consolidation": "replace"}, {"merge": "replace"}),
        ({"consolidation": "none"}, {"merge": "none"}),
        ({"hess_approx": "auto"}, {"hess_approx": "gradsq"}),
        ({}, {"merge": "eq8", "hess_approx": "gradsq"}),
    ],
)
def test_keys_and_values_of_earlier_versions_are_translated(old, new):
    assert covon(**old) == covon(**new)
    model = {"hidden_size": 1, "hidden_layers": 1}
    stored = {"name": "x", "title": "X", "epochs": 1, "train_mb_size": 1, "final_lr_factor": 1.0}
    stored |= {"stream": {"name": "PermutedDigits", "n_experiences": 1}, "model": model}
    today = settings_today({**stored, "strategy": {**BASE, **old}})["strategy"]
    assert new.items() <= today.items()


def test_what_is_no_longer_known_names_what_is():
    assert "'gradsq' or 'reparam'" in refused(**BASE, hess_approx="per_example")
    assert "consolidation is the old name" in refused(**BASE, consolidation="ema", merge="ema")
    assert "'ema', 'fisher', 'replace' or 'none'" in refused(**BASE, consolidation="mean")
    for name in ("supervised.Naive", "supervised:Na-ive"):
        own = STRATEGIES["custom"] | {"implementation": name}
        assert f"implementation = {name!r}: must look like module:Class" in refused(**own)
    for name in ("finetune", "ewc", "lwf"):
        assert settings(name).merge == "none"
        assert "merge = 'eq8': " in refused(**STRATEGIES[name], merge="eq8")


def test_each_rule_merges_after_every_domain():
    rules = {"regmean": RegMean, "average": Average, "ema": EMA, "fisher": FisherMerge}
    for name, rule in rules.items():
        for kind in ("finetune", "ewc", "lwf"):
            plugin = settings(kind, merge=name, merge_gamma=0.3).build().plugins[0]
            assert isinstance(plugin, MergePlugin)
            assert type(plugin.rule) is rule
    assert settings("ewc", merge="ema", merge_gamma=0.3).build().plugins[0].rule.gamma == 0.3
    for name in ("regmean", "average", "fisher"):  # Eq. 8 and EMA are the optimizer's own
        assert type(covon(merge=name).build().arguments["merge"]) is rules[name]
    assert "merge" not in covon(merge="ema").build().arguments


def test_the_preset_of_the_paper():
    paper = covon(preset="paper")
    assert paper == covon(preset="paper", beta2=0.9999, hess_approx="reparam")
    plain = covon(beta2=0.9999, hess_approx="reparam")
    assert paper.model_dump() == plain.model_dump()  # which is what results store
    assert paper.gamma_precision is None
    for own in ({"beta2": 0.99}, {"hess_approx": "gradsq"}, {"gamma_precision": 0.5}):
        (key, value), *_ = own.items()
        sentence = refused(**BASE, preset="paper", **own)
        assert f'strategies.it: preset = "paper" sets {key} = ' in sentence
        assert f"but {value!r} is given" in sentence


def test_optimizers_have_the_settings():
    model = nn.Linear(2, 2)

    def group(own):
        optimizer = own.make_optimizer(model)
        return type(optimizer), optimizer.param_groups[0]

    kind, options = group(settings("covon", **NEWTON, merge="replace", gamma_precision="auto"))
    assert kind is Optimizer
    expected = {"lr": 0.1, "ess": 1437.0, "betas": (0.9, 0.99), "hess_approx": "reparam"}
    expected |= {"gamma": 0.9, "gamma_precision": "auto", "consolidation": "replace"}
    assert expected.items() <= options.items()
    assert group(covon(merge="regmean"))[1]["consolidation"] == "merge"
    assert group(covon())[1]["betas"] == (0.9, None)
    kind, options = group(settings("vcl"))
    assert kind is BayesByBackprop
    assert {"lr": 0.01, "ess": 1437.0, "weight_decay": 1e-4}.items() <= options.items()
    kind, options = group(settings("finetune", weight_decay=0.5))
    assert (kind, options["weight_decay"]) == (torch.optim.AdamW, 0.5)
    for name in ("ada-reg", "ewc-star"):  # there it is the first prior's
        assert group(settings(name, weight_decay=0.5))[1]["weight_decay"] == 0
        assert settings(name, weight_decay=0.5).build().arguments["weight_decay"] == 0.5
    kind, options = group(settings("gem"))
    assert (kind, options["momentum"], options["nesterov"]) == (torch.optim.SGD, 0.9, True)


def test_the_schedule_of_covon_is_that_of_the_recipe():
    assert settings("covon").build().arguments["schedule"] == [{"hess_init": 0.05}] * 2
    own = covon(schedule=[{"lr": 0.2, "epochs": 3}, {}])
    assert own.build().arguments["schedule"] == [{"lr": 0.2, "epochs": 3}, {}]
    assert own.without_own_epochs().build().arguments["schedule"] == [{"lr": 0.2}, {}]
