"""The pull toward the weights after the last task, against closed forms."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from covon_avalanche.optim.quadratic_anchor import (
    QuadraticAnchor,
    adam_second_moments,
    explicit_pull,
    implicit_pull,
)

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


def one_weight(value, grad):
    model = nn.Linear(1, 1, bias=False)
    model.weight.data.fill_(value)
    model.weight.grad = torch.full((1, 1), grad)
    return model


@pytest.mark.parametrize(("strength", "expected"), [(0.5, 3.0 - 0.5 * 2.0 - 0.1), (4.0, 0.0)])
def test_a_step_pulls_before_or_after_it(strength, expected):
    """lr = 0.1, importance 10, so the rate is the strength; the anchor is at 1, the weight at 3."""
    model = one_weight(1.0, 1.0)
    anchor = QuadraticAnchor(model.named_parameters(), ess=7.0, strength=strength)
    anchor.add({"weight": torch.full((1, 1), 10.0)})
    model.weight.data.fill_(3.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with anchor.pulling(optimizer):
        optimizer.step()
    if strength > 1:  # first the gradient step, then the proximal one
        expected = (2.9 + strength * 1.0) / (1 + strength)
    assert model.weight.item() == pytest.approx(expected)
    optimizer.step()  # outside nothing pulls
    assert model.weight.item() == pytest.approx(expected - 0.1)


def test_precisions_add_up_and_the_anchor_moves():
    model = one_weight(1.0, 1.0)
    anchor = QuadraticAnchor(model.named_parameters(), ess=2.0, strength=3.0)
    anchor.add({"weight": torch.full((1, 1), 5.0)})
    model.weight.data.fill_(4.0)
    anchor.add({"weight": torch.full((1, 1), 1.0)})
    later = QuadraticAnchor(model.named_parameters(), ess=2.0, gaussian=anchor.gaussian)
    assert later.gaussian.mean["weight"].item() == 4.0
    assert later.gaussian.precision["weight"].item() == 2.0 * 3.0 * (5.0 + 1.0)
    with pytest.raises(ValueError, match=r"importance given for 'weight' must have shape \(1, 1\)"):
        anchor.add({"weight": torch.ones(2)})
    with pytest.raises(ValueError, match="'weight' is not finite"):
        anchor.add({"weight": torch.full((1, 1), torch.nan)})


def test_the_second_moments_of_adam_are_unbiased():
    model = one_weight(1.0, 3.0)
    optimizer = torch.optim.AdamW(model.parameters())
    assert adam_second_moments(model.named_parameters(), optimizer) == {}
    for _ in range(3):
        optimizer.step()
    found = adam_second_moments(model.named_parameters(), optimizer)
    assert found["weight"].item() == pytest.approx(9.0)


def test_frozen_weights_are_left_alone():
    model = one_weight(1.0, 1.0).requires_grad_(False)
    anchor = QuadraticAnchor(model.named_parameters(), ess=1.0)
    anchor.add({})
    assert anchor.gaussian.mean == {}


def test_a_grown_parameter_keeps_its_anchor_and_a_smaller_one_is_an_error():
    small, large = nn.Linear(2, 1, bias=False), nn.Linear(2, 3, bias=False)
    anchor = QuadraticAnchor(small.named_parameters(), ess=5.0)
    anchor.add({"weight": torch.tensor([[1.0, 2.0]])})
    later = QuadraticAnchor(large.named_parameters(), ess=5.0, gaussian=anchor.gaussian)
    assert torch.equal(later.gaussian.mean["weight"][:1], small.weight.detach())
    expected = torch.tensor([[5.0, 10.0], [0.0, 0.0], [0.0, 0.0]])
    assert torch.equal(later.gaussian.precision["weight"], expected)
    with pytest.raises(ValueError, match=r"shape \(3, 2\) does not fit into .* \(1, 2\)"):
        QuadraticAnchor(small.named_parameters(), ess=5.0, gaussian=later.gaussian)
