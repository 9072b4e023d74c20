"""CoVON: fast variational online Newton steps, slow merging of task posteriors.

Paper: "Fast and Slow Variational Continual Learning", Algorithm 1. The fast step is IVON
(Shen et al., "Variational Learning is Effective for Large Deep Networks", ICML 2024,
Algorithm 1) with the previous tasks' posterior as its prior. Written from the papers;
no code of the authors' repository or of ivon-opt was used. MIT licence.

:func:`fast_step` is the algorithm for one parameter, in ``fast_step.py``; ``cpu_kernel.step`` and
``multi_tensor.step`` do the same for lists of parameters, faster. ``PosteriorOptimizer.step``
checks settings and gradients, then :meth:`CoVON._step` calls one of these two. With
``implementation="reference"``, or where a gradient is suspect, ``PosteriorOptimizer._step`` calls
:func:`fast_step` for each parameter instead, and checks all results before it writes them. The
slow step, Eq. 8, is ``posterior.gaussian.merge_tensors``.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from covon_avalanche.checks import check_choice, check_positive
from covon_avalanche.float64 import exact_sum
from covon_avalanche.optim import multi_tensor, natural_units
from covon_avalanche.optim.averaging import beta1_at, beta2_at
from covon_avalanche.optim.checks import check_betas, check_given, check_keys, check_precisions
from covon_avalanche.optim.diagnostics import Diagnostics, diagnose, warn_unless_learned
from covon_avalanche.optim.fast_step import StepSettings, fast_step
from covon_avalanche.optim.hessian import HessApprox
from covon_avalanche.optim.interrupts import defer_interrupt
from covon_avalanche.optim.named_params import NamedParam
from covon_avalanche.optim.natural_units import ess_of, has_natural_units
from covon_avalanche.optim.posterior_optimizer import (
    Group,
    PosteriorOptimizer,
    State,
    current_prior,
    first_precision,
    prior_dtype,
)
from covon_avalanche.optim.samples import (
    Buffers,
    SampleAccumulator,
    align_state_,
    bump_versions,
    compiled_kernel,
    copy_rounded_,
    match_layout,
    noise_key,
    pieces,
    state_dtype,
)
from covon_avalanche.optim.sharding import (
    first_entry,
    is_sharded,
    local,
    sharded_like,
    true_everywhere,
)
from covon_avalanche.posterior.gaussian import (
    DiagGaussian,
    check_gamma,
    check_gaussian,
    merge_tensors,
)
from covon_avalanche.presets import FINETUNING, FROM_SCRATCH, REPARAM

Implementation = Literal["auto", "compiled", "foreach", "reference"]
SlowStep = Literal["eq8", "replace", "none"]

_GAMMA_PRECISION = 2.0  # in the paper's units; chosen in docs/permuted-mnist.md
_LARGEST_GRADIENT = 1e9  # beyond it a Hessian estimate may overflow float32
_LARGEST_ESTIMATE = 1e15  # beyond it the square of a Hessian estimate may
_MANY_STEPS = 100  # before them a precision is not expected to be learned


class Bucket(NamedTuple):
    """Parameters that one call of a fast version can process: of one group, device and dtype, at
    the same step of the task, and with the same kind of prior."""

    group: Group
    params: list[NamedParam]
    means: list[Tensor]
    states: list[State]

    @property
    def i(self) -> int:
        """The iteration of the task that comes next, from 1."""
        return int(self.states[0]["step"]) + 1

    def entries(self, key: str, number: float = 0.0) -> Any:
        """One state entry of each parameter; before the first consolidation, a prior is a single
        number."""
        return [state[key] for state in self.states] if key in self.states[0] else number


class CoVON(PosteriorOptimizer):
    """Continual variational online Newton.

    The posterior of a parameter is N(m, 1/(ess * hess + prior_precision)), where ``m`` is
    the parameter itself. See :class:`PosteriorOptimizer` for how to step.

    By default settings have natural units: ``lr`` is AdamW's learning rate, noise and prior are
    relative to the weights, and ``gamma`` trades off plasticity against stability. The other
    defaults are those of ``presets.FROM_SCRATCH``, for networks with random weights; for pretrained
    ones use :meth:`finetuning`. With ``ess`` or ``hess_init`` settings have the paper's units
    instead, see *Settings in the paper's units* below.

    :param params: parameters, named parameters or groups, as for any torch optimizer. With names
        (``model.named_parameters()``), posteriors and error messages use them.
    :param lr: learning rate, as for AdamW: the largest change of a weight in a step is
        ``lr * clip_radius``, a typical one, after the first steps, a fraction of ``lr``. Default
        1e-3.
    :param gamma: merging coefficient of Eq. 8 in (0, 1]. Lower values are more stable, higher ones
        more plastic; 1, for the precision too, is CoVON-NoM, plain VCL. Above 1, an
        over-relaxation, is allowed with a warning.
    :param examples: number of training examples of the task, for tasks of different sizes: each
        task is weighted in proportion. Before a task of another size, set it in all groups: ``for
        group in optimizer.param_groups: group["examples"] = 500``. With Avalanche,
        :class:`CoVONPlugin` does so. By default all tasks have the same weight.
    :param batch_size: number of examples in a step, over all processes. The loss must be the mean
        over them: with a sum, squared gradients are ``batch_size²`` times too large. With
        Avalanche, Lightning and the Hugging Face Trainer, the plugin or callback sets it.
        ``"gradsq"`` needs it: in natural units the pull toward the prior, which protects earlier
        tasks, is proportional to it, and a warning is issued if a task ends without it; in the
        paper's units it is required. A step with fewer examples overestimates the Hessian: drop an
        incomplete last batch, or set the value in ``param_groups[0]`` before the step. Only the
        first group's value is used.
    :param noise: standard deviation of the posterior at the start of the first task, relative to
        the root mean square of a parameter tensor.
    :param prior_width: standard deviation of the first prior, relative to the same root mean
        square.
    :param data_precision: the precision that the data of a task add, in units of the initial
        precision, as estimated from the gradients of the very first step. It determines ``ess``,
        the effective sample size, which is one for all groups, so that only the first group's value
        is used: see ``optim/natural_units.py``. 10 by default, 100 with :meth:`finetuning`, and
        0.001 with ``"reparam"``.
    :param ess_per_example: sets the effective sample size directly, to this times ``examples``,
        instead of by ``data_precision``. 1 is Bayes' rule; a value above 1 gives a "cold" posterior
        of temperature ``1 / ess_per_example``.
    :param betas: averaging coefficients of gradient and Hessian. In natural units the first is the
        largest one: the window of the gradient's average grows with the steps ``t`` of a task,
        ``1 + t / 10``, up to ``1 / (1 - betas[0])``. ``None`` as the second stands for a window of
        ``50 + t / 10``. Otherwise coefficients are fixed, as in Algorithm 1. See
        ``optim/averaging.py``.
    :param gamma_precision: the coefficient for the precision that a task adds to the prior:
        ``s1 = s0 + gamma_precision * (s - s0)``. ``None``: ``gamma``, as in Eq. 8. With a number,
        the mean is normalised by its own weights (see ``posterior.merge``). Above 1 it keeps more
        of the past than Bayes' rule, and the merged posterior is narrower; it needs a Hessian
        estimate that is never negative. ``"auto"``, the default, therefore stands for a number with
        ``"gradsq"`` only, 20 or, in the paper's units, 2, and for ``None`` with ``"reparam"``.
    :param clip_radius: largest change of a weight in a step, in units of ``lr``, 2 by default;
        ``float("inf")`` for none. While the Hessian estimate is dominated by noise, unlimited
        Newton steps diverge.
    :param mc_samples: posterior samples per step.
    :param prior_mean: centre of the first prior: ``"zero"`` (the paper's), or ``"init"``,
        the starting weights, which is what fine-tuning a pretrained network needs.
    :param prior: Gaussian to use as the first prior, by parameter name, such as the posterior of
        an earlier run; parameters it lacks get the default prior. The weights are not changed: to
        continue from the prior, load its mean into the model, and give that run's
        ``ess_per_example``. Move the model to its device first.
    :param bfloat16_prior: keep the prior's mean and precision in bfloat16, which reduces the memory
        from five to four tensors of the size of the weights. They are merged in float32 and then
        rounded up or down at random, by at most 0.8 % and without bias; float32 weights are the
        merged mean itself. A change of this setting in a group applies from the next consolidation
        on; a loaded state brings its own setting.
    :param hess_approx: the estimate of the Hessian's diagonal: ``"gradsq"``, the squared gradient
        times ``batch_size``, or ``"reparam"``, the paper's, from the gradient and the noise, which
        needs float32 weights. See ``optim/hessian.py`` for derivations and noise. The same in all
        groups.
    :param generator: gives the seed of the noise at the first sample; by default torch's global
        generator does. With several processes it is required, with the same seed on all ranks.
    :param implementation: ``"foreach"``, torch's multi-tensor operations; ``"compiled"``, numba, on
        CPUs only; ``"reference"``, :func:`fast_step` parameter by parameter. ``"auto"``:
        ``"compiled"`` on CPUs with numba, else ``"foreach"``. Models on a CPU with trained weights
        that are float64, tensor subclasses or strided with gaps, and steps with several samples,
        always use ``"foreach"``. On a given device, all implementations draw the same samples.
    :raises ValueError: naming the value and the rule.

    **Settings in the paper's units**, if ``ess`` or ``hess_init`` is given:

    - ``ess``: effective sample size lambda, in examples; the number of training examples of the
      task is the Bayesian choice. The first noise has the standard deviation
      ``1 / sqrt(ess * (hess_init + weight_decay))``, which must be small against the weights:
      for pretrained networks ``ess`` is 1e6 to 1e9. ``ess_per_example`` replaces it where tasks
      differ in size.
    - ``hess_init``: Hessian per example (loss/weight²) at the start of each task; 0.03.
    - ``weight_decay``: precision per example of the first prior N(0, 1/s0), that is
      ``s0 = ess * weight_decay``; 1e-4. New parameters of later tasks start with it too. 0, as in
      timm's groups without weight decay, is an improper flat prior: only ``hess`` bounds the
      variance then.
    - ``lr`` is that of the Newton step (dimensionless, not that of Adam), 0.01; ``clip_radius`` is
      0.1 and ``gamma`` 0.9.

    With ``"gradsq"`` weights may be bfloat16: their mean is kept in float32 then (``mean`` in the
    state), and the weights are its rounded values, or those of a sample. Float16 is refused.

    State per parameter: ``momentum``, ``hess``, ``step`` within a task, in natural units also the
    scalars ``scale`` and ``step_square`` (see ``natural_units``); ``prior_mean`` and
    ``prior_precision``, in the paper's units only from the first consolidation on, or with
    ``prior``: until then the prior's precision is a number, and so is its mean, except with
    ``"init"``.

    On a CPU all gradients are checked before a step changes anything. On an accelerator, where this
    would require a synchronisation in each step, only ``"reference"`` does so. Otherwise, as with
    AdamW, a gradient that is not finite spreads to the weights; the merge in ``consolidate()`` then
    raises an error.
    """

    own_setting = "hess_init"
    former_defaults = dict.fromkeys(natural_units.RELATIVE | natural_units.SIZES)  # paper's units

    def __init__(
        self,
        params: Any,
        *,
        lr: float | None = None,
        gamma: float | None = None,
        examples: float | None = None,
        batch_size: float | None = None,
        noise: float | None = None,
        prior_width: float | None = None,
        data_precision: float | None = None,
        ess_per_example: float | None = None,
        ess: float | None = None,
        hess_init: float | None = None,
        weight_decay: float | None = None,
        betas: tuple[float, float | None] = (0.9, None),
        gamma_precision: float | Literal["auto"] | None = "auto",
        clip_radius: float | None = None,
        mc_samples: int = 1,
        prior_mean: Literal["zero", "init"] = "zero",
        prior: DiagGaussian | None = None,
        bfloat16_prior: bool = False,
        hess_approx: HessApprox = "gradsq",
        generator: torch.Generator | None = None,
        implementation: Implementation = "auto",
    ) -> None:
        check_choice("implementation", implementation, get_args(Implementation))
        settings: Group = dict(
            lr=lr,
            gamma=gamma,
            clip_radius=clip_radius,
            examples=examples,
            noise=noise,
            prior_width=prior_width,
            data_precision=data_precision,
            ess_per_example=ess_per_example,
            ess=ess,
            hess_init=hess_init,
            weight_decay=weight_decay,
            hess_approx=hess_approx,
            betas=betas,
            gamma_precision=gamma_precision,
            mc_samples=mc_samples,
            prior_mean=prior_mean,
            bfloat16_prior=bfloat16_prior,
            batch_size=batch_size,
        )
        settings = natural_units.with_defaults(settings)
        check_gamma(settings["gamma"])  # which may warn
        if gamma_precision == "auto":
            natural = FROM_SCRATCH["gamma_precision"]
            positive = natural if has_natural_units(settings) else _GAMMA_PRECISION
            settings["gamma_precision"] = positive if hess_approx == "gradsq" else None
        self.implementation = implementation
        super().__init__(params, settings, prior=prior, generator=generator)

    @classmethod
    def finetuning(cls, params: Any, *, lr: float, **settings: Any) -> CoVON:
        """CoVON for pretrained networks: the prior is centred at the pretrained weights, and noise
        and prior are as narrow as such networks need (``presets.FINETUNING``).

        Adapters, such as those of LoRA, count as pretrained.

        :param lr: as for AdamW.
        :param settings: settings that replace those of the preset, see :class:`CoVON`.
        """
        preset = FINETUNING | (REPARAM if settings.get("hess_approx") == "reparam" else {})
        return cls(params, lr=lr, **{**preset, **settings})

    def check_group(self, group: Group) -> None:
        """Raise a ``ValueError`` naming value and rule for a bad hyperparameter."""
        super().check_group(group)
        check_betas(group["betas"], second_may_be_none=True)
        if has_natural_units(group):
            natural_units.check_natural(group)
        else:
            check_positive("hess_init", group["hess_init"])
        check_positive("gamma", group["gamma"])
        if group["gamma_precision"] is not None:
            check_positive("gamma_precision", group["gamma_precision"])
        if group["clip_radius"] != math.inf:
            check_positive("clip_radius", group["clip_radius"])
        check_choice("prior_mean", group["prior_mean"], ("zero", "init"))
        check_choice("bfloat16_prior", group["bfloat16_prior"], (False, True))
        check_choice("hess_approx", group["hess_approx"], get_args(HessApprox))
        if group["hess_approx"] != self.hess_approx:
            raise ValueError(
                f"hess_approx must be the same in all groups, got {group['hess_approx']!r} and "
                f"{self.hess_approx!r}"
            )
        for name in ("batch_size", *natural_units.SIZES):
            if group[name] is not None:
                check_positive(name, group[name])

    @property
    def hess_approx(self) -> HessApprox:
        """The estimate of the Hessian, the same in all groups."""
        approx: HessApprox = self.param_groups[0]["hess_approx"]
        return approx

    @property
    def allows_bfloat16(self) -> bool:
        """With squared gradients only: the paper's estimate would take rounding for noise."""
        return self.hess_approx == "gradsq"

    def _batch_size(self) -> float:
        size = self.param_groups[0]["batch_size"]
        natural = has_natural_units(self.param_groups[0])  # consolidate() warns
        if size is None and self.hess_approx == "gradsq" and not natural:
            raise ValueError(
                "hess_approx='gradsq' needs the number of examples behind each gradient: pass "
                "batch_size=..., or hess_approx='reparam', which needs none"
            )
        return float(size or 1)

    def _new_record(self) -> SampleAccumulator:
        return SampleAccumulator(self.mc_samples, squared=self.hess_approx == "gradsq")

    # State -----------------------------------------------------------------------------

    def _start_task(self, p: Tensor, group: Group) -> State:
        mean = self.mean_of(p)
        start: State = {
            "step": 0,
            "momentum": torch.zeros_like(mean),
            "hess": torch.empty_like(mean),
        }
        if has_natural_units(group):
            start["scale"] = natural_units.scale_of(mean)
            start["step_square"] = torch.zeros_like(start["scale"])
            local(start["hess"]).copy_(natural_units.first_hess(group, start["scale"]))
            start |= self._first_prior(mean, group)  # unless a prior is in the state already
        else:
            start["hess"].fill_(group["hess_init"])
            if group["prior_mean"] == "init":
                start["prior_mean"] = mean.to(prior_dtype(p, group), copy=True)
        return start

    def _first_prior(self, p: Tensor, group: Group) -> State:
        prior = super()._first_prior(p, group)
        if has_natural_units(group):
            scale = natural_units.scale_of(p)
            first = natural_units.first_prior_precision(group, scale)
            local(prior["prior_precision"]).copy_(first)
        return prior

    @property
    def can_sample(self) -> bool:
        """Whether the settings determine a posterior."""
        return all(
            has_natural_units(group)
            or group["ess"]
            or (group["ess_per_example"] and group["examples"])
            for group in self.param_groups
        )

    def _check_ess(self) -> None:
        super()._check_ess()
        first, *others = (group["examples"] for group in self.param_groups)
        if other := [examples for examples in others if examples != first]:
            raise ValueError(
                f"examples is the size of the task, the same in all groups, got {first} and "
                f"{other[0]}: set it in each of optimizer.param_groups"
            )

    def _state_needs(self, group: Group) -> dict[str, set[str]]:
        return {
            "mean": {"step"},
            "step": {"momentum", "hess"},
            "momentum": {"step", "hess"},
            "hess": {"step", "momentum"},
            "prior_precision": {"prior_mean"},
            "scale": {"step", "step_square"},
            "step_square": {"step", "scale"},
        }

    def _precision(self, p: Tensor, group: Group, train: bool) -> Tensor:
        if not train and "hess" not in self.state[p]:  # the posterior is the next task's prior
            return self.state[p]["prior_precision"].to(state_dtype(p), copy=True)
        state = self._task_state(p, group)
        precision: Tensor = ess_of(group) * state["hess"]
        return precision.add_(current_prior(state, group)[1])

    # Sampling and the fast step --------------------------------------------------------

    def _draw(self, params: list[NamedParam], buffers: Buffers, train: bool, key: int) -> Buffers:
        """Algorithm 1, line 4."""
        if train:
            self._batch_size()  # raises where the step would, before the forward pass
            if self.param_groups[0]["noise_draws"] == 1:
                self._warn_of_noise(params)
        if self.implementation == "reference":
            return super()._draw(params, buffers, train, key)
        drawn = {named: self._buffer(buffers, named) for named in params}
        kernel = self._cpu_kernel(drawn) or multi_tensor
        positive = True
        for bucket in self._buckets(params, train):
            positive &= kernel.draw(
                bucket.means,
                [drawn[named].content for named in bucket.params],
                bucket.entries("hess"),
                bucket.entries("prior_precision", first_precision(bucket.group)),
                [named.number for named in bucket.params],
                ess=ess_of(bucket.group),
                key=key,
            )
        if not positive:
            precisions = [(n.name, local(self._precision(n.param, n.group, train))) for n in params]
            check_precisions([(name, p.min()) for name, p in precisions if p.numel()])
        if train and self.param_groups[0]["noise_draws"] == 1:
            self._warn_of_rounding(drawn)
        return drawn

    def _warn_of_noise(self, params: list[NamedParam]) -> None:
        """Warn if the first sample is mostly noise."""
        variance = weights = 0.0
        for named in params:
            precision = local(self._precision(named.param, named.group, train=True))
            if (precision > 0).all():  # else the draw raises
                variance += exact_sum(1 / precision).item()
                weights += exact_sum(local(named.param).square()).item()
        if variance > weights > 0:
            natural = has_natural_units(params[0].group)
            advice = "lower noise" if natural else "raise ess, or leave it out"
            warnings.warn(
                f"the first sample's noise is {(variance / weights) ** 0.5:.1f} times as large as "
                f"the weights, so the network may not learn: {advice}",
                stacklevel=6,
            )

    def _warn_of_rounding(self, drawn: Buffers) -> None:
        """Warn if most weights of the first sample are the mean's, because they are bfloat16."""
        pairs = [
            (local(buffer.content), local(named.param))
            for named, buffer in drawn.items()
            if named.param.dtype == torch.bfloat16
        ]
        equal = sum(int((sample == p).sum()) for sample, p in pairs)
        entries = sum(p.numel() for _, p in pairs)
        if 2 * equal > entries:
            warnings.warn(
                f"{equal / entries:.0%} of the weights are the same in the first sample as in the "
                "mean, because its noise is below the resolution of bfloat16: raise noise (or "
                "lower ess), or keep the weights in float32",
                stacklevel=6,
            )

    def _step(self, params: list[NamedParam], record: SampleAccumulator) -> None:
        """Algorithm 1, lines 6 to 9, by the kernel or by multi-tensor operations; by
        :func:`fast_step` if asked for, or if a gradient on a CPU is not finite or too large."""
        self._set_ess(params, record)
        if self.implementation == "reference" or not params:
            super()._step(params, record)
            return
        averaged = record.mc_samples > 1
        buffers = {named: record.buffers[named] for named in params}
        kernel = None if averaged else self._cpu_kernel(buffers)
        bfloat16 = kernel is None  # multi-tensor operations cast one bucket at a time
        samples: dict[NamedParam, Tensor] = {}  # of several, their statistics
        grads: dict[NamedParam, Tensor] = {}
        for named, buffer in buffers.items():
            p, sample = named.param, buffer.content
            if averaged:
                sample = record.statistic(named)
            assert p.grad is not None
            for found, value, what in (samples, sample, "sample"), (grads, p.grad, "gradient"):
                fits = buffer.fits(value) and is_sharded(value) == is_sharded(p)
                found[named] = value if fits else match_layout(value, p, named.name, what, bfloat16)
        # so that neither Hessian estimates nor their squares overflow float32
        largest = _LARGEST_ESTIMATE / self._batch_size() if record.squared else _LARGEST_ESTIMATE
        limit = min(_LARGEST_GRADIENT, largest**0.5) if record.squared else _LARGEST_GRADIENT
        if kernel is not None:
            step, fit = kernel.step, kernel.all_below(list(grads.values()), limit)
        else:
            fit = multi_tensor.all_below(params, list(grads.values()), limit)
            if averaged:
                fit &= multi_tensor.all_below(params, list(samples.values()), largest)
            step = partial(multi_tensor.step, averaged=averaged)
        if not fit:
            super()._step(params, record)
            return
        bump_versions(named.param for named in params)
        for bucket in self._buckets(params, train=True):
            natural = has_natural_units(bucket.group)
            step(
                bucket.means,
                [samples[named] for named in bucket.params],
                [grads[named] for named in bucket.params],
                bucket.entries("momentum"),
                bucket.entries("hess"),
                bucket.entries("prior_mean"),
                bucket.entries("prior_precision", first_precision(bucket.group)),
                self._settings(bucket.group, bucket.i),
                step_squares=bucket.entries("step_square") if natural else None,
            )
            for named, state in zip(bucket.params, bucket.states, strict=True):
                state["step"] += 1
                self.state[named.param] = state
                if "mean" in state:
                    named.param.copy_(state["mean"])

    def _set_ess(self, params: list[NamedParam], record: SampleAccumulator) -> None:
        """In natural units: choose the effective sample size by the gradients of the first step."""
        natural = [n for n in params if has_natural_units(n.group)]
        if not natural or natural[0].group["ess_per_example"] is not None:
            return
        group = natural[0].group
        grads = [n.param.grad for n in natural if n.param.grad is not None]
        if record.squared and record.mc_samples > 1:  # of several mini-batches, perhaps
            grads = [record.statistic(n).sqrt() for n in natural]
        precisions = [self._precision(n.param, n.group, train=True) for n in natural]
        ess = natural_units.suitable_ess(
            grads, precisions, self._batch_size(), group["data_precision"]
        )
        if not 0 < ess < math.inf:  # no gradient, or one that is not finite: the next step chooses
            return
        for named in self._named_params():  # states of steps without gradients
            state = self.state.get(named.param, {})
            if has_natural_units(named.group) and "hess" in state:
                state["hess"] *= ess_of(group) / ess
        for other in filter(has_natural_units, self.param_groups):
            other["ess_per_example"] = ess / (group["examples"] or 1.0)

    def add_param_group(self, param_group: Group) -> None:
        has_size = "examples" in param_group
        super().add_param_group(param_group)
        if not has_size:  # the task's size may have changed since the defaults were given
            self.param_groups[-1]["examples"] = self.param_groups[0]["examples"]
        natural = [group for group in self.param_groups if has_natural_units(group)]
        known = [group for group in natural if group["ess_per_example"] is not None]
        for group in natural:  # one size for all: the first step sets that of groups so far
            if known and group["ess_per_example"] is None:
                for key in ("ess_per_example", "examples"):
                    group[key] = known[0][key]

    def _cpu_kernel(self, buffers: Buffers) -> Any:
        """The module ``cpu_kernel`` if it can make a draw or a step for all parameters."""
        compiled = self.implementation == "compiled"
        if compiled and any(named.param.device.type != "cpu" for named in buffers):
            raise ValueError("implementation='compiled' is for CPUs: use 'auto' or 'foreach'")
        if self.implementation == "foreach" or not all(b.for_cpu_kernel for b in buffers.values()):
            return None
        kernel = compiled_kernel()
        if kernel is None and compiled:
            raise ValueError("implementation='compiled' needs a working numba on a CPU")
        return kernel

    def _buckets(self, params: list[NamedParam], train: bool) -> list[Bucket]:
        """The parameters in as few lists as the fast versions allow."""
        buckets: dict[tuple[object, ...], Bucket] = {}
        for named in params:
            p, group = named.param, named.group
            state = self._task_state(p, group) if train else self.state[p]
            mean = p if state_dtype(p) == p.dtype else state.get("mean", self.mean_of(p))
            if "hess" not in state:  # between tasks the posterior is the next prior
                state = {**state, "hess": torch.zeros_like(mean, requires_grad=False)}
            prior = "prior_mean" in state, "prior_precision" in state
            kind = id(group), p.device, p.dtype, state.get("step"), *prior
            if (bucket := buckets.get(kind)) is None:
                bucket = buckets[kind] = Bucket(group, [], [], [])
            bucket.params.append(named)
            bucket.means.append(mean)
            bucket.states.append(state)
        return list(buckets.values())

    def _settings(self, group: Group, i: int) -> StepSettings:
        """Settings of iteration ``i`` of the task."""
        beta1, beta2 = group["betas"]
        natural = has_natural_units(group)
        return StepSettings(
            i=i,
            ess=ess_of(group),
            lr=float(group["lr"]),
            beta1=beta1_at(beta1, i - 1) if natural else beta1,
            gradients_weight=1.0 if natural else 1 - beta1**i,
            beta2=beta2_at(beta2, i - 1),
            clip_radius=group["clip_radius"],
            hess_approx=self.hess_approx,
            batch_size=self._batch_size(),
            retraction=0.0 if natural and self.hess_approx == "gradsq" else 0.5,
        )

    def _propose(
        self, p: Tensor, group: Group, state: State, grad: Tensor, statistic: Tensor
    ) -> tuple[Tensor, State]:
        i = state["step"] + 1
        prior_mean, prior_precision = (
            x.to(p.dtype) if isinstance(x, Tensor) else x for x in current_prior(state, group)
        )
        mean, momentum, hess, step_square = fast_step(
            p,
            statistic,
            grad,
            state["momentum"],
            state["hess"],
            prior_mean,
            prior_precision,
            self._settings(group, i),
            state.get("step_square"),
        )
        # NaN, which no step takes, where float32 cannot hold the precision
        hess = torch.where(torch.isfinite(ess_of(group) * hess), hess, torch.nan)
        natural = {} if step_square is None else {"step_square": step_square}
        return mean, {"step": i, "momentum": momentum, "hess": hess, **natural}

    # The slow step ---------------------------------------------------------------------

    def consolidate(
        self,
        merge: SlowStep = "eq8",
        *,
        means: Mapping[Tensor, Tensor] | None = None,
    ) -> None:
        """Merge the task's posterior into its prior.

        The parameters become the merged mean, and the merged Gaussian is the posterior used
        for prediction and the prior of the next task. Parameters that had no step in this
        task keep theirs.

        :param merge: ``"eq8"``, Eq. 8; ``"replace"``, no slow state: what the task alone adds to
            the first prior becomes the prior (negative entries of the Hessian count as 0);
            ``"none"``, plain IVON: the next task continues this one. The last two, and
            :class:`covon_avalanche.merging.EMA` with ``gamma_precision=None``, are the ablations of
            the paper's Figure 2b.
        :param means: merged means instead of Eq. 8's, by parameter and of its shape, such as those
            of a rule in :mod:`covon_avalanche.merging`; the precision is Eq. 8's. Those of
            parameters that had no step are not used.
        :raises ValueError: if the merged posterior is not a Gaussian, or a mean does not fit or is
            not finite; nothing is changed then.
        """
        check_choice("merge", merge, get_args(SlowStep))
        check_keys("means", means)
        self._check_consolidation()
        group = self.param_groups[0]
        needs_size = self.hess_approx == "gradsq" or has_natural_units(group)
        in_task = [n for n in self._named_params() if "hess" in self.state.get(n.param, {})]
        if self.state and not in_task and merge != "none":
            warnings.warn(
                "no step was made since the last consolidation, so there is nothing to merge: had "
                "the loader no batches (drop_last=True), or did early stopping go back to the "
                "start of the task?",
                stacklevel=2,
            )
        elif needs_size and group["batch_size"] is None:
            warnings.warn(
                "batch_size is not set, so the pull toward the prior in the next task is that of "
                "batch_size=1: pass the number of examples per step, CoVON(..., batch_size=...)",
                stacklevel=2,
            )
        trained = in_task if merge != "none" else []
        replace = merge == "replace"
        steps = max((self.state[named.param]["step"] for named in trained), default=0)
        if steps >= _MANY_STEPS:
            warn_unless_learned(steps, self._diagnose(trained))
        with defer_interrupt(), torch.no_grad():
            problems, moved = [], False
            for named in trained:  # check all before anything is written
                name, p, group = named.name, named.param, named.group
                align_state_(self.state[p], p, name)
                both = self.mean_of(p), current_prior(self.state[p], group)[0]
                moved = moved or any((m != m0).any() for m, m0 in pieces(*map(local, both)))
                try:
                    for merged in self._merged(p, group, replace):
                        check_gaussian(name, *merged)
                    if means and p in means:
                        check_given(name, means[p], p, "mean")
                except ValueError as error:
                    problems.append(error)
            if not true_everywhere(not problems, [named.param for named in trained]):
                raise (problems or [ValueError("see the error of another process")])[0]
            if trained and not moved:
                warnings.warn(
                    "no weight has changed in this task: was lr 0, or the loss? If a new schedule "
                    "starts at the lr with which the last one ended, set lr in param_groups before "
                    "creating it",
                    stacklevel=2,
                )
            self._buffers = {}  # their memory is needed now
            self.discard_samples()
            first = self.param_groups[0]
            last_key = noise_key(first["noise_seed"] or 0, first["noise_draws"])  # of the rounding
            for named in trained:
                news = self._merged(named.param, named.group, replace)
                self._write_merged(named, news, (means or {}).get(named.param), last_key)
            self._finish_task()

    def _merged(self, p: Tensor, group: Group, replace: bool) -> Iterator[tuple[Tensor, Tensor]]:
        """Mean and precision after the task, some rows of this process's part at a time."""
        state, mean, ess = self.state[p], self.mean_of(p), ess_of(group)
        if replace:
            first = self._first_prior(mean, group)["prior_precision"]
            if "scale" in state:  # of the weights when the task started
                scale = state["scale"]
                local(first).copy_(natural_units.first_prior_precision(group, scale))
            for m, hess, s0 in pieces(*map(local, (mean, state["hess"], first))):
                yield m, ess * hess.clamp(min=0) + s0
            return
        tensors = mean, state["hess"], *current_prior(state, group)
        gammas = group["gamma"], group["gamma_precision"]
        for m, hess, m0, s0 in pieces(*map(local, tensors)):
            yield merge_tensors(m0, s0, m, ess * hess + s0, *gammas)

    def _write_merged(
        self,
        named: NamedParam,
        merged: Iterator[tuple[Tensor, Tensor]],
        given_mean: Tensor | None,
        key: int,
    ) -> None:
        """Make mean and precision after the task the weights and the prior."""
        p, group, number = named.param, named.group, named.number
        prior_mean = torch.empty_like(self.state[p]["hess"], dtype=prior_dtype(p, group))
        prior_precision = torch.empty_like(prior_mean)
        begin = first_entry(p)
        if given_mean is not None and is_sharded(p) and not is_sharded(given_mean):
            given_mean = sharded_like(given_mean, p)
        parts = pieces(*map(local, (prior_mean, prior_precision, p.detach(), given_mean)))
        for (m0, s0, weights, given), (mean, precision) in zip(parts, merged, strict=True):
            mean = mean if given is None else given
            copy_rounded_(m0, mean, noise_key(key, 0), number, begin, p.numel())
            copy_rounded_(s0, precision, noise_key(key, 1), number, begin, p.numel())
            weights.copy_(m0 if p.dtype == torch.bfloat16 else mean)
            begin += m0.numel()
        self.state[p] = {"prior_mean": prior_mean, "prior_precision": prior_precision}

    @torch.no_grad()
    def diagnostics(self) -> dict[str, Diagnostics]:
        """Whether the precision is being learned, by parameter name, and pooled over all under
        ``"all"``: see :class:`Diagnostics`. To be called within a task; empty before the
        first step."""
        trained = [n for n in self._named_params() if "hess" in self.state.get(n.param, {})]
        parts = {"all": trained, **{named.name: [named] for named in trained}}
        return {name: self._diagnose(part) for name, part in parts.items() if part}

    def _diagnose(self, params: list[NamedParam]) -> Diagnostics:
        states = ({"mean": self.mean_of(n.param), **self.state[n.param]} for n in params)
        return diagnose(zip((n.group for n in params), states, strict=True))

    # torch.optim -----------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "implementation": self.implementation}
