"""The growing window of the Hessian average: against its closed form, and in a step."""

import math

import pytest
import torch
from torch import nn
from toys import make_covon, make_vcl

from covon_avalanche.optim.hessian_average import beta2_at, what_is_left
from covon_avalanche.optim.kernels.formulas import covon_hess

ALL = pytest.mark.parametrize("implementation", ["eager", "foreach", "compiled"])


@pytest.mark.parametrize("steps", [0, 1, 7, 1000])
def test_a_number_is_an_exponential_average(steps):
    start, squares = what_is_left(0.99, steps)
    assert start == pytest.approx(0.99**steps)
    assert squares == pytest.approx(0.01 / 1.99 * (1 - 0.99 ** (2 * steps)))


@pytest.mark.parametrize("steps", [1, 7, 1000, 20_000])
def test_none_is_a_polynomial_average(steps):
    """1 - 10 / (500 + t): products of it telescope."""
    logs = [math.log(490 + i) - math.log(490 + steps + i) for i in range(10)]
    assert what_is_left(None, steps)[0] == pytest.approx(math.exp(sum(logs)), rel=1e-9)
    assert 1 / (1 - beta2_at(None, steps)) == pytest.approx(50 + steps / 10)


def test_of_a_long_task_it_averages_over_the_last_part():
    """Weights in proportion to (s / t)^9 have the squared sum 100 / 19 / t for large t."""
    assert what_is_left(None, 500_000)[1] == pytest.approx(100 / 19 / 500_000, rel=0.01)


@ALL
def test_a_step_takes_the_window_of_its_task(implementation):
    p = nn.Parameter(torch.zeros(3))
    optimizer = make_covon(
        [p], hess_approx="gradsq", batch_size=4, betas=(0.9, None), implementation=implementation
    )
    for _ in range(2):
        hess = torch.full((3,), 0.5)
        for step in range(5):
            prior = optimizer._prior_precision(
                optimizer.state.get(p, {}), optimizer.param_groups[0]
            )
            with optimizer.sampled_params():
                optimizer.zero_grad()
                (torch.tensor([1.0, 2.0, 3.0 + step]) * p).sum().backward()
            optimizer.step()
            estimate = 4 * torch.tensor([1.0, 2.0, 3.0 + step]).square()
            hess = covon_hess(hess, estimate, prior / 100.0, 1 - 1 / (50 + step / 10))
            torch.testing.assert_close(optimizer.state[p]["hess"], hess)
        optimizer.consolidate()


def test_none_is_for_the_hessian_alone(linear):
    with pytest.raises(ValueError, match=r"\[0, 1\), or None as the second, got \(0.9, 1.5\)"):
        make_covon(linear.parameters(), betas=(0.9, 1.5))
    with pytest.raises(ValueError, match=r"two numbers in \[0, 1\), got \(0.9, None\)"):
        make_vcl(linear.parameters(), betas=(0.9, None))


def test_auto_keeps_twice_the_precision_of_estimates_that_are_never_negative():
    for options, factor in (
        (dict(hess_approx="gradsq", batch_size=4), 2.0),
        (dict(hess_approx="gradsq", batch_size=4, gamma_precision=None), 0.7),
        (dict(hess_approx="gradsq", batch_size=4, consolidation="ema"), 0.7),
        (dict(hess_approx="gradsq", batch_size=4, gamma_precision=3.0), 3.0),
        (dict(hess_approx="reparam"), 0.7),
    ):
        p = nn.Parameter(torch.zeros(3))
        optimizer = make_covon([p], **options)
        for _ in range(3):
            with optimizer.sampled_params():
                optimizer.zero_grad()
                (2.0 * p).sum().backward()
            optimizer.step()
        hess = optimizer.state[p]["hess"].clone()
        optimizer.consolidate()
        expected = 100.0 * 0.01 + factor * 100.0 * hess
        torch.testing.assert_close(optimizer.state[p]["prior_precision"], expected)
