"""How the posterior of a task enters the prior of the next."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import torch
from torch import Tensor

from covon_avalanche.optim.buffers import flat_blocks, moved
from covon_avalanche.optim.places import Group, State
from covon_avalanche.posterior.gaussian import check_gaussian, merge_tensors

Consolidation = Literal["merge", "ema", "replace", "none"]


def check_merge(name: str, p: Tensor, group: Group, state: State) -> None:
    """Raise a ``ValueError`` naming the parameter, if its merge would not be a Gaussian."""
    for *_, merged_mean, merged_precision in _merged_blocks(p, group, state):
        check_gaussian(name, merged_mean, merged_precision)


@torch.no_grad()
def merge_into_prior(p: Tensor, group: Group, state: State) -> State:
    """Merge (Eq. 8) for a parameter, block by block, in the memory of its state.

    :return: the state after it; the old one is used up.
    """
    for mean, centre, precision, merged_mean, merged_precision in _merged_blocks(p, group, state):
        mean.copy_(merged_mean)
        centre.copy_(merged_mean)
        precision.copy_(merged_precision)
    moved([p])
    prior_mean, prior_precision = _memory_of_prior(state)
    return {"prior_mean": prior_mean, "prior_precision": prior_precision}


def _memory_of_prior(state: State) -> tuple[Tensor, Tensor]:
    """In the first task momentum and hess, which a merge needs no more, make room for it."""
    mean = state["prior_mean" if "prior_mean" in state else "momentum"]
    precision = state["prior_precision" if "prior_precision" in state else "hess"]
    return mean, precision


@torch.no_grad()
def _merged_blocks(p: Tensor, group: Group, state: State) -> Iterator[tuple[Tensor, ...]]:
    """By block the weights, the memory of the prior's mean and precision, and what the merge
    makes of them: mean and precision."""
    tensors = [p.detach(), state["hess"], *_memory_of_prior(state)]
    first = group["ess"] * group["weight_decay"]
    for mean, hess, centre, precision in flat_blocks(tensors):
        m0 = centre if "prior_mean" in state else 0.0
        s0 = precision if "prior_precision" in state else first
        yield mean, centre, precision, *_merged(group, mean, hess, m0, s0)


def _merged(
    group: Group, mean: Tensor, hess: Tensor, m0: Tensor | float, s0: Tensor | float
) -> tuple[Tensor, Tensor]:
    ess, gamma = group["ess"], group["gamma"]
    if group["consolidation"] == "replace":
        first = ess * group["weight_decay"]
        return mean, ess * hess.clamp(min=0) + first
    merged_mean, merged_precision = merge_tensors(
        m0, s0, mean, ess * hess + s0, gamma, group["gamma_precision"]
    )
    if group["consolidation"] == "ema":
        merged_mean = m0 + gamma * (mean - m0)
    return merged_mean, merged_precision
