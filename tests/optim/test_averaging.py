"""Coefficients of the averages of gradient and Hessian, against closed forms."""

import math

import pytest

from covon_avalanche.optim.averaging import beta1_at, beta2_at


@pytest.mark.parametrize("steps", [1, 7, 1000, 20_000])
def test_growing_windows_are_polynomial_averages(steps):
    """1 - 10 / (500 + t): products of it telescope."""
    logs = [math.log(490 + i) - math.log(490 + steps + i) for i in range(10)]
    product = math.prod(beta2_at(None, step) for step in range(steps))
    assert product == pytest.approx(math.exp(sum(logs)), rel=1e-9)
    assert 1 / (1 - beta2_at(None, steps)) == pytest.approx(50 + steps / 10)
    assert 1 / (1 - beta1_at(1.0, steps)) == pytest.approx(1 + steps / 10)
    assert 1 / (1 - beta1_at(0.9, steps)) == pytest.approx(min(10, 1 + steps / 10))
    assert beta1_at(0.9, 0) == 0  # the average is the first gradient
