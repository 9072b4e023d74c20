"""Utility-based perturbed gradient descent (UPGD), a baseline without a posterior.

Elsayed and Mahmood, "Addressing Loss of Plasticity and Catastrophic Forgetting in Continual
Learning" (ICLR 2024), with the first-order utility and its global scaling, which the authors'
repository (github.com/mohmdelsayed/upgd) recommends; written from the formulas.
"""

from __future__ import annotations

from collections.abc import Callable
from numbers import Real
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from covon_avalanche.checks import check_positive
from covon_avalanche.optim.checks import check_betas
from covon_avalanche.optim.interrupts import defer_interrupt
from covon_avalanche.optim.samples import fill_normal_, next_noise_key

Group = dict[str, Any]


class UPGD(Optimizer):
    """First-order UPGD with weight decay (UPGD-W): weights that are useful change less.

    The utility of a weight is the increase of the loss if it were zero, to first order, as a
    bias-corrected running average; relative to the largest utility of all weights it scales down
    both gradient and noise::

        u <- beta_utility * u + (1 - beta_utility) * (-g * p)
        u' = u / (1 - beta_utility**step)
        s = sigmoid(u' / max u')                        # maximum over all parameters
        p <- p * (1 - lr * weight_decay) - lr * (g + xi) * (1 - s),    xi ~ N(0, sigma²)

    The authors' code takes the maximum before the bias correction, which makes ``s`` nearly binary
    in the first ``1 / (1 - beta_utility)`` steps; here the ratio is at most 1 at any time. If no
    utility is positive, weights with a negative one change as in gradient descent.

    With ``betas``, ``g`` in the last line is Adam's direction ``m / (sqrt(v) + eps)``: AdaUPGD of
    the authors' code, for deep networks, whose step is twice as long for the same ``lr``.

    Parameters without a gradient neither change nor count in the maximum. Noise is a function of a
    seed and the number of the step, which live in the first group (``noise_seed``,
    ``noise_draws``), so that ``state_dict()``, copies and pickles restore it.

    :param params: parameters, named parameters or groups, as for any torch optimizer.
    :param lr: learning rate.
    :param weight_decay: decoupled weight decay, 1/``lr``.
    :param beta_utility: averaging coefficient of the utility, in [0, 1).
    :param sigma: standard deviation of the noise, in units of the gradient.
    :param betas: averaging coefficients of Adam's moments; ``None``: gradient descent.
    :param eps: added to the root of Adam's second moment.
    :param generator: gives the seed of the noise; by default torch's global generator. With
        DistributedDataParallel it is required, with the same seed on all ranks.
    :raises ValueError: naming the value and the rule.

    State per parameter: ``step`` and ``utility``, the running average without bias correction
    (loss, shape of the parameter); with ``betas`` Adam's ``exp_avg`` and ``exp_avg_sq``.
    """

    def __init__(
        self,
        params: Any,
        *,
        lr: float = 0.01,
        weight_decay: float = 0.0,
        beta_utility: float = 0.999,
        sigma: float = 0.001,
        betas: tuple[float, float] | None = None,
        eps: float = 1e-5,
        generator: torch.Generator | None = None,
    ) -> None:
        self._generator = generator
        defaults: Group = dict(lr=lr, weight_decay=weight_decay, sigma=sigma)
        defaults |= dict(beta_utility=beta_utility, betas=betas, eps=eps)
        super().__init__(params, {**defaults, "noise_seed": None, "noise_draws": 0})

    def add_param_group(self, param_group: Group) -> None:
        group = {**self.defaults, **param_group}
        for name in ("lr", "weight_decay", "sigma"):
            check_positive(name, group[name], zero=True)
        beta = group["beta_utility"]
        if not (isinstance(beta, Real) and 0 <= float(beta) < 1):
            raise ValueError(f"beta_utility must be in [0, 1), got {beta!r}")
        if group["betas"] is not None:
            check_betas(group["betas"])
        check_positive("eps", group["eps"])
        super().add_param_group(param_group)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters that have a gradient.

        :param closure: computes a loss and its gradients.
        :return: the closure's loss, or ``None``.
        :raises ValueError: for a sparse gradient; nothing is changed then.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        named = [(p, group) for group in self.param_groups for p in group["params"]]
        trained = [(i, p, g) for i, (p, g) in enumerate(named) if p.grad is not None and p.numel()]
        if any(p.grad.is_sparse for _, p, _ in trained):
            raise ValueError("UPGD does not support sparse gradients, got one")
        if not trained:
            return loss
        key = next_noise_key(self.param_groups[0], self._generator)
        with defer_interrupt():
            utilities = [self._utility(p, group) for _, p, group in trained]
            largest = [utility.max() for utility in utilities]
            # Positive, so that the signs of utilities are kept; with no synchronisation.
            tiny = torch.finfo(largest[0].dtype).tiny
            maximum = torch.stack([m.to(largest[0]) for m in largest]).max().clamp_min(tiny)
            for (number, p, group), utility in zip(trained, utilities, strict=True):
                change = fill_normal_(torch.empty_like(p), key, number).mul_(group["sigma"])
                change.add_(self._direction(p, p.grad, group))
                kept = (utility / maximum.to(utility)).neg_().sigmoid_()  # 1 - s
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.addcmul_(change, kept, value=-group["lr"])
        return loss

    def _utility(self, p: Tensor, group: Group) -> Tensor:
        """Update the running average; returns the bias-corrected one, a new tensor."""
        state, beta = self.state[p], group["beta_utility"]
        if not state:
            state |= {"step": 0, "utility": torch.zeros_like(p)}
        state["step"] += 1
        state["utility"].mul_(beta).addcmul_(p.grad, p, value=beta - 1)
        return state["utility"] / (1 - beta ** state["step"])

    def _direction(self, p: Tensor, grad: Tensor, group: Group) -> Tensor:
        """The gradient, or Adam's direction, whose moments are updated."""
        if group["betas"] is None:
            return grad
        (beta1, beta2), state = group["betas"], self.state[p]
        for name in ("exp_avg", "exp_avg_sq"):
            if name not in state:
                state[name] = torch.zeros_like(p)
        state["exp_avg"].lerp_(grad, 1 - beta1)
        state["exp_avg_sq"].mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        root = (state["exp_avg_sq"] / (1 - beta2 ** state["step"])).sqrt_().add_(group["eps"])
        return state["exp_avg"] / (1 - beta1 ** state["step"]) / root

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_generator": self._generator}
