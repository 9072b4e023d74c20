"""CoVON's arithmetic for lists of tensors, by torch's multi-tensor operations.

For accelerators, for CPUs without numba, for float64 weights, and for several samples a step. The
formulas are those of ``covon.fast_step``, multiplied through by ``ess`` so that few passes and
temporaries are needed.

Scalars that change from step to step are numbers in eager mode and 0-d tensors under
``torch.compile``, which would compile the function anew for each number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from covon_avalanche.optim.samples import fill_normal_
from covon_avalanche.optim.sharding import is_sharded, local

Tensors = list[Tensor] | tuple[Tensor, ...]
Prior = Any  # Tensors, or the float that it still is in the first task
Scalar = Any  # a float, or a 0-d tensor

LARGEST_GRADIENT = 1e9  # beyond it a Hessian estimate may overflow float32
LARGEST_ESTIMATE = 1e15  # beyond it the square of a Hessian estimate may
_LARGEST_BUCKET = 2**26  # entries: multi-tensor operations make temporaries of this size
_LARGEST_BUCKET_CPU = 2**20  # which then stay in its cache: a third less time


class Rates(NamedTuple):
    """Settings of a group in a step.

    :param one_minus_beta2: which is accurate in float32, too.
    :param bias_correction: ``1 - beta1**step``, or 1 without debiasing.
    """

    ess: float
    lr: float
    beta1: float
    one_minus_beta2: float
    bias_correction: float
    clip_radius: float
    batch_size: float


class StepArgs(NamedTuple):
    """One parameter in a draw or a step. Tensors have its shape and layout.

    :param name: for errors.
    :param number: of the parameter within the optimizer.
    :param mean: the parameter; changed in place by a step.
    :param sample: theta, written by a draw; the statistic of several samples in a step, see
        :class:`SampleAccumulator`. Used up by a step.
    :param hess: loss/weight²; changed in place by a step.
    :param prior_mean: a tensor, or 0.
    :param prior_precision: 1/weight²; a number in the first task.
    :param rates: settings of the group, see :class:`CoVON`.
    :param grad: loss/weight; for steps only, as what follows.
    :param momentum: changed in place.
    :param step: of the task, from 1.
    """

    name: str
    number: int
    mean: Tensor
    sample: Tensor
    hess: Tensor
    prior_mean: Any
    prior_precision: Any
    rates: Rates
    grad: Any = None
    momentum: Any = None
    step: int = 0

    def local(self) -> StepArgs:
        """With this process's parts of DTensors."""
        return StepArgs(*map(local, self)) if is_sharded(self.mean) else self


def draw_samples(args: Sequence[StepArgs], key: int) -> bool:
    """Write posterior samples (Algorithm 1, line 4).

    :param key: of the noise.
    :return: whether all precisions on the CPU are positive; those on an accelerator are not
        looked at, to avoid synchronising with it.
    """
    good = True
    for a in args:
        fill_normal_(a.sample, key, a.number)
    for bucket in _buckets([a.local() for a in args]):
        means, samples = [a.mean for a in bucket], [a.sample for a in bucket]
        std = _precisions(
            [a.hess for a in bucket], _column(bucket, "prior_precision"), bucket[0].rates.ess
        )
        torch._foreach_rsqrt_(std)
        torch._foreach_mul_(samples, std)
        torch._foreach_add_(samples, means)
        if means[0].device.type == "cpu":
            good = good and all(bool(torch.isfinite(s).all()) for s in std)
    return good


