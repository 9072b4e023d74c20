"""Mean-field variational continual learning, trained with Bayes by Backprop.

Nguyen et al., "Variational Continual Learning" (ICLR 2018), as in Algorithm 4 of "Fast and
Slow Variational Continual Learning"; Blundell et al., "Weight Uncertainty in Neural
Networks" (ICML 2015) for the gradients.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from covon_avalanche.checks import check_choice, check_positive
from covon_avalanche.optim.checks import check_betas, check_given, check_keys
from covon_avalanche.optim.interrupts import defer_interrupt
from covon_avalanche.optim.posterior_optimizer import (
    Group,
    PosteriorOptimizer,
    State,
    current_prior,
)
from covon_avalanche.posterior.gaussian import DiagGaussian

_MOMENTS = ("exp_avg", "exp_avg_sq", "log_std_exp_avg", "log_std_exp_avg_sq")


class BayesByBackprop(PosteriorOptimizer):
    """VCL: minimise ``E_q[loss] + KL(q || prior) / ess`` over mean and log standard deviation.

    The KL divergence to the previous posterior is in closed form; nothing is merged, the
    posterior of a task is the prior of the next. Same protocol as :class:`CoVON`.

    :param params: parameters, named parameters or groups, as for any torch optimizer.
    :param lr: learning rate of mean and log standard deviation.
    :param ess: effective sample size lambda, in examples; larger means a weaker KL term.
    :param std_init: standard deviation of every weight at the start of the first task. A step of
        Adam changes it by a factor of about ``exp(lr)`` at most, so after few steps the posterior
        is hardly wider; if it is narrow, the next task learns little.
    :param inner: ``"adam"`` or ``"sgd"``, the update of mean and log standard deviation.
    :param betas: Adam's averaging coefficients.
    :param eps: Adam's constant.
    :param weight_decay: precision per example of the first prior N(0, 1/s0), that is
        ``s0 = ess * weight_decay``; positive.
    :param importance_strength: weight of EVCL's penalty
        ``0.5 * sum(importance * ((mean - m')² + (std - std')²))`` beside the loss per example,
        with ``m'`` and ``std'`` of the previous posterior (Batra and Clark, "EVCL: Elastic
        Variational Continual Learning with Weight Consolidation", 2024, Eq. 6); only where
        :meth:`consolidate` was given an importance.
    :param mc_samples: posterior samples per step.
    :param prior: a prior instead, by parameter name, such as the posterior of an earlier run; the
        weights stay as they are: load its mean into the model to continue from it.
    :param generator: gives the seed of the noise; see :class:`CoVON`.
    :raises ValueError: naming the value and the rule.

    State per parameter: ``log_std``, kept from task to task; ``step`` and Adam's four moments
    within a task; ``prior_mean`` and ``prior_precision`` from the first consolidation on, and
    ``importance`` where one was given.
    """

    own_setting = "std_init"

    def __init__(
        self,
        params: Any,
        *,
        ess: float,
        lr: float = 1e-3,
        std_init: float = 0.01,
        inner: str = "adam",
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-4,
        importance_strength: float = 0.0,
        mc_samples: int = 1,
        prior: DiagGaussian | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        defaults = dict(
            lr=lr,
            ess=ess,
            std_init=std_init,
            inner=inner,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            importance_strength=importance_strength,
            mc_samples=mc_samples,
        )
        super().__init__(params, defaults, prior=prior, generator=generator)

    def check_group(self, group: Group) -> None:
        """Raise a ``ValueError`` naming value and rule for a bad hyperparameter."""
        super().check_group(group)
        check_betas(group["betas"])
        check_positive("std_init", group["std_init"])
        check_positive("eps", group["eps"])
        check_positive("weight_decay", group["weight_decay"])  # the KL needs a proper prior
        check_positive("importance_strength", group["importance_strength"], zero=True)
        check_choice("inner", group["inner"], ("adam", "sgd"))

    def _start_task(self, p: Tensor, group: Group) -> State:
        prior_precision = self.state.get(p, {}).get("prior_precision")
        if prior_precision is not None:
            log_std = -0.5 * prior_precision.log()  # a given prior: start from it
        else:
            log_std = torch.full_like(p, group["std_init"]).log_()
        start: State = {"step": 0, "log_std": log_std}
        if group["inner"] == "adam":
            start |= {key: torch.zeros_like(p) for key in _MOMENTS}
        return start

    def _state_needs(self, group: Group) -> dict[str, set[str]]:
        return {
            **{key: {"step"} for key in _MOMENTS},
            "step": {"log_std", *(_MOMENTS if group["inner"] == "adam" else ())},
            "prior_mean": {"prior_precision"},
            "prior_precision": {"prior_mean"},
            "importance": {"prior_mean"},
        }

    def _precision(self, p: Tensor, group: Group, train: bool) -> Tensor:
        state = self.state.get(p, {})
        if "log_std" in state:
            return torch.exp(-2 * state["log_std"])
        if "prior_precision" in state:  # a given prior, before the first step
            return state["prior_precision"].clone()
        return torch.full_like(p, group["std_init"] ** -2)

    def _propose(
        self, p: Tensor, group: Group, state: State, grad: Tensor, statistic: Tensor
    ) -> tuple[Tensor, State]:
        """Gradient step on ``E_q[loss] + KL(q || prior) / ess``; theta = m + exp(log_std) eps."""
        prior_mean, prior_precision = current_prior(state, group)
        prior_hess = prior_precision / group["ess"]
        variance = torch.exp(2 * state["log_std"])
        mean_grad = grad + prior_hess * (p - prior_mean)
        log_std_grad = statistic + prior_hess * variance - 1 / group["ess"]
        if "importance" in state and group["importance_strength"] > 0:
            weight = group["importance_strength"] * state["importance"]
            std = variance.sqrt()
            mean_grad += weight * (p - prior_mean)
            log_std_grad += weight * (std - prior_precision.rsqrt()) * std
        new: State = {"step": state["step"] + 1}
        if group["inner"] == "adam":  # the gradients become Adam's directions
            mean_grad = _adam(mean_grad, "", state, new, group)
            log_std_grad = _adam(log_std_grad, "log_std_", state, new, group)
        log_std = state["log_std"] - group["lr"] * log_std_grad
        # NaN, which no step takes, where float32 cannot hold the precision
        new["log_std"] = torch.where(log_std.abs() < 43, log_std, torch.nan)
        return p - group["lr"] * mean_grad, new

    def consolidate(self, *, importance: Mapping[Tensor, Tensor] | None = None) -> None:
        """The task's posterior becomes the prior of the next (Algorithm 4), and the moments
        of the inner update begin anew. Parameters without a step keep their prior.

        :param importance: curvature per example of the task by parameter, for EVCL; those of
            all tasks add up.
        """
        self._check_consolidation()
        check_keys("importance", importance)
        importance = importance or {}
        for named in self._named_params():
            if (p := named.param) in importance:
                check_given(named.name, importance[p], p, "importance")
        with defer_interrupt(), torch.no_grad():
            for p in (named.param for named in self._named_params()):
                state = self.state.get(p, {})
                if "step" in state:
                    kept = {k: state[k] for k in ("log_std", "importance") if k in state}
                    if p in importance:
                        kept["importance"] = kept.get("importance", 0.0) + importance[p]
                    self.state[p] = {
                        **kept,
                        "prior_mean": p.detach().clone(),
                        "prior_precision": torch.exp(-2 * state["log_std"]),
                    }
            self._finish_task()


def _adam(grad: Tensor, prefix: str, state: State, new: State, group: Group) -> Tensor:
    """Adam's direction (Kingma and Ba 2015, Algorithm 1); its moments are added to ``new``."""
    (beta1, beta2), step = group["betas"], new["step"]
    average = state[f"{prefix}exp_avg"].lerp(grad, 1 - beta1)
    squares = state[f"{prefix}exp_avg_sq"].lerp(grad.square(), 1 - beta2)
    new |= {f"{prefix}exp_avg": average, f"{prefix}exp_avg_sq": squares}
    denominator = (squares / (1 - beta2**step)).sqrt() + group["eps"]
    return average / (1 - beta1**step) / denominator
