"""CoVON's arithmetic for lists of tensors, by torch's multi-tensor operations.

For accelerators, for CPUs without numba, for float64 weights, and for several samples a step. The
formulas are those of ``covon.fast_step``, multiplied through by ``ess`` so that few passes and
temporaries are needed. A prior is a list of tensors, or the number it still is in the first task.

Scalars that change from step to step are numbers in eager mode and 0-d tensors under
``torch.compile``, which would compile the function anew for each number.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

Tensors = list[Tensor] | tuple[Tensor, ...]
Prior = Any  # Tensors, or a float
Scalar = Any  # a float, or a 0-d tensor


def draw_samples(
    means: Tensors, noise: Tensors, hessians: Prior, prior_precisions: Prior, ess: float
) -> list[Tensor]:
    """Turn standard normals into posterior samples, in place (Algorithm 1, line 4).

    :param noise: standard normals, which the samples replace.
    :return: the posterior's standard deviations; NaN or infinite where its precision is not
        positive.
    """
    if isinstance(hessians, float):
        hessians = [torch.full_like(mean, hessians) for mean in means]
    std = _precisions(hessians, prior_precisions, ess)
    torch._foreach_rsqrt_(std)
    torch._foreach_mul_(noise, std)
    torch._foreach_add_(noise, means)
    return std


def step(
    means: Tensors,
    grads: Tensors,
    statistics: Tensors | None,
    momenta: Tensors,
    hessians: Tensors,
    prior_means: Prior,
    prior_precisions: Prior,
    *,
    squared: bool,
    ess: Scalar,
    lr: Scalar,
    beta1: float,
    rest2: Scalar,
    correction: Scalar,
    clip_radius: float,
    batch_size: Scalar,
    finite: Tensor | None = None,
) -> None:
    """Update means, momenta and hessians in place (Algorithm 1, lines 6 to 9).

    :param statistics: ``grad * (theta - mean)``, or with ``squared`` the squared gradients,
        averaged over the samples; ``None`` with ``squared``: the squares of ``grads``.
    :param rest2: ``1 - beta2``.
    :param correction: ``1 / (1 - beta1**step)``.
    :param finite: a scalar on the tensors' device; where it is false nothing changes.
    """
    precisions = _precisions(hessians, prior_precisions, ess)
    # line 6, by how much the average exceeds the new estimate
    excess: Tensors = torch._foreach_clone(hessians)
    if squared:
        squares = torch._foreach_mul(grads, grads) if statistics is None else statistics
        _add_(excess, squares, -batch_size)
        del squares
    else:
        torch._foreach_addcmul_(excess, statistics, precisions, value=-1)  # type: ignore[arg-type]
    ratio: Tensors = torch._foreach_div(
        excess, precisions
    )  # before the square, which might overflow
    del precisions
    if finite is not None:
        excess = [torch.where(finite, x, 0.0) for x in excess]
        ratio = [torch.where(finite, x, 0.0) for x in ratio]
        grads = [torch.where(finite, g, m) for g, m in zip(grads, momenta, strict=True)]
    torch._foreach_lerp_(momenta, grads, 1 - beta1)  # line 7
    _add_(hessians, excess, -rest2)
    _addcmul_(hessians, excess, ratio, 0.5 * ess * rest2**2)  # line 8
    del excess, ratio
    precisions = _precisions(hessians, prior_precisions, ess)
    direction: Tensors = torch._foreach_sub(means, prior_means)
    torch._foreach_mul_(direction, prior_precisions)
    _add_(direction, momenta, ess * correction)
    torch._foreach_div_(direction, precisions)
    torch._foreach_clamp_min_(direction, -clip_radius)
    torch._foreach_clamp_max_(direction, clip_radius)
    if finite is not None:
        direction = [torch.where(finite, x, 0.0) for x in direction]
    _add_(means, direction, -lr)  # line 9


def _precisions(hessians: Tensors, prior_precisions: Prior, ess: Scalar) -> list[Tensor]:
    """The posterior's precisions, 1/weight²."""
    precisions = list(torch._foreach_mul(hessians, ess))
    torch._foreach_add_(precisions, prior_precisions)
    return precisions


def _add_(xs: Tensors, ys: Tensors, scale: Scalar) -> None:
    """``x += scale * y``."""
    if isinstance(scale, Tensor):
        torch._foreach_add_(xs, torch._foreach_mul(ys, scale))
    else:
        torch._foreach_add_(xs, ys, alpha=scale)


def _addcmul_(xs: Tensors, ys: Tensors, zs: Tensors, scale: Scalar) -> None:
    """``x += scale * y * z``."""
    if isinstance(scale, Tensor):
        products = torch._foreach_mul(ys, zs)
        torch._foreach_add_(xs, torch._foreach_mul(products, scale))
    else:
        torch._foreach_addcmul_(xs, ys, zs, value=scale)


@cache
def compiled_step() -> Callable[..., None]:
    """:func:`step` by ``torch.compile``; scalars must be 0-d tensors."""
    return torch.compile(step)
