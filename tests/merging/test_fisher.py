"""Fisher-weighted averaging against its formula."""

import pytest
import torch
from torch import nn
from toy_merging import end_task
from toy_optimizers import weights

from covon_avalanche.merging import CoFiMA, FisherMerge
from covon_avalanche.posterior.fisher import squared_example_gradients


def fisher_by_hand(weight, x, y):
    """Squared gradients of a linear layer, example by example."""
    weight, total = weight.clone().requires_grad_(), torch.zeros_like(weight)
    for xi, yi in zip(x, y, strict=True):
        loss = nn.functional.cross_entropy(weight @ xi, yi)
        total += torch.autograd.grad(loss, weight)[0].square() / len(x)
    return total


def merge_task(model, rule, x, y, weight):
    end_task(model, rule, {"weight": weight}, lambda: zip(x.split(7), y.split(7), strict=True))


def test_three_tasks_have_the_fisher_weighted_mean():
    """``sum F_i theta_i / sum F_i``, each F at the weights that its own task left."""
    torch.manual_seed(0)
    model, rule = nn.Linear(4, 3, bias=False), FisherMerge()
    weighted, total = 0, 0
    for _ in range(3):
        x, y, weight = torch.randn(10, 4), torch.randint(3, (10,)), torch.randn(3, 4)
        fisher = fisher_by_hand(weight, x, y)
        merge_task(model, rule, x, y, weight)
        weighted, total = weighted + fisher * weight, total + fisher
        torch.testing.assert_close(model.weight.detach(), weighted / total, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(rule.fisher["weight"], total)


def test_new_classes_and_weights_without_information_keep_their_new_values():
    """The second input is always zero, and class 3 is new in the second task."""
    torch.manual_seed(0)
    rule, model = FisherMerge(), nn.Linear(2, 3, bias=False)
    x, y = torch.tensor([[1.0, 0.0], [2.0, 0.0]]), torch.tensor([0, 1])
    merge_task(model, rule, x, y, torch.randn(3, 2))
    old, model, new = model.weight.detach(), nn.Linear(2, 4, bias=False), torch.randn(4, 2)
    with torch.no_grad():
        model.weight[:3] = old
    merge_task(model, rule, x, y, new)
    merged = model.weight.detach()
    torch.testing.assert_close(merged[:, 1], new[:, 1])
    torch.testing.assert_close(merged[3], new[3])
    low, high = torch.minimum(old, new[:3])[:, 0], torch.maximum(old, new[:3])[:, 0]
    assert ((low < merged[:3, 0]) & (merged[:3, 0] < high)).all()


def test_the_criterion_of_the_training_is_used_and_gradients_are_left_alone(linear, batch):
    def half(output, target):
        return nn.functional.cross_entropy(output, target) / 2

    rules = FisherMerge(), FisherMerge(half)
    for rule in rules:
        end_task(linear, rule, weights(linear), lambda: [batch])
    torch.testing.assert_close(rules[0].fisher["weight"], 4 * rules[1].fisher["weight"])
    assert linear.weight.grad is None


def batch_fisher_by_hand(weight, batches):
    """Mean over batches of the squared gradient of the mean loss, at most 1e-4."""
    squares = []
    for x, y in batches:
        weight = weight.detach().clone().requires_grad_()
        loss = nn.functional.cross_entropy(x @ weight.T, y)
        squares.append(torch.autograd.grad(loss, weight)[0].square())
    return torch.stack(squares).mean(0).clamp(max=1e-4)


def test_cofima_weighs_the_last_two_models_by_their_fishers():
    """Batches of 7 and 3; the third input is so large that its Fisher is 1e-4, and the last one is
    always zero."""
    torch.manual_seed(0)
    model, rule = nn.Linear(4, 3, bias=False), CoFiMA(0.4)
    past, before = None, None
    for t in range(3):
        x, y, weight = torch.randn(10, 4), torch.randint(3, (10,)), torch.randn(3, 4)
        x = x * torch.tensor([0.01, 0.02, 10.0, 0.0])
        merge_task(model, rule, x, y, weight)
        fisher = batch_fisher_by_hand(weight, zip(x.split(7), y.split(7), strict=True))
        assert (fisher[:, 2] == 1e-4).all()
        assert (fisher[:, :2] < 1e-4).all()
        expected = weight
        if t > 0:
            old, new = 0.6 * past, 0.4 * fisher
            expected = (old * before + new * weight) / (old + new)
            expected[:, 3] = weight[:, 3]
        torch.testing.assert_close(model.weight.detach(), expected, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(rule.fisher["weight"], fisher)  # only the last
        before, past = model.weight.detach().clone(), fisher


def test_cofima_measures_in_training_mode_and_leaves_the_flags_alone():
    model, modes = nn.Sequential(nn.Dropout(), nn.Linear(4, 3)).eval(), []
    model.register_forward_pre_hook(lambda module, _: modes.append(module[0].training))
    batch = torch.randn(5, 4), torch.randint(3, (5,))
    end_task(model, CoFiMA(), weights(model), lambda: [batch, batch])
    assert modes == [True, True]
    assert not model.training


def test_autocast_does_not_change_the_fisher_information():
    """Of a network with layer norm, which ``vmap`` cannot compute with mixed types."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2))
    x, y = torch.randn(8, 3), torch.randint(2, (8,))
    plain = squared_example_gradients(model, [(x, y)])
    with torch.autocast("cpu", torch.bfloat16):
        found = squared_example_gradients(model, [(x, y)])
    assert all(torch.equal(found[name], value) for name, value in plain.items())


@pytest.mark.parametrize("rule", [FisherMerge(), CoFiMA()])
def test_a_task_without_examples_is_an_error(rule, linear):
    with pytest.raises(ValueError, match="at least one example"):
        end_task(linear, rule, weights(linear), lambda: [])
