"""Applying a rule to a model: what is written, and when nothing is."""

import copy

import pytest
import torch
from torch import nn
from toys import make_covon, same, train_step, weights

from covon_avalanche.merging import Average, MergeRule, RegMean, Task, merge_into


class Constant(MergeRule):
    """Sets the weight, and notes what it observes."""

    def __init__(self, value):
        self.value, self.observed = value, []

    def merge(self, task):
        return {"weight": torch.full_like(task.before["weight"], self.value)}

    def observe(self, task):
        self.observed.append(weights(task.model))


def optimizers(model):
    covon = make_covon(model.named_parameters())
    return covon, torch.optim.AdamW(model.parameters()), torch.optim.SGD(model.parameters(), 0.1)


@pytest.mark.parametrize("number", range(3))
def test_merged_weights_are_in_place_when_the_rule_observes(linear, batch, number):
    optimizer, rule = optimizers(linear)[number], Constant(0.25)
    if number == 0:
        train_step(optimizer, linear, batch)
    before = weights(linear)
    merge_into(linear, optimizer, rule, before)
    assert (linear.weight == 0.25).all()
    assert same(rule.observed[0], weights(linear))
    if number == 0:
        assert (optimizer.prior().mean["weight"] == 0.25).all()
    else:
        assert torch.equal(linear.bias, before["bias"])


@pytest.mark.parametrize("number", range(3))
def test_if_a_weight_is_not_finite_nothing_changes(linear, batch, number):
    optimizer, rule = optimizers(linear)[number], Constant(torch.nan)
    if number == 0:
        train_step(optimizer, linear, batch)
    before = weights(linear)
    with pytest.raises(FloatingPointError, match="merged weights of 'weight' are not finite"):
        merge_into(linear, optimizer, rule, before)
    assert same(weights(linear), before)
    assert rule.observed == []
    if number == 0:
        assert "hess" in optimizer.state[linear.weight]


def test_covon_keeps_the_precision_of_eq_8_and_eq_8_for_other_parameters(linear, batch):
    other = copy.deepcopy(linear)
    posteriors = []
    for model in (linear, other):
        optimizer = make_covon(model.named_parameters())
        train_step(optimizer, model, batch)
        if model is linear:
            merge_into(model, optimizer, Constant(0.25))
        else:
            optimizer.consolidate()
        posteriors.append(optimizer.posterior())
    ours, eq8 = posteriors
    assert (ours.mean["weight"] == 0.25).all()
    assert torch.equal(ours.mean["bias"], eq8.mean["bias"])
    assert same(ours.precision, eq8.precision)


def test_covon_may_own_only_a_part_of_the_model(batch):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))
    model[0].requires_grad_(False)
    optimizer = make_covon(model[1].named_parameters())
    for _ in range(2):
        train_step(optimizer, model, batch)
        merge_into(model, optimizer, RegMean(), batches=lambda: [batch])
    assert torch.equal(model[1].weight, optimizer.prior().mean["weight"])


def test_weights_before_the_task_have_the_models_shapes_and_new_entries_its_values():
    model = nn.Linear(2, 3)
    task = Task(model, {"weight": torch.zeros(2, 2)})
    assert torch.equal(task.before["weight"][:2], torch.zeros(2, 2))
    assert torch.equal(task.before["weight"][2], model.weight[2])
    assert torch.equal(task.before["bias"], model.bias)
    with pytest.raises(ValueError, match=r"'weight' cannot be merged: .* does not fit"):
        _ = Task(model, {"weight": torch.zeros(4, 2)}).before


def test_missing_arguments_are_named(linear):
    optimizer = torch.optim.AdamW(linear.parameters())
    with pytest.raises(ValueError, match="Average needs the weights before the task: pass before"):
        merge_into(linear, optimizer, Average())
    with pytest.raises(ValueError, match="needs the task's data: pass batches"):
        merge_into(linear, optimizer, RegMean(), weights(linear))


def test_a_plain_loop_learns_two_tasks_that_fine_tuning_cannot_keep():
    """Inputs of the tasks lie in different directions: a linear layer has room for both."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 60, 8, generator=generator)
    x[0, :, 4:], x[1, :, :4] = 0, 0
    y = (x.sum(2) > 0).long()
    errors = {}
    for rule in (RegMean(), None):
        torch.manual_seed(0)
        model = nn.Linear(8, 2, bias=False)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.1)
        outputs = []
        for data in zip(x, y, strict=True):
            before = weights(model)
            for _ in range(100):
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(data[0]), data[1]).backward()
                optimizer.step()
            if rule is not None:
                merge_into(model, optimizer, rule, before, lambda data=data: [data])
            outputs.append(model(x[0]).detach())
        errors[rule is None] = (outputs[1] - outputs[0]).norm().item()
    assert errors[False] < 0.01 * errors[True]
