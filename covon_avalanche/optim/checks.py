"""Guards: what is refused before anything is changed, and the sentence that says why."""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Integral, Real
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter


def check_positive(name: str, value: float, *, zero: bool = False) -> None:
    """Raise a ``ValueError`` unless the value is > 0 (or >= 0) and finite."""
    if not (math.isfinite(value) and (value > 0 or (zero and value == 0))):
        raise ValueError(f"{name} must be {'>=' if zero else '>'} 0 and finite, got {value}")


def check_whole(name: str, value: Any, least: int = 1) -> None:
    """Raise a ``ValueError`` unless the value is a whole number that is large enough."""
    if not isinstance(value, Integral) or int(value) < least:
        raise ValueError(f"{name} must be a whole number >= {least}, got {value}")


def check_betas(betas: Any, *, second_may_be_none: bool = False) -> None:
    """Raise a ``ValueError`` unless they are two averaging coefficients."""
    needed = betas
    if isinstance(betas, Sequence) and len(betas) == 2 and second_may_be_none and betas[1] is None:
        needed = (betas[0], 0.0)
    pair = isinstance(needed, Sequence) and len(needed) == 2
    if not (pair and all(isinstance(beta, Real) and 0 <= float(beta) < 1 for beta in needed)):
        rest = ", or None as the second" if second_may_be_none else ""
        raise ValueError(f"betas must be two numbers in [0, 1){rest}, got {betas}")


def check_parameter(p: Tensor, name: str) -> None:
    """Refuse parameters that are pieces of a tensor (DTensor), whose processes would draw the same
    noise for each, and those whose dtype would swallow it."""
    if type(p) is not Parameter and hasattr(p, "device_mesh"):
        raise ValueError(
            f"{name!r} is a DTensor: parameters that are shared out among processes (by "
            "fully_shard) cannot be sampled yet. Use DistributedDataParallel"
        )
    if p.dtype not in (torch.float32, torch.float64):
        raise ValueError(
            f"{name!r} is {p.dtype}: noise of size 1e-4 vanishes in it, so the posterior "
            "could not be sampled. Keep the weights in float32 and run the forward pass "
            "under torch.autocast instead"
        )


def check_generator(generator: torch.Generator | None) -> None:
    """Refuse to draw different noise in each of several processes."""
    if _several_processes() and generator is None:
        raise ValueError(
            "in distributed training every rank must draw the same noise: pass "
            "generator=torch.Generator(device).manual_seed(seed), seeded alike on all ranks"
        )


def check_one_process(what: str) -> None:
    """Refuse what would see the examples of one process only."""
    if _several_processes():
        raise ValueError(f"{what} does not work in distributed training: use 'gradsq'")


def _several_processes() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def check_precisions(lowest: list[tuple[str, Tensor]]) -> None:
    """Refuse precisions that are not positive.

    :param lowest: names with their smallest precision, scalar tensors.
    """
    if not lowest:
        return
    device = lowest[0][1].device
    values = torch.stack([low.to(device) for _, low in lowest])
    if (values > 0).all():
        return
    name, low = next((name, low) for name, low in lowest if not low > 0)
    raise ValueError(
        f"the posterior precision of {name!r} must be > 0, smallest is {low.item():.3g}: "
        "ess, hess_init or weight_decay is too small, or was changed inside a task"
    )


def check_mean(name: str, mean: Tensor, p: Tensor) -> None:
    """Raise a ``ValueError`` naming the parameter unless it can take this mean."""
    if mean.shape != p.shape:
        raise ValueError(
            f"the mean given for {name!r} must have shape {tuple(p.shape)}, got {tuple(mean.shape)}"
        )
    if not torch.isfinite(mean).all():
        raise ValueError(f"the mean given for {name!r} is not finite")


def check_finite(tensors: list[tuple[str, str, Tensor]], *, step: int) -> None:
    """Refuse a step that is not finite; one synchronisation for all tensors.

    :param tensors: parameter name, what the tensor is (``"gradient"`` or what is new), tensor.
    :param step: of this task, for the message.
    :raises FloatingPointError: naming parameter, step and likely cause.
    """
    if not tensors:
        return
    device = tensors[0][2].device
    norms = torch.stack([torch.linalg.vector_norm(t).to(device) for *_, t in tensors])
    if torch.isfinite(norms).all():
        return
    for name, what, tensor in tensors:  # a norm may overflow where no entry does
        if not torch.isfinite(tensor).all():
            cause = (
                "the loss is not finite, or it overflowed (lower lr, or set clip_radius)"
                if what == "gradient"
                else "the step was too large: lower lr, raise hess_init, or set clip_radius"
            )
            raise FloatingPointError(
                f"{what} of {name!r} is not finite in step {step} of this task; nothing "
                f"was changed. Likely cause: {cause}."
            )


def all_below(tensors: list[Tensor], limit: float) -> bool:
    """Whether all norms are below a limit; one synchronisation for all tensors."""
    if not tensors:
        return True
    device = tensors[0].device
    norms = torch.stack([torch.linalg.vector_norm(t).to(device) for t in tensors])
    return bool((norms < limit).all())
