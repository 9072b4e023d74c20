"""Mixins of Avalanche strategies against plain loops."""

import pytest
import torch
from avalanche.training.supervised import Naive
from torch import nn
from toy_optimizers import accumulate, make_covon, make_vcl
from toys import Watch, columns, make_naive, same, toy_benchmark, toy_model, weights

from covon_avalanche import CoVONPlugin, VCLPlugin
from covon_avalanche.loops import Autocast, GradientAccumulation, GradientClipping


class Accumulating(GradientAccumulation, GradientClipping, Naive):
    accumulate = 2
    max_grad_norm = 0.5


@pytest.mark.parametrize(("make", "plugin"), [(make_covon, CoVONPlugin), (make_vcl, VCLPlugin)])
def test_one_sample_computes_all_mini_batches_of_a_step(make, plugin):
    """Three mini-batches of 16: a step by two and one by the last."""
    benchmark, (model, plain) = toy_benchmark(2), (toy_model(), toy_model())
    options = dict(hess_approx="gradsq") if make is make_covon else {}
    optimizer = make(model.named_parameters(), **options)
    beside = Watch(before_training_iteration=take_gradients)
    strategy = make_naive(model, optimizer, plugin(), beside, cls=Accumulating)
    optimizer = make(plain.named_parameters(), **options)
    for experience in benchmark.train_stream:
        strategy.train(experience, shuffle=False)
        x, y = columns(experience)
        batches = list(zip(x.split(16), y.split(16), strict=True))
        for step in (batches[:2], batches[2:]) * 2:
            if make is make_covon:
                optimizer.param_groups[0]["batch_size"] = 16 * len(step)
            accumulate(optimizer, plain, step, size=len(step), clip=0.5)
        optimizer.consolidate()
    assert same(weights(model), weights(plain))


def test_merges_are_counted_in_steps():
    """Three mini-batches are two steps, in each of two epochs."""

    def note(strategy):
        merged.append(strategy.optimizer.prior().precision["2.bias"].sum().item())

    merged = []
    model = toy_model()
    optimizer = make_covon(model.named_parameters())
    plugin = CoVONPlugin(consolidate_every=3)
    strategy = make_naive(model, optimizer, plugin, Watch(after_update=note), cls=Accumulating)
    strategy.train(toy_benchmark(1).train_stream[0])
    assert merged[0] == merged[1] != merged[2] == merged[3]
    assert optimizer.param_groups[0]["examples"] == 3 * 2 * strategy.train_mb_size


def decay(strategy):
    """A penalty that counts once in the average over mini-batches."""
    strategy.loss = strategy.loss + sum(p.square().sum() for p in strategy.model.parameters())


def double(strategy):
    """Add examples to each mini-batch, as generative replay does."""
    strategy.mbatch = [torch.cat([part, part]) for part in strategy.mbatch]


def take_gradients(strategy):
    """Those of something else, as A-GEM and GEM do before an iteration."""
    strategy.optimizer.zero_grad()
    strategy.model(strategy.mb_x).sum().backward()
    strategy.optimizer.zero_grad()


@pytest.mark.parametrize("before", [None, double, take_gradients])
def test_accumulated_steps_equal_those_of_large_batches(before):
    found, callbacks = [], {"before_training_iteration": before} if before else {}
    threefold = type("Threefold", (GradientAccumulation, Naive), {"accumulate": 3})
    for cls, size in ((Naive, 48), (threefold, 16), (threefold, 20)):  # 20 + 20 + 8
        benchmark, model = toy_benchmark(2), toy_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        plugin = Watch(before_backward=decay, **callbacks)
        strategy = make_naive(model, optimizer, plugin, cls=cls, train_mb_size=size)
        for experience in benchmark.train_stream:
            strategy.train(experience, shuffle=False)
        found.append(weights(model))
    for accumulated in found[1:]:
        torch.testing.assert_close(accumulated, found[0], rtol=1e-4, atol=1e-5)


def test_the_loss_that_plugins_see_is_that_of_the_mini_batch():
    def look(strategy):
        expected = nn.functional.cross_entropy(strategy.mb_output, strategy.mb_y)
        torch.testing.assert_close(strategy.loss.sum(), expected)
        seen.append(expected)

    model, seen = toy_model(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    strategy = make_naive(model, optimizer, Watch(after_training_iteration=look), cls=Accumulating)
    strategy.train(toy_benchmark(1).train_stream[0])
    assert len(seen) == 6


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
