"""CoVON's settings in natural units: relative to the weights, and steps as long as Adam's.

Algorithm 1 is as in ``fast_step``; these formulas choose its constants. Let ``r`` be the root
mean square of a parameter tensor at the start of a task.

- **Prior**: ``s0 = 1 / (prior_width r)²``, the same for all entries of a tensor.
- **Noise**: ``hess_init = (1 / (noise r)² - s0) / ess``, so that the first samples have the
  standard deviation ``noise r``.
- **Effective sample size**: the first step of the first task sets ``ess`` such that the squared
  gradients add ``data_precision`` times the initial precision, on average over all weights:
  ``ess = data_precision / mean(batch_size g² (noise r)²)``. Multiplying the loss by a constant
  then changes only the pull toward the prior, which is proportional to it. Later tasks have
  ``ess`` in proportion to their ``examples``.
- **Step**: line 9 becomes ``m <- m - lr * clip(u / rms, ±clip_radius)`` with the raw step
  ``u = (g + delta (m - m0)) / sqrt(h + delta)``, which is in proportion to the standard deviation
  of the posterior, and ``rms`` the root mean square of ``g_hat / sqrt(h + delta)`` over the tensor,
  a bias-corrected running average over the task. Where squared gradients dominate ``h``, it has
  the direction of Adam's step, but for the window of the momentum. So ``lr`` is a change of
  weights: at most ``lr * clip_radius``, and where gradients are mostly noise, in root mean square
  ``lr`` in the first step, decreasing to ``lr * sqrt((1 - beta1) / (1 + beta1))``, 0.23 ``lr`` by
  default, after 90 steps.
- **Momentum**: the window of line 7's average grows with the steps of a task
  (``averaging.beta1_at``), so it needs no bias correction.
- **Hessian**: squared gradients are averaged without line 8's last term, which keeps ``h`` positive
  where estimates may be negative.

The square root is not the paper's: a Newton step has ``h + delta`` itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from covon_avalanche.checks import check_positive
from covon_avalanche.float64 import exact_sum
from covon_avalanche.optim.sharding import local, sum_everywhere
from covon_avalanche.presets import CLIP_RADIUS, FROM_SCRATCH, REPARAM

_DEFAULTS: dict[str, Any] = dict(
    lr=1e-3, clip_radius=CLIP_RADIUS, weight_decay=0.0,
    **{key: FROM_SCRATCH[key] for key in ("noise", "prior_width", "data_precision", "gamma")},
)  # fmt: skip
_PAPERS_DEFAULTS = dict(lr=0.01, clip_radius=0.1, weight_decay=1e-4, hess_init=0.03, gamma=0.9)
RELATIVE = {"noise", "prior_width", "data_precision"}
SIZES = {"examples", "ess_per_example"}
_PAPERS = {"ess", "hess_init"}

AVERAGING = 0.99  # of the squared raw steps
NO_GRADIENT = 1e-20
"""Squared raw steps, in units of the loss, below it count as 0. They occur in a task that starts
with a loss of zero, whose gradients are rounding errors, with squares that underflow."""
SCALARS = ("scale", "step_square")
"""State entries that are one number for a whole tensor."""
_ALMOST_ZERO = 1e-3  # a root mean square below it, such as that of new biases and zero heads ...
_SCALE_OF_ZEROS = 1e-2  # ... counts as this

Group = Mapping[str, Any]


def with_defaults(settings: Group) -> dict[str, Any]:
    """Settings with the defaults of their units: the paper's, if ``ess`` or ``hess_init`` is given.

    :raises ValueError: if settings of both kinds are given, or the effective sample size twice.
    """
    given = {name for name, value in settings.items() if value is not None}
    if given & _PAPERS and given & RELATIVE:
        papers, relative = (" and ".join(sorted(given & kind)) for kind in (_PAPERS, RELATIVE))
        raise ValueError(
            f"settings must have one kind of units, got {papers} in the paper's and {relative} "
            "relative to the weights"
        )
    if "ess" in given and given & SIZES:
        raise ValueError(f"ess sets the effective sample size: leave out {min(given & SIZES)}")
    defaults = _PAPERS_DEFAULTS if given & _PAPERS else _DEFAULTS
    if settings["hess_approx"] == "reparam" and defaults is _DEFAULTS:
        defaults = defaults | {"data_precision": REPARAM["data_precision"]}
    return {**settings, **{name: defaults[name] for name in defaults.keys() - given}}


def has_natural_units(group: Group) -> bool:
    """Whether a group's settings are relative to its weights."""
    return group["noise"] is not None


def check_natural(group: Group) -> None:
    """Raise a ``ValueError`` naming value and rule for bad settings in natural units."""
    for name in ("noise", "prior_width", "data_precision"):
        check_positive(name, group[name])
    if not group["noise"] < group["prior_width"]:
        raise ValueError(
            f"noise must be smaller than prior_width, got {group['noise']} and "
            f"{group['prior_width']}: a posterior is narrower than its prior"
        )
    for name in sorted(_PAPERS):
        if group[name] is not None:
            raise ValueError(
                f"{name}={group[name]} has the paper's units, but noise={group['noise']} is "
                "relative to the weights: give settings of one kind"
            )
    if group["weight_decay"]:
        raise ValueError(
            f"weight_decay={group['weight_decay']} is the prior's precision per example, for "
            "settings with ess; with lr alone the prior has a prior_width relative to the weights "
            "and replaces weight decay: leave it out"
        )


def ess_of(group: Group) -> float:
    """The effective sample size; in natural units it is 1 until the first step has set it."""
    if group["ess"] is not None:
        return float(group["ess"])
    return float(group["ess_per_example"] or 1.0) * float(group["examples"] or 1.0)


def scale_of(p: Tensor) -> Tensor:
    """Root mean square of a parameter's entries, a scalar tensor; below 0.001 it counts as 0.01."""
    squares = exact_sum(local(p).detach().square())
    total = sum_everywhere([squares], [p])[0]
    scale = (total / p.numel()).sqrt()
    return torch.where(scale < _ALMOST_ZERO, _SCALE_OF_ZEROS, scale).to(p.dtype)


def first_prior_precision(group: Group, scale: Tensor) -> Tensor:
    """Precision of the first prior (1/weight²), a scalar tensor."""
    return (group["prior_width"] * scale) ** -2


def first_hess(group: Group, scale: Tensor) -> Tensor:
    """``hess`` at the start of a task, a scalar tensor."""
    return ((group["noise"] * scale) ** -2 - first_prior_precision(group, scale)) / ess_of(group)


def suitable_ess(
    grads: list[Tensor], precisions: list[Tensor], batch_size: float, data_precision: float
) -> float:
    """The effective sample size with which squared gradients add ``data_precision`` times the
    posterior's precision, on average over all entries; 0 if all gradients are 0.

    :param precisions: of the posterior the gradients were drawn from, 1/weight².
    """
    parts = [
        exact_sum(local(g).to(s.dtype).square() / local(s))
        for g, s in zip(grads, precisions, strict=True)
    ]
    sums = sum_everywhere(parts, grads)
    total = sum(float(part) for part in sums)
    entries = sum(g.numel() for g in grads)
    return data_precision * entries / (batch_size * total) if total > 0 else 0.0


def inverse_rms(running: Tensor, correction: Tensor | float) -> Tensor:
    """One over the root mean square of the raw steps; 0 if there was no gradient.

    :param running: running averages of the squared raw steps, loss; of any shape.
    :param correction: ``1 - AVERAGING**i`` after ``i`` steps, for their start at zero.
    """
    return torch.where(running > NO_GRADIENT, (correction / running).sqrt(), 0.0)
