"""Ada-Reg and EWC* against Algorithms 2 and 3 written out."""

import pytest
import torch
from torch import nn
from toys import ToDouble, columns, make_naive, make_strategy, toy_benchmark, toy_model, weights

from covon_avalanche import AdaRegPlugin
from covon_avalanche.plugins.task_loader import task_loader
from covon_avalanche.posterior.fisher import squared_batch_gradients, squared_example_gradients

LR, BETAS, EPS = 0.01, (0.9, 0.999), 1e-8


def batches(experience):
    x, y = columns(experience)
    return list(zip(x.double().split(16), y.split(16), strict=True))


def algorithm(strength, weight_decay, importance, *, restart_adam):
    """Algorithms 2 and 3 by hand: Adam with a decoupled pull, and a task's ``importance``."""
    model, ess = toy_model().double(), 48.0
    theta = dict(model.named_parameters())

    def filled(value):
        return {n: torch.full_like(p, value) for n, p in theta.items()}

    anchor, s = filled(0.0), filled(ess * weight_decay)
    g, h, step = filled(0.0), filled(0.0), 0
    for experience in toy_benchmark(3).train_stream:
        if restart_adam:
            g, h, step = filled(0.0), filled(0.0), 0
        for x, y in batches(experience) * 2:
            step += 1
            loss = nn.functional.cross_entropy(model(x), y)
            grads = torch.autograd.grad(loss, list(theta.values()))
            with torch.no_grad():
                for (n, p), grad in zip(theta.items(), grads, strict=True):
                    g[n] = BETAS[0] * g[n] + (1 - BETAS[0]) * grad
                    h[n] = BETAS[1] * h[n] + (1 - BETAS[1]) * grad**2
                    g_bar = g[n] / (1 - BETAS[0] ** step)
                    h_bar = h[n] / (1 - BETAS[1] ** step)
                    adam = g_bar / (h_bar.sqrt() + EPS)
                    rate = LR * s[n] / ess
                    explicit = p - LR * adam - rate * (p - anchor[n])
                    implicit = (p - LR * adam + rate * anchor[n]) / (1 + rate)
                    p.copy_(torch.where(rate < 1, explicit, implicit))
        h_bar = {n: v / (1 - BETAS[1] ** step) for n, v in h.items()}
        curvature = importance(model, experience, h_bar)
        s = {n: s[n] + strength * ess * curvature[n] for n in s}
        anchor = weights(model)
    return anchor, s


def assert_agrees(kind, expected, precision, **options):
    model = toy_model().double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=BETAS, eps=EPS, weight_decay=0)
    strategy = make_strategy(kind, model, optimizer=optimizer, plugins=[ToDouble()], **options)
    strategy.train(toy_benchmark(3).train_stream, shuffle=False)
    found = strategy.plugins[0].anchor.precision
    torch.testing.assert_close(weights(model), expected, rtol=1e-7, atol=1e-9)
    torch.testing.assert_close(found, precision, rtol=1e-7, atol=1e-12)


# With the larger strength many rates pass 1, and the implicit form takes over there.
@pytest.mark.parametrize(("strength", "weight_decay"), [(0.0, 0.3), (1e3, 0.0), (1e6, 0.3)])
def test_ada_reg_is_algorithm_2(strength, weight_decay):
    expected = algorithm(strength, weight_decay, lambda model, data, h: h, restart_adam=True)
    assert_agrees("ada-reg", *expected, strength=strength, weight_decay=weight_decay)


@pytest.mark.parametrize(("strength", "fisher"), [(1e2, "exact"), (1e6, "exact"), (1e2, "batch")])
def test_ewc_star_is_algorithm_3(strength, fisher, monkeypatch):
    function = squared_example_gradients if fisher == "exact" else squared_batch_gradients

    def importance(model, experience, h):
        return function(model, batches(experience))

    expected = algorithm(strength, 0.1, importance, restart_adam=False)
    monkeypatch.setattr(
        "covon_avalanche.plugins.ewc_star.task_loader",
        lambda *args: ((x.double(), y) for x, y in task_loader(*args)),
    )
    options = dict(strength=strength, weight_decay=0.1, fisher=fisher)
    assert_agrees("ewc-star", *expected, **options)


@pytest.mark.parametrize("family", [torch.optim.Adam, torch.optim.NAdam, torch.optim.RAdam])
def test_ada_reg_takes_the_whole_adam_family(family, model):
    strategy = make_naive(model, family(model.parameters(), lr=LR), AdaRegPlugin(strength=10.0))
    strategy.train(toy_benchmark(2).train_stream)
    precision = strategy.plugins[0].anchor.precision
    assert all((s >= 0).all() and s.sum() > 0 for s in precision.values())
