"""Diagnostics of CoVON, against closed forms."""

import pytest
import torch
from torch import nn
from toy_optimizers import make_covon, nll, step_on, train_step

from covon_avalanche import CoVON
from covon_avalanche.optim.diagnostics import diagnose, warn_unless_learned


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


@pytest.mark.parametrize("hess_approx", ["gradsq", "reparam"])
def test_numbers_by_hand(hess_approx):
    """All parameters are pooled."""
    options = dict(ess=10.0, weight_decay=0.5, hess_approx=hess_approx)
    optimizer = in_a_task([[1.0], [2.0, 3.0]], [[1.05], [3.0, 0.8]], **options)
    found = optimizer.diagnostics()
    assert set(found) == {"all", "0.0", "0.1"}
    assert (found["0.0"].hess_at_start, found["0.1"].hess_at_start) == (1, 0)
    assert found["all"].hess_at_start == pytest.approx(1 / 3)
    variance = 1 / 15.5 + 1 / 35.0 + 1 / 13.0
    assert found["all"].noise_to_weights == pytest.approx((variance / 14) ** 0.5)


def test_a_process_without_entries_warns_of_nothing(recwarn):
    warn_unless_learned(1000, diagnose([]))
    assert not recwarn.list


def test_inside_a_sample_they_are_those_outside(linear, batch):
    optimizer = make_covon(linear.named_parameters(), prior_mean="init")
    step_on(optimizer, nll(linear, batch))
    outside = optimizer.diagnostics()
    with optimizer.sampled_params():
        inside = optimizer.diagnostics()
    assert inside == outside


@pytest.mark.parametrize(("beta2", "warns"), [(0.99999, True), (0.9, False)])
def test_a_precision_that_is_not_learned_warns(linear, batch, beta2, warns, recwarn):
    optimizer = make_covon(linear.parameters(), betas=(0.9, beta2))
    for _ in range(100):
        train_step(optimizer, linear, batch)
    optimizer.consolidate()
    assert any("has not learned its precision" in str(w.message) for w in recwarn) == warns


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
