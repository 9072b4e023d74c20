"""CoVON's arithmetic for lists of tensors, by torch's multi-tensor operations.

For accelerators, for CPUs without numba, for float64 weights, and for several samples a step. The
formulas are those of ``covon.fast_step``, multiplied through by ``ess`` so that few passes and
temporaries are needed.

Scalars that change from step to step are numbers in eager mode and 0-d tensors under
``torch.compile``, which would compile the function anew for each number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor

from covon_avalanche.optim.natural_units import AVERAGING, inverse_rms
from covon_avalanche.optim.samples import fill_normal_
from covon_avalanche.optim.sharding import everywhere, is_sharded, local, sum_everywhere

Tensors = list[Tensor] | tuple[Tensor, ...]
Prior = Any  # Tensors, or the float that it still is in the first task
Scalar = Any  # a float, or a 0-d tensor

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
    for sample, number in zip(samples, numbers, strict=True):
        fill_normal_(sample, key, number)
    good = True
    for mean, sample, hess, prior_precision in _parts(means, samples, hessians, prior_precisions):
        std = _precisions(hess, prior_precision, ess)
        torch._foreach_rsqrt_(std)
        torch._foreach_mul_(sample, std)
        torch._foreach_add_(sample, mean)
        if means[0].device.type == "cpu":
            good = good and all(bool(torch.isfinite(s).all()) for s in std)
    return good


def step(
    means: list[Tensor],
    samples: list[Tensor],
    grads: list[Tensor],
    momenta: list[Tensor],
    hessians: list[Tensor],
    prior_means: Prior,
    prior_precisions: Prior,
    *,
    i: int,
    ess: float,
    lr: float,
    beta1: float,
    beta2: float,
    debias: bool,
    clip_radius: float,
    hess_approx: str,
    batch_size: float,
    retraction: float = 0.5,
    averaged: bool,
    compiled: bool,
    allowed: dict[torch.device, Tensor],
    step_squares: list[Tensor] | None = None,
) -> None:
    """Update means, momenta and hessians in place (Algorithm 1, lines 6 to 9), in natural units
    also ``step_squares``. See ``fast_step``.

    :param samples: theta, which is used up; with ``averaged`` the statistic of ``fast_step``.
    :param compiled: by ``torch.compile``, on accelerators.
    :param allowed: the scalars of :meth:`DeferredCheck.check`.
    """
    device, squared = means[0].device, hess_approx == "gradsq"
    scalars: dict[str, Any] = dict(
        ess=ess,
        lr=lr,
        one_minus_beta2=1 - beta2,
        bias_correction=1 - beta1**i if debias else 1.0,
        batch_size=batch_size,
        step_correction=1 - AVERAGING**i,
    )
    sharded = any(is_sharded(mean) for mean in means)
    run: Callable[..., None] = update
    if compiled and device.type != "cpu" and not (sharded and step_squares):
        run = compiled_update()
        scalars = {
            key: torch.full((), value, dtype=means[0].dtype, device=device)
            for key, value in scalars.items()
        }
    columns = samples, grads, momenta, hessians, prior_means, prior_precisions, step_squares
    begin = 0
    for mean, sample, grad, *others, squares in _parts(means, *columns):
        whole = means[begin : begin + len(mean)]
        begin += len(mean)
        if not averaged and not squared:
            torch._foreach_sub_(sample, mean)
            torch._foreach_mul_(sample, grad)
        run(
            mean,
            grad,
            sample if averaged or not squared else None,
            *others,
            squared=squared,
            beta1=beta1,
            clip_radius=clip_radius,
            retraction=retraction,
            allowed=allowed.get(device),
            step_squares=squares,
            sizes=[p.numel() for p in whole],
            sharded=whole if sharded else None,
            **scalars,
        )


def update(
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
    one_minus_beta2: Scalar,
    bias_correction: Scalar,
    clip_radius: float,
    batch_size: Scalar,
    retraction: float = 0.5,
    allowed: Tensor | None = None,
    step_squares: Tensors | None = None,
    step_correction: Scalar = 1.0,
    sizes: list[int] | None = None,
    sharded: list[Tensor] | None = None,
) -> None:
    """Algorithm 1, lines 6 to 9, on tensors of one device and dtype.

    :param statistics: ``grad * (theta - mean)``, or with ``squared`` the squared gradients,
        averaged over the samples; ``None`` with ``squared``: the squares of ``grads``.
    :param allowed: a scalar on the tensors' device; if it is false nothing changes.
    :param step_squares: in natural units, the running averages of squared raw steps.
    :param step_correction: for their start at zero.
    :param sizes: entries of the parameters, over all processes.
    :param sharded: the parameters, if they are distributed.
    """
    precisions = _precisions(hessians, prior_precisions, ess)
    # excess = hess - hess_hat (line 6), which line 8 subtracts
    if statistics is None:
        excess = _addcmul(hessians, grads, grads, -batch_size)
    elif squared:
        excess = _add(hessians, statistics, -batch_size)
    else:
        excess = _addcmul(hessians, statistics, precisions, -1.0)
    ratio: Tensors = torch._foreach_div(excess, precisions)  # before the square, might overflow
    del precisions
    if allowed is not None:
        excess = [torch.where(allowed, x, 0.0) for x in excess]
        ratio = [torch.where(allowed, x, 0.0) for x in ratio]
        grads = [torch.where(allowed, g, m) for g, m in zip(grads, momenta, strict=True)]
    torch._foreach_lerp_(momenta, grads, 1 - beta1)  # line 7
    # line 8: hess + change + change² / 2 (hess + delta), where change = -(1 - beta2) excess
    _add_(hessians, excess, -one_minus_beta2)
    if retraction:
        _addcmul_(hessians, excess, ratio, retraction * ess * one_minus_beta2**2)
    del excess, ratio
    precisions = _precisions(hessians, prior_precisions, ess)
    direction: Tensors = torch._foreach_sub(means, prior_means)
    torch._foreach_mul_(direction, prior_precisions)
    _add_(direction, momenta, ess / bias_correction)
    if step_squares is not None:  # both times ess
        torch._foreach_div_(direction, ess)
        torch._foreach_div_(precisions, ess)
        torch._foreach_sqrt_(precisions)
        norms = torch._foreach_norm(torch._foreach_div(grads, precisions))
        squares: Tensors = torch._foreach_mul(norms, norms)
        if sharded is not None:
            squares = sum_everywhere(list(squares), sharded)
        squares = torch._foreach_div(squares, [float(size) for size in sizes or ()])
        if allowed is not None:
            pairs = zip(squares, step_squares, strict=True)
            squares = [torch.where(allowed, square, running) for square, running in pairs]
        torch._foreach_lerp_(step_squares, squares, 1 - AVERAGING)
        factors = inverse_rms(torch.stack(list(step_squares)), step_correction)
        torch._foreach_mul_(direction, factors.unbind())
    torch._foreach_div_(direction, precisions)
    torch._foreach_clamp_min_(direction, -clip_radius)
    torch._foreach_clamp_max_(direction, clip_radius)
    if allowed is not None:
        direction = [torch.where(allowed, x, 0.0) for x in direction]
    _add_(means, direction, -lr)  # line 9


@cache
def compiled_update() -> Callable[..., None]:
    """:func:`update` by ``torch.compile``; scalars must be 0-d tensors."""
    return torch.compile(update)


def _precisions(hessians: Tensors, prior_precisions: Prior, ess: Scalar) -> list[Tensor]:
    """The posterior's precisions, 1/weight²."""
    precisions = list(torch._foreach_mul(hessians, ess))
    torch._foreach_add_(precisions, prior_precisions)
    return precisions


