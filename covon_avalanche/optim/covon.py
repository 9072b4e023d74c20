"""CoVON: fast variational online Newton steps, slow merging of task posteriors.

Paper: "Fast and Slow Variational Continual Learning", Algorithm 1. The fast step is IVON
(Shen et al., "Variational Learning is Effective for Large Deep Networks", ICML 2024,
Algorithm 1) with the previous tasks' posterior as its prior. Written from the papers;
no code of the authors' repository or of ivon-opt was used. MIT licence.

:func:`fast_step` is the algorithm; ``cpu_kernel`` and ``multi_tensor`` are faster versions of it.
``PosteriorOptimizer.step`` checks settings and gradients and calls :meth:`CoVON._step`, which
collects each parameter's tensors and rates in ``StepArgs`` and hands them to one of the two; with
``implementation="reference"``, or where a gradient is suspect, ``PosteriorOptimizer._step`` calls
:func:`fast_step` for each parameter and checks the results before it writes them.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Mapping
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from covon_avalanche.checks import check_choice, check_positive
from covon_avalanche.optim import multi_tensor
from covon_avalanche.optim.checks import check_betas, check_given, check_precisions
from covon_avalanche.optim.diagnostics import (
    MANY_STEPS,
    Diagnostics,
    diagnose,
    warn_unless_learned,
)
from covon_avalanche.optim.hessian import HessApprox, beta2_at
from covon_avalanche.optim.interrupts import defer_interrupt
from covon_avalanche.optim.multi_tensor import (
    LARGEST_ESTIMATE,
    LARGEST_GRADIENT,
    DeferredCheck,
    Rates,
    StepArgs,
)
from covon_avalanche.optim.posterior_optimizer import (
    Group,
    NamedParam,
    PosteriorOptimizer,
    State,
)
from covon_avalanche.optim.samples import (
    SampleAccumulator,
    SampleBuffer,
    align_state_,
    bump_versions,
    compiled_fill,
    match_layout,
)
from covon_avalanche.posterior.gaussian import (
    DiagGaussian,
    check_gamma,
    check_gaussian,
    merge_tensors,
)

Implementation = Literal["auto", "compiled", "foreach", "reference"]
Consolidation = Literal["merge", "replace", "none"]

ALGORITHM_1: dict[str, Any] = dict(hess_approx="reparam", betas=(0.9, 0.9999), gamma_precision=None)
"""The paper's choices where the defaults differ: ``CoVON(params, ess=N, **ALGORITHM_1)``.
Algorithm 1 as printed has no ``clip_radius``, the paper's experiments have one; for none add
``clip_radius=float("inf")``."""

_GAMMA_PRECISION = 2.0  # for estimates that are never negative; chosen in docs/permuted-mnist.md


def fast_step(
    mean: Tensor,
    statistic: Tensor,
    grad: Tensor,
    momentum: Tensor,
    hess: Tensor,
    prior_mean: Tensor | float,
    prior_precision: Tensor | float,
    i: int,
    *,
    ess: float,
    lr: float,
    beta1: float,
    beta2: float,
    debias: bool,
    clip_radius: float,
    hess_approx: HessApprox,
    batch_size: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Iteration ``i`` of Algorithm 1's inner loop for one parameter tensor, after the gradient.

    The reference: to try a change, edit it and pass ``implementation="reference"``.

    :param statistic: average over the posterior samples of ``grad * (theta - mean)``, or, for
        ``"gradsq"``, of ``grad²``; theta was drawn with the variance of line 4.
    :param grad: average gradient of the mini-batch loss over the samples (line 5), loss/weight.
    :return: new mean, momentum and hess. All tensors have the shape of the parameter.
    """
    delta = prior_precision / ess
    if hess_approx == "gradsq":
        hess_hat = batch_size * statistic
    else:
        hess_hat = statistic * (ess * hess + prior_precision)  # line 6; 1/sigma² of line 4
    momentum = torch.lerp(momentum, grad, 1 - beta1)  # line 7
    momentum_hat = momentum / (1 - beta1**i) if debias else momentum
    # line 8; the retraction of its last term keeps hess + delta positive (Lin et al., 2020)
    change = (1 - beta2) * (hess_hat - hess)
    hess = hess + change + 0.5 * change.square() / (hess + delta)
    newton = (momentum_hat + delta * (mean - prior_mean)) / (hess + delta)
    mean = mean - lr * newton.clamp(-clip_radius, clip_radius)  # line 9
    return mean, momentum, hess


