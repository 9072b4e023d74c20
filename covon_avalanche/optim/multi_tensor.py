"""CoVON's arithmetic for lists of tensors, by torch's multi-tensor operations.

For accelerators, for CPUs without numba, for float64 weights, and for several samples a step. The
formulas are those of ``fast_step``, multiplied through by ``ess`` so that few passes and
temporaries are needed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from covon_avalanche.optim.fast_step import StepSettings
from covon_avalanche.optim.named_params import NamedParam
from covon_avalanche.optim.natural_units import AVERAGING, inverse_rms
from covon_avalanche.optim.samples import fill_normal_
from covon_avalanche.optim.sharding import everywhere, local, sum_everywhere

Prior = Any  # a list of tensors, or the float that it still is in the first task

_LARGEST_PART = 2**26  # entries: multi-tensor operations make temporaries of this size
_LARGEST_PART_CPU = 2**20  # which then stay in its cache: a third less time


def draw(
    means: list[Tensor],
    samples: list[Tensor],
    hessians: list[Tensor],
    prior_precisions: Prior,
    numbers: list[int],
    *,
    ess: float,
    key: int,
) -> bool:
    """Write posterior samples (Algorithm 1, line 4), with noise as in ``samples.fill_normal_``.

    :return: whether all precisions on a CPU are positive; those on an accelerator are not
        looked at, to avoid synchronising with it.
    """
    good = True
    for part in _parts(means):
        mean, hess, s0 = _columns(part, means, hessians, prior_precisions)
        thetas = [  # in bfloat16 the noise would be rounded
            fill_normal_(sample if sample.dtype == m.dtype else torch.empty_like(m), key, number)
            for m, sample, number in zip(means[part], samples[part], numbers[part], strict=True)
        ]
        theta = [local(t) for t in thetas]
        std = _precisions(hess, s0, ess)
        torch._foreach_rsqrt_(std)
        torch._foreach_mul_(theta, std)
        torch._foreach_add_(theta, mean)
        for sample, exact in zip(samples[part], thetas, strict=True):
            if exact is not sample:
                sample.copy_(exact)
        if means[0].device.type == "cpu":
            good &= bool(torch.isfinite(torch.stack(torch._foreach_norm(std))).all())
    return good


def step(
    means: list[Tensor],
    samples: list[Tensor],
    grads: list[Tensor],
    momenta: list[Tensor],
    hessians: list[Tensor],
    prior_means: Prior,
    prior_precisions: Prior,
    settings: StepSettings,
    *,
    averaged: bool,
    step_squares: list[Tensor] | None = None,
) -> None:
    """Update means, momenta and hessians in place (Algorithm 1, lines 6 to 9), in natural units
    also ``step_squares``. See ``fast_step``.

    :param samples: theta, which is used up; with ``averaged`` the statistic of ``fast_step``.
    """
    i, ess, lr, beta1, weight, beta2, clip_radius, hess_approx, batch_size, retraction = settings
    squared = hess_approx == "gradsq"
    used = samples if averaged or not squared else 0.0  # nothing to cast to float32
    columns = used, grads, momenta, hessians, prior_means, prior_precisions, step_squares
    for part in _parts(means):
        mean, sample, grad, momentum, hess, m0, s0, squares = _columns(part, means, *columns)
        precision = _precisions(hess, s0, ess) if retraction or not squared else []
        # excess = hess - hess_hat (line 6), which line 8 subtracts
        if averaged and squared:
            excess = torch._foreach_add(hess, sample, alpha=-batch_size)
        elif squared:
            excess = torch._foreach_addcmul(hess, grad, grad, value=-batch_size)
        else:
            if not averaged:
                torch._foreach_sub_(sample, mean)
                torch._foreach_mul_(sample, grad)
            excess = torch._foreach_addcmul(hess, sample, precision, value=-1.0)
        # divided before the square, which might overflow
        ratio = torch._foreach_div(excess, precision) if retraction else ()
        del precision
        torch._foreach_lerp_(momentum, grad, 1 - beta1)  # line 7
        # line 8: hess + change + change² / 2 (hess + delta), where change = -(1 - beta2) excess
        torch._foreach_add_(hess, excess, alpha=beta2 - 1)
        if retraction:
            torch._foreach_addcmul_(hess, excess, ratio, value=retraction * ess * (1 - beta2) ** 2)
        del excess, ratio
        precision = _precisions(hess, s0, ess)
        direction = torch._foreach_sub(mean, m0)
        torch._foreach_mul_(direction, s0)
        torch._foreach_add_(direction, momentum, alpha=ess / weight)
        if squares is not None:  # direction and precision are those of fast_step times ess
            torch._foreach_sqrt_(precision)
            norms = torch._foreach_norm(torch._foreach_div(grad, precision))
            whole = means[part]
            sums = sum_everywhere(list(torch._foreach_mul(norms, norms)), whole)
            raw = torch._foreach_div(sums, [p.numel() / ess for p in whole])
            torch._foreach_lerp_(squares, raw, 1 - AVERAGING)
            factors = inverse_rms(torch.stack(squares), 1 - AVERAGING**i) / math.sqrt(ess)
            torch._foreach_mul_(direction, factors.unbind())
        torch._foreach_div_(direction, precision)
        torch._foreach_clamp_min_(direction, -clip_radius)
        torch._foreach_clamp_max_(direction, clip_radius)
        torch._foreach_add_(mean, direction, alpha=-lr)  # line 9
        del direction, precision, sample, grad, m0, s0  # before the temporaries of the next part


def all_below(params: list[NamedParam], tensors: list[Tensor], limit: float) -> bool:
    """Whether the norm of the tensor of each parameter on a CPU is below a limit; those on an
    accelerator are not looked at, to avoid synchronising with it. With sharded parameters all
    processes must call it."""
    pairs = [
        (n.param, t) for n, t in zip(params, tensors, strict=True) if n.param.device.type == "cpu"
    ]
    if not pairs:
        return True
    here, values = zip(*pairs, strict=True)
    below = torch.stack(torch._foreach_norm([local(t) for t in values])) < limit
    return bool(everywhere(below, here).all())  # NaN is not below


def _precisions(hessians: list[Tensor], prior_precisions: Prior, ess: float) -> list[Tensor]:
    """The posterior's precisions, 1/weight²."""
    precisions = list(torch._foreach_mul(hessians, ess))
    torch._foreach_add_(precisions, prior_precisions)
    return precisions


def _parts(tensors: list[Tensor]) -> Iterator[slice]:
    """Neighbours that have temporaries at the same time, up to a number of entries."""
    largest = _LARGEST_PART_CPU if tensors[0].device.type == "cpu" else _LARGEST_PART
    begin = entries = 0
    for end, tensor in enumerate(tensors):
        if end > begin and entries + tensor.numel() > largest:
            yield slice(begin, end)
            begin, entries = end, 0
        entries += tensor.numel()
    yield slice(begin, len(tensors))


def _columns(part: slice, means: list[Tensor], *others: Prior) -> list[Any]:
    """A part of each column, in the dtype of the means; of DTensors the parts of this process."""
    dtype = means[0].dtype
    return [
        _plain(column[part], dtype) if isinstance(column, list) else column
        for column in (means, *others)
    ]


def _plain(tensors: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """This process's parts of tensors, in a dtype."""
    if {type(t) for t in tensors} <= {Tensor, Parameter} and {t.dtype for t in tensors} == {dtype}:
        return tensors
    return [local(t).to(dtype) for t in tensors]
