"""Ada-Reg and EWC* against Algorithms 2 and 3 written out."""

import copy

import pytest
import torch
from avalanche.benchmarks import benchmark_from_datasets
from avalanche.benchmarks.utils import as_classification_dataset
from avalanche.training import Naive
from torch import nn
from torch.utils.data import TensorDataset
from toys import (
    QUIET,
    STRATEGIES,
    ToDouble,
    columns,
    make_naive,
    make_strategy,
    same,
    toy_benchmark,
    toy_model,
    toy_parts,
    weights,
)

from covon_avalanche import AdaRegPlugin, AdaRegStrategy, EWCStarPlugin, EWCStarStrategy
from covon_avalanche.plugins.task_loader import task_loader
from covon_avalanche.posterior.fisher import squared_batch_gradients, squared_example_gradients

LR, BETAS, EPS = 0.01, (0.9, 0.999), 1e-8


def batches(experience):
    x, y = columns(experience)
    return list(zip(x.split(16), y.split(16), strict=True))


def algorithm(benchmark, strength, weight_decay, importance, *, restart_adam):
    """Algorithms 2 and 3 by hand: Adam with a decoupled pull, in float64.

    ``importance(model, experience, h)`` is the task's curvature.
    """
    model = toy_model().double()
    theta = dict(model.named_parameters())
    ess = 48.0
    anchor = {n: torch.zeros_like(p) for n, p in theta.items()}
    s = {n: torch.full_like(p, ess * weight_decay) for n, p in theta.items()}
    g = {n: torch.zeros_like(p) for n, p in theta.items()}
    h, step = copy.deepcopy(g), 0
    for experience in benchmark.train_stream:
        if restart_adam:
            g = {n: torch.zeros_like(p) for n, p in theta.items()}
            h, step = copy.deepcopy(g), 0
        for _ in range(2):
            for x, y in batches(experience):
                step += 1
                loss = nn.functional.cross_entropy(model(x.double()), y)
                grads = torch.autograd.grad(loss, list(theta.values()))
                with torch.no_grad():
                    for (n, p), grad in zip(theta.items(), grads, strict=True):
                        g[n] = BETAS[0] * g[n] + (1 - BETAS[0]) * grad
                        h[n] = BETAS[1] * h[n] + (1 - BETAS[1]) * grad**2
                        g_bar = g[n] / (1 - BETAS[0] ** step)
                        h_bar = h[n] / (1 - BETAS[1] ** step)
                        adam = g_bar / (h_bar.sqrt() + EPS)
                        rate = LR * s[n] / ess
                        explicit = p - LR * adam - rate * (p - anchor[n])
                        implicit = (p - LR * adam + rate * anchor[n]) / (1 + rate)
                        p.copy_(torch.where(rate < 1, explicit, implicit))
        h_bar = {n: v / (1 - BETAS[1] ** step) for n, v in h.items()}
        curvature = importance(model, experience, h_bar)
        s = {n: s[n] + strength * ess * curvature[n] for n in s}
        anchor = weights(model)
    return weights(model), s


def trained(cls, benchmark, **options):
    model = toy_model().double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=BETAS, eps=EPS, weight_decay=0)
    strategy = cls(model=model, optimizer=optimizer, plugins=[ToDouble()], **QUIET, **options)
    strategy.train(benchmark.train_stream, shuffle=False)
    return strategy


def assert_agrees(strategy, expected, precision):
    found = strategy.plugins[0].anchor.precision
    for name, p in strategy.model.named_parameters():
        torch.testing.assert_close(p.detach(), expected[name], rtol=1e-7, atol=1e-9)
        torch.testing.assert_close(found[name], precision[name], rtol=1e-7, atol=1e-12)


# With the larger strength many rates pass 1, and the implicit form takes over there.
@pytest.mark.parametrize("strength", [1.0, 1e3, 1e6])
@pytest.mark.parametrize("weight_decay", [0.0, 0.3])
def test_ada_reg_is_algorithm_2(strength, weight_decay):
    benchmark = toy_benchmark(3)
    expected, s = algorithm(
        benchmark, strength, weight_decay, lambda model, experience, h: h, restart_adam=True
    )
    strategy = trained(AdaRegStrategy, benchmark, strength=strength, weight_decay=weight_decay)
    assert_agrees(strategy, expected, s)


@pytest.mark.parametrize("strength", [1.0, 1e2, 1e6])
@pytest.mark.parametrize("fisher", ["exact", "batch"])
def test_ewc_star_is_algorithm_3(strength, fisher, monkeypatch):
    benchmark = toy_benchmark(3)
    function = squared_example_gradients if fisher == "exact" else squared_batch_gradients

    def importance(model, experience, h):
        return function(model, [(x.double(), y) for x, y in batches(experience)])

    expected, s = algorithm(benchmark, strength, 0.1, importance, restart_adam=False)
    monkeypatch.setattr(
        "covon_avalanche.plugins.ewc_star.task_loader",
        lambda *args, **kwargs: ((x.double(), y) for x, y in task_loader(*args, **kwargs)),
    )
    options = dict(strength=strength, weight_decay=0.1, fisher=fisher, fisher_mb_size=16)
    strategy = trained(EWCStarStrategy, benchmark, **options)
    assert_agrees(strategy, expected, s)


