"""CoVON: fast variational online Newton steps, slow merging of task posteriors.

Paper: "Fast and Slow Variational Continual Learning", Algorithm 1. The fast step is IVON
(Shen et al., "Variational Learning is Effective for Large Deep Networks", ICML 2024,
Algorithm 1) with the previous tasks' posterior as its prior. Written from the papers;
no code of the authors' repository or of ivon-opt was used. MIT licence.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from covon_avalanche.gaussian import DiagGaussian, check_gamma, check_gaussian, merge_tensors
from covon_avalanche.optim.checks import check_positive
from covon_avalanche.optim.kernels import covon_hess, covon_mean
from covon_avalanche.optim.posterior_optimizer import Group, PosteriorOptimizer, State


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
    :param generator: source of the noise. With several processes it is required, seeded
        alike everywhere: gradients are averaged before they meet the noise.
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
    ) -> None:
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
        start: State = {
            "step": 0,
            "momentum": torch.zeros_like(p),
            "hess": torch.full_like(p, group["hess_init"]),
        }
        if group["prior_mean"] == "init":  # only counts where no prior is in the state yet
            start["prior_mean"] = p.detach().clone()
        return start

    def _first_prior(self, p: Tensor, group: Group) -> State:
        centre = p.detach().clone() if group["prior_mean"] == "init" else torch.zeros_like(p)
        precision = torch.full_like(p, group["ess"] * group["weight_decay"])
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

    # The two updates -------------------------------------------------------------------

    def _propose(
        self, p: Tensor, group: Group, state: State, grad: Tensor, grad_noise: Tensor
    ) -> tuple[Tensor, State]:
        """The fast step, Algorithm 1, lines 6 to 9."""
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
        if self._mean:
            raise RuntimeError("consolidate() must be called outside of sampled_params()")
        for value, name in ((gamma, "gamma"), (gamma_precision, "gamma_precision")):
            if value is not None:
                check_gamma(value, name)
        merged: list[tuple[Tensor, Tensor, Tensor]] = []
        for name, p, group in self._named_parameters():
            state = self.state.get(p, {})
            if "hess" not in state:
                continue
            prior_precision = self._prior_precision(state, group)
            mean, precision = merge_tensors(
                state.get("prior_mean", 0.0),
                prior_precision,
                p,
                group["ess"] * state["hess"] + prior_precision,
                group["gamma"] if gamma is None else gamma,
                gamma_precision,
            )
            check_gaussian(name, mean, precision)
            merged.append((p, mean, precision))
        for p, mean, precision in merged:
            p.copy_(mean)
            self.state[p] = {"prior_mean": mean, "prior_precision": precision}
        self.discard_samples()
