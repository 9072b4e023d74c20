"""Methods as their authors' code has them, where this package deliberately differs.

Custom classes of ``differences.toml``; written from the formulas (docs/concepts/sources.md).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from avalanche.models import avalanche_forward
from avalanche.training import Naive
from torch import Tensor, nn

from covon_avalanche.merging.regmean import RegMean
from covon_avalanche.merging.rule import Task
from covon_avalanche.optim.quadratic_anchor import accumulated, added
from covon_avalanche.plugins import EWCPlugin, ICaRLPlugin, MASPlugin, MergePlugin, RWalkPlugin
from covon_avalanche.plugins.task_loader import task_loader
from covon_avalanche.posterior.fisher import expected_squared_gradients, in_mode, zero_sums
from covon_avalanche.posterior.gaussian import DiagGaussian

_EPSILON = 1e-32
_DAMPING = 1e-3


class MASOfBatches(MASPlugin, supports_distributed=True):  # type: ignore[call-arg]
    """Absolute values of gradients that are summed over a batch of 200 examples."""

    def _consolidated(self, strategy: Any) -> DiagGaussian:
        model, importance, examples = strategy.model, zero_sums(strategy.model), 0
        with in_mode(model, train=False):
            for x, *_ in task_loader(strategy, 200):
                gradients = torch.autograd.grad(model(x).square().sum(), [*model.parameters()])
                for total, gradient in zip(importance.values(), gradients, strict=True):
                    total += gradient.abs()
                examples += len(x)
        means = {name: total / examples for name, total in importance.items()}
        return accumulated(self.anchor, model.named_parameters(), means, 1.0)


class RWalkReleased(RWalkPlugin, supports_distributed=True):  # type: ignore[call-arg]
    """Scores with the Fisher information of before, added to half of their sum with the old ones;
    both are shifted to a minimum of 0; a last incomplete window does not count."""

    @torch.no_grad()
    def _close_window(self, strategy: Any) -> None:
        found = {name: total / self._steps for name, total in self._squares.items()}
        before = self.fisher or found
        for name, p in strategy.model.named_parameters():
            distance = before[name] * (p - self._start[name]).square()
            self._new[name] += (self._path[name] / (distance + _DAMPING)).relu()
        decay = self.fisher_decay
        self.fisher = {n: (1 - decay) * f + decay * found[n] for n, f in before.items()}
        self._open_window(strategy)

    def _consolidated(self, strategy: Any) -> DiagGaussian:
        new = self._new
        self.scores = {n: s + (s + new[n]) / 2 for n, s in self.scores.items()} or new
        parts = [_between_extremes(self.fisher), _between_extremes(self.scores)]
        weights = {n: p.detach().clone() for n, p in strategy.model.named_parameters()}
        return DiagGaussian(weights, {n: parts[0][n] + parts[1][n] for n in weights})


def _between_extremes(values: dict[str, Tensor]) -> dict[str, Tensor]:
    least = min(float(value.min()) for value in values.values())
    largest = max(float(value.max()) for value in values.values())
    return {name: (v - least) / (largest - least + _EPSILON) for name, v in values.items()}


class EWCOfPredictions(EWCPlugin, supports_distributed=True):  # type: ignore[call-arg]
    """The Fisher information with labels from the model's predictions instead of the data's."""

    def _consolidated(self, strategy: Any) -> DiagGaussian:
        fisher = expected_squared_gradients(strategy.model, task_loader(strategy, 64))
        return added(self.anchor, strategy.model.named_parameters(), fisher)


class RegMeanBefore(MergePlugin, supports_distributed=True):  # type: ignore[call-arg]
    """Input second moments of a domain are kept as measured before the merge."""

    def __init__(self) -> None:
        super().__init__(_MomentsBefore())


class _MomentsBefore(RegMean):
    _before: Any = None

    def merge(self, task: Task) -> dict[str, Tensor]:
        self._before = super()._measure(task)
        return super().merge(task)

    def _measure(self, task: Task) -> dict[str, Tensor]:
        return self._before


class ICaRLReplaced(ICaRLPlugin):
    """After the first domain all labels are replaced by the outputs before it."""

    def before_backward(self, strategy: Any, **kwargs: Any) -> None:
        super().before_backward(strategy, **kwargs)
        if self._old_model is not None:
            with torch.no_grad():
                old = avalanche_forward(self._old_model, strategy.mb_x, strategy.mb_task_id)
            strategy.loss = F.binary_cross_entropy_with_logits(strategy.mb_output, old.sigmoid())


class UPGDReleased(Naive):
    """The largest utility is that of the running averages without their bias correction."""

    def __init__(
        self,
        *,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        criterion: Any,
        beta_utility: float,
        sigma: float,
        weight_decay: float,
        adam: bool = False,
        **kwargs: Any,
    ) -> None:
        lr = optimizer.param_groups[0]["lr"]
        own = _UPGD([*model.parameters()], lr, weight_decay, beta_utility, sigma, adam)
        super().__init__(model=model, optimizer=own, criterion=criterion, **kwargs)


class _UPGD(torch.optim.Optimizer):
    def __init__(
        self, params: Any, lr: float, decay: float, beta: float, sigma: float, adam: bool
    ) -> None:
        super().__init__(params, dict(lr=lr, decay=decay, beta=beta, sigma=sigma, adam=adam))

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        (group,) = self.param_groups
        beta, parameters = group["beta"], group["params"]
        for p in parameters:
            state = self.state[p]
            if not state:
                state |= {name: torch.zeros_like(p) for name in ("utility", "first", "second")}
                state["step"] = 0
            state["step"] += 1
            state["utility"].mul_(beta).addcmul_(p.grad, p, value=beta - 1)
            state["first"].mul_(0.9).add_(p.grad, alpha=0.1)
            state["second"].mul_(0.999).addcmul_(p.grad, p.grad, value=0.001)
        largest = max(float(self.state[p]["utility"].max()) for p in parameters)
        for p in parameters:
            state = self.state[p]
            n = state["step"]
            kept = torch.sigmoid(state["utility"] / (1 - beta**n) / largest)
            direction = p.grad
            if group["adam"]:
                root = (state["second"] / (1 - 0.999**n)).sqrt() + 1e-5
                direction = state["first"] / (1 - 0.9**n) / root
            noise = torch.randn_like(p) * group["sigma"]
            p.mul_(1 - group["lr"] * group["decay"])
            p.add_((direction + noise) * (1 - kept), alpha=-group["lr"])
