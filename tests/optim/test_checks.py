"""Checks of arguments: rules and errors."""

import math

import pytest

from covon_avalanche.optim import checks


@pytest.mark.parametrize(
    ("value", "zero", "good"),
    [
        (1.0, False, True),
        (3.4e38, False, True),
        (3.5e38, False, False),
        (0, False, False),
        (0, True, True),
        (-1e-9, True, False),
        (math.nan, True, False),
        (math.inf, False, False),
    ],
)
def test_positive_and_within_float32(value, zero, good):
    if good:
        checks.check_positive("x", value, zero=zero)
        return
    with pytest.raises(ValueError, match=rf"x must be (at most|{'>=' if zero else '>'} 0) .*got"):
        checks.check_positive("x", value, zero=zero)


def test_averaging_coefficients():
    checks.check_betas([0.0, 0.999])
    checks.check_betas((0.9, None), second_may_be_none=True)
    for bad in ((0.9, 1.0), (0.9,), (None, 0.9), 0.9, (0.9, math.nan), (-0.1, 0.5), ("0", 0)):
        for none in (False, True):
            with pytest.raises(ValueError, match="betas must be two numbers"):
                checks.check_betas(bad, second_may_be_none=none)
    with pytest.raises(ValueError, match="betas must be two numbers"):
        checks.check_betas((0.9, None))