@pytest.mark.parametrize("cls", [AdaRegStrategy, EWCStarStrategy])
def test_strength_zero_is_plain_adamw_and_a_huge_one_holds_what_was_important(cls):
    benchmark = toy_benchmark(2)

    def run(strategy_class, **options):
        model = toy_model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
        strategy = strategy_class(
            model=model, optimizer=optimizer, criterion=nn.CrossEntropyLoss(), **QUIET, **options
        )
        strategy.train(benchmark.train_stream[0], shuffle=False)
        first = weights(model)
        importance = getattr(strategy.plugins[0], "anchor", None)
        optimizer.state.clear()
        strategy.train(benchmark.train_stream[1], shuffle=False)
        return first, weights(model), importance

    _, plain, _ = run(Naive)
    _, free, _ = run(cls, strength=0.0)
    assert same(plain, free)
    first, second, anchor = run(cls, strength=1e12)
    for name, precision in anchor.precision.items():
        important = precision > 1e9
        assert important.any()
        assert (second[name] - first[name])[important].abs().max() < 1e-4
        assert (plain[name] - first[name])[important].abs().max() > 1e-2


@pytest.mark.parametrize("family", [torch.optim.Adam, torch.optim.NAdam, torch.optim.RAdam])
def test_ada_reg_takes_the_whole_adam_family(family):
    model = toy_model()
    strategy = make_naive(model, family(model.parameters(), lr=LR), AdaRegPlugin(strength=10.0))
    strategy.train(toy_benchmark(2).train_stream)
    precision = strategy.plugins[0].anchor.precision
    assert all((s >= 0).all() and s.sum() > 0 for s in precision.values())


def test_ada_reg_refuses_an_optimizer_without_a_second_moment():
    model = toy_model()
    strategy = make_naive(model, torch.optim.SGD(model.parameters(), lr=LR), AdaRegPlugin())
    with pytest.raises(ValueError, match=r"needs an optimizer of the Adam family .* got SGD"):
        strategy.train(toy_benchmark(1).train_stream[0])


@pytest.mark.parametrize("kind", ["ada-reg", "ewc-star"])
class TestOnlineStreams:
    def test_with_boundaries_the_task_counts_not_its_parts(self, kind):
        """One anchor a task, ess and Fisher from all of its data."""
        strategy, anchors, sizes = make_strategy(kind, toy_model()), [], []
        plugin = strategy.plugins[0]
        for experience in toy_parts(2):
            strategy.train(experience)
            anchors.append(None if plugin.anchor is None else dict(plugin.anchor.mean))
            sizes.append(plugin._ess_now)
        assert anchors[:2] == [None, None]
        assert same(anchors[2], anchors[3])
        assert same(anchors[2], anchors[4])
        assert not same(anchors[2], anchors[5])
        assert sizes == [48.0] * 6
        if kind == "ewc-star":
            strategy.experience = experience
            assert sum(len(y) for _, y in task_loader(strategy, 16)) == 48


@pytest.mark.parametrize("kind", STRATEGIES)
def test_a_benchmark_without_task_labels_will_do(kind):
    x, y = torch.randn(32, 8), torch.arange(32) % 4
    data = TensorDataset(x, y)
    data.targets = y.tolist()
    benchmark = benchmark_from_datasets(train=[as_classification_dataset(data)] * 2)
    make_strategy(kind, toy_model()).train(benchmark.train_stream)


def test_frozen_parameters_are_not_pulled():
    model = toy_model()
    model[0].requires_grad_(False)
    before = weights(model)
    strategy = make_strategy("ewc-star", model, weight_decay=0.5)
    strategy.train(toy_benchmark(2).train_stream)
    assert torch.equal(model[0].weight, before["0.weight"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"strength": -1.0}, "strength must be >= 0"),
        ({"ess": 0.0}, "ess must be > 0"),
        ({"weight_decay": -1.0}, "weight_decay must be >= 0"),
    ],
)
@pytest.mark.parametrize("plugin", [AdaRegPlugin, EWCStarPlugin])
def test_bad_arguments_name_value_and_rule(plugin, options, message):
    with pytest.raises(ValueError, match=message):
        plugin(**options)


def test_bad_arguments_of_ewc_star():
    with pytest.raises(ValueError, match=r"fisher must be one of \['batch', 'exact'\], got 'true'"):
        EWCStarPlugin(fisher="true")
    with pytest.raises(ValueError, match="fisher_mb_size must be an integer >= 1"):
        EWCStarPlugin(fisher_mb_size=0)


def test_the_callers_plugin_list_is_left_alone():
    for kind in STRATEGIES:
        plugins = []
        make_strategy(kind, toy_model(), plugins=plugins)
        assert plugins == []
