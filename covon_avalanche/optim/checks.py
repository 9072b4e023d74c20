"""Checks of optimizers before anything is changed, and the sentence of each error."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from numbers import Real
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from covon_avalanche.checks import check_whole
from covon_avalanche.optim.natural_units import SCALARS
from covon_avalanche.optim.sharding import check_sharding, everywhere, is_sharded, local


def check_betas(betas: Any, *, second_may_be_none: bool = False) -> None:
    """Raise a ``ValueError`` unless they are two averaging coefficients."""

    def allowed(beta: Any) -> bool:
        return isinstance(beta, Real) and 0 <= float(beta) < 1

    pair = isinstance(betas, Sequence) and len(betas) == 2
    none = pair and second_may_be_none and betas[1] is None
    if not (pair and allowed(betas[0]) and (none or allowed(betas[1]))):
        rest = ", or None as the second" if second_may_be_none else ""
        raise ValueError(f"betas must be two numbers in [0, 1){rest}, got {betas!r}")


def check_parameter(p: Tensor, name: str, *, bfloat16: bool = False) -> None:
    """Refuse half precision, complex numbers, and tensors distributed otherwise than as
    DTensors by rows.

    :param bfloat16: whether it is allowed, because the optimizer keeps the mean in float32.
    """
    if is_sharded(p):
        check_sharding(p, name)
    if getattr(p, "_fsdp_flattened", False):
        raise ValueError(
            f"{name!r} is a part of FullyShardedDataParallel (FSDP1), where each process would "
            "draw noise of its own: use torch.distributed.fsdp.fully_shard (FSDP2)"
        )
    if p.is_complex():
        raise ValueError(
            f"{name!r} is {p.dtype}: the posterior is over real numbers. Make the real and "
            "imaginary parts two parameters, and combine them by torch.complex"
        )
    if p.dtype not in (torch.float32, torch.float64, torch.bfloat16 if bfloat16 else None):
        raise ValueError(
            f"{name!r} is {p.dtype}: noise of size 1e-4 vanishes in it, so the posterior "
            "could not be sampled. Keep the weights in float32 and run the forward pass "
            "under torch.autocast instead (bfloat16 needs CoVON with hess_approx='gradsq')"
        )


def check_memory(named: Iterable[tuple[str, Tensor]]) -> None:
    """Refuse parameters that overlap in memory: each would get noise of its own."""
    spans = []
    for name, p in named:
        if is_lazy(p) or type(part := local(p.detach())) is not Tensor:
            continue
        dense = torch.ops.aten.is_non_overlapping_and_dense(part)
        if dense and part.numel() and (start := part.data_ptr()):
            last = sum((n - 1) * s for n, s in zip(part.shape, part.stride(), strict=True))
            spans.append((str(p.device), start, start + last * part.element_size(), name))
    for (device, _, end, name), (other, start, _, second) in pairwise(sorted(spans)):
        if device == other and start <= end:
            raise ValueError(
                f"{name!r} and {second!r} share memory: tie weights by a.weight = b.weight"
            )


def check_names(names: Iterable[str]) -> None:
    """Refuse a name of several parameters: posteriors and states are matched by name."""
    if several := [name for name, number in Counter(names).items() if number > 1]:
        raise ValueError(
            f"several parameters are named {several[0]!r}: take the names of the whole model, such "
            "as [(f'head.{name}', p) for name, p in model.head.named_parameters()]"
        )


def has_entries(p: Tensor, name: str) -> bool:
    """Whether there is anything to sample.

    :raises ValueError: if a parameter has no shape or no data yet.
    """
    if p.is_meta or is_lazy(p):
        raise ValueError(
            f"{name!r} has no values yet: run a lazy module once, or move a model from the meta "
            "device, before the optimizer is made"
        )
    return p.numel() > 0


def check_precisions(lowest: list[tuple[str, Tensor]]) -> None:
    """Refuse precisions that are not positive.

    :param lowest: names with their smallest precision, scalar tensors.
    """
    if not lowest:
        return
    device = lowest[0][1].device
    if torch.stack([low.to(device, torch.float32) for _, low in lowest]).min() > 0:
        return  # with one synchronisation
    for name, low in lowest:
        if not low > 0:
            raise ValueError(
                f"the posterior precision of {name!r} must be > 0, smallest is {low.item():.3g}: "
                "weights are not finite, or ess, hess_init or weight_decay is too small, or was "
                "changed within a task"
            )


def check_keys(what: str, given: Mapping[Tensor, Tensor] | None) -> None:
    """Raise a ``ValueError`` naming a key that is not a parameter."""
    for key in given or ():
        if not isinstance(key, Tensor):
            raise ValueError(f"{what} must have parameters as keys, not their names, got {key!r}")


def check_given(name: str, value: Tensor, p: Tensor, what: str) -> None:
    """Raise a ``ValueError`` naming the parameter unless the tensor has its shape and is finite."""
    if value.shape != p.shape:
        raise ValueError(
            f"the {what} given for {name!r} must have shape {tuple(p.shape)}, "
            f"got {tuple(value.shape)}"
        )
    if not torch.isfinite(local(value)).all():
        raise ValueError(f"the {what} given for {name!r} is not finite")


def check_state(
    name: str, p: Tensor, state: Mapping[str, Any], needs: Mapping[str, set[str]]
) -> None:
    """Check the loaded state of a parameter.

    :param needs: for each entry, the entries that it requires.
    :raises ValueError: naming the parameter and what is wrong.
    """
    missing = set().union(*(needs.get(key, set()) for key in state)) - state.keys()
    if missing:
        raise ValueError(f"the state of {name!r} has no {' and no '.join(sorted(missing))}")
    for key, value in state.items():
        if key == "step":
            check_whole(f"step of {name!r}", value, least=0)
            continue
        if not isinstance(value, Tensor) or value.shape != (() if key in SCALARS else p.shape):
            shape = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise ValueError(
                f"{key} of {name!r} must be a tensor of shape {tuple(p.shape)}, got {shape}"
            )
        if not torch.isfinite(local(value)).all():
            raise ValueError(f"{key} of {name!r} is not finite")
        if key == "prior_precision" and not (local(value) > 0).all():
            raise ValueError(f"prior_precision of {name!r} must be > 0")


def check_finite(tensors: list[tuple[str, str, Tensor]], *, step: int) -> None:
    """Refuse a step that is not finite.

    :param tensors: parameter name, what the tensor is (``"gradient"`` or what is new), tensor.
    :param step: of this task, for the message.
    :raises FloatingPointError: naming parameter, step and likely cause.
    """
    if not tensors:
        return
    each = [(0 * local(tensor)).sum() for *_, tensor in tensors]  # a fifth of isfinite's time
    finite = torch.stack([zero.to(each[0].device) for zero in each]) == 0
    finite = everywhere(finite, [tensor for *_, tensor in tensors])
    if finite.all():
        return
    for (name, what, _), good in zip(tensors, finite, strict=True):
        if not good:
            causes = {
                "gradient": "the loss is not finite, or it overflowed (lower lr, or set "
                "clip_radius)",
                "new hess": "the Hessian estimate of so large a gradient overflows: clip "
                "gradients, or if they grew in training, lower lr or set clip_radius",
            }
            too_large = "the step was too large: lower lr, raise hess_init, or set clip_radius"
            cause = causes.get(what, too_large)
            raise FloatingPointError(
                f"{what} of {name!r} is not finite in step {step} of this task; nothing "
                f"was changed. Likely cause: {cause}."
            )
