"""The ready-made strategy of CoVON."""

import pytest
import torch
from toys import QUIET, make_covon, make_strategy, same, toy_benchmark, toy_model, weights

from covon_avalanche import CoVONStrategy
from covon_avalanche.merging import RegMean


def make(model, **options):
    optimizer = make_covon(model.named_parameters())
    return CoVONStrategy(model=model, optimizer=optimizer, **{**QUIET, **options})


def test_it_trains_as_fine_tuning_with_the_plugin_does():
    models = toy_model(), toy_model()
    peer = make_strategy("covon", models[1], merge=RegMean())
    for strategy in make(models[0], merge=RegMean()), peer:
        torch.manual_seed(1)  # the order of the data
        strategy.train(toy_benchmark(2).train_stream)
    assert same(weights(models[0]), weights(models[1]))


def test_arguments_reach_the_plugin_and_the_template():
    other = make(toy_model()).plugins[0]
    strategy = make(toy_model(), eval_samples=2, plugins=(given := [other]), train_mb_size=7)
    assert given == [other]  # the caller's list is left alone
    assert strategy.plugins[0].eval_samples == 2
    assert strategy.plugins[1] is other
    del (options := dict(QUIET))["eval_mb_size"]
    model = toy_model()
    optimizer = make_covon(model.named_parameters())
    assert CoVONStrategy(model=model, optimizer=optimizer, **options).eval_mb_size == 16
    criterion = torch.nn.CrossEntropyLoss(label_smoothing=0.1)
    with pytest.warns(Warning, match="positional arguments"):  # Avalanche's order, deprecated there
        assert CoVONStrategy(model, optimizer, criterion)._criterion is criterion
    with pytest.raises(TypeError, match=r"CoVONStrategy.* argument.* shedule"):
        make(toy_model(), shedule=[])
