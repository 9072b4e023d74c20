"""Mixins of Avalanche strategies against plain loops."""

import pytest
import torch
from avalanche.training.plugins import SupervisedPlugin
from avalanche.training.supervised import Naive
from torch import nn
from toy_optimizers import make_covon, make_vcl
from toys import columns, make_naive, same, toy_benchmark, toy_model, weights

from covon_avalanche import CoVONPlugin, VCLPlugin
from covon_avalanche.loops import Autocast, GradientAccumulation, GradientClipping


class Accumulating(GradientAccumulation, GradientClipping, Naive):
    accumulate = 2
    max_grad_norm = 0.5


@pytest.mark.parametrize(("make", "plugin"), [(make_covon, CoVONPlugin), (make_vcl, VCLPlugin)])
def test_one_sample_computes_all_mini_batches_of_a_step(make, plugin):
    """Three mini-batches of 16: a step by two and one by the last."""
    options = dict(generator=torch.Generator().manual_seed(3))
    if make is make_covon:
        options |= dict(hess_approx="gradsq", batch_size=None)
    benchmark, model = toy_benchmark(2), toy_model()
    strategy = make_naive(
        model, make(model.named_parameters(), **options), plugin(), cls=Accumulating
    )
    for experience in benchmark.train_stream:
        strategy.train(experience, shuffle=False)
    plain = toy_model()
    options["generator"] = torch.Generator().manual_seed(3)
    optimizer = make(plain.named_parameters(), **options)
    for experience in benchmark.train_stream:
        x, y = columns(experience)
        for _ in range(2):
            for step in ([(x[:16], y[:16]), (x[16:32], y[16:32])], [(x[32:], y[32:])]):
                for group in optimizer.param_groups:
                    if make is make_covon:
                        group["batch_size"] = sum(len(inputs) for inputs, _ in step)
                with optimizer.sampled_params():
                    optimizer.zero_grad()
                    for inputs, targets in step:
                        loss = nn.functional.cross_entropy(plain(inputs), targets)
                        (loss / len(step)).backward()
                nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
                optimizer.step()
        optimizer.consolidate()
    assert same(weights(model), weights(plain))


def test_merges_are_counted_in_steps():
    """Three mini-batches are two steps, in each of two epochs."""

    class Steps(SupervisedPlugin):
        def after_update(self, strategy, **kwargs):
            merged.append(strategy.optimizer.prior().precision["2.bias"].sum().item())

    merged = []
    model = toy_model()
    optimizer = make_covon(model.named_parameters())
    plugin = CoVONPlugin(consolidate_every=3)
    strategy = make_naive(model, optimizer, plugin, Steps(), cls=Accumulating)
    strategy.train(toy_benchmark(1).train_stream[0])
    assert merged[0] == merged[1] != merged[2] == merged[3]


class Decay(SupervisedPlugin):
    """A penalty that counts once in the average over mini-batches."""

    def before_backward(self, strategy, **kwargs):
        strategy.loss = strategy.loss + sum(p.square().sum() for p in strategy.model.parameters())


def test_accumulated_steps_equal_those_of_large_batches():
    found = []
    threefold = type("Threefold", (GradientAccumulation, Naive), {"accumulate": 3})
    for cls, size in ((Naive, 48), (threefold, 16)):
        benchmark, model = toy_benchmark(2), toy_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        strategy = make_naive(model, optimizer, Decay(), cls=cls, train_mb_size=size)
        for experience in benchmark.train_stream:
            strategy.train(experience, shuffle=False)
        found.append(weights(model))
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)


def test_the_loss_that_plugins_see_is_that_of_the_mini_batch():
    class Watch(SupervisedPlugin):
        def after_training_iteration(self, strategy, **kwargs):
            outputs.append(strategy.mb_output.detach())
            losses.append((strategy.loss.detach(), strategy.mb_y))

    outputs, losses = [], []
    model = toy_model()
    strategy = make_naive(
        model, torch.optim.SGD(model.parameters(), lr=0.1), Watch(), cls=Accumulating
    )
    strategy.train(toy_benchmark(1).train_stream[0])
    for output, (loss, y) in zip(outputs, losses, strict=True):
        torch.testing.assert_close(loss.sum(), nn.functional.cross_entropy(output, y))


def test_autocast_keeps_weights_and_losses_in_float32():
    model, dtypes = toy_model(), set()
    model[0].register_forward_hook(lambda module, inputs, output: dtypes.add(output.dtype))
    cls = type("Fast", (Autocast, Naive), {})
    strategy = make_naive(model, torch.optim.SGD(model.parameters(), lr=0.1), cls=cls)
    strategy.train(toy_benchmark(1).train_stream[0])
    assert dtypes == {torch.bfloat16}
    assert strategy.loss.dtype == model[0].weight.dtype == torch.float32


def test_a_number_of_mini_batches_below_one_is_an_error():
    model = toy_model()
    cls = type("None", (GradientAccumulation, Naive), {"accumulate": 0})
    strategy = make_naive(model, torch.optim.SGD(model.parameters(), lr=0.1), cls=cls)
    with pytest.raises(ValueError, match="accumulate must be >= 1, got 0"):
        strategy.train(toy_benchmark(1).train_stream[0])
