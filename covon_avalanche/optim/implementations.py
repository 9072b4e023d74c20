"""Which code draws CoVON's samples and runs its step: numba, multi-tensor operations or neither."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from covon_avalanche.optim import multi_tensor, noise
from covon_avalanche.optim.checks import LARGEST_ESTIMATE, DeferredCheck, largest_gradient

Implementation = Literal["auto", "compiled", "foreach", "reference"]

_MOST_ENTRIES = 2**26  # that multi-tensor operations make temporaries of at a time


class StepArgs(NamedTuple):
    """One parameter in a draw or a step. Tensors have its shape and layout.

    :param name: for errors.
    :param number: of the parameter within the optimizer.
    :param mean: the parameter; changed in place by a step.
    :param sample: theta, written by a draw; the statistic of several samples in a step, see
        :class:`SampleAccumulator`. Used up by a step.
    :param hess: loss/weight²; a number before a task's first step. Changed in place.
    :param prior_mean: a tensor, or 0.
    :param prior_precision: 1/weight²; a number in the first task.
    :param rates: settings of the group, see :class:`CoVON`.
    :param dense: whether the mean has memory of its own without gaps.
    :param grad: loss/weight; for steps only, as what follows.
    :param momentum: changed in place.
    :param step: of the task, from 1.
    """

    name: str
    number: int
    mean: Tensor
    sample: Tensor
    hess: Any
    prior_mean: Any
    prior_precision: Any
    rates: Rates
    dense: bool
    grad: Any = None
    momentum: Any = None
    step: int = 0


class Rates(NamedTuple):
    """Settings of a group in a step.

    :param rest2: ``1 - beta2``.
    :param correction: ``1 / (1 - beta1**step)``, or 1 without debiasing.
    """

    ess: float
    lr: float
    beta1: float
    rest2: float
    correction: float
    clip_radius: float
    batch_size: float


def draw_samples(args: Sequence[StepArgs], key: int, implementation: Implementation) -> set[int]:
    """Write posterior samples (Algorithm 1, line 4).

    :param key: of the noise.
    :return: numbers of the parameters whose precision is not positive; on the CPU only, to
        avoid synchronising with an accelerator.
    """
    compiled, rest = _split(args, implementation)
    bad: set[int] = set()
    if compiled:
        from covon_avalanche.optim import cpu_kernel

        bad |= cpu_kernel.draw_samples(compiled, key)
    for bucket in _buckets(rest):
        samples = [noise.fill_normal_(a.sample, key, a.number) for a in bucket]
        std = multi_tensor.draw_samples(
            [a.mean for a in bucket],
            samples,
            _column(bucket, "hess"),
            _column(bucket, "prior_precision"),
            bucket[0].rates.ess,
        )
        if samples[0].device.type == "cpu":
            finite = [bool(torch.isfinite(s).all()) for s in std]
            bad |= {a.number for a, good in zip(bucket, finite, strict=True) if not good}
    return bad


def step(
    args: Sequence[StepArgs],
    implementation: Implementation,
    *,
    squared: bool,
    mc_samples: int,
    deferred: DeferredCheck,
) -> bool:
    """Update means, momenta and hessians in place (Algorithm 1, lines 6 to 9).

    :param squared: whether the Hessian estimate is that of squared gradients.
    :param deferred: checks the gradients on an accelerator.
    :return: whether all gradients on the CPU are finite and so small that a step cannot overflow;
        if not, nothing has changed.
    """
    compiled, rest = _split(args, implementation) if mc_samples == 1 else ([], list(args))
    limit = largest_gradient(squared, args[0].rates.batch_size) if args else 0.0
    on_cpu = [a for a in rest if a.mean.device.type == "cpu"]
    if not _norms_below([a.grad for a in on_cpu], limit):
        return False
    if mc_samples > 1 and not _norms_below([a.sample for a in on_cpu], LARGEST_ESTIMATE):
        return False
    if compiled:
        from covon_avalanche.optim import cpu_kernel

        if not cpu_kernel.step(compiled, squared, limit):
            return False
    finite: dict[torch.device, Tensor] = {}
    for device in {a.mean.device for a in rest} - {torch.device("cpu")}:
        there = [a for a in rest if a.mean.device == device]
        limits = [(a.name, a.grad, limit) for a in there]
        if mc_samples > 1:
            limits += [(a.name, a.sample, LARGEST_ESTIMATE) for a in there]
        finite[device] = deferred.add(limits, there[0].step)
    for bucket in _buckets(rest):
        means, grads = [a.mean for a in bucket], [a.grad for a in bucket]
        statistics = [a.sample for a in bucket]
        if mc_samples == 1 and not squared:
            torch._foreach_sub_(statistics, means)
            torch._foreach_mul_(statistics, grads)
        rates: dict[str, Any] = bucket[0].rates._asdict()
        constant = {key: rates.pop(key) for key in ("beta1", "clip_radius")}
        run: Callable[..., None] = multi_tensor.step
        device = means[0].device
        if device.type != "cpu" and implementation == "compiled":
            run = multi_tensor.compiled_step()
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


def _norms_below(tensors: list[Tensor], limit: float) -> bool:
    """Whether all norms are below a limit, which NaN is not."""
    if not tensors:
        return True
    return torch.stack(torch._foreach_norm(tensors)).max().item() < limit


def _split(
    args: Sequence[StepArgs], implementation: Implementation
) -> tuple[list[StepArgs], list[StepArgs]]:
    """Those for the CPU kernel, and the others."""
    compiled: list[StepArgs] = []
    rest: list[StepArgs] = []
    for a in args:
        (compiled if _fits_cpu_kernel(a, implementation) else rest).append(a)
    return compiled, rest


def _fits_cpu_kernel(args: StepArgs, implementation: Implementation) -> bool:
    p = args.mean
    if implementation == "foreach" or p.device.type != "cpu" or p.dtype != torch.float32:
        return False
    if not args.dense or not isinstance(args.hess, Tensor):
        return False
    if noise.compiled_fill() is not None:
        return True
    if implementation == "compiled":
        raise ValueError("implementation='compiled' needs a working numba on a CPU")
    return False


def _buckets(args: Sequence[StepArgs]) -> Iterator[list[StepArgs]]:
    """Parameters of the same device, dtype and rates, for multi-tensor operations."""
    kinds = [
        (
            str(a.mean.device),
            str(a.mean.dtype),
            a.rates,
            *(
                None if isinstance(v, Tensor) else v
                for v in (a.hess, a.prior_mean, a.prior_precision)
            ),
        )
        for a in args
    ]
    for _, some in groupby(zip(kinds, args, strict=True), lambda pair: pair[0]):
        bucket: list[StepArgs] = []
        entries = 0
        for _, a in some:
            if bucket and entries + a.mean.numel() > _MOST_ENTRIES:
                yield bucket
                bucket, entries = [], 0
            bucket.append(a)
            entries += a.mean.numel()
        yield bucket


def _column(bucket: list[StepArgs], field: str) -> list[Tensor] | float:
    """A field of a bucket: tensors, or the number that all have."""
    values = [getattr(a, field) for a in bucket]
    return values if isinstance(values[0], Tensor) else values[0]