def step(
    args: Sequence[StepArgs],
    limit: float,
    *,
    squared: bool,
    mc_samples: int,
    compiled: bool,
    deferred: DeferredCheck,
) -> bool:
    """Update means, momenta and hessians in place (Algorithm 1, lines 6 to 9).

    :param limit: of the gradients' norms, loss/weight.
    :param squared: whether the Hessian estimate is that of squared gradients.
    :param mc_samples: posterior samples behind gradients and statistics.
    :param compiled: by ``torch.compile``, on accelerators.
    :param deferred: raises for earlier steps on accelerators, which skip a step beyond the limit.
    :return: whether all gradients on the CPU are finite and below the limit; if not, nothing has
        changed.
    """
    deferred.raise_if_bad(wait=False)
    args = [a.local() for a in args]
    finite: dict[torch.device, Tensor] = {}
    for device in sorted({a.mean.device for a in args}, key=str):  # the CPU first
        there = [a for a in args if a.mean.device == device]
        fit = _fit(there, limit, mc_samples)
        if device.type != "cpu":
            finite[device] = deferred.add([a.name for a in there], there[0].step, fit)
        elif not fit.all():
            return False
    for bucket in _buckets(args):
        means, grads = [a.mean for a in bucket], [a.grad for a in bucket]
        statistics = [a.sample for a in bucket]
        if mc_samples == 1 and not squared:
            torch._foreach_sub_(statistics, means)
            torch._foreach_mul_(statistics, grads)
        rates: dict[str, Any] = bucket[0].rates._asdict()
        constant = {key: rates.pop(key) for key in ("beta1", "clip_radius")}
        run: Callable[..., None] = update
        device = means[0].device
        if device.type != "cpu" and compiled:
            run = compiled_update()
            rates = {key: torch.full((), value, device=device) for key, value in rates.items()}
        run(
            means,
            grads,
            None if mc_samples == 1 and squared else statistics,
            [a.momentum for a in bucket],
            [a.hess for a in bucket],
            _column(bucket, "prior_mean"),
            _column(bucket, "prior_precision"),
            squared=squared,
            finite=finite.get(device),
            **constant,
            **rates,
        )
    return True


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
    finite: Tensor | None = None,
) -> None:
    """Algorithm 1, lines 6 to 9, on tensors of one device and dtype.

    :param statistics: ``grad * (theta - mean)``, or with ``squared`` the squared gradients,
        averaged over the samples; ``None`` with ``squared``: the squares of ``grads``.
    :param finite: a scalar on the tensors' device; where it is false nothing changes.
    """
    precisions = _precisions(hessians, prior_precisions, ess)
    # line 6, by how much the average exceeds the new estimate
    if statistics is None:
        excess = _addcmul(hessians, grads, grads, -batch_size)
    elif squared:
        excess = _add(hessians, statistics, -batch_size)
    else:
        excess = _addcmul(hessians, statistics, precisions, -1.0)
    ratio: Tensors = torch._foreach_div(excess, precisions)  # before the square, might overflow
    del precisions
    if finite is not None:
        excess = [torch.where(finite, x, 0.0) for x in excess]
        ratio = [torch.where(finite, x, 0.0) for x in ratio]
        grads = [torch.where(finite, g, m) for g, m in zip(grads, momenta, strict=True)]
    torch._foreach_lerp_(momenta, grads, 1 - beta1)  # line 7
    _add_(hessians, excess, -one_minus_beta2)
    _addcmul_(hessians, excess, ratio, 0.5 * ess * one_minus_beta2**2)  # line 8
    del excess, ratio
    precisions = _precisions(hessians, prior_precisions, ess)
    direction: Tensors = torch._foreach_sub(means, prior_means)
    torch._foreach_mul_(direction, prior_precisions)
    _add_(direction, momenta, ess / bias_correction)
    torch._foreach_div_(direction, precisions)
    torch._foreach_clamp_min_(direction, -clip_radius)
    torch._foreach_clamp_max_(direction, clip_radius)
    if finite is not None:
        direction = [torch.where(finite, x, 0.0) for x in direction]
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


def _buckets(args: Sequence[StepArgs]) -> Iterator[list[StepArgs]]:
    """Parameters of the same device, dtype, rates and kind of prior, up to a size."""
    bucket: list[StepArgs] = []
    entries, kind = 0, None
    for a in args:
        largest = _LARGEST_BUCKET_CPU if a.mean.device.type == "cpu" else _LARGEST_BUCKET
        numbers = [None if isinstance(p, Tensor) else p for p in (a.prior_mean, a.prior_precision)]
        other = (a.mean.device, a.mean.dtype, a.rates, numbers)
        if bucket and (other != kind or entries + a.mean.numel() > largest):
            yield bucket
            bucket, entries = [], 0
        bucket.append(a)
        entries, kind = entries + a.mean.numel(), other
    if bucket:
        yield bucket


def _column(bucket: list[StepArgs], field: str) -> list[Tensor] | float:
    """A field of a bucket: tensors, or the number that all have."""
    values = [getattr(a, field) for a in bucket]
    return values if isinstance(values[0], Tensor) else values[0]


def _fit(args: Sequence[StepArgs], limit: float, mc_samples: int) -> Tensor:
    """For each parameter, whether its gradient is finite and small enough, as a tensor."""
    fit = torch.stack(torch._foreach_norm([a.grad for a in args])) < limit  # which NaN is not
    if mc_samples > 1:
        fit &= torch.stack(torch._foreach_norm([a.sample for a in args])) < LARGEST_ESTIMATE
    return fit


class DeferredCheck:
    """Checks gradients on an accelerator without waiting for it.

    A step that must not happen is skipped on the device; the error is raised by the first call
    that finds the answer on the host.
    """

    def __init__(self) -> None:
        self._pending: list[tuple[list[str], int, Tensor, torch.Event]] = []

    def add(self, names: list[str], step: int, fit: Tensor) -> Tensor:
        """Look at the gradients of a step.

        :param fit: for each parameter on the device, whether its gradient is fit for a step.
        :return: on the device, a scalar: whether all are.
        """
        event = torch.Event(fit.device)
        answer = fit.to("cpu", non_blocking=True)
        event.record()
        self._pending.append((names, step, answer, event))
        return fit.all()

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
