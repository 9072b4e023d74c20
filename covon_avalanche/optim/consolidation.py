"""How the posterior of a task enters the prior of the next."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from covon_avalanche.gaussian import check_gaussian, merge_tensors
from covon_avalanche.optim.buffers import flat_blocks, moved
from covon_avalanche.optim.places import Group, State

Consolidation = Literal["merge", "ema", "replace", "none"]


@torch.no_grad()
def consolidate(name: str, p: Tensor, group: Group, state: State, *, write: bool) -> State:
    """Merge (Eq. 8) for a parameter, block by block, in the memory of its state.

    :param write: change parameter and state, or only check that the result is a Gaussian.
    :return: the state after it; with ``write`` the old one is used up.
    :raises ValueError: naming the parameter, if it is not; without ``write``.
    """
    prior_mean, prior_precision = state.get("prior_mean"), state.get("prior_precision")
    # In the first task momentum and hess, which are not needed any more, make room.
    new_mean = state["momentum"] if prior_mean is None else prior_mean
    new_precision = state["hess"] if prior_precision is None else prior_precision
    first = group["ess"] * group["weight_decay"]
    for mean, hess, centre, precision in flat_blocks(
        [p.detach(), state["hess"], new_mean, new_precision]
    ):
        merged_mean, merged_precision = _merged(
            group,
            mean,
            hess,
            0.0 if prior_mean is None else centre,
            first if prior_precision is None else precision,
        )
        if not write:
            check_gaussian(name, merged_mean, merged_precision)
            continue
        mean.copy_(merged_mean)
        centre.copy_(merged_mean)
        precision.copy_(merged_precision)
    if write:
        moved([p])
    return {"prior_mean": new_mean, "prior_precision": new_precision}


def _merged(
    group: Group, mean: Tensor, hess: Tensor, m0: Tensor | float, s0: Tensor | float
) -> tuple[Tensor, Tensor]:
    ess, gamma = group["ess"], group["gamma"]
    if group["consolidation"] == "replace":
        first = ess * group["weight_decay"]
        return mean, ess * hess.clamp(min=0) + first
    merged = merge_tensors(m0, s0, mean, ess * hess + s0, gamma, group["gamma_precision"])
    if group["consolidation"] == "ema":
        return m0 + gamma * (mean - m0), merged[1]
    return merged
