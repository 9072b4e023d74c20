"""Estimates of the Hessian and their average, against closed forms."""

import itertools
import math

import pytest
import torch
from torch import nn
from toy_optimizers import make_covon

from covon_avalanche.optim.hessian import beta2_at, ema_weights


def test_gradsq_expects_what_its_docstring_says():
    """Over all mini-batches of two out of six, with replacement."""
    generator = torch.Generator().manual_seed(3)
    x, y = torch.randn(6, 3, generator=generator), torch.randn(6, generator=generator)
    theta = torch.tensor([0.3, -0.2, 0.5])
    single = (x @ theta - y)[:, None] * x  # gradient of half the squared error
    pairs = itertools.product(range(6), repeat=2)
    estimates = [2 * single[list(pair)].mean(0).square() for pair in pairs]
    mean, square = single.mean(0), single.square().mean(0)
    torch.testing.assert_close(torch.stack(estimates).mean(0), mean.square() + square)


@pytest.mark.parametrize("steps", [0, 1, 7, 1000])
def test_a_number_is_an_exponential_average(steps):
    start, squares = ema_weights(0.99, steps)
    assert start == pytest.approx(0.99**steps)
    assert squares == pytest.approx(0.01 / 1.99 * (1 - 0.99 ** (2 * steps)))


@pytest.mark.parametrize("steps", [1, 7, 1000, 20_000])
def test_none_is_a_polynomial_average(steps):
    """1 - 10 / (500 + t): products of it telescope."""
    logs = [math.log(490 + i) - math.log(490 + steps + i) for i in range(10)]
    assert ema_weights(None, steps)[0] == pytest.approx(math.exp(sum(logs)), rel=1e-9)
    assert 1 / (1 - beta2_at(None, steps)) == pytest.approx(50 + steps / 10)


def test_of_a_long_task_it_averages_over_the_last_part():
    """Weights in proportion to (s / t)^9 have the squared sum 100 / 19 / t for large t."""
    assert ema_weights(None, 100_000)[1] == pytest.approx(100 / 19 / 100_000, rel=0.05)


@pytest.mark.parametrize("implementation", ["reference", "foreach", "compiled"])
def test_a_step_takes_the_window_of_its_task(implementation):
    p = nn.Parameter(torch.zeros(3))
    optimizer = make_covon(
        [p], hess_approx="gradsq", batch_size=4, betas=(0.9, None), implementation=implementation
    )
    for _ in range(2):
        hess, delta = torch.full((3,), 0.5), optimizer.prior().precision["0.0"] / 100
        for step in range(5):
            gradient = torch.tensor([1.0, 2.0, 3.0 + step])
            with optimizer.sampled_params():
                optimizer.zero_grad()
                (gradient * p).sum().backward()
            optimizer.step()
            change = (4 * gradient.square() - hess) / (50 + step / 10)
            hess = hess + change + 0.5 * change.square() / (hess + delta)
            torch.testing.assert_close(optimizer.state[p]["hess"], hess)
        optimizer.consolidate()
