"""EVCL against autograd and against VCL."""

import pytest
import torch
from torch import nn
from torch.distributions import Normal, kl_divergence
from toy_optimizers import given_noise
from toys import Watch, columns, same, toy_benchmark, train_vcl, weights

from covon_avalanche import EVCLPlugin, VCLPlugin
from covon_avalanche.optim import BayesByBackprop
from covon_avalanche.posterior.fisher import squared_example_gradients


def test_evcl_steps_follow_autograd():
    """KL and elastic penalty by torch.distributions and autograd, two tasks after the first."""
    torch.manual_seed(0)
    model = nn.Linear(5, 3, bias=False).double()
    options = dict(ess=40.0, lr=0.05, std_init=0.2, weight_decay=0.1, inner="sgd")
    optimizer = BayesByBackprop(model.parameters(), importance_strength=3.0, **options)
    mean = model.weight.detach().clone().requires_grad_()
    log_std = torch.full_like(mean, 0.2).log().detach().requires_grad_()
    prior = Normal(torch.zeros_like(mean), torch.full_like(mean, (40.0 * 0.1) ** -0.5))
    total = torch.zeros_like(mean)
    for _ in range(3):
        x, y = torch.randn(30, 5).double(), torch.randint(3, (30,))
        for _ in range(10):
            noise = torch.randn_like(mean)
            with given_noise([noise]), optimizer.sampled_params():
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            loss = nn.functional.cross_entropy(x @ (mean + log_std.exp() * noise).T, y)
            loss = loss + kl_divergence(Normal(mean, log_std.exp()), prior).sum() / 40
            apart = (mean - prior.loc).square() + (log_std.exp() - prior.scale).square()
            loss = loss + 1.5 * (total * apart).sum()
            gradients = torch.autograd.grad(loss, [mean, log_std])
            with torch.no_grad():
                for value, gradient in zip((mean, log_std), gradients, strict=True):
                    value -= 0.05 * gradient
        torch.testing.assert_close(model.weight, mean, rtol=1e-8, atol=1e-10)
        importance = torch.rand(3, 5).double()
        optimizer.consolidate(importance={model.weight: importance})
        total = total + importance
        prior = Normal(mean.detach().clone(), log_std.detach().exp())


def test_the_evcl_plugin_adds_up_exact_fishers_at_each_mean():
    stream, found = list(toy_benchmark().train_stream), []

    def fisher_by_itself(strategy):
        batch = columns(stream[strategy.clock.train_exp_counter])
        found.append(squared_example_gradients(strategy.model, [batch]))

    strategy = train_vcl(EVCLPlugin(strength=2.0), [Watch(after_training_exp=fisher_by_itself)])
    assert len(found) == 3
    for name, p in strategy.model.named_parameters():
        importance = strategy.optimizer.state[p]["importance"]
        torch.testing.assert_close(importance, sum(f[name] for f in found))


def test_evcl_without_strength_is_vcl():
    plugins = EVCLPlugin(strength=0.0), VCLPlugin(), EVCLPlugin(strength=5.0)
    none, vcl, five = (weights(train_vcl(plugin).model) for plugin in plugins)
    assert same(none, vcl)
    assert not same(none, five)


def test_a_bad_batch_size_of_the_fisher_pass_is_named_before_training():
    with pytest.raises(ValueError, match="fisher_mb_size must be an integer >= 1, got 0"):
        EVCLPlugin(fisher_mb_size=0)
