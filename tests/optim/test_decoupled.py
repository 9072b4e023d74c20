"""The decoupled pull, against its closed forms."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from covon_avalanche.optim.decoupled import explicit_pull, implicit_pull

numbers = st.floats(-5, 5)


@given(numbers, numbers, st.floats(0, 0.999), st.floats(1, 1e9))
def test_small_rates_are_pulled_explicitly_and_large_ones_to_the_proximal_point(
    theta, anchor, small, large
):
    """Side by side: each entry by its own rate."""
    start = torch.tensor([theta, theta], dtype=torch.float64)
    rates = torch.tensor([small, large], dtype=torch.float64)
    explicit = explicit_pull(start, torch.full_like(start, anchor), rates)
    implicit = implicit_pull(start, torch.full_like(start, anchor), rates)
    expected = start.new_tensor([theta - small * (theta - anchor), theta])
    torch.testing.assert_close(explicit, expected)
    assert implicit[0].item() == theta
    # minimiser of 1/2 (x - theta)^2 + rate/2 (x - anchor)^2
    pulled = implicit[1].item()
    assert abs((pulled - theta) + large * (pulled - anchor)) <= 1e-9 * (1 + large) * 10
    assert min(theta, anchor) - 1e-9 <= pulled <= max(theta, anchor) + 1e-9
