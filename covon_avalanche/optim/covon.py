"""CoVON: fast variational online Newton steps, slow merging of task posteriors.

Paper: "Fast and Slow Variational Continual Learning", Algorithm 1. The fast step is IVON
(Shen et al., "Variational Learning is Effective for Large Deep Networks", ICML 2024,
Algorithm 1) with the previous tasks' posterior as its prior. Written from the papers;
no code of the authors' repository or of ivon-opt was used. MIT licence.
"""

from __future__ import annotations

from itertools import compress
from typing import Any

import torch
from torch import Tensor

from covon_avalanche.gaussian import DiagGaussian, check_gamma, check_gaussian, merge_tensors
from covon_avalanche.optim.buffers import (
    SecondCopy,
    empty_beside,
    flat_blocks,
    free_places,
    second_copy,
)
from covon_avalanche.optim.checks import check_positive, check_precisions
from covon_avalanche.optim.job_cache import JobCache
from covon_avalanche.optim.kernels import Implementation, KernelsByDevice
from covon_avalanche.optim.kernels.formulas import covon_hess, covon_mean
from covon_avalanche.optim.kernels.job import Job
from covon_avalanche.optim.posterior_optimizer import Group, Place, PosteriorOptimizer, State
from covon_avalanche.optim.samples import SampleRecord


