"""RegMean against least squares, and in a strategy."""

import copy

import pytest
import torch
from torch import nn
from toys import columns, make_strategy, toy_benchmark, toy_model, weights

from covon_avalanche import CoVONPlugin
from covon_avalanche.input_moments import InputMoments
from covon_avalanche.merging import Eq8, RegMean, Task
from covon_avalanche.merging.regmean import input_moments


class Net(nn.Module):
    """Two convolutions, one with groups, and two linear layers, one without a bias."""

    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(2, 4, 3, padding=1, stride=2)
        self.second = nn.Conv2d(4, 6, (3, 1), padding="same", groups=2, padding_mode="reflect")
        self.third = nn.Linear(6, 5, bias=False)
        self.head = nn.Linear(5, 3)

    def forward(self, x):
        x = self.second(self.first(x).tanh()).tanh().mean((-2, -1))
        return self.head(self.third(x).tanh())


def images(seed, n=40):
    return torch.randn(n, 2, 6, 6, generator=torch.Generator().manual_seed(seed))


def task_of(model, x, before=None, batch_size=10_000):
    """A task with these inputs."""
    return Task(model, before or {}, lambda: [(part, None) for part in x.split(batch_size)])


def layer_inputs(model, x):
    found = {}
    handles = [
        layer.register_forward_hook(lambda m, i, o, n=name: found.update({n: i[0].detach()}))
        for name, layer in model.named_children()
    ]
    model(x)
    for handle in handles:
        handle.remove()
    return found


def total_change(layer, old, new, inputs):
    """Of a layer's outputs against the old one's over old inputs and the new one's over new."""
    pairs = zip((old, new), inputs, strict=True)
    double = [(copy.deepcopy(which).double(), x.double()) for which, x in pairs]
    return sum((layer(x) - which(x)).square().sum() for which, x in double)


def test_merged_layers_change_the_outputs_of_all_tasks_least():
    """The sum of squares is convex, so its gradient tells; before and after the task it is far
    from zero."""
    torch.manual_seed(0)
    before, after = Net(), Net()
    x0, x1 = images(0), images(1)
    rule = RegMean()
    rule.observe(task_of(before, x0, batch_size=7))
    merged = rule.merge(task_of(after, x1, weights(before), batch_size=9))
    assert set(merged) == {name for name, _ in after.named_parameters()}
    for name, new in after.named_children():
        old, best = before.get_submodule(name), copy.deepcopy(new)
        best.load_state_dict({key: merged[f"{name}.{key}"] for key in best.state_dict()})
        inputs = layer_inputs(before, x0)[name], layer_inputs(after, x1)[name]
        slopes = []
        for layer in (best, copy.deepcopy(old), copy.deepcopy(new)):
            change = total_change(layer.double(), old, new, inputs)
            gradient = torch.autograd.grad(change, list(layer.parameters()))
            slopes.append(torch.cat([g.flatten() for g in gradient]).norm())
        assert slopes[0] < 1e-4 * min(slopes[1:]), name


