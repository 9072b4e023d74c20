"""Bayes by Backprop against autograd, torch.optim.Adam and the exact posterior."""

import math

import pytest
import torch
from torch import nn
from torch.distributions import Normal, kl_divergence
from toy_optimizers import (
    Antithetic,
    exact_posterior,
    given_noise,
    make_vcl,
    regression_step,
    regression_task,
    same,
    train_step,
)

from covon_avalanche.optim import BayesByBackprop
from covon_avalanche.posterior.gaussian import kl


class AntitheticVCL(Antithetic, BayesByBackprop):
    """Exact expectations for quadratic losses."""


def objective_by_autograd(mean, log_std, noise, prior, ess, x, y):
    """E_q[loss] by one reparametrised sample, plus KL / ess from torch.distributions."""
    weight = mean + log_std.exp() * noise
    loss = nn.functional.cross_entropy(x @ weight.T, y)
    return loss + kl_divergence(Normal(mean, log_std.exp()), prior).sum() / ess


@pytest.mark.parametrize("inner", ["sgd", "adam"])
def test_steps_follow_autograd_and_torchs_own_optimizers_over_two_tasks(inner):
    torch.manual_seed(0)
    model = nn.Linear(5, 3, bias=False).double()
    optimizer = BayesByBackprop(
        model.named_parameters(),
        ess=40.0,
        lr=0.05,
        std_init=0.2,
        weight_decay=0.1,
        inner=inner,
    )
    mean = model.weight.detach().clone().requires_grad_()
    log_std = torch.full_like(mean, 0.2).log().detach().requires_grad_()
    prior = Normal(torch.zeros_like(mean), (40.0 * 0.1) ** -0.5)
    for task in range(2):
        x, y = torch.randn(30, 5).double(), torch.randint(3, (30,))
        peer_class = torch.optim.SGD if inner == "sgd" else torch.optim.Adam
        peer = peer_class([mean, log_std], lr=0.05)
        for _ in range(15):
            noise = torch.randn_like(mean)
            with given_noise([noise]), optimizer.sampled_params():
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            peer.zero_grad()
            objective_by_autograd(mean, log_std, noise, prior, 40.0, x, y).backward()
            peer.step()
        torch.testing.assert_close(model.weight, mean, rtol=1e-8, atol=1e-10)
        torch.testing.assert_close(
            optimizer.state[model.weight]["log_std"], log_std.detach(), rtol=1e-8, atol=1e-10
        )
        optimizer.consolidate()
        prior = Normal(mean.detach().clone(), log_std.detach().exp())
        assert task < 2


def test_conjugate_regression_gives_the_exact_sequential_posterior():
    tasks = [regression_task(seed) for seed in range(3)]
    torch.manual_seed(0)
    model = nn.Linear(4, 1, bias=False).double()
    optimizer = AntitheticVCL(
        model.parameters(),
        ess=64,
        lr=0.05,
        std_init=0.1,
        inner="sgd",
        weight_decay=0.05,
        mc_samples=2,
        generator=torch.Generator().manual_seed(0),
    )
    for task, (mean, precision) in zip(tasks, exact_posterior(tasks, 0.05), strict=True):
        for lr, steps in ((0.03, 600), (5.0, 120)):  # mean, then the flatter log std
            optimizer.param_groups[0]["lr"] = lr
            for _ in range(steps):
                regression_step_scaled(optimizer, model, task, freeze_mean=lr > 1)
        optimizer.consolidate()
        posterior = optimizer.posterior(model.named_parameters())
        torch.testing.assert_close(posterior.mean["weight"][0], mean, rtol=1e-6, atol=1e-8)
        torch.testing.assert_close(posterior.precision["weight"][0], precision, rtol=1e-6, atol=0)


def regression_step_scaled(optimizer, model, task, *, freeze_mean):
    """A step; with ``freeze_mean`` the mean is put back, so that lr can suit the spread."""
    before = model.weight.detach().clone()
    regression_step(optimizer, model, *task)
    if freeze_mean:
        model.weight.data.copy_(before)


def test_the_posterior_is_the_prior_of_the_next_task(linear, batch):
    optimizer = BayesByBackprop(linear.named_parameters(), ess=50)
    for _ in range(5):
        train_step(optimizer, linear, batch)
    before = optimizer.posterior()
    optimizer.consolidate()
    after = optimizer.posterior()
    assert kl(before, after).item() == pytest.approx(0.0, abs=1e-5)
    assert set(optimizer.state[linear.weight]) == {"log_std", "prior_mean", "prior_precision"}


def test_importance_pulls_mean_and_spread_toward_the_prior(linear, batch):
    """EVCL's Eq. 6 against autograd; importances of tasks add up."""
    options = dict(ess=40.0, lr=0.05, std_init=0.2, inner="sgd", importance_strength=3.0)
    optimizer = BayesByBackprop(linear.named_parameters(), **options)
    for _ in range(2):
        train_step(optimizer, linear, batch)
        optimizer.consolidate(importance={linear.weight: torch.full((3, 4), 0.5)})
    state, w = optimizer.state[linear.weight], linear.weight
    torch.testing.assert_close(state["importance"], torch.ones(3, 4))
    assert "importance" not in optimizer.state[linear.bias]
    with torch.no_grad():
        w.add_(0.1)
    state["log_std"] = state["log_std"] + 0.3
    mean = w.detach().clone().requires_grad_()
    log_std = state["log_std"].clone().requires_grad_()
    noise = torch.randn(3, 4)
    with given_noise([noise]), optimizer.sampled_params():
        optimizer.zero_grad()
        (w.square().sum() + 0 * linear.bias.sum()).backward()
    optimizer.step()
    std, prior_std = log_std.exp(), state["prior_precision"].rsqrt()
    prior = Normal(state["prior_mean"], prior_std)
    penalty = 0.5 * 3.0 * ((mean - state["prior_mean"]).square() + (std - prior_std).square()).sum()
    loss = (mean + std * noise).square().sum() + kl_divergence(Normal(mean, std), prior).sum() / 40
    (loss + penalty).backward()
    torch.testing.assert_close(w.detach(), mean.detach() - 0.05 * mean.grad)
    new = optimizer.state[w]["log_std"]
    torch.testing.assert_close(new, log_std.detach() - 0.05 * log_std.grad, rtol=1e-4, atol=1e-5)


def test_an_importance_that_does_not_fit_is_named_before_anything_changes(linear, batch):
    optimizer = make_vcl(linear.named_parameters())
    train_step(optimizer, linear, batch)
    before = optimizer.posterior()
    for bad, what in ((torch.ones(7), "shape"), (torch.full((3,), math.nan), "finite")):
        with pytest.raises(ValueError, match=f"importance given for .bias. .*{what}"):
            optimizer.consolidate(importance={linear.bias: bad})
    assert "step" in optimizer.state[linear.weight]
    assert same(before.mean, optimizer.posterior().mean)