class CoVON(PosteriorOptimizer):
    """Continual variational online Newton.

    The posterior of a parameter is N(m, 1/(ess * hess + prior_precision)), where ``m`` is
    the parameter itself. See :class:`PosteriorOptimizer` for how to step.

    :param params: parameters, named parameters or groups, as for any torch optimizer. With
        names (``model.named_parameters()``) posteriors and errors carry them.
    :param lr: learning rate of the Newton step (dimensionless; not that of Adam).
    :param ess: effective sample size lambda, in examples; the number of training examples
        of the task is the Bayesian choice. Larger means less noise and weaker memory.
    :param hess_init: Hessian per example (loss/weight²) at the start of each task.
    :param betas: averaging coefficients of gradient and Hessian.
    :param weight_decay: precision per example of the first prior N(0, 1/s0), that is
        ``s0 = ess * weight_decay``. New parameters of later tasks start with it too.
    :param gamma: merging coefficient of Eq. 8 in (0, 1]; 1 is CoVON-NoM, plain VCL.
    :param clip_radius: largest change of a weight in a step, in units of ``lr``;
        ``float("inf")`` for none. Where the Hessian estimate is still noisy, Newton steps
        without a limit diverge.
    :param debias: correct the zero start of the gradient average.
    :param mc_samples: posterior samples per step.
    :param prior_mean: centre of the first prior: ``"zero"`` (the paper's), or ``"init"``,
        the starting weights, which is what fine-tuning a pretrained network needs.
    :param prior: a posterior to continue from instead, by parameter name; parameters it
        lacks get the first prior. Move the model to its device before.
    :param generator: source of the noise; by default one that is seeded by torch's global
        one at the first sample. With several processes it is required, seeded alike
        everywhere: gradients are averaged before they meet the noise.
    :param implementation: how the arithmetic is run: ``"compiled"`` in one pass over memory
        (CPU, by numba), ``"triton"`` in one launch (CUDA), ``"eager"`` by torch operations on
        blocks that fit a CPU's cache, ``"foreach"`` by torch operations on large blocks.
        ``"auto"`` takes the fastest there is. The first two make their own noise from keys
        drawn from the generator, so their samples differ from those of the others.
    :raises ValueError: naming the value and the rule.

    State per parameter: ``momentum``, ``hess``, ``step`` within a task; ``prior_mean`` and
    ``prior_precision`` from the first consolidation on (before it the prior is a number).
    """

    def __init__(
        self,
        params: Any,
        *,
        ess: float,
        lr: float = 0.05,
        hess_init: float = 0.05,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 1e-4,
        gamma: float = 0.8,
        clip_radius: float = 0.1,
        debias: bool = True,
        mc_samples: int = 1,
        prior_mean: str = "zero",
        prior: DiagGaussian | None = None,
        generator: torch.Generator | None = None,
        implementation: Implementation = "auto",
    ) -> None:
        self.implementation = implementation
        self._forget_plans()
        defaults = dict(
            lr=lr,
            ess=ess,
            hess_init=hess_init,
            betas=betas,
            weight_decay=weight_decay,
            gamma=gamma,
            clip_radius=clip_radius,
            debias=debias,
            mc_samples=mc_samples,
            prior_mean=prior_mean,
        )
        super().__init__(params, defaults, prior=prior, generator=generator)

    def check_group(self, group: Group) -> None:
        """Raise a ``ValueError`` naming value and rule for a bad hyperparameter."""
        super().check_group(group)
        check_positive("hess_init", group["hess_init"])
        check_gamma(group["gamma"])
        if not group["clip_radius"] > 0:
            raise ValueError(f"clip_radius must be > 0, got {group['clip_radius']}")
        if group["prior_mean"] not in ("zero", "init"):
            raise ValueError(f"prior_mean must be 'zero' or 'init', got {group['prior_mean']!r}")

    # State -----------------------------------------------------------------------------

    def _start_task(self, p: Tensor, group: Group) -> State:
        places = free_places(p, self.state.get(p, {}))
        start: State = {
            "step": 0,
            "momentum": empty_beside(p, next(places)).zero_(),
            "hess": empty_beside(p, next(places)).fill_(group["hess_init"]),
        }
        if group["prior_mean"] == "init":  # only counts where no prior is in the state yet
            start["prior_mean"] = empty_beside(p, next(places)).copy_(p)
        return start

    def _first_prior(self, p: Tensor, group: Group) -> State:
        centre = empty_beside(p, 4)
        centre.copy_(p) if group["prior_mean"] == "init" else centre.zero_()
        precision = empty_beside(p, 5).fill_(group["ess"] * group["weight_decay"])
        return {"prior_mean": centre, "prior_precision": precision}

    def _prior_precision(self, state: State, group: Group) -> Tensor | float:
        """That of the current task's prior; a number until the first consolidation."""
        return state.get("prior_precision", group["ess"] * group["weight_decay"])

    def _precision(self, p: Tensor, group: Group, train: bool) -> Tensor | float | None:
        state = self.state.get(p, {})
        if not train and "hess" not in state:
            return state.get("prior_precision")  # between tasks the slow posterior predicts
        prior_precision = self._prior_precision(state, group)
        return group["ess"] * state.get("hess", group["hess_init"]) + prior_precision

    # Sampling and the fast step --------------------------------------------------------

    def _draw(
        self, places: list[Place], copies: dict[Tensor, SecondCopy], train: bool
    ) -> list[tuple[Tensor, SecondCopy]]:
        states = [self.state.get(place.parameter, {}) for place in places]
        if not train:
            known = [bool(s.keys() & {"hess", "prior_precision"}) for s in states]
            places, states = list(compress(places, known)), list(compress(states, known))
        drawn = [(place.parameter, second_copy(copies, place.parameter)) for place in places]
        # Between tasks the slow posterior predicts.
        make = self._job if train else self._job_between_tasks
        jobs = self._jobs.get(places, states, [c.content for _, c in drawn], make, train)
        for kernel, some in self._kernels.split(jobs):
            bad = kernel.draw(some, self._noise, self._fill_noise)
            check_precisions([(job.name, _precision(job).min()) for job in bad])
        return drawn

    def _step(self, places: list[Place], record: SampleRecord) -> None:
        """The fast step, Algorithm 1, lines 6 to 9."""
        states, samples = [], []
        for _, p, group, _ in places:
            state = self.state.get(p, {})
            if "step" not in state:
                state = {**self._start_task(p, group), **state}
            states.append(state)
            theta = record.theta(p)
            samples.append(record.grad_times_noise(p) if theta is None else theta)
        jobs = self._jobs.get(places, states, samples, self._job, True)
        for job, state, (_, p, group, _) in zip(jobs, states, places, strict=True):
            job.grad = _in_layout(p.grad, p)
            job.averaged = record.mc_samples > 1
            job.momentum = state["momentum"]
            job.beta1, job.beta2 = group["betas"]
            job.lr, job.clip_radius = float(group["lr"]), group["clip_radius"]
            job.correction = 1 / (1 - job.beta1 ** (state["step"] + 1)) if group["debias"] else 1.0
        parts = self._kernels.split(jobs)
        several = len(parts) > 1  # no device may step if another cannot
        if several and not all(kernel.safe(some) for kernel, some in parts):
            done = False
        else:
            done = all(kernel.step(some, self._noise) for kernel, some in parts)
        for job in jobs:
            job.grad = None  # or it would outlive zero_grad()
        if record.mc_samples > 1:
            self._forget_plans()  # and so would the averages
        if not done:
            super()._step(places, record)  # whole tensors, checked before anything is changed
            return
        for state, place in zip(states, places, strict=True):
            state["step"] += 1
            self.state[place.parameter] = state

    def _job(self, place: Place, state: State, sample: Tensor) -> Job:
        return Job(
            name=place.name,
            number=place.number,
            mean=place.parameter.detach(),
            sample=sample,
            hess=state["hess"] if "hess" in state else place.group["hess_init"],
            prior_mean=state.get("prior_mean", 0.0),
            prior_precision=self._prior_precision(state, place.group),
            ess=place.group["ess"],
        )

    def _job_between_tasks(self, place: Place, state: State, sample: Tensor) -> Job:
        return self._job(place, {"hess": 0.0, **state}, sample)

    def _propose(
        self, p: Tensor, group: Group, state: State, grad: Tensor, grad_noise: Tensor
    ) -> tuple[Tensor, State]:
        """The fast step as pure functions, for steps that may not be finite."""
        beta1, beta2 = group["betas"]
        step = state["step"] + 1
        prior_precision = self._prior_precision(state, group)
        prior_hess = prior_precision / group["ess"]
        precision = group["ess"] * state["hess"] + prior_precision
        momentum = torch.lerp(state["momentum"], grad, 1 - beta1)
        hess = covon_hess(state["hess"], grad_noise * precision, prior_hess, beta2)
        mean = covon_mean(
            p,
            momentum / (1 - beta1**step) if group["debias"] else momentum,
            hess,
            state.get("prior_mean", 0.0),
            prior_hess,
            lr=group["lr"],
            clip_radius=group["clip_radius"],
        )
        return mean, {"step": step, "momentum": momentum, "hess": hess}

    @torch.no_grad()
    def consolidate(
        self, *, gamma: float | None = None, gamma_precision: float | None = None
    ) -> None:
        """The slow step, Eq. 8: merge the task's posterior into its prior.

        The parameters become the merged mean, and the merged Gaussian is the posterior used
        for prediction and the prior of the next task. Parameters that had no step in this
        task keep theirs.

        :param gamma: instead of the groups' ``gamma``.
        :param gamma_precision: a different coefficient for the precision.
        :raises ValueError: if the merged posterior is no Gaussian; nothing is changed then.
        """
        if self._inside:
            raise RuntimeError("consolidate() must be called outside of sampled_params()")
        for value, name in ((gamma, "gamma"), (gamma_precision, "gamma_precision")):
            if value is not None:
                check_gamma(value, name)
        trained = [p for p in self._places() if "hess" in self.state.get(p.parameter, {})]
        for write in (False, True):  # nothing is written before all is known to be Gaussian
            for place in trained:
                self._merge(place, gamma, gamma_precision, write=write)
        self._copies = {}
        self._forget_plans()
        self.discard_samples()

    def _merge(
        self, place: Place, gamma: float | None, gamma_precision: float | None, *, write: bool
    ) -> None:
        """Eq. 8 for a parameter, block by block, in the memory of its state."""
        p, group, state = place.parameter, place.group, self.state[place.parameter]
        prior_mean, prior_precision = state.get("prior_mean"), state.get("prior_precision")
        # In the first task momentum and hess, which are not needed any more, make room.
        new_mean = state["momentum"] if prior_mean is None else prior_mean
        new_precision = state["hess"] if prior_precision is None else prior_precision
        blocks = flat_blocks([p.detach(), state["hess"], new_mean, new_precision])
        for mean, hess, centre, precision in blocks:
            s0 = group["ess"] * group["weight_decay"] if prior_precision is None else precision
            merged_mean, merged_precision = merge_tensors(
                0.0 if prior_mean is None else centre,
                s0,
                mean,
                group["ess"] * hess + s0,
                group["gamma"] if gamma is None else gamma,
                gamma_precision,
            )
            if not write:
                check_gaussian(place.name, merged_mean, merged_precision)
                continue
            mean.copy_(merged_mean)
            centre.copy_(merged_mean)
            precision.copy_(merged_precision)
        if write:
            torch.autograd.graph.increment_version(p)
            self.state[p] = {"prior_mean": new_mean, "prior_precision": new_precision}

    # Copies ----------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "implementation": self.implementation}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._forget_plans()

    def _forget_plans(self) -> None:
        self._jobs = JobCache()
        self._kernels = KernelsByDevice(self.implementation)


def _in_layout(grad: Tensor | None, p: Tensor) -> Tensor:
    """The gradient with the parameter's dtype and strides, which the kernels rely on."""
    assert grad is not None
    if grad.stride() == p.stride() and grad.dtype == p.dtype:
        return grad
    return torch.empty_like(p).copy_(grad)


def _precision(job: Job) -> Tensor:
    return torch.as_tensor(job.ess * job.hess + job.prior_precision, dtype=job.mean.dtype)
