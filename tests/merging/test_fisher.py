"""Fisher-weighted averaging against its formula."""

import pytest
import torch
from torch import nn
from toys import make_covon, train_step, weights

from covon_avalanche.merging import FisherMerge, merge_into


def fisher_by_hand(model, x, y):
    """Squared gradients, example by example."""
    sums = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    for xi, yi in zip(x, y, strict=True):
        loss = nn.functional.cross_entropy(model(xi[None]), yi[None])
        for (name, _), g in zip(
            model.named_parameters(),
            torch.autograd.grad(loss, list(model.parameters())),
            strict=True,
        ):
            sums[name] += g.square() / len(x)
    return sums


def tasks(n, inputs=4, classes=3):
    """Data and the weights that each task leaves."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(n):
        x = torch.randn(10, inputs, generator=generator)
        y = torch.randint(classes, (10,), generator=generator)
        yield x, y, torch.randn(classes, inputs, generator=generator)


def train_to(model, rule, x, y, weight):
    before = weights(model)
    with torch.no_grad():
        model.weight.copy_(weight)
    fisher = fisher_by_hand(model, x, y)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    merge_into(model, optimizer, rule, before, lambda: zip(x.split(7), y.split(7), strict=True))
    return fisher


def test_three_tasks_have_the_fisher_weighted_mean():
    """``sum F_i theta_i / sum F_i``, each F at the weights that its own task left."""
    model, rule = nn.Linear(4, 3, bias=False), FisherMerge()
    weighted, total = 0, 0
    for x, y, weight in tasks(3):
        fisher = train_to(model, rule, x, y, weight)["weight"]
        weighted, total = weighted + fisher * weight, total + fisher
        torch.testing.assert_close(model.weight.detach(), weighted / total, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(rule.fisher["weight"], total)
    assert rule.fisher["weight"].shape == model.weight.shape


def test_new_classes_and_weights_without_information_keep_their_new_values():
    """The second input is always zero, and class 3 is new in the second task."""
    torch.manual_seed(0)
    rule, model = FisherMerge(), nn.Linear(2, 3, bias=False)
    x, y = torch.tensor([[1.0, 0.0], [2.0, 0.0]]), torch.tensor([0, 1])
    train_to(model, rule, x, y, torch.randn(3, 2))
    old, model = model, nn.Linear(2, 4, bias=False)
    with torch.no_grad():
        model.weight[:3] = old.weight
    new = torch.randn(4, 2)
    train_to(model, rule, x, y, new)
    torch.testing.assert_close(model.weight[:, 1].detach(), new[:, 1])
    torch.testing.assert_close(model.weight[3].detach(), new[3])
    low, high = torch.minimum(old.weight, new[:3])[:, 0], torch.maximum(old.weight, new[:3])[:, 0]
    assert ((low < model.weight[:3, 0]) & (model.weight[:3, 0] < high)).all()


def test_frozen_and_unused_parameters_keep_their_weights():
    model = nn.ModuleDict({"used": nn.Linear(2, 2), "unused": nn.Linear(2, 2)})
    model.forward = lambda x: model["used"](x)
    model["used"].bias.requires_grad_(False)
    rule, optimizer = FisherMerge(), torch.optim.SGD(model.parameters(), lr=0.1)
    batch = torch.randn(6, 2), torch.tensor([0, 1] * 3)
    for _ in range(2):
        before = weights(model)
        with torch.no_grad():
            model["used"].weight.add_(1)
        merge_into(model, optimizer, rule, before, lambda: [batch])
    after = weights(model)
    assert all(torch.equal(after[n], before[n]) for n in before if n != "used.weight")
    assert "used.bias" not in rule.fisher


def test_the_criterion_of_the_training_is_used_and_gradients_are_left_alone(linear, batch):
    def half(output, target):
        return nn.functional.cross_entropy(output, target) / 2

    rules = FisherMerge(), FisherMerge(half)
    for rule in rules:
        optimizer = torch.optim.SGD(linear.parameters(), lr=0.1)
        merge_into(linear, optimizer, rule, weights(linear), lambda: [batch])
    torch.testing.assert_close(rules[0].fisher["weight"], 4 * rules[1].fisher["weight"])
    assert linear.weight.grad is None


def test_diverged_weights_are_refused_by_name(linear, batch):
    before = weights(linear)
    with torch.no_grad():
        linear.weight.fill_(torch.inf)
    optimizer = torch.optim.SGD(linear.parameters(), lr=0.1)
    rule = FisherMerge()
    with pytest.raises(FloatingPointError, match="merged weights of 'weight' are not finite"):
        merge_into(linear, optimizer, rule, before, lambda: [batch])
    assert rule.fisher == {}


def test_with_covon_the_means_are_fishers_and_the_precision_is_eq_8s(linear, batch):
    optimizer = make_covon(linear.named_parameters())
    for _ in range(2):
        train_step(optimizer, linear, batch)
    fast = weights(linear)
    precision = optimizer.prior().precision["weight"]
    merge_into(linear, optimizer, FisherMerge(), batches=lambda: [batch])
    torch.testing.assert_close(linear.weight.detach(), fast["weight"])  # the only task so far
    assert (optimizer.prior().precision["weight"] > precision).all()