def test_three_tasks_of_a_linear_layer_are_one_least_squares_problem():
    """Trained from task to task, the result is the layer that reproduces each task's outputs."""
    torch.manual_seed(3)
    rule, layer = RegMean(), nn.Linear(4, 3)
    inputs, targets = [torch.randn(30, 4) for _ in range(3)], []
    for x in inputs:
        before = weights(layer)
        for p in layer.parameters():  # the task
            p.data = p.data + torch.randn_like(p)
        targets.append(layer(x).detach())
        layer.load_state_dict(rule.merge(task_of(layer, x, before)), strict=False)
        rule.observe(task_of(layer, x))
    x = torch.cat([torch.cat(inputs), torch.ones(90, 1)], 1)
    solution = torch.linalg.lstsq(x, torch.cat(targets)).solution.T
    torch.testing.assert_close(layer.weight.detach(), solution[:, :-1], rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(layer.bias.detach(), solution[:, -1], rtol=1e-3, atol=1e-4)


def test_directions_without_inputs_stay_and_those_of_one_task_follow_it():
    """Closed form for inputs along the axes."""
    layer, rule = nn.Linear(4, 1, bias=False), RegMean()
    nn.init.constant_(layer.weight, 5.0)
    rule.moments[""] = torch.diag(torch.tensor([3.0, 2.0, 0.0, 0.0]))[None]
    rule.outputs[""] = 1
    x = torch.tensor([[1.0, 0.0, 0.0, 0.0], [0.0, 0.0, 2.0, 0.0]])
    merged = rule.merge(task_of(layer, x, {"weight": torch.ones(1, 4)}))
    want = torch.tensor([[1 + 4 * 1 / 4, 1.0, 5.0, 1.0]])
    torch.testing.assert_close(merged["weight"], want, rtol=1e-4, atol=0)


def test_moments_are_sums_over_examples_and_tasks():
    torch.manual_seed(1)
    model, rule = Net().train(), RegMean()
    x0, x1 = images(2), images(3)
    rule.observe(task_of(model, x0))
    rule.observe(task_of(model, x1))
    both = input_moments(model, [(torch.cat([x0, x1]), None)])
    torch.testing.assert_close(rule.moments, both, rtol=1e-4, atol=1e-4)
    x = layer_inputs(model, x0)["third"]
    alone = input_moments(model, [(x0, None)])
    torch.testing.assert_close(alone["third"][0], x.T @ x)
    rows = nn.functional.unfold(x0, 3, padding=1, stride=2).mT.flatten(0, 1)
    rows = torch.cat([rows, torch.ones(len(rows), 1)], 1)
    torch.testing.assert_close(alone["first"][0], rows.T @ rows, rtol=1e-4, atol=1e-3)
    assert model.training
    assert not model.first._forward_pre_hooks


def test_new_outputs_keep_their_weights():
    torch.manual_seed(2)
    small, grown = nn.Linear(3, 2), nn.Linear(3, 4)
    x, rule = torch.randn(20, 3), RegMean()
    rule.observe(task_of(small, x))
    before = {n: torch.zeros_like(p) for n, p in grown.named_parameters()}
    merged = rule.merge(task_of(grown, x, before))
    for name, p in grown.named_parameters():
        assert torch.equal(merged[name][2:], p[2:])
        torch.testing.assert_close(merged[name][:2], p[:2] / 2, rtol=1e-4, atol=1e-5)


def test_only_trained_layers_that_are_known_and_used_are_merged():
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 2), nn.Linear(2, 2))
    model[2].weight.requires_grad_(False)
    model.forward = lambda x: model[2](model[1](model[0](x)))  # 3 is another task's head
    rule, task = RegMean(), task_of(model, torch.randn(5, 3), weights(model))
    assert rule.merge(task) == {}
    rule.observe(task)
    assert set(rule.merge(task)) == {"0.weight", "0.bias"}
    assert rule.merge(Task(model, weights(model), lambda: [])) == {}
    rule.moments["0"] = torch.eye(7)[None]
    with pytest.raises(ValueError, match=r"layer '0' has 4 inputs .* but had 7 in earlier tasks"):
        rule.merge(task)


def test_a_layer_with_tied_weights_is_merged_under_the_parameters_name():
    model = nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 5, bias=False))
    model[1].weight = model[0].weight
    rule, x = RegMean(), torch.tensor([[0, 1], [2, 3]])
    rule.observe(task_of(model, x))
    assert set(rule.merge(task_of(model, x, weights(model)))) == {"0.weight"}


def test_a_strategy_merges_with_the_inputs_of_all_its_tasks():
    """The weights it ends with, from those that the last task left, by hand."""
    model, by_hand, fast = toy_model(), RegMean(), {}
    strategy = make_strategy("covon", model, merge=RegMean())
    rule, consolidate = strategy.plugins[0].merge, strategy.optimizer.consolidate
    first, second = toy_benchmark(2).train_stream

    def watched(**given):
        fast.update(weights(model))
        consolidate(**given)

    strategy.optimizer.consolidate = watched
    strategy.train(first)
    slow = weights(model)
    by_hand.observe(task_of(model, columns(first)[0]))
    torch.testing.assert_close(rule.moments, by_hand.moments, rtol=1e-4, atol=1e-4)
    strategy.train(second)
    merged = weights(model)
    model.load_state_dict(fast)
    want = by_hand.merge(task_of(model, columns(second)[0], slow))
    torch.testing.assert_close(merged, want, rtol=1e-3, atol=1e-4)
    assert not any(torch.allclose(merged[name], fast[name], atol=1e-3) for name in merged)


def test_the_deprecated_names_still_work():
    model = toy_model()
    for make in (
        CoVONPlugin,
        lambda **options: make_strategy("covon", toy_model(), **options).plugins[0],
    ):
        with pytest.warns(DeprecationWarning, match=r"use merge=RegMean\(\)") as caught:
            plugin = make(merge_by_inputs=True)
        assert isinstance(plugin.merge, RegMean)
    assert caught[0].filename.endswith("toys.py")  # shown to the user by Python's default filter
    with pytest.raises(ValueError, match="not both"):
        CoVONPlugin(merge=Eq8(), merge_by_inputs=True)
    with pytest.warns(DeprecationWarning, match=r"use covon_avalanche\.merging\.RegMean"):
        moments = InputMoments()
    x, rule = torch.randn(20, 8), RegMean()
    moments.add(model, [(x, None)])
    rule.observe(task_of(model, x))
    before = {name: torch.zeros_like(p) for name, p in weights(model).items()}
    merged = moments.merged(model, before, [(x, None)])
    for name, value in rule.merge(task_of(model, x, before)).items():
        assert torch.equal(merged[model.get_parameter(name)], value)
