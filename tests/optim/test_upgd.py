"""UPGD against its formulas in float64 numpy; ``test_torch_contract`` copies and resumes it."""

import math
import re

import numpy as np
import pytest
import torch
from torch import nn
from toy_optimizers import contents, same, unchanged

from covon_avalanche.optim import UPGD
from covon_avalanche.optim.samples import fill_normal_, noise_key


def reference_step(params, grads, averages, noise, step, *, lr, weight_decay, beta, sigma):
    """The paper's update of a list of arrays; ``averages`` are changed in place."""
    utilities = []
    for p, g, u in zip(params, grads, averages, strict=True):
        u[...] = beta * u + (1 - beta) * -g * p
        utilities.append(u / (1 - beta**step))
    largest = max(u.max() for u in utilities)
    return [
        p * (1 - lr * weight_decay) - lr * (g + sigma * xi) * (1 - 1 / (1 + np.exp(-u / largest)))
        for p, g, u, xi in zip(params, grads, utilities, noise, strict=True)
    ]


def make(parameters, seed=0, **changes):
    options = dict(lr=0.1, weight_decay=0.05, beta_utility=0.9, sigma=0.3)
    generator = torch.Generator().manual_seed(seed)
    return UPGD(parameters, **{**options, "generator": generator, **changes})


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()


def train(optimizer, model, steps, start=0):
    """Each step on a batch of its own."""
    for step in range(start, start + steps):
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(8, 4, generator=generator, dtype=torch.float64)
        y = torch.randint(3, (8,), generator=generator)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()


@pytest.mark.parametrize("beta", [0.0, 0.9])
def test_steps_follow_the_formulas(beta):
    """Twelve steps, over which the learning rate changes as a scheduler changes it."""
    model = network()
    optimizer = make(model.parameters(), beta_utility=beta)
    group = optimizer.param_groups[0]
    params = [p.detach().numpy().copy() for p in model.parameters()]
    averages = [np.zeros_like(p) for p in params]
    for step in range(1, 13):
        group["lr"] = 0.3 / step
        train(optimizer, model, 1, start=step)
        key = noise_key(group["noise_seed"], step)
        empty = enumerate(map(torch.empty_like, model.parameters()))
        noise = [fill_normal_(out, key, i).numpy() for i, out in empty]
        assert all(0.1 < np.abs(xi).max() < 5 for xi in noise)
        grads = [p.grad.numpy() for p in model.parameters()]
        options = dict(lr=0.3 / step, weight_decay=0.05, beta=beta, sigma=0.3)
        params = reference_step(params, grads, averages, noise, step, **options)
        for p, expected in zip(model.parameters(), params, strict=True):
            torch.testing.assert_close(p.detach(), torch.from_numpy(expected), rtol=1e-12, atol=0)
    for p, average in zip(model.parameters(), averages, strict=True):
        torch.testing.assert_close(optimizer.state[p]["utility"], torch.from_numpy(average))


def test_with_betas_gradients_become_adams_directions():
    """Two steps of AdaUPGD by hand, as the authors' code computes them, without their factor 2."""
    p = nn.Parameter(torch.tensor([2.0, -1.0], dtype=torch.float64))
    betas, eps = (0.8, 0.95), 0.01
    optimizer = make([p], lr=0.1, sigma=0.0, betas=betas, eps=eps)
    value, m, v, u = p.detach().numpy().copy(), 0, 0, 0
    for step, g in enumerate(([-3.0, 0.5], [1.0, -2.0]), 1):
        g = np.array(g)
        p.grad = torch.from_numpy(g.copy())
        optimizer.step()
        u = 0.9 * u + 0.1 * -g * value
        m, v = 0.8 * m + 0.2 * g, 0.95 * v + 0.05 * g**2
        scaled = 1 / (1 + np.exp(-u / u.max()))
        direction = m / (1 - 0.8**step) / (np.sqrt(v / (1 - 0.95**step)) + eps)
        value = value * (1 - 0.1 * 0.05) - 0.1 * direction * (1 - scaled)
        torch.testing.assert_close(p.detach(), torch.from_numpy(value))


def test_the_largest_utility_is_that_of_all_groups_and_each_has_its_own_settings():
    small, large, idle = (nn.Parameter(torch.tensor([v], dtype=torch.float64)) for v in (1, -2, 9))
    groups = [{"params": [small], "lr": 0.1}, {"params": [large, idle], "lr": 0.2}]
    optimizer = make(groups, sigma=0.0, weight_decay=0.5)
    small.grad, large.grad = torch.full_like(small, -3), torch.full_like(large, 4)
    optimizer.step()
    # Utilities 3 and 8; the averages are 0.3 and 0.8, which the correction divides by 0.1.
    expected = 1 * (1 - 0.1 * 0.5) + 0.1 * 3 / (1 + math.exp(3 / 8))
    assert small.item() == pytest.approx(expected, rel=1e-12)
    assert large.item() == pytest.approx(-2 * 0.9 - 0.2 * 4 / (1 + math.e), rel=1e-12)
    assert (idle.item(), idle in optimizer.state) == (9, False)


@pytest.mark.parametrize("grad", [0.0, 3.0])
def test_without_a_positive_utility_weights_change_as_in_gradient_descent(grad):
    p = nn.Parameter(torch.tensor([2.0]))
    optimizer = make([p], lr=0.5, weight_decay=0.0, sigma=0.0)
    p.grad = torch.full_like(p, grad)
    optimizer.step()
    assert p.item() == pytest.approx(2 - 0.5 * grad)


def test_the_seed_comes_from_the_generator_or_torchs_global_one():
    found = []
    for generator in (torch.Generator().manual_seed(3), None, None):
        model = network()
        torch.manual_seed(3)
        optimizer = make(model.parameters(), generator=generator)
        train(optimizer, model, 2)
        found.append(contents(optimizer))
    assert same(found[0], found[1])
    assert same(found[1], found[2])


@pytest.mark.parametrize(
    ("option", "value"),
    [("lr", -1.0), ("weight_decay", -0.1), ("sigma", math.inf), ("beta_utility", 1.0), ("lr", "1")]
    + [("betas", (0.9, 1.0)), ("eps", 0.0), ("beta_utility", "0.9")],
)
def test_bad_settings_are_named(option, value):
    settings, error = {option: value}, rf"{option} must be .*, got {re.escape(repr(value))}"
    with pytest.raises(ValueError, match=error):
        make(network().parameters(), **settings)
    optimizer = make(network().parameters())
    with pytest.raises(ValueError, match=error):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))], **settings})
    assert len(optimizer.param_groups) == 1


def test_sparse_gradients_are_refused_before_anything_changes():
    table, other = nn.Embedding(4, 2, sparse=True), nn.Parameter(torch.ones(2))
    optimizer = make([other, *table.parameters()])
    (table(torch.tensor([1])) * other).sum().backward()
    with unchanged(optimizer), pytest.raises(ValueError, match="sparse gradients"):
        optimizer.step()


def test_a_missing_generator_is_an_error_before_anything_changes(monkeypatch):
    """Processes would draw different noise."""
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    w = nn.Parameter(torch.ones(2))
    optimizer = make([w], generator=None)
    w.sum().backward()
    with unchanged(optimizer), pytest.raises(ValueError, match="need identical noise"):
        optimizer.step()
