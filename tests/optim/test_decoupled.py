"""The decoupled pull, against its closed forms."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from covon_avalanche.optim.decoupled import explicit_pull, implicit_pull

numbers = st.floats(-5, 5)


def t(value):
    return torch.tensor([value], dtype=torch.float64)


@given(numbers, numbers, st.floats(0, 0.999))
def test_below_one_only_the_explicit_pull_acts(theta, anchor, rate):
    expected = theta - rate * (theta - anchor)
    torch.testing.assert_close(explicit_pull(t(theta), t(anchor), t(rate)), t(expected))
    assert implicit_pull(t(theta), t(anchor), t(rate)).item() == theta


@given(numbers, numbers, st.floats(1, 1e9))
def test_from_one_on_only_the_implicit_pull_acts_and_it_is_the_proximal_point(theta, anchor, rate):
    assert explicit_pull(t(theta), t(anchor), t(rate)).item() == theta
    pulled = implicit_pull(t(theta), t(anchor), t(rate)).item()
    # minimiser of 1/2 (x - theta)^2 + rate/2 (x - anchor)^2
    assert abs((pulled - theta) + rate * (pulled - anchor)) <= 1e-9 * (1 + rate) * 10
    assert min(theta, anchor) - 1e-9 <= pulled <= max(theta, anchor) + 1e-9


def test_entries_are_treated_one_by_one():
    theta, anchor = torch.ones(2), torch.zeros(2)
    rate = torch.tensor([0.5, 3.0])
    assert explicit_pull(theta, anchor, rate).tolist() == [0.5, 1.0]
    assert implicit_pull(theta, anchor, rate).tolist() == [1.0, 0.25]
