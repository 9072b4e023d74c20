"""``StepArgs`` with random content, and what ``fast_step`` makes of them in float64."""

import math

import torch
from torch import Tensor

from covon_avalanche.optim import cpu_kernel, multi_tensor
from covon_avalanche.optim.covon import fast_step
from covon_avalanche.optim.multi_tensor import DeferredCheck, Rates, StepArgs

SIZES = (1, 7, 1023, 1024, 1025, 16 * 1024 - 1, 16 * 1024, 2 * 16 * 1024 + 5)
"""Around the CPU kernel's groups and tiles."""

RATES = Rates(
    ess=60.0,
    lr=0.1,
    beta1=0.9,
    one_minus_beta2=0.01,
    bias_correction=0.8,
    clip_radius=0.5,
    batch_size=17.0,
)


MIXED = ["tensors", *["numbers"] * 3, *["centre"] * 2, *["tensors"] * 2]


def make_args(dtype, prior, *, sizes=SIZES) -> list[StepArgs]:
    """One parameter a size.

    :param prior: ``"tensors"``, ``"numbers"``, ``"centre"`` (a tensor for the mean only) or
        ``"mixed"``: neighbours that differ in any one of kind, number and rates.
    """
    generator = torch.Generator().manual_seed(0)

    def normal(n):
        return torch.randn(n, dtype=dtype, generator=generator)

    def positive(n):
        return torch.rand(n, dtype=dtype, generator=generator) + 0.1

    mixed, args = prior == "mixed", []
    for i, n in enumerate(sizes):
        kind = MIXED[i] if mixed else prior
        precision = float(i // 3) if mixed else 0.4
        args.append(
            StepArgs(
                name=f"p{i}",
                number=i,
                mean=normal(n),
                sample=normal(n),
                hess=positive(n),
                prior_mean=0.0 if kind == "numbers" else normal(n),
                prior_precision=positive(n) if kind == "tensors" else precision,
                rates=own_rates(i // 2) if mixed else RATES,
                grad=normal(n),
                momentum=normal(n),
                step=5,
            )
        )
    return args


def own_rates(i: int) -> Rates:
    """Of one group among several; one has no momentum and another no clipping."""
    rates = RATES._replace(
        ess=30.0 + i, lr=0.1 / (i + 1), beta1=0.8 - i / 10, one_minus_beta2=0.01 * (i + 1)
    )
    if i == 2:
        return rates._replace(beta1=0.0, bias_correction=1.0)
    return rates._replace(clip_radius=math.inf) if i == 3 else rates


def expected(args: StepArgs, *, squared: bool, mc_samples: int) -> tuple[Tensor, ...]:
    """Mean, momentum and hess after a step."""
    wide = args._asdict()
    wide = {k: v.double() if isinstance(v, Tensor) else v for k, v in wide.items()}
    statistic, rates = wide["sample"], args.rates
    if mc_samples == 1:
        g = wide["grad"]
        statistic = g**2 if squared else g * (statistic - wide["mean"])
    mean, momentum, hess = fast_step(
        wide["mean"],
        statistic,
        wide["grad"],
        wide["momentum"],
        wide["hess"],
        wide["prior_mean"],
        wide["prior_precision"],
        # the i with which the correction is the given one
        math.log(1 - rates.bias_correction) / math.log(rates.beta1) if rates.beta1 else 1,
        ess=rates.ess,
        lr=rates.lr,
        beta1=rates.beta1,
        beta2=1 - rates.one_minus_beta2,
        debias=True,
        clip_radius=rates.clip_radius,
        hess_approx="gradsq" if squared else "reparam",
        batch_size=rates.batch_size,
    )
    return mean, momentum, hess


def draw(args, implementation, key=3) -> bool:
    """Draw samples by the CPU kernel, for float32, or by multi-tensor operations."""
    fast = implementation == "compiled" and args[0].mean.dtype == torch.float32
    return (cpu_kernel if fast else multi_tensor).draw_samples(args, key)


def step(args, implementation, *, squared, mc_samples, limit=1e9) -> bool:
    """The same for a step of one sample; whether the gradients were below the limit."""
    fast = implementation == "compiled" and args[0].mean.dtype == torch.float32
    if fast and mc_samples == 1:
        return cpu_kernel.step(args, squared, limit)
    kind = dict(squared=squared, mc_samples=mc_samples, compiled=False)
    return multi_tensor.step(args, limit, deferred=DeferredCheck(), **kind)


def largest_error(args, implementation, **kind) -> float:
    """Of a step: the largest error, relative to the largest entry of each tensor."""
    answers = [expected(a, **kind) for a in args]
    assert step(args, implementation, **kind)
    return max(
        ((got.double() - want).abs().max() / want.abs().max()).item()
        for a, answer in zip(args, answers, strict=True)
        for got, want in zip((a.mean, a.momentum, a.hess), answer, strict=True)
    )
