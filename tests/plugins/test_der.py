"""DER and ER-ACE against their definitions."""

import pytest
import torch
from avalanche.training.supervised import Naive
from torch import nn
from toys import Head, Watch, make_naive, sgd, toy_benchmark, toy_model, weights

from covon_avalanche.loops import GradientAccumulation
from covon_avalanche.plugins import DERPlugin
from covon_avalanche.strategies import ERACEStrategy


class Accumulating(GradientAccumulation, Naive):
    """Steps of two mini-batches and of one."""


@pytest.mark.parametrize("cls", [Naive, Accumulating])
def test_logits_are_those_of_the_step_that_trained_on_the_example(cls):
    """All examples fit; each is stored with the output that training computed for it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 10), nn.Dropout(0.5), nn.Linear(10, 4))
    seen = []
    watch = Watch(after_forward=lambda s: seen.append((s.mb_x, s.mb_y, s.mb_output.detach())))
    plugin = DERPlugin(200, alpha=0.0, beta=0.0)
    strategy = make_naive(model, sgd(model), plugin, watch, cls=cls)
    strategy.train(toy_benchmark(1).train_stream[0])
    assert plugin.seen == 96  # two epochs
    for column, values in zip((0, 1, 3), zip(*seen, strict=True), strict=True):
        assert torch.equal(plugin.memory[column][:96], torch.cat(values))


def test_masked_logits_count_as_0():
    """Those of classes that a classifier of Avalanche has units for, but no task has had."""
    plugin, model, losses = DERPlugin(200), Head(), []
    watch = Watch(after_backward=lambda s: losses.append(float(s.loss)))
    strategy = make_naive(model, sgd(model), plugin, watch)
    benchmark = toy_benchmark(2, classes_per_experience=2)
    for experience in benchmark.train_stream:
        strategy.eval(benchmark.test_stream)  # the head grows here
        strategy.train(experience)
    assert not plugin.memory[3][:96, 2:].any()
    assert plugin.memory[3][:96, :2].all()
    assert max(losses) < 20


def test_a_step_adds_both_losses_of_stored_examples(monkeypatch):
    """The second batch of a strategy whose memory holds the first one."""
    plugin, model = DERPlugin(16, alpha=0.3, beta=0.6), toy_model()
    batches = []
    watch = Watch(before_forward=lambda s: batches.append((s.mb_x, s.mb_y)))
    strategy = make_naive(model, sgd(model), plugin, watch, train_epochs=1)
    monkeypatch.setattr(torch, "randint", lambda *_, **kwargs: torch.tensor(16))  # keep the first
    strategy.train(toy_benchmark(1).train_stream[0], shuffle=False)
    by_hand = toy_model()
    optimizer = sgd(by_hand)
    stored = None
    for x, labels in batches:
        optimizer.zero_grad()
        output = by_hand(x)
        loss = nn.functional.cross_entropy(output, labels)
        if stored is not None:  # as many as are stored, so that their order does not matter
            again = by_hand(stored[0])
            loss = loss + 0.3 * (again - stored[2]).square().mean()
            loss = loss + 0.6 * nn.functional.cross_entropy(again, stored[1])
        loss.backward()
        stored = stored or (x, labels, output.detach())
        optimizer.step()
    torch.testing.assert_close(weights(model), weights(by_hand))


def test_every_example_stays_with_the_same_probability():
    """Reservoir sampling: 40 of 96, over 300 runs of a memory without training."""
    counts = torch.zeros(96)
    torch.manual_seed(0)
    for _ in range(300):
        plugin = DERPlugin(40)
        for part in torch.arange(96.0).split(16):
            plugin._store([part[:, None]] * 4)
        counts[plugin.memory[0][:, 0].long()] += 1
        assert len(plugin.memory[0].unique()) == 40
    shares = counts / 300
    assert (shares - 40 / 96).abs().max() < 5 * (0.42 * 0.58 / 300) ** 0.5


def test_er_ace_adds_the_losses_and_draws_as_many_examples_as_there_are_new_ones():
    strategy = make_naive(toy_model(), sgd(toy_model()), cls=ERACEStrategy, mem_size=20)
    assert strategy.batch_size_mem == strategy.train_mb_size == 16
    new, old = torch.randn(6, 4), torch.randn(5, 4)
    y, y_old = torch.tensor([0, 2, 2, 0, 2, 0]), torch.tensor([0, 1, 2, 3, 3])
    own = new[:, [0, 2]].log_softmax(1)  # the classes of the batch
    expected = -own[torch.arange(6), y // 2].mean() + nn.functional.cross_entropy(old, y_old)
    torch.testing.assert_close(strategy.ace_criterion(new, y, old, y_old), expected)


def test_er_ace_replays_all_examples_where_a_batch_would_have_more():
    """Of 20 examples the memory keeps 20 // 4 of each class, fewer than a batch of 32. The replay
    begins with the second training, whatever the number of its experience."""
    sizes = []
    options = {"mem_size": 20, "train_mb_size": 32}
    strategy = make_naive(toy_model(), sgd(toy_model()), cls=ERACEStrategy, **options)
    own = strategy.ace_criterion
    strategy.ace_criterion = lambda *given: sizes.append(len(given[3])) or own(*given)
    strategy.train([*reversed(toy_benchmark(2).train_stream)])
    assert len(sizes) == 2 * 2  # epochs and batches of the second training
    assert set(sizes) == {20}