def _add(xs: Tensors, ys: Tensors, scale: Scalar) -> Tensors:
    """``x + scale * y``."""
    if isinstance(scale, Tensor):
        return torch._foreach_add(xs, torch._foreach_mul(ys, scale))
    return torch._foreach_add(xs, ys, alpha=scale)


def _add_(xs: Tensors, ys: Tensors, scale: Scalar) -> None:
    if isinstance(scale, Tensor):
        torch._foreach_add_(xs, torch._foreach_mul(ys, scale))
    else:
        torch._foreach_add_(xs, ys, alpha=scale)


def _addcmul(xs: Tensors, ys: Tensors, zs: Tensors, scale: Scalar) -> Tensors:
    """``x + scale * y * z``."""
    if isinstance(scale, Tensor):
        return _add(xs, torch._foreach_mul(ys, zs), scale)
    return torch._foreach_addcmul(xs, ys, zs, value=scale)


def _addcmul_(xs: Tensors, ys: Tensors, zs: Tensors, scale: Scalar) -> None:
    if isinstance(scale, Tensor):
        _add_(xs, torch._foreach_mul(ys, zs), scale)
    else:
        torch._foreach_addcmul_(xs, ys, zs, value=scale)


def _parts(means: list[Tensor], *columns: Prior) -> Iterator[list[Any]]:
    """The same parameters of all columns, up to a number of entries, in the dtype of the means; of
    DTensors the parts of this process."""
    largest = _LARGEST_PART_CPU if means[0].device.type == "cpu" else _LARGEST_PART
    begin, entries, dtype = 0, 0, means[0].dtype
    for end, mean in enumerate([*means, None]):
        if end > begin and (mean is None or entries + mean.numel() > largest):
            yield [
                [local(t).to(dtype) for t in column[begin:end]]
                if isinstance(column, list)
                else column
                for column in (means, *columns)
            ]
            begin, entries = end, 0
        entries += 0 if mean is None else mean.numel()


