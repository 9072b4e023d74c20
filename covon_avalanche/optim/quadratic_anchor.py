"""Decoupled quadratic regularisation toward the weights after the last task, for Ada-Reg and EWC*.

As AdamW decouples weight decay from Adam, Algorithms 2 and 3 of "Fast and Slow Variational
Continual Learning" decouple the pull ``theta - rate * (theta - anchor)``, with
``rate = lr * precision / ess``, from the gradient step. Where the rate is 1 or more, that step
would jump past the anchor and, from 2 on, diverge; there the implicit (proximal) step
``(theta + rate * anchor) / (1 + rate)`` is taken instead, after the gradient step, as a proximal
method does.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.optim import Optimizer

from covon_avalanche.checks import check_positive
from covon_avalanche.optim.checks import check_given
from covon_avalanche.optim.named_optimizer import unwrapped
from covon_avalanche.posterior.gaussian import DiagGaussian, embed


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

    :param implicit: pull the entries with ``rate >= 1``, after the optimizer's step; otherwise
        those with ``rate < 1``, before it.
    :param ess: effective sample size of the current task, in examples.
    :param largest: the anchor's largest precision by parameter name; most parameters need no
        implicit pull.
    """
    lr = {p: group["lr"] for group in optimizer.param_groups for p in group["params"]}
    for name, p in named_parameters:
        if p not in lr or not p.requires_grad or name not in largest:
            continue
        if implicit and p.grad is None:  # before the step, a closure may have to compute it
            continue
        scale = lr[p] / ess
        most = scale * largest[name]
        if most == 0 or (implicit and most < 1):
            continue
        mean, rate = anchor.mean[name], scale * anchor.precision[name]
        if implicit:
            p.copy_(torch.where(rate < 1, p, (p + rate * mean) / (1 + rate)))
        else:
            p.sub_(torch.where(rate < 1, rate, 0) * (p - mean))


def adam_second_moments(
    named_parameters: Iterable[tuple[str, Tensor]], optimizer: Optimizer
) -> dict[str, Tensor]:
    """Adam's bias-corrected average of squared gradients by parameter name: Ada-Reg's importance
    (Algorithm 2). Parameters without a step are left out.

    :raises ValueError: if the optimizer has none.
    """
    names = {p: name for name, p in named_parameters}
    found = {}
    for group in optimizer.param_groups:
        stepped = [p for p in group["params"] if p in names and optimizer.state.get(p)]
        states = {names[p]: optimizer.state[p] for p in stepped}
        if "betas" not in group or any("exp_avg_sq" not in state for state in states.values()):
            kind = type(optimizer).__name__
            raise ValueError(f"Ada-Reg needs the second moments of Adam or a relative, got {kind}")
        for name, state in states.items():
            correction = 1 - group["betas"][1] ** float(state["step"])
            found[name] = state["exp_avg_sq"] / correction
    return found


def grown(
    anchor: DiagGaussian, named_parameters: Iterable[tuple[str, Tensor]], precision: float = 0.0
) -> DiagGaussian:
    """The anchor in the current shapes of the parameters; entries of others stay as they are.

    It is at least in float32, because long sums in bfloat16 stop growing.

    :param precision: of new entries, whose anchor is 0.
    :raises ValueError: if a parameter has become smaller.
    """
    means, precisions = dict(anchor.mean), dict(anchor.precision)
    for name, p in named_parameters:
        dtype = torch.promote_types(p.dtype, torch.float32)
        means[name] = torch.zeros_like(p, dtype=dtype, requires_grad=False)
        precisions[name] = torch.full_like(means[name], precision)
        if name in anchor.mean:
            means[name] = embed(anchor.mean[name].to(means[name]), means[name])
            precisions[name] = embed(anchor.precision[name].to(means[name]), precisions[name])
    return DiagGaussian(means, precisions)


@torch.no_grad()
def accumulated(
    anchor: DiagGaussian,
    named_parameters: Iterable[tuple[str, Tensor]],
    importance: Mapping[str, Tensor],
    factor: float,
) -> DiagGaussian:
    """The anchor after a task: the weights, with ``factor * importance`` added to the precision.

    :param importance: by parameter name; a parameter that is left out keeps its precision.
    """
    means, precisions = dict(anchor.mean), dict(anchor.precision)
    for name, p in named_parameters:
        means[name] = p.detach().clone()
        if name in importance:
            precisions[name] = precisions[name] + factor * importance[name]
    return DiagGaussian(means, precisions)