class CoVON(PosteriorOptimizer):
    """Continual variational online Newton.

    The posterior of a parameter is N(m, 1/(ess * hess + prior_precision)), where ``m`` is
    the parameter itself. See :class:`PosteriorOptimizer` for how to step.

    :param params: parameters, named parameters or groups, as for any torch optimizer. With
        names (``model.named_parameters()``) posteriors and errors carry them.
    :param lr: learning rate of the Newton step (dimensionless; not that of Adam).
    :param ess: effective sample size lambda, in examples; the number of training examples
        of the task is the Bayesian choice. Larger means less noise, and, if larger than in
        earlier tasks, a weaker memory of them. May be left out if a plugin with
        ``ess_per_example`` sets it.
    :param hess_init: Hessian per example (loss/weight²) at the start of each task.
    :param betas: averaging coefficients of gradient and Hessian. ``None`` for the latter: an
        average whose window grows within the task, to ``50 + t / 10`` after ``t`` steps, see
        ``optim/hessian.py``; a number gives the fixed coefficient of Algorithm 1.
    :param weight_decay: precision per example of the first prior N(0, 1/s0), that is
        ``s0 = ess * weight_decay``. New parameters of later tasks start with it too. 0, as in
        timm's groups without weight decay, is an improper flat prior: only ``hess`` bounds the
        variance then, so keep ``hess_init`` positive, or give ``min_weight_decay``.
    :param min_weight_decay: least ``weight_decay`` of any group, such as timm's for biases and
        norms.
    :param gamma: merging coefficient of Eq. 8 in (0, 1]; 1, for the precision too, is CoVON-NoM,
        plain VCL. Above 1, an over-relaxation, is allowed with a warning.
    :param gamma_precision: the coefficient for the precision that a task adds to the prior.
        ``None``: use ``gamma``, as in Eq. 8. With a number, the mean is normalised by its own
        weights (see ``posterior.merge``). Above 1 it keeps more of the past than Bayes' rule, and
        the merged posterior is narrower; it needs a Hessian estimate that is never negative
        (``"gradsq"``). ``"auto"``: 2 with ``"gradsq"``, else ``None``.
    :param clip_radius: largest change of a weight in a step, in units of ``lr``;
        ``float("inf")`` for none. While the Hessian estimate is dominated by noise, unlimited
        Newton steps diverge.
    :param debias: correct the gradient average for its start at zero.
    :param mc_samples: posterior samples per step.
    :param prior_mean: centre of the first prior: ``"zero"`` (the paper's), or ``"init"``,
        the starting weights, which is what fine-tuning a pretrained network needs.
    :param prior: Gaussian to use as the first prior, by parameter name, such as the posterior of
        an earlier run; parameters it lacks get the default prior. The weights are not changed: to
        continue from the prior, load its mean into the model. Move the model to its device first.
    :param hess_approx: the estimate of the Hessian's diagonal: ``"gradsq"``, the squared gradient
        times ``batch_size``, or ``"reparam"``, the paper's, from the gradient and the noise. See
        ``optim/hessian.py`` for derivations and noise. The same in all groups.
    :param batch_size: examples behind a step's gradient (over all processes), for
        ``"gradsq"``; with Avalanche :class:`CoVONPlugin` sets it in each step. Only the first
        group's value is used.
    :param consolidation: what happens at the end of a task: ``"merge"``, Eq. 8; ``"replace"``, no
        slow state: what the task alone adds to the first prior becomes the prior (negative entries
        of the Hessian count as 0); ``"none"``, plain IVON without consolidation. The last two, and
        :class:`covon_avalanche.merging.EMA` with ``gamma_precision=None``, are the ablations of
        the paper's Figure 2b.
    :param generator: gives the seed of the noise at the first sample; by default torch's global
        generator does. With several processes it is required, with the same seed on all ranks.
    :param implementation: ``"foreach"``, torch's multi-tensor operations; ``"compiled"``, numba on
        CPUs and ``torch.compile`` on accelerators; ``"reference"``, :func:`fast_step` parameter by
        parameter. ``"auto"``: ``"compiled"`` on CPUs with numba, else ``"foreach"``. Models on a
        CPU with trained weights that are float64, tensor subclasses or strided with gaps always
        use ``"foreach"``. On a given device, all implementations draw the same samples.
    :raises ValueError: naming the value and the rule.

    State per parameter: ``momentum``, ``hess``, ``step`` within a task; ``prior_mean`` and
    ``prior_precision`` from the first consolidation on, or from the start with ``prior``. Until
    then the prior's precision is a number, and so is its mean, except with ``"init"``.

    On a CPU all gradients are checked before a step changes anything. An accelerator skips a step
    with gradients that are not finite, or so large that a float32 Hessian might overflow, without
    synchronisation; a later step, ``consolidate()`` or ``state_dict()`` raises. A skipped step
    still counts for the averages.
    """

    own_setting = "hess_init"

    def __init__(
        self,
        params: Any,
        *,
        ess: float | None = None,
        lr: float = 0.01,
        hess_init: float = 0.03,
        betas: tuple[float, float | None] = (0.9, None),
        weight_decay: float = 1e-4,
        min_weight_decay: float = 0.0,
        gamma: float = 0.9,
        gamma_precision: float | Literal["auto"] | None = "auto",
        clip_radius: float = 0.1,
        debias: bool = True,
        mc_samples: int = 1,
        prior_mean: Literal["zero", "init"] = "zero",
        prior: DiagGaussian | None = None,
        hess_approx: HessApprox = "gradsq",
        batch_size: float | None = None,
        consolidation: Consolidation = "merge",
        generator: torch.Generator | None = None,
        implementation: Implementation = "auto",
    ) -> None:
        check_choice("implementation", implementation, get_args(Implementation))
        check_gamma(gamma)  # which may warn
        self.implementation = implementation
        self._deferred = DeferredCheck()
        defaults = dict(
            lr=lr,
            ess=ess,
            hess_init=hess_init,
            betas=betas,
            weight_decay=weight_decay,
            min_weight_decay=min_weight_decay,
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
        check_positive("gamma", group["gamma"])
        if group["gamma_precision"] not in (None, "auto"):
            check_positive("gamma_precision", group["gamma_precision"])
        if group["clip_radius"] != math.inf:
            check_positive("clip_radius", group["clip_radius"])
        check_choice("prior_mean", group["prior_mean"], ("zero", "init"))
        check_choice("hess_approx", group["hess_approx"], get_args(HessApprox))
        check_choice("consolidation", group["consolidation"], get_args(Consolidation))
        if group["hess_approx"] != self.hess_approx:
            raise ValueError(
                f"hess_approx must be the same in all groups, got {group['hess_approx']!r} and "
                f"{self.hess_approx!r}"
            )
        if group["batch_size"] is not None:
            check_positive("batch_size", group["batch_size"])

    @property
    def hess_approx(self) -> HessApprox:
        """The estimate of the Hessian, the same in all groups."""
        approx: HessApprox = self.param_groups[0]["hess_approx"]
        return approx

    def _batch_size(self) -> float:
        size = self.param_groups[0]["batch_size"]
        if size is None and self.hess_approx == "gradsq":
            raise ValueError(
                "hess_approx='gradsq' needs the number of examples behind each gradient: pass "
                "batch_size=..., or hess_approx='reparam', which needs none"
            )
        return float(size or 1)

    def _new_record(self) -> SampleAccumulator:
        return SampleAccumulator(self.mc_samples, squared=self.hess_approx == "gradsq")

    # State -----------------------------------------------------------------------------

    def _start_task(self, p: Tensor, group: Group) -> State:
        start: State = {
            "step": 0,
            "momentum": torch.zeros_like(p, requires_grad=False),
            "hess": torch.full_like(p, group["hess_init"], requires_grad=False),
        }
        if group["prior_mean"] == "init":  # unless a prior is in the state already
            start["prior_mean"] = p.detach().clone()
        return start

    def _first_prior(self, p: Tensor, group: Group) -> State:
        init = group["prior_mean"] == "init"
        precision = group["ess"] * group["weight_decay"]
        return {
            "prior_mean": p.detach().clone() if init else torch.zeros_like(p, requires_grad=False),
            "prior_precision": torch.full_like(p, precision, requires_grad=False),
        }

    def _state_needs(self, group: Group) -> dict[str, set[str]]:
        return {
            "step": {"momentum", "hess"},
            "momentum": {"step", "hess"},
            "hess": {"step", "momentum"},
            "prior_precision": {"prior_mean"},
        }

    def _prior_precision(self, state: State, group: Group) -> Tensor | float:
        """Precision of the current prior; a number until the first consolidation."""
        return state.get("prior_precision", float(group["ess"]) * group["weight_decay"])

    def _hess(self, p: Tensor, group: Group, train: bool) -> Tensor | float | None:
        """Hessian of the posterior to sample from; between tasks, that of the merged one."""
        state = self.state.get(p, {})
        if not train and "hess" not in state:
            return 0.0 if "prior_precision" in state else None
        return state.get("hess", float(group["hess_init"]))

    def _precision(self, p: Tensor, group: Group, train: bool) -> Tensor | float | None:
        hess = self._hess(p, group, train)
        if hess is None:
            return None
        return group["ess"] * hess + self._prior_precision(self.state.get(p, {}), group)

    # Sampling and the fast step --------------------------------------------------------

    def _draw(
        self, params: list[NamedParam], buffers: dict[Tensor, SampleBuffer], train: bool, key: int
    ) -> dict[Tensor, SampleBuffer]:
        """Algorithm 1, line 4."""
        if train:
            self._batch_size()  # raises where the step would, before the forward pass
        if self.implementation == "reference":
            return super()._draw(params, buffers, train, key)
        drawn: dict[Tensor, SampleBuffer] = {}
        args: list[StepArgs] = []
        for named in params:
            name, p, group, _ = named
            hess = self._hess(p, group, train)
            if hess is None:
                continue
            drawn[p] = self._buffer(buffers, p, name)  # which may replace the state's tensors
            state = self.state.get(p, {})
            if not isinstance(hess, Tensor):
                state = {**state, "hess": torch.full_like(p, hess, requires_grad=False)}
            args.append(self._step_args(named, state, 1, drawn[p].content))
        if self._use_cpu_kernel(drawn.values()):
            from covon_avalanche.optim import cpu_kernel

            good = cpu_kernel.draw_samples(args, key)
        else:
            good = multi_tensor.draw_samples(args, key)
        if not good:
            check_precisions(
                [(a.name, (a.rates.ess * a.hess + a.prior_precision).min()) for a in args]
            )
        return drawn

    def _step(self, params: list[NamedParam], record: SampleAccumulator) -> None:
        """Algorithm 1, lines 6 to 9."""
        if self.implementation == "reference":
            super()._step(params, record)
            return
        states = [self._task_state(named.param, named.group) for named in params]
        args = []
        for named, state in zip(params, states, strict=True):
            name, p, *_ = named
            if not self._buffers[p].fits(p):
                raise RuntimeError(f"{name!r} was cast or moved between its sample and step()")
            sample = record.theta(p) if record.mc_samples == 1 else record.statistic(p)
            sample = match_layout(sample, p, name, "the sample")
            assert p.grad is not None
            grad = match_layout(p.grad, p, name, "the gradient")
            args.append(self._step_args(named, state, state["step"] + 1, sample, grad))
        limit = LARGEST_GRADIENT
        if record.squared:
            limit = min(limit, math.sqrt(LARGEST_ESTIMATE / self._batch_size()))
        if record.mc_samples == 1 and self._use_cpu_kernel(self._buffers[p] for _, p, *_ in params):
            from covon_avalanche.optim import cpu_kernel

            done = cpu_kernel.step(args, record.squared, limit)
        else:
            done = multi_tensor.step(
                args,
                limit,
                squared=record.squared,
                mc_samples=record.mc_samples,
                compiled=self.implementation == "compiled",
                deferred=self._deferred,
            )
        if not done:  # gradients that are not finite, which raise here, or large
            super()._step(params, record)
            return
        bump_versions(named.param for named in params)
        for named, state in zip(params, states, strict=True):
            state["step"] += 1
            self.state[named.param] = state

    def _use_cpu_kernel(self, buffers: Iterable[SampleBuffer]) -> bool:
        """Whether numba makes a draw or a step; it does if it can for all parameters."""
        if self.implementation == "foreach" or not all(b.for_cpu_kernel for b in buffers):
            return False
        if self.implementation == "compiled" and compiled_fill() is None:
            raise ValueError("implementation='compiled' needs a working numba on a CPU")
        return compiled_fill() is not None

    def _step_args(
        self,
        named: NamedParam,
        state: State,
        i: int,
        sample: Tensor,
        grad: Tensor | None = None,
    ) -> StepArgs:
        """Arguments of iteration ``i`` of the task."""
        group = named.group
        beta1, beta2 = group["betas"]
        rates = Rates(
            ess=float(group["ess"]),
            lr=float(group["lr"]),
            beta1=beta1,
            one_minus_beta2=1 - beta2_at(beta2, i - 1),
            bias_correction=1 - beta1**i if group["debias"] else 1.0,
            clip_radius=group["clip_radius"],
            batch_size=float(self.param_groups[0]["batch_size"] or 1),
        )
        return StepArgs(
            name=named.name,
            number=named.number,
            mean=named.param,
            sample=sample,
            hess=state["hess"],
            prior_mean=state.get("prior_mean", 0.0),
            prior_precision=self._prior_precision(state, group),
            rates=rates,
            grad=grad,
            momentum=state.get("momentum"),
            step=i,
        )

    def _propose(
        self, p: Tensor, group: Group, state: State, grad: Tensor, statistic: Tensor
    ) -> tuple[Tensor, State]:
        beta1, beta2 = group["betas"]
        mean, momentum, hess = fast_step(
            p,
            statistic,
            grad,
            state["momentum"],
            state["hess"],
            state.get("prior_mean", 0.0),
            self._prior_precision(state, group),
            state["step"] + 1,
            ess=group["ess"],
            lr=group["lr"],
            beta1=beta1,
            beta2=beta2_at(beta2, state["step"]),
            debias=group["debias"],
            clip_radius=group["clip_radius"],
            hess_approx=self.hess_approx,
            batch_size=self._batch_size(),
        )
        return mean, {"step": state["step"] + 1, "momentum": momentum, "hess": hess}

    # The slow step ---------------------------------------------------------------------

    def consolidate(
        self,
        *,
        gamma: float | None = None,
        gamma_precision: float | None = None,
        means: Mapping[Tensor, Tensor] | None = None,
    ) -> None:
        """Merge the task's posterior into its prior (Eq. 8).

        The parameters become the merged mean, and the merged Gaussian is the posterior used
        for prediction and the prior of the next task. Parameters that had no step in this
        task keep theirs.

        :param gamma: instead of the groups' ``gamma``.
        :param gamma_precision: instead of the groups' ``gamma_precision``.
        :param means: merged means instead of Eq. 8's, by parameter and of its shape, such as those
            of a rule in :mod:`covon_avalanche.merging`; the precision is Eq. 8's. Those of
            parameters that had no step are not used.
        :raises ValueError: if the merged posterior is not a Gaussian, or a mean does not fit or is
            not finite; nothing is changed then.
        """
        if self._in_place:
            raise RuntimeError("consolidate() must be called outside of sampled_params()")
        self._deferred.raise_if_bad(wait=True)
        given = {"gamma": gamma, "gamma_precision": gamma_precision}
        instead = {key: value for key, value in given.items() if value is not None}
        for key, value in instead.items():
            check_gamma(value, key)
        trained = [
            named
            for named in self._named_params()
            if "hess" in self.state.get(named.param, {}) and named.group["consolidation"] != "none"
        ]
        steps = max((self.state[named.param]["step"] for named in trained), default=0)
        if steps >= MANY_STEPS:
            warn_unless_learned(steps, self.diagnostics()["all"])
        with defer_interrupt(), torch.no_grad():
            for name, p, group, _ in trained:  # check all before anything is written
                align_state_(self.state[p], p, name)
                check_gaussian(name, *self._merged(p, {**group, **instead}))
                if means and p in means:
                    check_given(name, means[p], p, "mean")
            for _, p, group, _ in trained:
                mean, precision = self._merged(p, {**group, **instead})
                p.copy_(means[p] if means and p in means else mean)
                self.state[p] = {"prior_mean": p.detach().clone(), "prior_precision": precision}
            self._buffers = {}
            self.discard_samples()

    def _merged(self, p: Tensor, group: Group) -> tuple[Tensor, Tensor]:
        """Mean and precision after the task."""
        state, ess, gamma_precision = self.state[p], group["ess"], group["gamma_precision"]
        if group["consolidation"] == "replace":
            return p.detach(), ess * state["hess"].clamp(min=0) + ess * group["weight_decay"]
        if gamma_precision == "auto":
            gamma_precision = None if self.hess_approx == "reparam" else _GAMMA_PRECISION
        m0, s0 = state.get("prior_mean", 0.0), self._prior_precision(state, group)
        precision = ess * state["hess"] + s0
        return merge_tensors(m0, s0, p.detach(), precision, group["gamma"], gamma_precision)

    @torch.no_grad()
    def diagnostics(self) -> dict[str, Diagnostics]:
        """Whether the precision is being learned, by parameter name, and pooled over all under
        ``"all"``: see :class:`Diagnostics`. To be called within a task, best between a step
        and the next ``zero_grad``; empty before the first step."""
        trained = {
            name: (p, group, state, self._prior_precision(state, group))
            for name, p, group, _ in self._named_params()
            if "hess" in (state := self.state.get(p, {}))
        }
        if not trained:
            return {}
        found = {name: diagnose([one], self.hess_approx) for name, one in trained.items()}
        return {"all": diagnose(list(trained.values()), self.hess_approx), **found}

    # torch.optim -----------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Groups and state, the noise included."""
        self._deferred.raise_if_bad(wait=True)
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """See :meth:`PosteriorOptimizer.load_state_dict`. Hessian estimates of earlier versions
        become ``"gradsq"``, and ``consolidation="ema"`` becomes ``"merge"``, with a warning."""
        groups = [dict(group) for group in state_dict["param_groups"]]
        for group in groups:
            if group.get("hess_approx") in ("auto", "per_example"):
                group["hess_approx"] = "gradsq"
            if group.get("consolidation") == "ema":
                group["consolidation"] = "merge"
                if group.get("gamma_precision") == "auto":
                    group["gamma_precision"] = None
                warnings.warn(
                    "consolidation='ema' is gone: to average means without the precision merge "
                    f"with covon_avalanche.merging.EMA({group['gamma']})",
                    stacklevel=2,
                )
        super().load_state_dict({**state_dict, "param_groups": groups})

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "implementation": self.implementation}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._deferred = DeferredCheck()
