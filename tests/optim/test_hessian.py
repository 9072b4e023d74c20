"""The average of Hessian estimates against closed forms; ``test_covon`` steps with it."""

import math

import pytest

from covon_avalanche.optim.hessian import beta2_at, ema_weights


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
