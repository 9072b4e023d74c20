"""Decoupled quadratic regularisation toward the weights after the last task, for Ada-Reg and EWC*.

As AdamW decouples weight decay from Adam, Algorithms 2 and 3 of "Fast and Slow Variational
Continual Learning" decouple the pull ``theta - rate * (theta - anchor)``, with
``rate = lr * precision / ess``, from the gradient step. Where the rate is 1 or more, that step
would jump past the anchor and, from 2 on, diverge; there the implicit (proximal) step
``(theta + rate * anchor) / (1 + rate)`` is taken instead, after the gradient step, as a proximal
method does.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Adam, AdamW, NAdam, Optimizer, RAdam

from covon_avalanche.optim.checks import check_given, check_positive
from covon_avalanche.posterior.gaussian import DiagGaussian

_ADAM_FAMILY = (Adam, AdamW, NAdam, RAdam)


def explicit_pull(parameter: Tensor, anchor: Tensor, rate: Tensor) -> Tensor:
    """The pull of the entries with ``rate < 1``, to be made before the gradient step."""
    stable = torch.where(rate < 1, rate, torch.zeros_like(rate))
    return parameter - stable * (parameter - anchor)


def implicit_pull(parameter: Tensor, anchor: Tensor, rate: Tensor) -> Tensor:
    """The pull of the entries with ``rate >= 1``, to be made after the gradient step."""
    return torch.where(rate < 1, parameter, (parameter + rate * anchor) / (1 + rate))


@torch.no_grad()
def pull_(
    named_parameters: Iterable[tuple[str, Tensor]],
    optimizer: Optimizer,
    anchor: DiagGaussian,
    ess: float,
    largest: Mapping[str, float],
    *,
    implicit: bool,
) -> None:
    """Pull the parameters that the optimizer steps toward the anchor, in place.

    :param ess: effective sample size of the present task, in examples.
    :param largest: the anchor's largest precision by parameter name; most parameters need no
        implicit pull.
    """
    lr = {p: group["lr"] for group in optimizer.param_groups for p in group["params"]}
    pull = implicit_pull if implicit else explicit_pull
    for name, p in named_parameters:
        if p not in lr or not p.requires_grad or p.grad is None or name not in largest:
            continue
        scale = lr[p] / ess
        most = scale * largest[name]
        if most > 0 and (most >= 1 or not implicit):
            p.copy_(pull(p, anchor.mean[name], scale * anchor.precision[name]))


def check_adam_family(optimizer: Optimizer, user: str) -> None:
    """Raise a ``ValueError`` unless the optimizer averages squared gradients as Adam does.

    :param user: who needs it, for the message.
    """
    if not isinstance(optimizer, _ADAM_FAMILY):
        known = ", ".join(cls.__name__ for cls in _ADAM_FAMILY)
        raise ValueError(
            f"{user} needs an optimizer of the Adam family ({known}), got "
            f"{type(optimizer).__name__}"
        )


def adam_second_moments(
    named_parameters: Iterable[tuple[str, Tensor]], optimizer: Optimizer
) -> dict[str, Tensor]:
    """Adam's bias-corrected average of squared gradients by parameter name: Ada-Reg's importance
    (Algorithm 2). Parameters without a step are left out."""
    names = {p: name for name, p in named_parameters}
    found = {}
    for group in optimizer.param_groups:
        beta2 = group["betas"][1]
        for p in group["params"]:
            state = optimizer.state.get(p)
            if state and p in names:
                found[names[p]] = state["exp_avg_sq"] / (1 - beta2 ** float(state["step"]))
    return found


class QuadraticAnchor:
    """Pulls an optimizer's weights toward those after the last task; in a plain PyTorch loop::

        anchor = QuadraticAnchor(model.named_parameters(), ess=len(data), strength=1e5)
        for loader in tasks:
            optimizer = AdamW(model.parameters(), weight_decay=0.0)
            with anchor.pulling(optimizer):
                train(model, optimizer, loader)
            anchor.add(adam_second_moments(model.named_parameters(), optimizer))  # Ada-Reg
            anchor.add(squared_batch_gradients(model, loader))  # or EWC*

    Keeps one anchor and one accumulated precision, whatever the number of tasks.
    """

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, Tensor]],
        *,
        ess: float,
        strength: float = 1.0,
        gaussian: DiagGaussian | None = None,
    ) -> None:
        """
        :param ess: effective sample size of a task, in examples.
        :param strength: multiplies each task's importance, and so sets the regularisation: ``ess``
            cancels between accumulating the precision and using it, where tasks have the same.
        :param gaussian: the anchor of an earlier session.
        """
        check_positive("ess", ess)
        check_positive("strength", strength, zero=True)
        self.ess = ess
        self.strength = strength
        self._named = [(name, p) for name, p in named_parameters if p.requires_grad]
        given = gaussian or DiagGaussian({}, {})
        known = [(name, p) for name, p in self._named if name in given.mean]
        self.gaussian = DiagGaussian(
            {name: given.mean[name].to(p) for name, p in known},
            {name: given.precision[name].to(p) for name, p in known},
        )
        """The weights after the last task, and the precision of the pull toward them."""

    def pulling(self, optimizer: Optimizer) -> _Pulling:
        """Context manager: each step of the optimizer inside also pulls."""
        return _Pulling(self, optimizer)

    @torch.no_grad()
    def add(self, importance: Mapping[str, Tensor]) -> None:
        """End a task: the weights become the anchor, and the importance adds to its precision.

        :param importance: curvature per example of the task by parameter name; a parameter that is
            left out keeps its precision.
        :raises ValueError: if an importance does not fit its parameter or is not finite.
        """
        means, precisions = {}, {}
        for name, p in self._named:
            means[name] = p.detach().clone()
            precisions[name] = self.gaussian.precision.get(name, torch.zeros_like(p)).to(p)
            if name in importance:
                check_given(name, importance[name], p, "importance")
                precisions[name] = precisions[name] + self.strength * self.ess * importance[name]
        self.gaussian = DiagGaussian(means, precisions)


class _Pulling:
    """Step hooks of an optimizer: the explicit pull before a step, the implicit one after it."""

    def __init__(self, anchor: QuadraticAnchor, optimizer: Optimizer) -> None:
        self._anchor = anchor
        self._optimizer = optimizer
        self._handles: list[Any] = []

    def __enter__(self) -> None:
        anchor = self._anchor
        largest = {name: s.max().item() for name, s in anchor.gaussian.precision.items()}

        def pull(implicit: bool) -> None:
            pull_(
                anchor._named,
                self._optimizer,
                anchor.gaussian,
                anchor.ess,
                largest,
                implicit=implicit,
            )

        self._handles = [
            self._optimizer.register_step_pre_hook(lambda *_: pull(False)),
            self._optimizer.register_step_post_hook(lambda *_: pull(True)),
        ]

    def __exit__(self, *_: Any) -> None:
        for handle in self._handles:
            handle.remove()
