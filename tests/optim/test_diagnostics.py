"""Diagnostics of CoVON, and the average of Hessian estimates, against closed forms."""

import math
import warnings

import pytest
import torch
from torch import nn
from toy_optimizers import make_covon, nll, step_on, train_step

from covon_avalanche import CoVON
from covon_avalanche.optim.hessian import beta2_at, ema_weights


def in_a_task(values, hessians, **changes):
    """An optimizer after a step, with these entries."""
    parameters = [nn.Parameter(torch.tensor(value)) for value in values]
    optimizer = make_covon(parameters, hess_init=1.0, betas=(0.5, 0.8), **changes)
    assert optimizer.diagnostics() == {}
    for p, hess in zip(parameters, hessians, strict=True):
        momentum = torch.full_like(p, 4.0, requires_grad=False)
        optimizer.state[p] = {"step": 1, "momentum": momentum, "hess": torch.tensor(hess)}
        p.grad = p.detach().clone()
    return optimizer


def test_numbers_by_hand():
    optimizer = in_a_task([[1.0, 2.0]], [[1.05, 3.0]], ess=10.0, weight_decay=0.5, debias=False)
    found = optimizer.diagnostics()["all"]
    precision = (15.5, 35.0)
    noise = (1 * precision[0] + 4 * precision[1]) * 0.2 / 1.8 * (1 - 0.64)
    assert found.hess_signal_to_noise == pytest.approx(math.hypot(0.25, 2.2) / noise**0.5)
    assert found.hess_at_start == 0.5
    assert found.prior_pull == pytest.approx(0.5 * math.hypot(1, 2) / math.hypot(4, 4))
    variance = 1 / precision[0] + 1 / precision[1]
    assert found.noise_to_weights == pytest.approx((variance / 5) ** 0.5)
    optimizer.zero_grad()
    assert math.isnan(optimizer.diagnostics()["all"].hess_signal_to_noise)


def test_numbers_of_squared_gradients_and_of_several_parameters():
    """The noise is that of ``gradsq``, sqrt(2) times the mean; all parameters are pooled."""
    hessians = [1.05], [3.0, 0.8]
    optimizer = in_a_task([[1.0], [2.0, 3.0]], hessians, hess_approx="gradsq", mc_samples=2)
    found = optimizer.diagnostics()
    assert set(found) == {"all", "0.0", "0.1"}
    assert found["all"].hess_at_start == pytest.approx(1 / 3)
    assert (found["0.0"].hess_at_start, found["0.1"].hess_at_start) == (1, 0)
    noise = sum(2 * h**2 / 2 for h in (1.05, 3.0, 0.8)) * 0.2 / 1.8 * (1 - 0.64)
    signal = math.hypot(0.25, 2.2, 0)
    assert found["all"].hess_signal_to_noise == pytest.approx(signal / noise**0.5)
    pull = 0.01 * math.hypot(1, 2, 3) / math.hypot(8, 8, 8)  # the average is debiased by 1 / 0.5
    assert found["all"].prior_pull == pytest.approx(pull)


def test_inside_a_sample_they_are_those_outside(linear, batch):
    optimizer = make_covon(linear.named_parameters(), prior_mean="init")
    step_on(optimizer, nll(linear, batch))
    outside = optimizer.diagnostics()
    with optimizer.sampled_params():
        inside = optimizer.diagnostics()
    assert inside == outside


@pytest.mark.parametrize("hess_init", [0.01, 10.0])
def test_hess_of_pure_noise_has_a_signal_to_noise_of_one(hess_init):
    """Gradients of random sign, no curvature; hess_init far below the noise, and above."""
    generator = torch.Generator().manual_seed(0)
    p = nn.Parameter(torch.zeros(20_000))
    optimizer = make_covon([p], ess=1e3, lr=0.0, hess_init=hess_init, betas=(0.9, 0.99))
    optimizer.param_groups[0]["weight_decay"] = 100.0  # keeps the precision as it is
    for _ in range(100):
        signs = torch.randint(2, p.shape, generator=generator) * 2.0 - 1
        step_on(optimizer, lambda: (0.01 * signs * p).sum())  # noqa: B023
    assert optimizer.diagnostics()["all"].hess_signal_to_noise == pytest.approx(1, abs=0.05)


@pytest.mark.parametrize(("beta2", "warns"), [(0.99999, True), (0.9, False)])
def test_a_precision_that_is_not_learned_warns(linear, batch, beta2, warns):
    optimizer = make_covon(linear.parameters(), betas=(0.9, beta2))
    for _ in range(100):
        train_step(optimizer, linear, batch)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer.consolidate()
    assert any("has not learned its precision" in str(w.message) for w in caught) == warns


@pytest.mark.parametrize("large", [False, True])
def test_noise_that_has_grown_far_beyond_the_weights_is_warned_of(large, batch, recwarn):
    model = nn.Linear(4, 3)
    optimizer = CoVON(model.named_parameters(), batch_size=8, prior_width=50.0)
    step_on(optimizer, nll(model, batch))
    for p in model.parameters():
        optimizer.state[p]["step"] = 100
        if large:  # the data have added nothing, for long
            optimizer.state[p]["hess"].zero_()
    optimizer.consolidate()
    says = [str(w.message) for w in recwarn if "the noise has grown to" in str(w.message)]
    assert len(says) == large


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