@torch.no_grad()
def added(
    anchor: DiagGaussian,
    named_parameters: Iterable[tuple[str, Tensor]],
    importance: Mapping[str, Tensor],
) -> DiagGaussian:
    """The sum of the anchor's quadratic and one around the weights, as one quadratic.

    ``S0 (theta - m0)² + F (theta - m)²`` is ``(S0 + F) (theta - (S0 m0 + F m) / (S0 + F))²`` plus
    a constant. Where the precision is 0, the centre is the weight.

    :param importance: ``F`` by parameter name; a parameter that is left out keeps its quadratic.
    """
    means, precisions = dict(anchor.mean), dict(anchor.precision)
    for name, p in named_parameters:
        if name in importance:
            precisions[name] = precisions[name] + importance[name]
            share = importance[name] / precisions[name]
            step = torch.where(precisions[name] > 0, share, 1.0) * (p.detach() - means[name])
            means[name] = means[name] + step
    return DiagGaussian(means, precisions)


def check_finite(anchor: DiagGaussian) -> None:
    """Raise a ``FloatingPointError`` naming a parameter whose precision is not finite."""
    for name, precision in anchor.precision.items():
        if not torch.isfinite(precision).all():
            raise FloatingPointError(
                f"the importance of {name!r} is not finite: training has diverged, or the "
                "criterion is not finite for single examples, as with a class weight of 0"
            )


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
        :param gaussian: the anchor of an earlier session; parameters may have grown since.
        :raises ValueError: naming the value and the rule.
        """
        check_positive("ess", ess)
        check_positive("strength", strength, zero=True)
        self.ess = ess
        self.strength = strength
        self._all = list(named_parameters)
        if gaussian is not None:
            self._check_names("gaussian", gaussian.mean, self._all)
        self.gaussian = grown(gaussian or DiagGaussian({}, {}), self._named)
        """The weights after the last task, and the precision of the pull toward them."""

    @property
    def _named(self) -> list[tuple[str, Tensor]]:
        """The parameters that are not frozen now."""
        return [(name, p) for name, p in self._all if p.requires_grad]

    def _check_names(
        self, what: str, given: Mapping[str, Tensor], named: list[tuple[str, Tensor]]
    ) -> None:
        known = {name for name, _ in named}
        if given and known.isdisjoint(given):
            raise ValueError(
                f"{what} has none of the anchor's parameters, got {next(iter(given))!r} and not "
                f"{next(iter(known), None)!r}: take both from the same module"
            )

    @contextmanager
    def pulling(self, optimizer: Optimizer) -> Iterator[None]:
        """Context manager: each step of the optimizer inside also pulls.

        :param optimizer: may be one that Accelerate has prepared.
        :raises ValueError: if the optimizer has none of the anchor's parameters.
        """
        optimizer = unwrapped(optimizer)
        owned = {p for group in optimizer.param_groups for p in group["params"]}
        if owned.isdisjoint(p for _, p in self._all):
            raise ValueError(
                "the optimizer has none of the anchor's parameters: for a new model object make a "
                "new anchor, QuadraticAnchor(model.named_parameters(), gaussian=old.gaussian, ...)"
            )
        largest = {name: s.max().item() for name, s in self.gaussian.precision.items() if s.numel()}

        def pull(implicit: bool) -> None:
            pull_(self._named, optimizer, self.gaussian, self.ess, largest, implicit=implicit)

        before = optimizer.register_step_pre_hook(lambda *_: pull(False))
        after = optimizer.register_step_post_hook(lambda *_: pull(True))
        try:
            yield
        finally:
            before.remove()
            after.remove()

    def add(self, importance: Mapping[str, Tensor]) -> None:
        """End a task: the weights become the anchor, and the importance adds to its precision.

        :param importance: curvature per example of the task by parameter name; a parameter that is
            left out keeps its precision.
        :raises ValueError: if an importance does not fit its parameter or is not finite, or all
            are of other parameters, such as those of a wrapped model.
        """
        named = self._named
        self._check_names("importance", importance, named)
        for name, p in named:
            if name in importance:
                check_given(name, importance[name], p, "importance")
        means = self.gaussian.mean
        if any(n not in means or means[n].device != p.device for n, p in named):
            self.gaussian = grown(self.gaussian, named)  # were frozen, or on another device
        factor = self.strength * self.ess
        self.gaussian = accumulated(self.gaussian, named, importance, factor)
