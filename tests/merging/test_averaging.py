"""Averages over tasks and MagMax: closed forms, growing classifiers, and CoVON."""

import pytest
import torch
from torch import nn
from toy_merging import end_task
from toy_optimizers import make_covon, train_step, weights
from toys import toy_model

from covon_avalanche import CoVON
from covon_avalanche.merging import EMA, Average, MagMax, merge_into
from covon_avalanche.posterior import merge


@pytest.mark.parametrize(
    ("rule", "shares"), [(Average(), [1 / 3] * 3), (EMA(0.3), [0.49, 0.21, 0.3])]
)
def test_three_tasks_have_the_closed_form(rule, shares):
    """The first task is kept as it is: initial weights are no task's. EMA is then CoMA."""
    torch.manual_seed(0)
    model = toy_model()
    tasks = [{k: torch.randn_like(p) for k, p in weights(model).items()} for _ in shares]
    for task in tasks:
        end_task(model, rule, task)
    for name, p in model.named_parameters():
        expected = sum(share * task[name] for share, task in zip(shares, tasks, strict=True))
        torch.testing.assert_close(p.detach(), expected)


@pytest.mark.parametrize(("rule", "second"), [(Average(), 1 / 2), (EMA(0.25), 0.25)])
def test_each_row_counts_the_tasks_that_have_trained_it(rule, second):
    """Two classes, then four; the last task trains neither class 0 nor the frozen bias."""
    model = nn.Linear(1, 2)
    end_task(model, rule, {"weight": torch.tensor([[1.0], [2.0]]), "bias": torch.ones(2)})
    model = nn.Linear(1, 4)
    nn.init.zeros_(model.bias)
    with torch.no_grad():
        model.weight[:2] = torch.tensor([[1.0], [2.0]])
    end_task(model, rule, {"weight": torch.tensor([[2.0], [3.0], [5.0], [6.0]])})
    merged = torch.tensor([[1 + second], [2 + second], [5.0], [6.0]])
    torch.testing.assert_close(model.weight.detach(), merged)
    model.bias.requires_grad_(False)
    bias = model.bias.clone()
    new = model.weight + torch.tensor([[0.0], [0.0], [1.0], [1.0]])
    end_task(model, rule, {"weight": new, "bias": bias + 1})
    merged += torch.tensor([[0.0], [0.0], [second], [second]])
    torch.testing.assert_close(model.weight.detach(), merged)
    assert torch.equal(model.bias, bias + 1)


def test_scalars_and_empty_parameters_are_averaged_too():
    model, rule = nn.Module(), Average()
    model.scale, model.empty = nn.Parameter(torch.zeros(())), nn.Parameter(torch.zeros(0, 3))
    for value in (1.0, 4.0):
        end_task(model, rule, {"scale": torch.tensor(value)})
    assert model.scale.item() == 2.5


def test_ema_with_covon_is_eq_8_without_curvature_in_the_mean(linear, batch):
    """Three tasks; the first is averaged with the prior, too."""
    optimizer, rule = make_covon(linear.named_parameters(), gamma=0.7), EMA(0.7)
    for _ in range(3):
        train_step(optimizer, linear, batch)
        train_step(optimizer, linear, batch)
        prior, fast = optimizer.prior(), optimizer.posterior()
        merge_into(linear, optimizer, rule)
        slow = optimizer.prior()
        torch.testing.assert_close(slow.precision, merge(prior, fast, 0.7).precision)
        for name, p in linear.named_parameters():
            torch.testing.assert_close(p.detach(), 0.3 * prior.mean[name] + 0.7 * fast.mean[name])
            assert torch.equal(slow.mean[name], p)


