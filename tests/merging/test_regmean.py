"""Merging by inputs against least squares, and in a strategy."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader
from toys import make_covon, make_strategy, toy_benchmark, toy_model, train_step, weights

from covon_avalanche import CoVONPlugin
from covon_avalanche.merging.regmean import InputMoments, input_moments


class Net(nn.Module):
    """Two convolutions, one with groups, and two linear layers, one without a bias."""

    def __init__(self, outputs: int = 3):
        super().__init__()
        self.first = nn.Conv2d(2, 4, 3, padding=1, stride=2)
        self.second = nn.Conv2d(4, 6, (3, 1), padding="same", groups=2, padding_mode="reflect")
        self.third = nn.Linear(6, 5, bias=False)
        self.head = nn.Linear(5, outputs)

    def forward(self, x):
        x = self.second(self.first(x).tanh()).tanh().mean((-2, -1))
        return self.head(self.third(x).tanh())


def data(seed, n=40):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n, 2, 6, 6, generator=generator), torch.zeros(n)


def seen(model, x):
    """What each layer gets."""
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
    """The sum of squares is convex, so its gradient tells; on either side of the merge it is far
    from zero."""
    torch.manual_seed(0)
    before, after = Net(), Net()
    x0, x1 = data(0)[0], data(1)[0]
    moments = InputMoments()
    moments.add(before, [(part, None) for part in x0.split(7)])
    means = moments.merged(after, weights(before), [(part, None) for part in x1.split(9)])
    assert set(means) == set(after.parameters())
    for name, new in after.named_children():
        old, merged = before.get_submodule(name), copy.deepcopy(new).double()
        for p, q in zip(merged.parameters(), new.parameters(), strict=True):
            p.data.copy_(means[q])
        inputs = seen(before, x0)[name], seen(after, x1)[name]
        slopes = []
        for layer in (merged, copy.deepcopy(old).double(), copy.deepcopy(new).double()):
            change = total_change(layer, old, new, inputs)
            gradient = torch.autograd.grad(change, list(layer.parameters()))
            slopes.append(torch.cat([g.flatten() for g in gradient]).norm())
        assert slopes[0] < 1e-4 * min(slopes[1:]), name


def test_weights_that_no_input_reaches_stay_and_those_of_one_task_only_follow_it():
    """Closed form for inputs along the axes."""
    layer = nn.Linear(4, 1, bias=False)
    old = {"weight": torch.tensor([[1.0, 1.0, 1.0, 1.0]])}
    nn.init.constant_(layer.weight, 5.0)
    moments = InputMoments()
    moments.sums[""] = torch.diag(torch.tensor([3.0, 2.0, 0.0, 0.0]))[None]
    moments.outputs[""] = 1
    x = torch.tensor([[1.0, 0.0, 0.0, 0.0], [0.0, 0.0, 2.0, 0.0]])
    (merged,) = moments.merged(layer, old, [(x, None)]).values()
    want = torch.tensor([[1 + 4 * 1 / 4, 1.0, 5.0, 1.0]])
    torch.testing.assert_close(merged, want, rtol=1e-4, atol=0)


def test_moments_are_sums_over_examples_and_tasks():
    torch.manual_seed(1)
    model = Net()
    x0, x1 = data(2)[0], data(3)[0]
    moments = InputMoments()
    moments.add(model, [(x0, None)])
    moments.add(model, [(x1, None)])
    both = input_moments(model, [(torch.cat([x0, x1]), None)])
    for name, moment in both.items():
        torch.testing.assert_close(moments.sums[name], moment, rtol=1e-4, atol=1e-4)
    x = seen(model, x0)["third"]
    torch.testing.assert_close(input_moments(model, [(x0, None)])["third"][0], x.T @ x)
    rows = nn.functional.unfold(x0, 3, padding=1, stride=2).mT.flatten(0, 1)
    rows = torch.cat([rows, torch.ones(len(rows), 1)], 1)
    first = input_moments(model, [(x0, None)])["first"][0]
    torch.testing.assert_close(first, rows.T @ rows, rtol=1e-4, atol=1e-3)


def test_outputs_that_came_later_have_no_past():
    torch.manual_seed(2)
    small, grown = nn.Linear(3, 2), nn.Linear(3, 4)
    x = torch.randn(20, 3)
    moments = InputMoments()
    moments.add(small, [(x, None)])
    old = {n: torch.zeros_like(p) for n, p in grown.named_parameters()}
    merged = moments.merged(grown, old, [(x, None)])
    assert torch.equal(merged[grown.weight][2:], grown.weight[2:])
    assert torch.equal(merged[grown.bias][2:], grown.bias[2:])
    torch.testing.assert_close(merged[grown.weight][:2], grown.weight[:2] / 2, rtol=1e-4, atol=1e-5)


def test_only_trained_layers_that_are_known_and_used_are_merged():
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 2))
    model[2].weight.requires_grad_(False)
    x = torch.randn(5, 3)
    moments = InputMoments()
    assert moments.merged(model, weights(model), [(x, None)]) == {}
    moments.add(model, [(x, None)])
    assert set(moments.merged(model, weights(model), [(x, None)])) == set(model[0].parameters())
    assert moments.merged(model, weights(model), []) == {}
    moments.sums["0"] = torch.eye(7)[None]
    with pytest.raises(ValueError, match=r"layer '0' has 4 inputs .* and had 7"):
        moments.merged(model, weights(model), [(x, None)])


def test_the_model_is_left_as_it_was(linear, batch):
    linear.train()
    input_moments(linear, [batch])
    assert linear.training
    assert not linear._forward_hooks


def test_consolidate_takes_means_and_keeps_the_precision_of_the_merge(linear, batch):
    other = copy.deepcopy(linear)
    posteriors = []
    for model, given in ((linear, True), (other, False)):
        optimizer = make_covon(model.named_parameters())
        train_step(optimizer, model, batch)
        mean = torch.full_like(model.weight, 0.25)
        optimizer.consolidate(means={model.weight: mean} if given else None)
        posteriors.append(optimizer.posterior())
        if given:
            assert torch.equal(model.weight, mean)
            assert torch.equal(optimizer.prior().mean["weight"], mean)
    with_means, without = posteriors
    assert torch.equal(with_means.mean["bias"], without.mean["bias"])
    for name in without.precision:
        assert torch.equal(with_means.precision[name], without.precision[name])


@pytest.mark.parametrize(
    ("mean", "says"),
    [(torch.ones(2), r"must have shape \(\d+, \d+\), got \(2,\)"), (torch.nan, "is not finite")],
)
def test_bad_means_change_nothing(linear, batch, mean, says):
    optimizer = make_covon(linear.named_parameters())
    train_step(optimizer, linear, batch)
    if not torch.is_tensor(mean):
        mean = torch.full_like(linear.weight, mean)
    before = weights(linear)
    with pytest.raises(ValueError, match=f"the mean given for 'weight' {says}"):
        optimizer.consolidate(means={linear.weight: mean})
    assert all(torch.equal(p, before[n]) for n, p in linear.named_parameters())
    assert "hess" in optimizer.state[linear.weight]


def test_a_strategy_merges_by_the_inputs_of_all_its_tasks():
    """What it ends with, from what a plain run has left, by hand."""
    benchmark, model = toy_benchmark(), toy_model()
    strategy = make_strategy("covon", model, merge_by_inputs=True)
    first, second = list(benchmark.train_stream)[:2]
    strategy.train(first)
    slow = weights(model)
    whole = [next(iter(DataLoader(e.dataset.eval(), 10_000))) for e in (first, second)]
    by_hand = InputMoments()
    by_hand.add(model, [whole[0][:2]])
    plugin = next(p for p in strategy.plugins if isinstance(p, CoVONPlugin))
    for name, moment in by_hand.sums.items():
        torch.testing.assert_close(plugin.moments.sums[name], moment, rtol=1e-4, atol=1e-4)
    fast, consolidate = {}, strategy.optimizer.consolidate

    def watched(**given):
        fast.update(weights(model))
        consolidate(**given)

    strategy.optimizer.consolidate = watched
    strategy.train(second)
    merged = weights(model)
    model.load_state_dict(fast)
    want = by_hand.merged(model, slow, [whole[1][:2]])
    for name, p in model.named_parameters():
        torch.testing.assert_close(merged[name], want[p], rtol=1e-3, atol=1e-4)
        assert not torch.allclose(merged[name], fast[name], atol=1e-3)


def test_without_boundaries_there_is_no_data_to_pass():
    with pytest.raises(ValueError, match="merge_by_inputs needs the data of a task"):
        CoVONPlugin(merge_by_inputs=True, consolidate_every=5)
