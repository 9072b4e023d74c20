"""Whether a CoVON posterior is learning its precision, in four numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from covon_avalanche.optim.buffers import flat_blocks
from covon_avalanche.optim.curvature import HessApprox
from covon_avalanche.optim.hessian_average import what_is_left
from covon_avalanche.optim.places import Group, State

_NEAR = 0.1  # an entry within this fraction of hess_init counts as still there


class Diagnostics(NamedTuple):
    """One parameter's, or those of all together.

    ``hess_signal_to_noise``: what the estimates have put into ``hess`` (root mean square, less
    what is left of ``hess_init``), in units of the noise they leave in the average. About 1:
    what looks like curvature is noise. The noise is that of the formulas in
    ``optim/curvature.py`` with the last step's gradient, so it varies from batch to batch; NaN
    if that gradient is gone.

    ``hess_at_start``: share of the entries of ``hess`` still within 10 % of ``hess_init``. Near
    1: the precision has not been learned, the posterior is nearly isotropic.

    ``prior_pull``: prior's part of the update against the data's (root mean squares), of
    ``prior_hess * (mean - prior_mean)`` and the gradient average.

    ``noise_to_weights``: standard deviation of the posterior against the weights (root mean
    squares).
    """

    hess_signal_to_noise: float
    hess_at_start: float
    prior_pull: float
    noise_to_weights: float


class Sums(NamedTuple):
    """Sums over a parameter's entries that the diagnostics are made of; they add up."""

    entries: int
    learned: float
    noise: float
    at_start: float
    prior: float
    data: float
    variance: float
    weights: float

    def diagnostics(self) -> Diagnostics:
        """The ratios."""
        return Diagnostics(
            hess_signal_to_noise=_ratio(self.learned, self.noise),
            hess_at_start=self.at_start / self.entries,
            prior_pull=_ratio(self.prior, self.data),
            noise_to_weights=_ratio(self.variance, self.weights),
        )


def diagnose(
    p: Tensor, group: Group, state: State, prior_precision: Tensor | float, hess_approx: HessApprox
) -> Sums:
    """The sums of a parameter within a task, block by block.

    :param hess_approx: the estimator in use.
    :param state: with ``hess``, ``momentum`` and ``step``.
    """
    values: dict[str, Tensor | float | None] = {
        "mean": p.detach(),
        "hess": state["hess"],
        "momentum": state["momentum"],
        "prior_mean": state.get("prior_mean", 0.0),
        "prior_precision": prior_precision,
        "grad": p.grad,
    }
    tensors = {k: v for k, v in values.items() if isinstance(v, Tensor)}
    alike = all(t.stride() == p.stride() for t in tensors.values())
    blocks = flat_blocks([*tensors.values()]) if alike else [[*tensors.values()]]
    return add(
        [
            _sums({**values, **dict(zip(tensors, block, strict=True))}, group, state, hess_approx)
            for block in blocks
        ]
    )


def _sums(v: Mapping[str, Any], group: Group, state: State, hess_approx: HessApprox) -> Sums:
    step, ess = state["step"], group["ess"]
    beta1, beta2 = group["betas"]
    start, average = what_is_left(beta2, step)
    precision = ess * v["hess"] + v["prior_precision"]
    moved = v["hess"] - group["hess_init"]
    return Sums(
        entries=moved.numel(),
        learned=_squares(v["hess"] - start * group["hess_init"]),
        noise=_noise(v["grad"], group, v["hess"], precision, hess_approx) * average,
        at_start=(moved.abs() <= _NEAR * group["hess_init"]).sum().item(),
        prior=_squares((v["mean"] - v["prior_mean"]) * (v["prior_precision"] / ess)),
        data=_squares(v["momentum"] / (1 - beta1**step if group["debias"] else 1.0)),
        variance=(1 / precision).sum(dtype=torch.float64).item(),
        weights=_squares(v["mean"]),
    )


def add(sums: list[Sums]) -> Sums:
    """Over several parameters."""
    return Sums(*map(sum, zip(*sums, strict=True)))


def _noise(
    grad: Tensor | None, group: Group, hess: Tensor, precision: Tensor, hess_approx: HessApprox
) -> float:
    """Sum of the variances of a single estimate."""
    match hess_approx:
        case "gradsq":
            return 2 * _squares(hess) / group["mc_samples"]
        case "per_example":
            return 2 * _squares(hess) / group["mc_samples"] / (group["batch_size"] or 1)
    if grad is None:
        return math.nan
    variances = grad.square() * precision
    return variances.sum(dtype=torch.float64).item() / group["mc_samples"]


def _squares(x: Tensor) -> float:
    return x.square().sum(dtype=torch.float64).item()


def _ratio(squares: float, others: float) -> float:
    """Of root mean squares."""
    if others == 0:
        return math.inf if squares > 0 else math.nan
    return math.sqrt(squares / others)
