"""Batch norm's running statistics after a merge."""

import copy

import pytest
import torch
from avalanche.benchmarks import benchmark_from_datasets
from avalanche.benchmarks.scenarios.task_aware import with_task_labels
from avalanche.training.plugins import SupervisedPlugin
from torch import nn
from toys import adamw, columns, make_naive, make_strategy, same, toy_benchmark, toy_model

from covon_avalanche import MergePlugin
from covon_avalanche.merging import RegMean, rule
from covon_avalanche.merging.batch_norm import update_batch_norm
from covon_avalanche.plugins.task_loader import dataset_loader


class Frozen(nn.BatchNorm1d):
    """Stays in eval mode, as people freeze it."""

    def train(self, mode: bool = True):
        return super().train(False)


def network(frozen: bool = False, dropout: float = 0.0) -> nn.Sequential:
    torch.manual_seed(0)
    second = Frozen(6) if frozen else nn.BatchNorm1d(6, momentum=0.3)
    return nn.Sequential(
        nn.Linear(8, 10), nn.BatchNorm1d(10), nn.ReLU(), nn.Dropout(dropout), nn.Linear(10, 6),
        second, nn.ReLU(), nn.Linear(6, 4),
    )  # fmt: skip


def statistics(model):
    return {n: b.clone() for n, b in model.named_buffers()}


@pytest.fixture
def batches():
    torch.manual_seed(1)
    return [(2 * torch.randn(20, 8) + 1, torch.zeros(20)) for _ in range(5)]


def test_statistics_are_those_of_torch(batches):
    ours, theirs = network(), network()
    update_batch_norm(ours, batches)
    torch.optim.swa_utils.update_bn(batches, theirs)
    torch.testing.assert_close(statistics(ours), statistics(theirs))


def test_dropout_is_off_frozen_layers_keep_theirs_and_the_rest_is_as_it_was(batches):
    model, without = network(frozen=True, dropout=0.5).eval(), network()
    model[3].train()
    before = copy.deepcopy(model.state_dict())
    update_batch_norm(model, batches)
    update_batch_norm(without, batches)
    after = model.state_dict()
    changed = {name for name in before if not torch.equal(after[name], before[name])}
    assert changed == {f"1.{n}" for n in ("running_mean", "running_var", "num_batches_tracked")}
    torch.testing.assert_close(model[1].running_mean, without[1].running_mean)
    assert [m.training for m in model] == [False] * 3 + [True] + [False] * 4
    assert model[1].momentum == 0.1


def test_layers_that_the_task_does_not_use_keep_theirs(batches):
    """As those of other tasks' heads."""
    model = network()
    model[5].running_mean.fill_(3.0)
    model[5].num_batches_tracked.fill_(7)
    model.forward = lambda x: model[1](model[0](x))
    update_batch_norm(model, batches)
    assert int(model[1].num_batches_tracked) == 5
    assert (model[5].running_mean == 3).all()
    assert int(model[5].num_batches_tracked) == 7


def test_an_error_in_the_middle_of_the_pass_leaves_everything_as_it_was(batches):
    model = network().eval()
    before = statistics(model)
    with pytest.raises(RuntimeError):
        update_batch_norm(model, [*batches, (torch.randn(5, 3), None)])
    assert same(statistics(model), before)
    assert not any(m.training for m in model)
    assert (model[1].momentum, model[5].momentum) == (0.1, 0.3)


@pytest.mark.parametrize("case", ["eq8", "regmean", "MergePlugin"])
def test_after_a_task_they_are_those_of_the_merged_weights(case):
    """Of 48 examples in three batches, which are the averages over all."""
    model = network()
    if case == "MergePlugin":
        strategy = make_naive(model, adamw(model), MergePlugin(RegMean()))
    else:
        strategy = make_strategy("covon", model, merge=RegMean() if case == "regmean" else "eq8")
    experiences = list(toy_benchmark(2).train_stream)
    strategy.train(experiences)
    x, _ = columns(experiences[-1])
    mean = model[0](x).detach().mean(0)
    torch.testing.assert_close(model[1].running_mean, mean, rtol=1e-4, atol=1e-5)
    assert int(model[1].num_batches_tracked) == 3
    again, data = copy.deepcopy(model), experiences[-1].dataset.eval()
    update_batch_norm(again, dataset_loader(data, strategy, 16, shuffled=True))
    torch.testing.assert_close(statistics(model), statistics(again))


def test_batches_are_shuffled_or_a_sorted_task_would_have_small_variances():
    """Four clusters, sorted: batches in order would have one each."""
    data = toy_benchmark(n=400).train_stream[0].dataset
    data = data.subset(torch.arange(400).remainder(4).argsort(stable=True).tolist())
    benchmark = with_task_labels(benchmark_from_datasets(train=[data]))
    strategy = make_strategy("covon", network(), train_mb_size=100)
    strategy.train(benchmark.train_stream[0])
    out = strategy.model[0](torch.stack([x for x, *_ in data])).detach()
    whole, within = out.var(0), out.unflatten(0, (4, 100)).var(1).mean(0)
    running = strategy.model[1].running_var
    assert ((running - whole).abs() < (running - within).abs()).all()


def test_no_pass_without_batch_norm_and_no_update_within_a_task(monkeypatch):
    def batches():
        pytest.fail("a pass")
        yield

    update_batch_norm(toy_model(), batches())
    monkeypatch.setattr(rule, "update_batch_norm", lambda *_: pytest.fail("a pass"))
    strategy = make_strategy("covon", network(), consolidate_every=2)
    strategy.train(toy_benchmark().train_stream[0])


class FreezeSecond(SupervisedPlugin):
    """Puts a layer into eval mode in each iteration, as people freeze it."""

    def before_training_iteration(self, strategy, **kwargs):
        strategy.model[5].eval()


@pytest.mark.parametrize("with_covon", [True, False])
def test_layers_in_eval_mode_while_the_model_trains_keep_theirs(with_covon):
    model = network()
    model[5].running_mean.fill_(3.0)
    if with_covon:
        strategy = make_strategy("covon", model, plugins=[FreezeSecond()])
    else:
        strategy = make_naive(model, adamw(model), MergePlugin(RegMean()), FreezeSecond())
    strategy.train(toy_benchmark().train_stream[0])
    assert (model[5].running_mean == 3).all()
    assert int(model[1].num_batches_tracked) == 3


def test_a_model_in_eval_mode_within_a_wrapper_is_updated(batches):
    class Wrapper(nn.Module):
        def __init__(self, model):
            super().__init__()
            self.model = model

        def forward(self, x):
            return self.model(x)

    wrapper, alone = Wrapper(network().eval()), network()
    for model in (wrapper, alone):
        update_batch_norm(model, batches)
    torch.testing.assert_close(statistics(wrapper.model), statistics(alone))
