"""Whether a CoVON posterior is learning its precision, in two numbers."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable
from typing import NamedTuple

from covon_avalanche.float64 import exact_sum
from covon_avalanche.optim.natural_units import ess_of, first_hess
from covon_avalanche.optim.posterior_optimizer import Group, State, current_prior
from covon_avalanche.optim.samples import pieces
from covon_avalanche.optim.sharding import local

_NEAR = 0.1  # an entry within this fraction of hess_init counts as still there
_SHARE_TO_WARN = 0.9  # of hess still near hess_init
_NOISE_TO_WARN = 5.0  # times the weights


class Diagnostics(NamedTuple):
    """Diagnostics of one parameter, or of all together.

    ``hess_at_start``: share of the entries of ``hess`` still within 10 % of ``hess_init``. Near
    1, the precision has not been learned and the posterior is nearly isotropic.

    ``noise_to_weights``: standard deviation of the posterior relative to the weights (root mean
    squares).
    """

    hess_at_start: float
    noise_to_weights: float


def diagnose(parameters: Iterable[tuple[Group, State]]) -> Diagnostics:
    """The diagnostics of parameters within a task, pooled over their entries; of sharded ones over
    those of this process.

    :param parameters: groups and states, which contain the ``mean``.
    """
    entries = at_start = 0
    variance = weights = 0.0
    for group, state in parameters:
        ess = ess_of(group)
        start = first_hess(group, state["scale"]) if "scale" in state else group["hess_init"]
        tensors = state["mean"], state["hess"], current_prior(state, group)[1]
        for mean, hess, s0 in pieces(*map(local, tensors)):
            entries += hess.numel()
            at_start += int(((hess - start).abs() <= _NEAR * start).sum())
            variance += exact_sum(1 / (ess * hess + s0)).item()
            weights += exact_sum(mean.square()).item()
    if not entries:  # of this process
        return Diagnostics(math.nan, math.nan)
    return Diagnostics(
        hess_at_start=at_start / entries,
        noise_to_weights=math.sqrt(variance / weights) if weights > 0 else math.inf,
    )


def warn_unless_learned(steps: int, found: Diagnostics) -> None:
    """Warn if a task of many steps has left the precision as it began."""
    if found.hess_at_start > _SHARE_TO_WARN:
        warnings.warn(
            f"the posterior has not learned its precision: after {steps} steps "
            f"{found.hess_at_start:.0%} of the entries of hess are within 10 % of hess_init, so "
            "the prior it becomes is nearly isotropic; lower beta2 (None adapts to the task), "
            "choose hess_init nearer to the curvature, or see optimizer.diagnostics() before "
            "consolidate()",
            stacklevel=3,
        )
    if found.noise_to_weights > _NOISE_TO_WARN:
        warnings.warn(
            f"the noise has grown to {found.noise_to_weights:.1f} times the weights, because the "
            "data have added little precision: check the accuracy, normalize the inputs, or raise "
            "data_precision (ess)",
            stacklevel=3,
        )
