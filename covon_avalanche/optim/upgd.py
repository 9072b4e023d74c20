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
        groups = [(g, [p for p in g["params"] if p.grad is not None]) for g in self.param_groups]
        if any(grad.is_sparse for _, params in groups for grad in _grads(params)):
            raise ValueError("UPGD does not support sparse gradients, got one")
        if not any(p.numel() for _, params in groups for p in params):
            return loss
        key = next_noise_key(self.param_groups[0], self._generator)
        numbers = {p: i for i, p in enumerate(p for g in self.param_groups for p in g["params"])}
        with defer_interrupt():
            utilities = [self._update_utilities(params, group) for group, params in groups]
            largest = [u.max() for of_group in utilities for u in of_group if u.numel()]
            # Positive, so that the signs of utilities are kept; with no synchronisation.
            tiny = torch.finfo(largest[0].dtype).tiny
            maximum = torch.stack([m.to(largest[0]) for m in largest]).max().clamp_min(tiny)
            for (group, params), of_group in zip(groups, utilities, strict=True):
                if params:
                    noise = [fill_normal_(torch.empty_like(p), key, numbers[p]) for p in params]
                    directions = self._directions(params, group)
                    _descend(params, directions, noise, of_group, maximum, group)
        return loss

    def _update_utilities(self, params: list[Tensor], group: Group) -> list[Tensor]:
        """Update the running averages; returns the bias-corrected ones, new tensors."""
        if not params:
            return []
        states = [self.state[p] for p in params]
        for p, state in zip(params, states, strict=True):
            if not state:
                state |= {"step": 0, "utility": torch.zeros_like(p)}
            state["step"] += 1
        beta, utilities = group["beta_utility"], [state["utility"] for state in states]
        torch._foreach_mul_(utilities, beta)
        torch._foreach_addcmul_(utilities, _grads(params), params, value=beta - 1)
        corrected = torch._foreach_div(utilities, [1 - beta ** s["step"] for s in states])
        return list(corrected)

    def _directions(self, params: list[Tensor], group: Group) -> list[Tensor]:
        """Gradients, or Adam's directions, whose moments are updated."""
        grads = _grads(params)
        if group["betas"] is None:
            return grads
        (beta1, beta2), states = group["betas"], [self.state[p] for p in params]
        for p, state in zip(params, states, strict=True):
            for name in ("exp_avg", "exp_avg_sq"):
                if name not in state:
                    state[name] = torch.zeros_like(p)
        averages, squares = ([s[name] for s in states] for name in ("exp_avg", "exp_avg_sq"))
        torch._foreach_lerp_(averages, grads, 1 - beta1)
        torch._foreach_mul_(squares, beta2)
        torch._foreach_addcmul_(squares, grads, grads, value=1 - beta2)
        roots = torch._foreach_div(squares, [1 - beta2 ** s["step"] for s in states])
        torch._foreach_sqrt_(roots)
        torch._foreach_add_(roots, group["eps"])
        directions = torch._foreach_div(averages, [1 - beta1 ** s["step"] for s in states])
        torch._foreach_div_(directions, roots)
        return list(directions)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore the state, also of before ``betas``."""
        super().__setstate__(state)
        for group in self.param_groups:
            group.setdefault("betas", None)
            group.setdefault("eps", 1e-5)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_generator": self._generator}


def _grads(params: list[Tensor]) -> list[Tensor]:
    return [p.grad for p in params if p.grad is not None]


def _descend(
    params: list[Tensor],
    directions: list[Tensor],
    noise: list[Tensor],
    utilities: list[Tensor],
    maximum: Tensor,
    group: Group,
) -> None:
    """Change the parameters of a group in place; overwrites noise and utilities.

    :param maximum: of the utilities in all groups, > 0.
    """
    for utility in utilities:
        utility.div_(maximum.to(utility))
    torch._foreach_neg_(utilities)
    torch._foreach_sigmoid_(utilities)  # 1 - sigmoid(u' / max u')
    torch._foreach_mul_(noise, group["sigma"])
    torch._foreach_add_(noise, directions)
    torch._foreach_mul_(params, 1 - group["lr"] * group["weight_decay"])
    torch._foreach_addcmul_(params, noise, utilities, value=-group["lr"])
