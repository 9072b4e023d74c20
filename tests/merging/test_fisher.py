"""Fisher-weighted averaging against its formula."""

import torch
from torch import nn
from toy_merging import end_task
from toy_optimizers import weights

from covon_avalanche.merging import CoFiMA, FisherMerge
from covon_avalanche.posterior.fisher import squared_example_gradients


def fisher_by_hand(weight, x):
    """Of a linear layer: expected over the predicted labels, at least 1e-6, over its norm."""
    weight, total = weight.clone().requires_grad_(), torch.zeros_like(weight)
    for xi in x:
        log_p = torch.log_softmax(weight @ xi, 0)
        for label in range(len(weight)):
            (g,) = torch.autograd.grad(log_p[label], weight, retain_graph=True)
            total += log_p[label].exp().detach() * g.square() / len(x)
    return total.clamp(min=1e-6) / total.norm()


def merge_task(model, rule, x, y, weight):
    end_task(model, rule, {"weight": weight}, lambda: zip(x.split(7), y.split(7), strict=True))


def test_three_tasks_have_the_fisher_weighted_mean():
    """Each Fisher information at the weights that its own task left; the last input is almost 0."""
    torch.manual_seed(0)
    model, rule = nn.Linear(4, 3, bias=False), FisherMerge()
    weighted, total = 0, 0
    for scale in (1.0, 10.0, 0.1):  # so that the norms differ
        x, y, weight = torch.randn(10, 4), torch.randint(3, (10,)), torch.randn(3, 4)
        x = scale * x
        x[:, 3] *= 1e-4
        fisher = fisher_by_hand(weight, x)
        assert torch.equal(fisher[:, 3], fisher.min().expand(3))
        merge_task(model, rule, x, y, weight)
        weighted, total = weighted + fisher * weight, total + fisher
        torch.testing.assert_close(model.weight.detach(), weighted / total, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(rule.fisher["weight"], total, rtol=1e-4, atol=1e-8)
    assert model.weight.grad is None


def test_new_classes_keep_their_new_values_and_weights_without_information_are_averaged():
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
    torch.testing.assert_close(merged[3], new[3])
    low, high = torch.minimum(old, new[:3]), torch.maximum(old, new[:3])
    assert ((low < merged[:3]) & (merged[:3] < high)).all()


def batch_fisher_by_hand(weight, batches):
    """Mean over batches of the squared gradient of the mean loss, at most 1e-4."""
    squares = []
    for x, y in batches:
        weight = weight.detach().clone().requires_grad_()
        loss = nn.functional.cross_entropy(x @ weight.T, y)
        squares.append(torch.autograd.grad(loss, weight)[0].square())
    return torch.stack(squares).mean(0).clamp(max=1e-4)


def test_cofima_weighs_the_last_two_models_by_their_fishers():
    """The third input is so large that its Fisher is 1e-4; the last one is always zero."""
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


def test_cofima_leaves_layers_in_eval_mode_that_are_frozen_while_the_model_trains():
    model = nn.Sequential(nn.BatchNorm1d(4), nn.Dropout(), nn.Linear(4, 3))
    model[0].eval()
    modes = []
    model.register_forward_pre_hook(lambda module, _: modes.append([m.training for m in module]))
    before = {name: buffer.clone() for name, buffer in model[0].named_buffers()}
    batch = torch.randn(5, 4), torch.randint(3, (5,))
    end_task(model, CoFiMA(), weights(model), lambda: [batch])
    assert modes == [[False, True, True]]
    for name, buffer in model[0].named_buffers():
        assert torch.equal(buffer, before[name])


def test_cofima_of_bfloat16_weights_does_not_depend_on_the_number_of_batches():
    torch.manual_seed(0)
    model = nn.Linear(4, 3).bfloat16()
    batch, found = ((0.05 * torch.randn(5, 4)).bfloat16(), torch.randint(3, (5,))), []
    for count in (1, 1000):
        rule = CoFiMA()
        end_task(model, rule, weights(model), lambda count=count: [batch] * count)
        found.append(rule.fisher)
    torch.testing.assert_close(found[1], found[0])
    assert (found[0]["weight"] < 1e-4).any()


def test_autocast_does_not_change_the_fisher_information():
    """Of a network with layer norm, which ``vmap`` cannot compute with mixed types."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2))
    x, y = torch.randn(8, 3), torch.randint(2, (8,))
    plain = squared_example_gradients(model, [(x, y)])
    with torch.autocast("cpu", torch.bfloat16):
        found = squared_example_gradients(model, [(x, y)])
    assert all(torch.equal(found[name], value) for name, value in plain.items())
