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
    nll,
    record_sample,
    regression_step,
    regression_task,
    train_step,
    unchanged,
)

from covon_avalanche.optim import BayesByBackprop


class AntitheticVCL(Antithetic, BayesByBackprop):
    """Exact expectations for quadratic losses."""


@pytest.mark.parametrize(("inner", "strength"), [("sgd", 0.0), ("adam", 0.0), ("sgd", 3.0)])
def test_steps_follow_autograd_and_torchs_own_optimizers_over_three_tasks(inner, strength):
    """One reparametrised sample plus KL / ess plus EVCL's Eq. 6, whose importances add up."""
    torch.manual_seed(0)
    model = nn.Linear(5, 3, bias=False).double()
    options = dict(std_init=0.2, weight_decay=0.1, inner=inner, importance_strength=strength)
    optimizer = BayesByBackprop(model.named_parameters(), ess=40.0, lr=0.05, **options)
    mean = model.weight.detach().clone().requires_grad_()
    log_std = torch.full_like(mean, 0.2).log().detach().requires_grad_()
    prior = Normal(torch.zeros_like(mean), torch.full_like(mean, 40.0 * 0.1) ** -0.5)
    importance = torch.zeros_like(mean)

    def objective():
        std = log_std.exp()
        loss = nn.functional.cross_entropy(x @ (mean + std * noise).T, y)
        distance = (mean - prior.mean).square() + (std - prior.stddev).square()
        penalty = 0.5 * strength * (importance * distance).sum()
        return loss + kl_divergence(Normal(mean, std), prior).sum() / 40 + penalty

    for _ in range(3):
        x, y = torch.randn(30, 5).double(), torch.randint(3, (30,))
        peer_class = torch.optim.SGD if inner == "sgd" else torch.optim.Adam
        peer = peer_class([mean, log_std], lr=0.05)
        for _ in range(15):
            noise = torch.randn_like(mean)
            with given_noise([noise]):
                train_step(optimizer, model, (x, y))
            peer.zero_grad()
            objective().backward()
            peer.step()
        torch.testing.assert_close(model.weight, mean, rtol=1e-8, atol=1e-10)
        found = optimizer.state[model.weight]["log_std"]
        torch.testing.assert_close(found, log_std.detach(), rtol=1e-8, atol=1e-10)
        new = torch.rand_like(mean)
        optimizer.consolidate(importance={model.weight: new})
        importance = importance + new
        prior = Normal(mean.detach().clone(), log_std.detach().exp())


def test_conjugate_regression_gives_the_exact_sequential_posterior():
    tasks = [regression_task(seed) for seed in range(3)]
    torch.manual_seed(0)
    model = nn.Linear(4, 1, bias=False).double()
    options = dict(std_init=0.1, inner="sgd", weight_decay=0.05, mc_samples=2)
    generator = torch.Generator().manual_seed(0)
    optimizer = AntitheticVCL(model.parameters(), ess=64, **options, generator=generator)
    for t, (mean, precision) in enumerate(exact_posterior(tasks, 0.05)):
        for lr, steps in ((0.11 / (t + 1), 170), (16.0, 50)):  # mean, then the flatter log std
            optimizer.param_groups[0]["lr"] = lr
            for _ in range(steps):
                before = model.weight.detach().clone()
                regression_step(optimizer, model, *tasks[t])
                if lr > 1:
                    model.weight.data.copy_(before)
        optimizer.consolidate()
        posterior = optimizer.posterior(model.named_parameters())
        torch.testing.assert_close(posterior.mean["weight"][0], mean, rtol=1e-6, atol=1e-8)
        torch.testing.assert_close(posterior.precision["weight"][0], precision, rtol=1e-6, atol=0)


def test_an_importance_that_does_not_fit_is_named_before_anything_changes(linear, batch):
    optimizer = make_vcl(linear.named_parameters())
    train_step(optimizer, linear, batch)
    for bad, what in ((torch.ones(7), "shape"), (torch.full((3,), math.nan), "finite")):
        says = f"importance given for .bias. .*{what}"
        with unchanged(optimizer), pytest.raises(ValueError, match=says):
            optimizer.consolidate(importance={linear.bias: bad})


@pytest.mark.parametrize("inner", ["adam", "sgd"])
def test_a_step_to_an_infinite_standard_deviation_is_refused(linear, batch, inner):
    """Its precision would be 0, with which no sample can be drawn."""
    optimizer = make_vcl(linear.parameters(), inner=inner)
    train_step(optimizer, linear, batch)
    record_sample(optimizer, nll(linear, batch))
    optimizer.param_groups[0]["lr"] = 1e20
    with unchanged(optimizer), pytest.raises(FloatingPointError, match="new log_std"):
        optimizer.step()
