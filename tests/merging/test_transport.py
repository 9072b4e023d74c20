"""Transport plans against the conditions of their optimum, and an assignment."""

import pytest
import torch
from scipy.optimize import linear_sum_assignment

from covon_avalanche.merging.transport import transport_plan


@pytest.mark.parametrize("shape", [(6, 6), (4, 7)])
def test_the_transport_plan_is_that_of_the_regularised_problem(shape):
    """Its minimum is the one plan with these marginals for which log S + cost / reg is a sum of a
    row's and a column's value."""
    torch.manual_seed(0)
    cost = torch.rand(shape, dtype=torch.float64)
    plan = transport_plan(cost, 0.2)
    for dim, size in enumerate(shape):
        torch.testing.assert_close(plan.sum(1 - dim), torch.full_like(plan.sum(1 - dim), 1 / size))
    both = plan.log() + cost / 0.2
    both = both - both.mean(0) - both.mean(1, keepdim=True) + both.mean()
    torch.testing.assert_close(both, torch.zeros_like(both))


def test_transport_with_little_regularisation_is_an_assignment():
    torch.manual_seed(0)
    cost = 20 * torch.rand(5, 5)
    rows, columns = linear_sum_assignment(cost)
    expected = torch.zeros(5, 5)
    expected[rows, columns] = 1 / 5
    torch.testing.assert_close(transport_plan(cost, 1e-2), expected, atol=1e-5, rtol=0)
    torch.testing.assert_close(transport_plan(cost, 1e6), torch.full((5, 5), 1 / 25))
    with pytest.raises(ValueError, match="reg must be > 0"):
        transport_plan(cost, 0.0)


def test_costs_that_are_not_numbers_end_the_iterations():
    assert transport_plan(torch.full((2, 2), torch.nan), 0.1).isnan().all()
