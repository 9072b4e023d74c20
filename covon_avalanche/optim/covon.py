"""CoVON: fast variational online Newton steps, slow merging of task posteriors.

Paper: "Fast and Slow Variational Continual Learning", Algorithm 1. The fast step is IVON
(Shen et al., "Variational Learning is Effective for Large Deep Networks", ICML 2024,
Algorithm 1) with the previous tasks' posterior as its prior. Written from the papers;
no code of the authors' repository or of ivon-opt was used. MIT licence.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from itertools import compress
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from covon_avalanche.optim.buffers import (
    PRIOR_MEAN_SLOT,
    PRIOR_PRECISION_SLOT,
    SecondCopy,
    empty_beside,
    free_slots,
    laid_like,
    second_copy,
    settle,
)
from covon_avalanche.optim.checks import (
    all_below,
    check_betas,
    check_mean,
    check_one_process,
    check_positive,
    check_precisions,
)
from covon_avalanche.optim.consolidation import Consolidation, check_merge, merge_into_prior
from covon_avalanche.optim.curvature import (
    GRADIENT_TIMES_NOISE,
    Curvature,
    HessApprox,
    squared_example_gradients,
    squared_gradient,
)
from covon_avalanche.optim.diagnostics import Diagnostics, add, diagnose
from covon_avalanche.optim.hessian_average import beta2_at
from covon_avalanche.optim.job_cache import JobCache
from covon_avalanche.optim.kernels import Implementation, KernelsByDevice
from covon_avalanche.optim.kernels.formulas import covon_hess, covon_mean
from covon_avalanche.optim.kernels.job import LARGEST_ESTIMATE, Holds, Job
from covon_avalanche.optim.places import Group, Place, State
from covon_avalanche.optim.posterior_optimizer import PosteriorOptimizer
from covon_avalanche.optim.samples import SampleRecord
from covon_avalanche.posterior.gaussian import DiagGaussian, check_gamma

_MANY_STEPS = 100  # before them nobody expects a learned precision
_SHARE_TO_WARN = 0.9  # of hess still near hess_init
_GAMMA_PRECISION = 2.0  # where no estimate is negative; chosen in docs/permuted-mnist.md
_ASSUMED_BATCH_SIZE = 128  # where nobody tells; docs/permuted-mnist.md has what an error costs

_CHOICES = {"hess_approx": get_args(HessApprox), "consolidation": get_args(Consolidation)}


class CoVON(PosteriorOptimizer):
    """Continual variational online Newton.

    The posterior of a parameter is N(m, 1/(ess * hess + prior_precision)), where ``m`` is
    the parameter itself. See :class:`PosteriorOptimizer` for how to step.

    :param params: parameters, named parameters or groups, as for any torch optimizer. With
        names (``model.named_parameters()``) posteriors and errors carry them.
    :param lr: learning rate of the Newton step (dimensionless; not that of Adam).
    :param ess: effective sample size lambda, in examples; the number of training examples
        of the task is the Bayesian choice. Larger means less noise; larger than in the tasks
        before, a weaker memory of them.
    :param hess_init: Hessian per example (loss/weight²) at the start of each task.
    :param betas: averaging coefficients of gradient and Hessian. ``None`` for the latter: an
        average whose window grows with the task, ``50 + t / 10`` steps after ``t`` of them, see
        ``optim/hessian_average.py``; a number is Algorithm 1's.
    :param weight_decay: precision per example of the first prior N(0, 1/s0), that is
        ``s0 = ess * weight_decay``. New parameters of later tasks start with it too.
    :param gamma: merging coefficient of Eq. 8 in (0, 1]; 1, for the precision too, is CoVON-NoM,
        plain VCL. Above 1, an over-relaxation, is allowed with a warning.
    :param gamma_precision: the coefficient for the precision that a task adds to the prior.
        ``None``: ``gamma``, Eq. 8. A number: that; the mean is then normalised by its own weights
        (see ``gaussian.merge``). Above 1 it keeps more of the past than Bayes' rule, and the
        merged posterior is narrower; it needs a Hessian estimate that is never negative
        (``"gradsq"``, ``"per_example"``). ``"auto"``: 2 with these, else ``None``.
    :param clip_radius: largest change of a weight in a step, in units of ``lr``;
        ``float("inf")`` for none. Where the Hessian estimate is still noisy, Newton steps
        without a limit diverge.
    :param debias: correct the zero start of the gradient average.
    :param mc_samples: posterior samples per step.
    :param prior_mean: centre of the first prior: ``"zero"`` (the paper's), or ``"init"``,
        the starting weights, which is what fine-tuning a pretrained network needs.
    :param prior: a prior instead, by parameter name, such as the posterior of an earlier day;
        parameters it lacks get the first prior. The weights stay what they are: load its mean
        into the model to go on from there. Move the model to its device before.
    :param generator: source of the noise; by default one that is seeded by torch's global
        one at the first sample. With several processes it is required, seeded alike
        everywhere: gradients are averaged before they meet the noise.
    :param hess_approx: what estimates the curvature: ``"reparam"``, the paper's, from the
        gradient and the noise; ``"gradsq"``, the squared gradient times ``batch_size``;
        ``"per_example"``, exact squares of per-example gradients, for which
        :func:`covon_avalanche.posterior.fisher.track_example_squares` must watch the model;
        ``"auto"``, ``"gradsq"``, which may guess its ``batch_size``. See ``optim/curvature.py`` for
        derivations and noise. The same in all groups.
    :param batch_size: examples behind a step's gradient (over all processes), for
        ``"gradsq"``; in Avalanche the plugin sets it in each step. That of the first group
        counts. ``None`` with ``"auto"``: 128, with a warning; a wrong size is a wrong ``ess`` of
        the data, by the same factor.
    :param consolidation: what the end of a task does: ``"merge"``, Eq. 8, precision-aware;
        ``"ema"``, the same precision, but means averaged without it,
        ``(1 - gamma) m0 + gamma m``; ``"replace"``, no slow state: what the task alone adds to
        the first prior becomes the prior (negative entries of the Hessian count as 0);
        ``"none"``, plain IVON, which goes on. The last three are the ablations of the paper's
        Figure 2b.
    :param implementation: how the arithmetic is run: ``"compiled"`` in one pass over memory
        (CPU, by numba), ``"triton"`` in one launch (CUDA), ``"eager"`` by torch operations on
        blocks that fit a CPU's cache, ``"foreach"`` by torch operations on large blocks.
        ``"auto"`` takes the fastest there is. On a CPU with numba all draw the same samples;
        those of ``"triton"`` differ.
    :raises ValueError: naming the value and the rule.

    State per parameter: ``momentum``, ``hess``, ``step`` within a task; ``prior_mean`` and
    ``prior_precision`` from the first consolidation on, or from the start with ``prior``. Until
    then the prior's precision is a number, and so is its mean, except with ``"init"``.
    """

    own_setting = "hess_init"

    def __init__(
        self,
        params: Any,
        *,
        ess: float,
        lr: float = 0.01,
        hess_init: float = 0.03,
        betas: tuple[float, float | None] = (0.9, None),
        weight_decay: float = 1e-4,
        gamma: float = 0.9,
        gamma_precision: float | Literal["auto"] | None = "auto",
        clip_radius: float = 0.1,
        debias: bool = True,
        mc_samples: int = 1,
        prior_mean: str = "zero",
        prior: DiagGaussian | None = None,
        hess_approx: HessApprox = "auto",
        batch_size: float | None = None,
        consolidation: Consolidation = "merge",
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
            gamma_precision=gamma_precision,
            clip_radius=clip_radius,
            debias=debias,
            mc_samples=mc_samples,
            prior_mean=prior_mean,
            hess_approx=hess_approx,
            batch_size=batch_size,
            consolidation=consolidation,
        )
        super().__init__(params, defaults, prior=prior, generator=generator)

    def check_group(self, group: Group) -> None:
        """Raise a ``ValueError`` naming value and rule for a bad hyperparameter."""
        super().check_group(group)
        check_betas(group["betas"], second_may_be_none=True)
        check_positive("hess_init", group["hess_init"])
        check_gamma(group["gamma"])
        if group["gamma_precision"] not in (None, "auto"):
            check_positive("gamma_precision", group["gamma_precision"])
        if not group["clip_radius"] > 0:
            raise ValueError(f"clip_radius must be > 0, got {group['clip_radius']}")
        if group["prior_mean"] not in ("zero", "init"):
            raise ValueError(f"prior_mean must be 'zero' or 'init', got {group['prior_mean']!r}")
        for key, known in _CHOICES.items():
            if group[key] not in known:
                raise ValueError(f"{key} must be one of {known}, got {group[key]!r}")
        if group["hess_approx"] != self.param_groups[0]["hess_approx"]:
            raise ValueError(
                f"hess_approx must be the same in all groups, got {group['hess_approx']!r} and "
                f"{self.param_groups[0]['hess_approx']!r}"
            )
        if group["batch_size"] is not None:
            check_positive("batch_size", group["batch_size"])

    @property
    def hess_approx(self) -> HessApprox:
        """What estimates the curvature, the same in all groups; never ``"auto"``."""
        group = self.param_groups[0]
        if group["hess_approx"] == "auto":
            return "gradsq"
        return group["hess_approx"]

    # Curvature -------------------------------------------------------------------------

    def _curvature(self) -> Curvature:
        match self.hess_approx:
            case "gradsq":
                return squared_gradient(self._batch_size)
            case "per_example":
                check_one_process("hess_approx='per_example'")
                return squared_example_gradients(self._name)
        return GRADIENT_TIMES_NOISE

    def _holds(self, mc_samples: int) -> Holds:
        """What a step finds in the memory of the samples, see :class:`Job`."""
        reparam = self.hess_approx == "reparam"
        if mc_samples == 1 and self.hess_approx != "per_example":  # the kernel makes the estimate
            return "theta" if reparam else "nothing"
        return "product" if reparam else "hess"

    @torch.no_grad()
    def diagnostics(self) -> dict[str, Diagnostics]:
        """Whether the precision is being learned, by parameter name, and pooled over all under
        ``"all"``: see :class:`Diagnostics`. To be called within a task, best between a step
        and the next ``zero_grad``; empty before the first step."""
        found = {
            name: diagnose(p, group, state, self._prior_precision(state, group), self.hess_approx)
            for name, p, group, _ in self._places()
            if "hess" in (state := self.state.get(p, {}))
        }
        if not found:
            return {}
        pooled = {"all": add(list(found.values())), **found}
        return {name: sums.diagnostics() for name, sums in pooled.items()}

    def _warn_unless_learned(self, trained: list[Place]) -> None:
        """Say so if a task of some length has left the precision as it began."""
        steps = max((self.state[place.parameter]["step"] for place in trained), default=0)
        if steps < _MANY_STEPS:
            return
        share = self.diagnostics()["all"].hess_at_start
        if share > _SHARE_TO_WARN:
            warnings.warn(
                f"the posterior has not learned its precision: after {steps} steps {share:.0%} of "
                "the entries of hess are within 10 % of hess_init, so the prior it becomes is "
                "nearly isotropic; lower beta2 (None follows the task), choose hess_init nearer to "
                "the curvature, or see optimizer.diagnostics() before consolidate()",
                stacklevel=4,
            )

    def _warn_of_the_assumed_batch_size(self) -> None:
        group = self.param_groups[0]
        if group["hess_approx"] == "auto" and group["batch_size"] is None:
            warnings.warn(
                f"without batch_size CoVON assumes {_ASSUMED_BATCH_SIZE} examples behind each "
                "gradient, and a size that is far off costs accuracy: give batch_size=, or "
                "hess_approx='reparam', which needs none",
                stacklevel=7,
            )

    def _name(self, p: Tensor) -> str:
        return next(name for name, q, *_ in self._places() if q is p)

    def _gamma_precision(self, group: Group) -> float | None:
        given = group["gamma_precision"]
        if given != "auto":
            return given
        signed = self.hess_approx == "reparam" or group["consolidation"] != "merge"
        return None if signed else _GAMMA_PRECISION

    def _batch_size(self) -> float:
        group = self.param_groups[0]
        size = group["batch_size"]
        if size is None and group["hess_approx"] == "auto":
            return _ASSUMED_BATCH_SIZE
        if size is None:
            raise ValueError(
                "hess_approx='gradsq' needs the number of examples behind a gradient: give "
                "batch_size=, or set it in param_groups before sampled_params()"
            )
        check_positive("batch_size", size)
        return size

    # State -----------------------------------------------------------------------------

    def _start_task(self, p: Tensor, group: Group) -> State:
        slots = free_slots(p, self.state.get(p, {}))
        start: State = {
            "step": 0,
            "momentum": empty_beside(p, next(slots)).zero_(),
            "hess": empty_beside(p, next(slots)).fill_(group["hess_init"]),
        }
        if group["prior_mean"] == "init":  # only counts where no prior is in the state yet
            start["prior_mean"] = empty_beside(p, next(slots)).copy_(p)
        return start

    def _first_prior(self, p: Tensor, group: Group) -> State:
        centre = empty_beside(p, PRIOR_MEAN_SLOT)
        centre.copy_(p) if group["prior_mean"] == "init" else centre.zero_()
        precision = empty_beside(p, PRIOR_PRECISION_SLOT)
        precision.fill_(group["ess"] * group["weight_decay"])
        return {"prior_mean": centre, "prior_precision": precision}

    def _prior_precision(self, state: State, group: Group) -> Tensor | float:
        """That of the current task's prior; a number until the first consolidation."""
        return state.get("prior_precision", float(group["ess"]) * group["weight_decay"])

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
        if train and self.hess_approx == "per_example":
            for place in places:  # of a sample that no step has used
                vars(place.parameter).pop("example_squares", None)
        drawn = [(place.parameter, second_copy(copies, place.parameter)) for place in places]
        # Between tasks the slow posterior predicts.
        make = self._job if train else self._job_between_tasks
        jobs = self._draws.get(places, states, [c.content for _, c in drawn], make, train)
        key = self._noise.key() if jobs else 0
        for kernel, some in self._kernels.split(jobs):
            bad = kernel.draw(some, key)
            check_precisions([(job.name, job.lowest_precision) for job in bad])
        return drawn

    def _step(self, places: list[Place], record: SampleRecord) -> None:
        """The fast step, Algorithm 1, lines 6 to 9."""
        states, samples = [], []
        holds = self._holds(record.mc_samples)
        one_pass = holds in ("theta", "nothing")
        batch_size = self._batch_size() if holds == "nothing" else 1.0
        for _, p, group, _ in places:
            state = self.state.get(p, {})
            if "step" not in state:
                state = {**self._start_task(p, group), **state}
            states.append(state)
            samples.append(record.theta(p) if one_pass else record.statistic(p))
        if not any(state["step"] for state in states):
            self._warn_of_the_assumed_batch_size()
        jobs = self._jobs.get(places, states, samples, self._job)
        for job, state, place in zip(jobs, states, places, strict=True):
            job.holds, job.batch_size = holds, batch_size
            _refresh(job, state, place)
        parts = self._kernels.split(jobs)
        safe = (one_pass or all_below(samples, LARGEST_ESTIMATE)) and all(
            kernel.safe(some) for kernel, some in parts
        )
        if safe:
            next_key = self._noise.peek() if one_pass else None
            for kernel, some in parts:
                kernel.step(some, next_key)
        for job in jobs:
            job.grad = None  # or it would outlive zero_grad()
        if record.mc_samples > 1:
            self._forget_plans()  # and so would the averages
        if not safe:
            super()._step(places, record)  # whole tensors, checked before anything is changed
            return
        for state, place in zip(states, places, strict=True):
            if not state["step"]:
                self.state[place.parameter] = state
            state["step"] += 1

    def _job(self, place: Place, state: State, sample: Tensor) -> Job:
        return Job(
            name=place.name,
            number=place.number,
            mean=place.parameter.detach(),
            sample=sample,
            momentum=state.get("momentum"),
            hess=state["hess"] if "hess" in state else place.group["hess_init"],
            prior_mean=state.get("prior_mean", 0.0),
            prior_precision=self._prior_precision(state, place.group),
            ess=float(place.group["ess"]),
        )

    def _job_between_tasks(self, place: Place, state: State, sample: Tensor) -> Job:
        return self._job(place, {"hess": 0.0, **state}, sample)

    def _propose(
        self, p: Tensor, group: Group, state: State, grad: Tensor, statistic: Tensor
    ) -> tuple[Tensor, State]:
        """The fast step as pure functions, for steps that may not be finite."""
        beta1 = group["betas"][0]
        beta2 = beta2_at(group["betas"][1], state["step"])
        step = state["step"] + 1
        prior_precision = self._prior_precision(state, group)
        prior_hess = prior_precision / group["ess"]
        precision = group["ess"] * state["hess"] + prior_precision
        momentum = torch.lerp(state["momentum"], grad, 1 - beta1)
        estimate = statistic * precision if self.hess_approx == "reparam" else statistic
        hess = covon_hess(state["hess"], estimate, prior_hess, beta2)
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
        self,
        *,
        gamma: float | None = None,
        gamma_precision: float | None = None,
        means: Mapping[Tensor, Tensor] | None = None,
    ) -> None:
        """The slow step, Eq. 8: merge the task's posterior into its prior.

        The parameters become the merged mean, and the merged Gaussian is the posterior used
        for prediction and the prior of the next task. Parameters that had no step in this
        task keep theirs.

        :param gamma: instead of the groups' ``gamma``.
        :param gamma_precision: instead of the groups' ``gamma_precision``.
        :param means: merged means instead of Eq. 8's, by parameter and of its shape, such as those
            of :class:`covon_avalanche.merging.regmean.InputMoments`; the precision is Eq. 8's.
            Those of parameters that had no step do not count.
        :raises ValueError: if the merged posterior is no Gaussian, or a mean does not fit or is not
            finite; nothing is changed then.
        """
        if self._inside:
            raise RuntimeError("consolidate() must be called outside of sampled_params()")
        given = {"gamma": gamma, "gamma_precision": gamma_precision}
        instead = {key: value for key, value in given.items() if value is not None}
        for key, value in instead.items():
            check_gamma(value, key)
        trained = [
            place
            for place in self._places()
            if "hess" in self.state.get(place.parameter, {})
            and place.group["consolidation"] != "none"
        ]
        for name, p, *_ in trained:
            settle(name, p, self.state[p])
        self._warn_unless_learned(trained)
        merges = [
            (name, p, {**group, "gamma_precision": self._gamma_precision(group), **instead})
            for name, p, group, _ in trained
        ]
        for name, p, settings in merges:  # all, before anything is written
            check_merge(name, p, settings, self.state[p])
            if means and p in means:
                check_mean(name, means[p], p)
        for _, p, settings in merges:
            self.state[p] = merge_into_prior(p, settings, self.state[p])
            if means and p in means:
                p.copy_(means[p])
                self.state[p]["prior_mean"].copy_(means[p])
        self._copies = {}
        self._forget_plans()
        self.discard_samples()

    # Copies ----------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "implementation": self.implementation}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._forget_plans()

    def _forget_plans(self) -> None:
        self._jobs, self._draws = JobCache(), JobCache()  # what is drawn may have no gradient
        self._kernels = KernelsByDevice(self.implementation)


def _refresh(job: Job, state: State, place: Place) -> None:
    """Take over gradient and settings of a step."""
    p, group = place.parameter, place.group
    assert p.grad is not None
    job.grad = laid_like(p.grad, p, job.name, "the gradient")
    job.beta1, beta2 = group["betas"]
    job.beta2 = beta2_at(beta2, state["step"])
    job.lr, job.clip_radius = float(group["lr"]), group["clip_radius"]
    job.correction = 1 / (1 - job.beta1 ** (state["step"] + 1)) if group["debias"] else 1.0
