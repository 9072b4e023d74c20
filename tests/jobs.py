"""Jobs for the step kernels with random content, and the pure functions' answer to them."""

import torch
from covon_avalanche.optim.kernels.formulas import covon_hess, covon_mean
from covon_avalanche.optim.kernels.job import Job

SIZES = (1, 7, 511, 512, 513, 1500, 2048, 2**17 + 3)


def make_jobs(dtype, prior, *, holds="theta", sizes=SIZES):
    """One job a size.

    :param prior: ``"tensors"``, ``"numbers"`` or ``"centre"`` (a tensor for the mean only).
    """
    generator = torch.Generator().manual_seed(0)

    def normal(n):
        return torch.randn(n, dtype=dtype, generator=generator)

    def positive(n):
        return torch.rand(n, dtype=dtype, generator=generator) + 0.1

    return [
        Job(
            name=f"p{i}",
            number=i,
            mean=normal(n),
            sample=normal(n),
            grad=normal(n),
            momentum=normal(n),
            hess=positive(n),
            prior_mean=0.3 if prior == "numbers" else normal(n),
            prior_precision=positive(n) if prior == "tensors" else 0.4,
            ess=60.0,
            holds=holds,
            beta1=0.9,
            beta2=0.99,
            batch_size=17.0,
            lr=0.1,
            clip_radius=0.5,
            correction=1.3,
        )
        for i, n in enumerate(sizes)
    ]


def expected(job):
    """Mean, momentum and hess after a step, in float64."""
    wide = {k: v.double() for k, v in vars(job).items() if isinstance(v, torch.Tensor)}
    mean, grad, hess = wide["mean"], wide["grad"], wide["hess"]
    prior_precision = wide.get("prior_precision", job.prior_precision)
    prior_hess = prior_precision / job.ess
    estimate = wide["sample"]
    if job.holds == "theta":
        estimate = grad * (estimate - mean)
    if job.holds == "nothing":
        estimate = job.batch_size * grad**2
    if job.holds in ("theta", "product"):
        estimate = estimate * (job.ess * hess + prior_precision)
    new_hess = covon_hess(hess, estimate, prior_hess, job.beta2)
    momentum = torch.lerp(wide["momentum"], grad, 1 - job.beta1)
    new_mean = covon_mean(
        mean,
        momentum * job.correction,
        new_hess,
        wide.get("prior_mean", job.prior_mean),
        prior_hess,
        lr=job.lr,
        clip_radius=job.clip_radius,
    )
    return new_mean, momentum, new_hess


def largest_error(jobs, step):
    """Largest relative error of what ``step()`` makes, in units of each tensor's largest entry."""
    answers = [expected(job) for job in jobs]
    step()
    errors = []
    for job, answer in zip(jobs, answers, strict=True):
        for got, want in zip((job.mean, job.momentum, job.hess), answer, strict=True):
            errors.append(((got.double() - want).abs().max() / want.abs().max()).item())
    return max(errors)


def same_as_drawn_anew(plan, jobs):
    """Whether a step's own next sample is, bit by bit, what drawing with its key gives; and
    has the posterior's spread."""
    assert plan.safe()
    plan.step(77)
    ahead = [job.sample.clone() for job in jobs]
    assert plan.draw(77) == []
    noise = torch.cat(
        [(j.sample - j.mean).double() * (j.ess * j.hess + j.prior_precision) ** 0.5 for j in jobs]
    )
    n = len(noise)
    assert abs(noise.mean()) < 5 / n**0.5
    assert abs(noise.var() - 1) < 5 * (2 / n) ** 0.5
    return all(torch.equal(a, job.sample) for a, job in zip(ahead, jobs, strict=True))
