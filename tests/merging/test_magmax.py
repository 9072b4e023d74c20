"""MagMax against direct computations on tasks' weights."""

import pytest
import torch
from torch import nn
from toy_optimizers import weights
from toys import toy_model

from covon_avalanche.merging import MagMax, merge_into


def run_tasks(model, rule, changes):
    """Tasks that each add a change to the weights they start from.

    :return: the weights before each task's training, after it, and merged; each a list by task.
    """
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


@pytest.mark.parametrize("start", ["pretrained", "last"])
def test_training_starts_where_it_should_and_the_largest_changes_are_merged(start, changes):
    model = toy_model()
    first = flat(weights(model))
    before, after, merged = run_tasks(model, MagMax(0.5, start), changes)
    for t in range(3):
        expected = first if start == "pretrained" or t == 0 else flat(after[t - 1])
        assert torch.equal(flat(before[t]), expected)
        vectors = torch.stack([flat(state) - first for state in after[: t + 1]])
        largest = vectors.gather(0, vectors.abs().argmax(0, keepdim=True))[0]
        torch.testing.assert_close(flat(merged[t]), first + 0.5 * largest)


def test_magmax_takes_the_later_of_two_changes_of_equal_magnitude():
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    changes = [{"weight": torch.tensor([[2.0]])}, {"weight": torch.tensor([[-2.0]])}]
    run_tasks(model, MagMax(1.0, "pretrained"), changes)
    assert model.weight.item() == -2.0


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