@pytest.mark.parametrize(("bfloat16_prior", "rtol"), [(False, 1e-5), (True, 8e-3)])
def test_the_average_with_covon_counts_the_tasks_that_train_a_head(batch, bfloat16_prior, rtol):
    torch.manual_seed(0)
    heads, rule = nn.ModuleList(nn.Linear(4, 3) for _ in range(3)), Average()
    optimizer = CoVON(heads.named_parameters(), lr=0.1, bfloat16_prior=bfloat16_prior)
    fast = [[] for _ in heads]
    for i in (0, 1, 2, 0):
        train_step(optimizer, heads[i], batch)
        fast[i].append(weights(heads[i]))
        merge_into(heads, optimizer, rule)
    for i, head in enumerate(heads):
        for name, p in head.named_parameters():
            mean = torch.stack([values[name] for values in fast[i]]).mean(0)
            torch.testing.assert_close(p.detach(), mean, rtol=rtol, atol=1e-6)
            assert (rule.tasks[f"{i}.{name}"] == len(fast[i])).all()


def run_tasks(model, rule, changes):
    """Tasks that each add a change; the weights before, after and merged, each a list by task."""
    optimizer, found = torch.optim.SGD(model.parameters(), lr=0.1), ([], [], [])
    for change in changes:
        rule.begin_task(model)
        found[0].append(weights(model))
        with torch.no_grad():
            for name, p in model.named_parameters():
                p += change[name]
        found[1].append(weights(model))
        merge_into(model, optimizer, rule)
        found[2].append(weights(model))
    return found


@pytest.fixture
def changes():
    torch.manual_seed(1)
    return [{k: torch.randn_like(p) for k, p in weights(toy_model()).items()} for _ in range(3)]


def flat(state):
    return torch.cat([value.flatten() for value in state.values()])


def test_training_continues_from_the_unmerged_weights_and_the_largest_changes_are_merged(changes):
    model = toy_model()
    first = flat(weights(model))
    before, after, merged = run_tasks(model, MagMax(0.5), changes)
    for t in range(3):
        assert torch.equal(flat(before[t]), flat(after[t - 1]) if t else first)
        vectors = torch.stack([flat(state) - first for state in after[: t + 1]])
        largest = vectors.gather(0, vectors.abs().argmax(0, keepdim=True))[0]
        torch.testing.assert_close(flat(merged[t]), first + 0.5 * largest)


def test_magmax_takes_the_later_of_two_changes_of_equal_magnitude():
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    changes = [{"weight": torch.tensor([[2.0]])}, {"weight": torch.tensor([[-4.0]])}]
    run_tasks(model, MagMax(1.0), changes)
    assert model.weight.item() == -2.0


def test_a_head_that_a_later_task_does_not_train_keeps_its_merged_weights_with_covon(batch):
    """The later task starts from the unmerged weights, which are merged again without a step."""
    heads, rule = nn.ModuleList([nn.Linear(4, 3), nn.Linear(4, 3)]), MagMax()
    optimizer, merged = make_covon(heads.named_parameters()), []
    for head in heads:
        rule.begin_task(heads)
        train_step(optimizer, head, batch)
        merge_into(heads, optimizer, rule)
        merged.append(heads[0].weight.detach().clone())
    assert torch.equal(*merged)


def test_new_outputs_start_at_their_initial_weights():
    """A classifier with two classes, then three; a frozen parameter is left alone."""
    rule = MagMax(0.5)
    small = nn.Linear(1, 2)
    nn.init.zeros_(small.weight)
    small.bias.requires_grad_(False)
    run_tasks(small, rule, [{"weight": torch.tensor([[4.0], [2.0]]), "bias": torch.zeros(2)}])
    grown = nn.Linear(1, 3)
    grown.bias.requires_grad_(False)
    with torch.no_grad():
        grown.weight.copy_(torch.tensor([[2.0], [1.0], [10.0]]))
    bias = grown.bias.clone()
    change = {"weight": torch.tensor([[-1.0], [1.0], [6.0]]), "bias": torch.zeros(3)}
    before, _, _ = run_tasks(grown, rule, [change])
    assert before[0]["weight"].flatten().tolist() == [4.0, 2.0, 10.0]
    assert grown.weight.flatten().tolist() == [2.0, 1.5, 13.0]
    assert torch.equal(grown.bias, bias)