class DeferredCheck:
    """Checks gradients on an accelerator without waiting for it.

    A step that must not happen is skipped on the device; the error is raised by the first call
    that finds the answer on the host.
    """

    def __init__(self) -> None:
        self._pending: list[tuple[list[str], int, Tensor, torch.Event]] = []

    def check(
        self,
        names: list[str],
        means: list[Tensor],
        bounds: list[tuple[list[Tensor], float]],
        step: int,
    ) -> tuple[bool, dict[torch.device, Tensor]]:
        """Look at the gradients of a step; raise for those of earlier steps. With sharded
        parameters all processes must call it.

        :param names: of the parameters.
        :param means: the parameters.
        :param bounds: for each parameter a gradient or statistic, and what its norm must be below.
        :param step: of the task, for the error.
        :return: whether all on a CPU are finite and below the bounds; and for each accelerator a
            scalar on it, whether all there are.
        """
        self.raise_if_bad(wait=False)
        allowed: dict[torch.device, Tensor] = {}
        devices = [mean.device for mean in means]
        for device in sorted(set(devices), key=str):  # the CPU first
            there = [i for i, other in enumerate(devices) if other == device]
            norms = [torch._foreach_norm([local(ts[i]) for i in there]) for ts, _ in bounds]
            below = torch.stack(
                [torch.stack(norm) < bound for norm, (_, bound) in zip(norms, bounds, strict=True)]
            ).all(0)  # NaN is not below
            below = everywhere(below, [means[i] for i in there])
            if device.type != "cpu":
                event = torch.Event(device)
                answer = below.to("cpu", non_blocking=True)
                event.record()
                self._pending.append(([names[i] for i in there], step, answer, event))
                allowed[device] = below.all()
            elif not below.all():
                return False, {}
        return True, allowed

    def raise_if_bad(self, *, wait: bool) -> None:
        """Raise for a step that was skipped.

        :param wait: for the device, if it has not finished all steps.
        :raises FloatingPointError: naming parameter and step.
        """
        while self._pending:
            names, step, answer, event = self._pending[0]
            if wait:
                event.synchronize()
            elif not event.query():
                return
            self._pending.pop(0)
            if not answer.all():
                self._pending.clear()
                bad = next(n for n, good in zip(names, answer.tolist(), strict=True) if not good)
                raise FloatingPointError(
                    f"the gradient of {bad!r} is not finite or too large in step {step} of this "
                    "task; that step was skipped. Likely cause: the loss is not finite, or it "
                    "overflowed (lower lr, or set clip_radius)."
                )
