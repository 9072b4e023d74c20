"""Diagnostics of CoVON: by hand, and where their value is known."""

import math
import warnings

import pytest
import torch
from torch import nn
from toy_optimizers import make_covon, train_step


def test_the_noise_of_the_reparametrised_estimate_is_what_the_diagnostics_take():
    """Variance of ``g (theta - mean) / sigma²`` for a loss without curvature."""
    p = nn.Parameter(torch.zeros(20_000))
    optimizer = make_covon([p], ess=50.0, hess_init=0.4, weight_decay=0.2)
    with optimizer.sampled_params():
        (3 * p).sum().backward()
    precision = 50.0 * 0.4 + 50.0 * 0.2
    estimate = optimizer._record.statistic(p) * precision
    assert abs(estimate.mean()) < 5 * 3 * (precision / 20_000) ** 0.5
    assert estimate.var().item() == pytest.approx(9 * precision, rel=5 * (2 / 20_000) ** 0.5)


def test_numbers_by_hand():
    p = nn.Parameter(torch.tensor([1.0, 2.0]))
    optimizer = make_covon(
        [p], ess=10.0, hess_init=1.0, weight_decay=0.5, betas=(0.5, 0.8), debias=False
    )
    assert optimizer.diagnostics() == {}
    optimizer.state[p] = {
        "step": 1,
        "momentum": torch.tensor([3.0, 4.0]),
        "hess": torch.tensor([1.05, 3.0]),
    }
    p.grad = torch.tensor([1.0, 2.0])
    found = optimizer.diagnostics()
    assert found["all"] == found["0.0"]
    precision = (15.5, 35.0)
    noise = (1 * precision[0] + 4 * precision[1]) * 0.2 / 1.8 * (1 - 0.64)
    assert found["all"].hess_signal_to_noise == pytest.approx(
        ((0.25**2 + 2.2**2) / noise) ** 0.5, rel=1e-5
    )
    assert found["all"].hess_at_start == 0.5
    assert found["all"].prior_pull == pytest.approx((0.5**2 * 5 / 25) ** 0.5)
    assert found["all"].noise_to_weights == pytest.approx(
        ((1 / precision[0] + 1 / precision[1]) / 5) ** 0.5
    )
    p.grad = None
    assert math.isnan(optimizer.diagnostics()["all"].hess_signal_to_noise)


@pytest.mark.parametrize("hess_init", [0.01, 10.0])
def test_hess_of_pure_noise_has_a_signal_to_noise_of_one(hess_init):
    """Gradients of random sign, no curvature; hess_init far below the noise, and above."""
    generator = torch.Generator().manual_seed(0)
    p = nn.Parameter(torch.zeros(20_000))
    optimizer = make_covon([p], ess=1e3, lr=0.0, hess_init=hess_init, betas=(0.9, 0.99))
    optimizer.param_groups[0]["weight_decay"] = 100.0  # keeps the precision as it is
    for _ in range(100):
        with optimizer.sampled_params():
            optimizer.zero_grad()
            signs = torch.randint(2, p.shape, generator=generator) * 2.0 - 1
            (0.01 * signs * p).sum().backward()
        optimizer.step()
    assert optimizer.diagnostics()["all"].hess_signal_to_noise == pytest.approx(1, abs=0.05)


@pytest.mark.parametrize(("beta2", "warns"), [(0.99999, True), (0.9, False)])
def test_a_precision_that_is_not_learned_is_said(linear, batch, beta2, warns):
    optimizer = make_covon(linear.parameters(), betas=(0.9, beta2))
    for _ in range(100):
        train_step(optimizer, linear, batch)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer.consolidate()
    assert any("has not learned its precision" in str(w.message) for w in caught) == warns


def test_numbers_of_squared_gradients_and_of_several_parameters():
    """The noise is that of ``gradsq``, sqrt(2) times the mean; all parameters are pooled."""
    parameters = [nn.Parameter(torch.tensor([1.0])), nn.Parameter(torch.tensor([2.0, 3.0]))]
    optimizer = make_covon(
        parameters, hess_init=1.0, betas=(0.5, 0.8), hess_approx="gradsq", mc_samples=2
    )
    hessians = (torch.tensor([1.05]), torch.tensor([3.0, 0.8]))
    for p, hess in zip(parameters, hessians, strict=True):
        optimizer.state[p] = {"step": 1, "momentum": torch.ones_like(p), "hess": hess}
    found = optimizer.diagnostics()
    assert set(found) == {"all", "0.0", "0.1"}
    assert found["all"].hess_at_start == pytest.approx(1 / 3)
    assert (found["0.0"].hess_at_start, found["0.1"].hess_at_start) == (1, 0)
    h = torch.cat(hessians).double()
    noise = (2 * h.square() / 2).sum() * 0.2 / 1.8 * (1 - 0.64)
    signal = (h - 0.8).square().sum()
    assert found["all"].hess_signal_to_noise == pytest.approx((signal / noise).sqrt().item())
    pull = (0.01**2 * (1 + 4 + 9) / (3 * 2**2)) ** 0.5  # the average is debiased by 1 / 0.5
    assert found["all"].prior_pull == pytest.approx(pull)
