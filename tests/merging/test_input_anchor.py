"""The input anchor against its definition."""

import pytest
import torch
from torch import nn
from toys import adamw, columns, make_naive, make_strategy, toy_benchmark, toy_model, weights

from covon_avalanche import MergePlugin
from covon_avalanche.merging import InputAnchor, RegMean, Task
from covon_avalanche.plugins import InputAnchorPlugin

LR, EXAMPLES = 0.1, 10


def anchored(model, x, strength, step=0.3):
    """A model whose weights have moved since the anchor was set on inputs ``x``, and its pull."""
    anchor = InputAnchor(strength)
    anchor.observe(model, lambda: [(x, None)])
    before = weights(model)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(step * torch.randn_like(p))
            p.grad = torch.zeros_like(p)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    return anchor, before, weights(model), optimizer


@pytest.mark.parametrize("bias", [True, False])
def test_the_pull_is_a_proximal_step_of_the_change_of_outputs(bias):
    """``V`` minimises ``|V - W|² / 2 + lr strength / examples * sum |(V - W0) x|² / 2``."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(4, 3, bias=bias)).double(), torch.randn(7, 4).double()
    anchor, before, moved, optimizer = anchored(model, x, strength=2.0)
    anchor.pull_(model, optimizer, EXAMPLES)

    values = {n: p.detach().clone().requires_grad_() for n, p in model.named_parameters()}
    change = torch.func.functional_call(model, values, x) - torch.func.functional_call(
        model, before, x
    )
    near = sum((values[n] - moved[n]).square().sum() for n in values)
    objective = (near + LR * 2.0 / EXAMPLES * change.square().sum()) / 2
    for gradient in torch.autograd.grad(objective, list(values.values())):
        torch.testing.assert_close(gradient, torch.zeros_like(gradient), atol=1e-5, rtol=0)
    assert any((values[n] - moved[n]).abs().max() > 0.01 for n in values)


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (nn.Linear(6, 3), (4, 6)),
        (nn.Conv2d(2, 4, 2), (1, 2, 3, 3)),
        (nn.Conv2d(4, 4, 2, groups=2), (1, 4, 3, 3)),
        (nn.Conv2d(4, 4, 2, groups=4, bias=False), (1, 4, 2, 2)),
    ],
)
def test_a_strong_pull_keeps_earlier_outputs_and_leaves_other_directions_free(layer, shape):
    torch.manual_seed(0)
    model, x = nn.Sequential(layer).double(), torch.randn(shape).double()
    expected = model(x).detach()
    anchor, before, moved, optimizer = anchored(model, x, strength=1e12)
    distance = (model(x) - expected).abs().max()
    anchor.pull_(model, optimizer, EXAMPLES)
    torch.testing.assert_close(model(x), expected, atol=1e-6 * distance.item(), rtol=0)
    pulled = weights(model)["0.weight"]
    assert (pulled - before["0.weight"]).norm() > 0.1 * (moved["0.weight"] - pulled).norm()


def test_moments_of_tasks_add_up_and_a_rule_may_measure_them():
    torch.manual_seed(0)
    model, rule = toy_model(), RegMean()
    own, shared = InputAnchor(1.0), InputAnchor(1.0, rule)
    for experience in toy_benchmark(2).train_stream:
        batches = [columns(experience)]
        task = Task(model, weights(model), lambda batches=batches: batches)
        rule.observe(task)
        for anchor in (own, shared):
            anchor.observe(model, task.batches)
    assert not shared.moments
    assert own.moments.keys() == rule.moments.keys() == own.weights.keys() == shared.weights.keys()
    for name, a0 in rule.moments.items():
        torch.testing.assert_close(own.moments[name], a0)
        values, vectors = shared._eigen[name]
        torch.testing.assert_close((vectors * values[:, None]) @ vectors.mT, a0, atol=1e-3, rtol=0)


def test_frozen_layers_and_layers_without_a_step_stay():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3))
    model[0].requires_grad_(False)
    anchor, _, moved, optimizer = anchored(model, torch.randn(8, 4), strength=1e6)
    model[1].weight.grad = None
    anchor.pull_(model, optimizer, EXAMPLES)
    same = {n: torch.equal(p, moved[n]) for n, p in weights(model).items()}
    assert same["0.weight"]
    assert same["1.weight"]
    assert not same["2.weight"]


def test_new_outputs_are_free_and_other_inputs_an_error():
    torch.manual_seed(0)
    x = torch.randn(8, 4)
    anchor, _, _, _ = anchored(nn.Sequential(nn.Linear(4, 2)), x, strength=1e6)
    grown = nn.Sequential(nn.Linear(4, 3))
    optimizer = torch.optim.SGD(grown.parameters(), lr=LR)
    grown(x).sum().backward()
    before = weights(grown)
    anchor.pull_(grown, optimizer, EXAMPLES)
    torch.testing.assert_close(grown[0].weight[:2], anchor.weights["0"][:, :4], atol=1e-2, rtol=0)
    assert torch.equal(grown[0].weight[2], before["0.weight"][2])

    wider = nn.Sequential(nn.Linear(5, 2))
    wider(torch.randn(8, 5)).sum().backward()
    optimizer = torch.optim.SGD(wider.parameters(), lr=LR)
    with pytest.raises(ValueError, match=r"layer '0' has 6 inputs .* but had 5 in earlier tasks"):
        anchor.pull_(wider, optimizer, EXAMPLES)


@pytest.mark.parametrize("optimizer", ["adamw", "covon"])
def test_strategies_forget_less_with_the_plugin(optimizer):
    """The outputs for earlier tasks change less, whatever the strategy and the optimizer."""

    def change(strength):
        torch.manual_seed(0)
        rule, model = RegMean(), toy_model()
        plugin = InputAnchorPlugin(strength, rule)
        if optimizer == "adamw":
            strategy = make_naive(model, adamw(model), MergePlugin(rule), plugin)
        else:
            strategy = make_strategy("covon", model, merge=rule, plugins=[plugin])
        first, second = toy_benchmark(2).train_stream
        strategy.train(first)
        x = torch.stack([first.dataset[i][0] for i in range(len(first.dataset))])
        before = model(x).detach()
        strategy.train(second)
        assert plugin.anchor.weights.keys() == (rule.moments if strength else {}).keys()
        return (model(x) - before).square().sum().item()

    free, weak, strong = change(0.0), change(10.0), change(1e5)
    assert strong < 0.1 * weak < 0.1 * free
