"""Bad settings, and damaged checkpoints: named, and nothing is changed."""

import copy
import math
import re

import pytest
import torch
from toy_optimizers import (
    make_covon,
    make_vcl,
    nll,
    record_sample,
    train_step,
    train_task,
    unchanged,
)

from covon_avalanche.optim import BayesByBackprop, CoVON
from covon_avalanche.optim.checks import check_finite

BOTH = [("lr", -1.0), ("lr", math.nan), ("lr", 1e39), ("lr", "9"), ("ess", 0.0), ("ess", "9")]
BOTH += [("weight_decay", 1e308), ("mc_samples", 0), ("mc_samples", 1.5), ("mc_samples", "2")]
BOTH += [("betas", b) for b in (0.9, (0.9,), (0.9, 1.0), (-0.1, 0.5), (0.9, math.nan), ("0", 0))]
COVON = [("hess_init", 0.0), ("clip_radius", 0.0), ("clip_radius", math.nan), ("gamma", 0.0)]
COVON += [("gamma_precision", -1.0), ("batch_size", math.nan), ("betas", (None, 0.9))]
COVON += [(choice, "junk") for choice in ("hess_approx", "prior_mean", "bfloat16_prior")]
VCL = [("std_init", math.inf), ("inner", "rmsprop"), ("weight_decay", 0.0), ("eps", 0.0)]
VCL += [("betas", (0.9, None)), ("importance_strength", -1.0)]


@pytest.mark.parametrize(
    ("make", "option", "value"),
    [(make_covon, *s) for s in BOTH + COVON] + [(make_vcl, *s) for s in BOTH + VCL],
)
def test_bad_settings_are_named_when_made_and_written_later(make, linear, batch, option, value):
    """As schedulers write them: checked once a step, before anything is changed."""
    with pytest.raises(ValueError, match=rf"{option} must be .*got {re.escape(repr(value))}"):
        make(linear.parameters(), **{option: value})
    optimizer = make(linear.parameters())
    train_step(optimizer, linear, batch)
    record_sample(optimizer, nll(linear, batch))
    good = optimizer.param_groups[0][option]
    optimizer.param_groups[0][option] = value
    with unchanged(optimizer), pytest.raises(ValueError, match=f"{option} must be"):
        optimizer.step()
    optimizer.param_groups[0][option] = good
    optimizer.step()  # the sample is still there


def test_groups_must_agree(linear):
    for option, values in {"mc_samples": (1, 2), "hess_approx": ("gradsq", "reparam")}.items():
        parameters = zip(linear.parameters(), values, strict=True)
        with pytest.raises(ValueError, match=f"{option} must be the same in all groups"):
            make_covon([{"params": [p], option: value} for p, value in parameters])


@pytest.fixture
def trained(make, linear, batch):
    optimizer = make(linear.named_parameters())
    train_task(optimizer, linear, batch)
    train_step(optimizer, linear, batch)
    return optimizer


def refused(optimizer, damaged, says):
    groups = copy.deepcopy(optimizer.state_dict()["param_groups"])
    with unchanged(optimizer), pytest.raises(ValueError, match=says):
        optimizer.load_state_dict(damaged)
    assert optimizer.state_dict()["param_groups"] == groups


def test_damaged_state_is_named_and_nothing_is_changed(trained, linear, batch):
    spread = "hess" if isinstance(trained, CoVON) else "log_std"
    moment = "momentum" if isinstance(trained, CoVON) else "exp_avg_sq"
    for damage, says in (
        (lambda s: s.pop(spread), f"state of 'bias' has no {spread}"),
        (lambda s: s.pop(moment), f"state of 'bias' has no {moment}"),
        (lambda s: s.pop("prior_mean"), "state of 'bias' has no prior_mean"),
        (lambda s: s.update({spread: torch.zeros(4)}), r"of 'bias' must be .*\(3,\), got \(4"),
        (lambda s: s.update({moment: 0.5}), rf"{moment} of 'bias' must be a tensor.*got float"),
        (lambda s: s[spread].__setitem__(1, math.nan), f"{spread} of 'bias' is not finite"),
        (lambda s: s["prior_precision"].zero_(), "prior_precision of 'bias' must be > 0"),
        (lambda s: s.update(step=-1), "step of 'bias' must be an integer >= 0"),
    ):
        damaged = copy.deepcopy(trained.state_dict())
        damage(damaged["state"][1])
        refused(trained, damaged, says)
    train_step(trained, linear, batch)  # training continues


def test_the_state_of_another_optimizer_is_refused(trained, linear):
    sibling = BayesByBackprop if isinstance(trained, CoVON) else CoVON
    for other in (torch.optim.AdamW(linear.parameters()), sibling(linear.parameters(), ess=10)):
        refused(trained, other.state_dict(), "another optimizer's state")


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("ess", math.nan, "ess must be"),
        ("mc_samples", 0, "mc_samples must be"),
        ("betas", (0.9, 2.0), "betas must be"),
        ("noise_draws", "x", "noise_draws must be"),
        ("noise_seed", -1, "noise_seed must be"),
        ("params", [0], "doesn't match the size"),
    ],
)
def test_damaged_groups_are_named_and_nothing_is_changed(trained, key, value, says):
    damaged = copy.deepcopy(trained.state_dict())
    damaged["param_groups"][0][key] = value
    refused(trained, damaged, says)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_entry_that_is_not_finite_is_found_and_large_ones_are_not(dtype):
    """The sum of the large ones overflows."""
    large = torch.full((100, 70), torch.finfo(dtype).max, dtype=dtype)
    check_finite([("a", "gradient", large), ("b", "gradient", large[:0])], step=1)
    for value in (math.nan, math.inf, -math.inf):
        bad = large.clone()
        bad[71, 3] = value
        with pytest.raises(FloatingPointError, match=r"new mean of 'b' is not finite in step 5"):
            check_finite([("a", "new mean", large), ("b", "new mean", bad)], step=5)
