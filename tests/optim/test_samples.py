"""What samples leave behind for a step: with one, and with several."""

import pytest
import torch
from torch import nn

from covon_avalanche.optim.samples import SampleAccumulator


def recorded(mc_samples, squared, grads, thetas):
    p = nn.Parameter(torch.tensor([1.0, -2.0, 0.5]))
    record = SampleAccumulator(mc_samples, squared)
    for grad, theta in zip(grads, thetas, strict=True):
        assert not record.complete
        p.grad = grad.clone()
        record.add([(p, theta)])
    assert record.complete
    return p, record


@pytest.mark.parametrize("squared", [False, True])
@pytest.mark.parametrize("mc_samples", [1, 3])
def test_averages_of_gradients_and_statistics_at_the_scale_of_the_gradient(mc_samples, squared):
    grads, thetas = torch.randn(mc_samples, 3), torch.randn(mc_samples, 3)
    p, record = recorded(mc_samples, squared, grads, thetas)
    torch.testing.assert_close(p.grad, grads.mean(0))
    want = (grads.square() if squared else grads * (thetas - p.detach())).mean(0)
    torch.testing.assert_close(record.statistic(p), want)
    p.grad.mul_(0.1)  # as clipping does
    torch.testing.assert_close(record.statistic(p), want * (0.01 if squared else 0.1))
    p.grad = p.grad * 5  # as a new tensor, too
    torch.testing.assert_close(record.statistic(p), want * (0.25 if squared else 0.5))
    p.grad.zero_()
    assert not record.statistic(p).any()


@pytest.mark.parametrize("mc_samples", [1, 2])
def test_zero_gradients_are_no_division_by_zero(mc_samples):
    p, record = recorded(mc_samples, False, torch.zeros(mc_samples, 3), torch.ones(mc_samples, 3))
    assert not record.statistic(p).any()


def test_a_parameter_may_have_a_gradient_in_some_samples_only():
    """The average is over all of them."""
    p, q = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))
    record = SampleAccumulator(2)
    p.grad = torch.ones(2)
    record.add([(p, torch.ones(2)), (q, torch.ones(2))])
    q.grad = torch.tensor([2.0, 4.0])
    record.add([(p, torch.ones(2)), (q, torch.full((2,), 3.0))])
    assert p.grad.tolist() == [0.5, 0.5]
    assert q.grad.tolist() == [1, 2]
    assert record.statistic(q).tolist() == [3, 6]
    assert record.covers(p)
    assert not record.covers(nn.Parameter(torch.zeros(2)))


@pytest.mark.parametrize(("mc_samples", "kept"), [(1, 0), (2, 24)])
def test_who_holds_gradients(mc_samples, kept):
    p, record = recorded(mc_samples, True, torch.ones(mc_samples, 3), torch.ones(mc_samples, 3))
    assert record.still_in_grad()
    assert record.memory() == kept
    p.grad = None
    assert not record.still_in_grad()
