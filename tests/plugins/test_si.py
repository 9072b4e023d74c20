"""Synaptic Intelligence against its definition."""

import torch
from avalanche.training.plugins import SynapticIntelligencePlugin
from torch import nn
from toys import columns, make_naive, same, toy_benchmark, toy_model, weights

from covon_avalanche import SIPlugin


def si_run(*plugins):
    model = toy_model()
    torch.manual_seed(0)
    strategy = make_naive(model, torch.optim.SGD(model.parameters(), lr=0.1), *plugins)
    strategy.train(toy_benchmark(2).train_stream)
    return weights(model)


def test_si_regularises_where_avalanches_own_does_nothing_on_a_cpu():
    alone = si_run()
    assert same(alone, si_run(SynapticIntelligencePlugin(si_lambda=1e4)))  # a trap of 0.6
    assert not same(alone, si_run(SIPlugin(si_lambda=1e4)))


def test_the_importance_of_si_is_the_path_integral():
    """One step of SGD on one batch: -g . dtheta / (dtheta² + eps), at most 1e-3."""
    model = nn.Linear(8, 4)
    start = weights(model)
    plugin = SIPlugin(si_lambda=1.0, eps=10.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    strategy = make_naive(model, optimizer, plugin, train_mb_size=48, train_epochs=1)
    experience = toy_benchmark(1).train_stream[0]
    x, y = columns(experience)
    gradient = torch.autograd.grad(nn.functional.cross_entropy(model(x), y), model.weight)[0]
    strategy.train(experience)
    moved = model.weight.detach() - start["weight"]
    torch.testing.assert_close(moved, -0.05 * gradient)
    expected = (-gradient * moved / (moved.square() + 10.0)).clamp(max=1e-3)
    assert (expected > 0).any()
    torch.testing.assert_close(plugin.ewc_data[1]["weight"].data, expected.flatten())
