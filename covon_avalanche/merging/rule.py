"""The interface of merge rules, and the function that applies one after a task."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from covon_avalanche.merging.batch_norm import update_batch_norm
from covon_avalanche.optim import CoVON, PosteriorOptimizer
from covon_avalanche.optim.covon import SlowStep
from covon_avalanche.optim.interrupts import defer_interrupt
from covon_avalanche.optim.named_optimizer import unwrapped
from covon_avalanche.optim.sharding import local
from covon_avalanche.posterior.fisher import Batch, checked
from covon_avalanche.posterior.gaussian import embed

Batches = Callable[[], Iterable[Batch]]
"""Starts a pass over a task's data: ``(input, target, *more)``, for ``model(input, *more)``."""


class Task:
    """A finished task: the input of a merge rule."""

    def __init__(
        self,
        model: nn.Module,
        before: Mapping[str, Tensor],
        batches: Batches | None = None,
        *,
        has_prior: bool = False,
        mean_of: Callable[[Tensor], Tensor] = Tensor.detach,
    ) -> None:
        """
        :param model: in :meth:`MergeRule.merge` with the weights that training left, in
            :meth:`MergeRule.observe` with the merged ones.
        :param before: weights before the task, by parameter name. Where a parameter has grown
            since, or is new, its new entries count as unchanged by the task.
        :param batches: passes over the task's data; may be left out for rules that need none.
        :param has_prior: whether ``before`` is the mean of a posterior optimizer's prior.
        :param mean_of: returns the present weights of a parameter, with CoVON never in bfloat16.
        """
        self.model = model
        self.has_prior = has_prior
        self.mean_of = mean_of
        self.measured: dict[str, Tensor] = {}
        """Statistics that :meth:`MergeRule.merge` has measured, for :meth:`MergeRule.observe`."""
        self._given = before
        self._batches = batches

    @cached_property
    def before(self) -> dict[str, Tensor]:
        """Weights before the task, of every parameter, in its present shape.

        :raises ValueError: if a parameter has shrunk, naming it.
        """
        before = {}
        for name, p in self.model.named_parameters():
            try:
                before[name] = in_shape(self._given.get(name), self.mean_of(p))
            except ValueError as error:
                raise ValueError(f"{name!r} cannot be merged: {error}") from error
        return before

    def trained(self) -> dict[str, Tensor]:
        """The present weights of the parameters that are not frozen, by name."""
        return {n: self.mean_of(p) for n, p in self.model.named_parameters() if p.requires_grad}

    def batches(self) -> Iterable[Batch]:
        """Start a pass over the task's data.

        :raises ValueError: without a batch, or for batches in another format.
        """
        if self._batches is None:
            raise ValueError("this merge rule needs the task's data: pass batches")
        return checked(self._batches())


class MergeRule(ABC):
    """How the weights of a task are merged with those of the earlier tasks.

    What a rule remembers of the earlier tasks is in plain attributes (dictionaries of tensors by
    parameter name), so that checkpoints store it. They are replaced, not changed in place, so that
    an interrupted merge can be undone.
    """

    needs_data: ClassVar[bool] = False
    """Whether :meth:`merge` or :meth:`observe` passes over the task's data."""
    needs_before: ClassVar[bool] = True
    """Whether :meth:`merge` uses the weights before the task."""
    augmented: ClassVar[bool] = False
    """Whether these passes are over training's own mini-batches: shuffled, of its size, with its
    transform. Otherwise they have the evaluation transform, in the order of the data."""

    def begin_task(self, model: nn.Module) -> None:  # noqa: B027 (most rules change nothing)
        """Set the weights that a task's training starts from; called at its beginning.

        Most rules leave the merged weights of the earlier tasks in place.
        """

    @abstractmethod
    def merge(self, task: Task) -> dict[str, Tensor]:
        """Compute merged weights of trained parameters, by name, changing neither the model nor
        the memory of earlier tasks.

        A parameter that is left out keeps the weights of the task or, with a posterior
        optimizer, is merged by Eq. 8.
        """

    def observe(self, task: Task) -> None:  # noqa: B027 (a rule without memory needs none)
        """Update what the rule remembers; called when the merged weights are in place, with the
        object that :meth:`merge` was given."""


def check_rule(rule: object) -> None:
    """Raise a ``ValueError`` unless it is a merge rule, neither a name nor a class."""
    if not isinstance(rule, MergeRule):
        raise ValueError(f"a merge rule is an object such as RegMean(), got {rule!r}")


def check_optimizer(optimizer: Optimizer) -> None:
    """Raise a ``ValueError`` if merge rules do not work with this optimizer."""
    if isinstance(optimizer, PosteriorOptimizer) and not isinstance(optimizer, CoVON):
        raise ValueError(
            f"{type(optimizer).__name__} uses each posterior as the next prior, without merging: "
            "merge rules work with CoVON and with optimizers that have no posterior"
        )


@torch.no_grad()
def merge_into(
    model: nn.Module,
    optimizer: Optimizer,
    rule: MergeRule | SlowStep,
    *,
    before: Mapping[str, Tensor] | None = None,
    batches: Batches | None = None,
    batch_norm_batches: Batches | None = None,
) -> None:
    """Merge the weights at the end of a task; in a plain PyTorch loop::

        for loader in tasks:
            rule.begin_task(model)
            before = {name: p.detach().clone() for name, p in model.named_parameters()}
            train(model, optimizer, loader)
            merge_into(model, optimizer, rule, before=before, batches=lambda: loader)

    CoVON receives the merged weights through ``consolidate(means=...)``, so that its precision
    follows Eq. 8; for any other optimizer they are copied into the parameters.

    :param optimizer: may be one that Accelerate has prepared.
    :param rule: a rule of :mod:`covon_avalanche.merging` or, with CoVON, what ``consolidate()``
        takes, such as ``"eq8"``.
    :param before: copies of the weights before the task, by parameter name. For CoVON's parameters
        the mean of its prior is used instead; without ``before``, parameters that it did not step
        count as unchanged.
    :param batches: starts a pass over the task's data, for rules with ``needs_data``:
        ``(input, target, *more)``, for ``model(input, *more)``.
    :param batch_norm_batches: starts a pass over shuffled data, to re-estimate the running
        statistics of batch norm after the merge, see :func:`update_batch_norm`.
    :raises ValueError: if the rule does not work with the optimizer, an argument is missing, or a
        merged weight has another shape than its parameter.
    :raises FloatingPointError: if a merged weight is not finite. After this or any other error, or
        Ctrl-C, weights, statistics, posterior and the rule's memory are those before the merge.
    """
    optimizer = unwrapped(optimizer)
    check_optimizer(optimizer)
    for name, start in (("batches", batches), ("batch_norm_batches", batch_norm_batches)):
        if start is not None and not callable(start):
            kind = type(start).__name__
            raise ValueError(f"{name} must start a pass, such as lambda: loader, got a {kind}")
    if isinstance(rule, str):
        if not isinstance(optimizer, CoVON):
            kind = type(optimizer).__name__
            raise ValueError(f"the slow step {rule!r} needs a CoVON optimizer, got {kind}")
        with _undone_on_error(model, optimizer):
            optimizer.consolidate(rule)
            torch.clear_autocast_cache()  # of casts of the weights from before the merge
            if batch_norm_batches is not None:
                update_batch_norm(model, batch_norm_batches())
        return
    check_rule(rule)
    if before:
        _check_before(model, before)
    if isinstance(optimizer, CoVON):
        stepped = {p for p, state in optimizer.state.items() if "hess" in state}  # in this task
        own = [(name, p) for name, p in model.named_parameters() if p in stepped]
        before = {**(before or {}), **optimizer.prior(own).mean} if rule.needs_before else {}
    elif before is None and rule.needs_before:
        raise ValueError(f"{type(rule).__name__} needs the weights before the task: pass before")
    has_prior = isinstance(optimizer, CoVON)
    mean_of = optimizer.mean_of if isinstance(optimizer, CoVON) else Tensor.detach
    task = Task(model, before or {}, batches, has_prior=has_prior, mean_of=mean_of)
    paused = optimizer.unattached() if isinstance(optimizer, CoVON) else nullcontext()
    with paused, _undone_on_error(model, optimizer, rule):
        merged = rule.merge(task)
        named = dict(model.named_parameters(remove_duplicate=False))
        for name, value in merged.items():
            if name not in named or value.shape != named[name].shape:
                wanted = f"of shape {tuple(named[name].shape)}" if name in named else "no parameter"
                raise ValueError(
                    f"{type(rule).__name__} returns merged weights of shape {tuple(value.shape)} "
                    f"for {name!r}, which is {wanted}"
                )
            if not torch.isfinite(value).all():
                raise FloatingPointError(
                    f"the merged weights of {name!r} are not finite: training has diverged; no "
                    "weight was changed"
                )
        means: dict[Tensor, Tensor] = {named[n]: m for n, m in merged.items()}
        if isinstance(optimizer, CoVON):
            optimizer.consolidate(means=means)
            means = {p: mean for p, mean in means.items() if p not in stepped}  # not used by it
        for p, mean in means.items():
            p.copy_(mean)
        torch.clear_autocast_cache()
        if batch_norm_batches is not None:
            update_batch_norm(model, batch_norm_batches())
        rule.observe(task)


def _check_before(model: nn.Module, before: Mapping[str, Tensor]) -> None:
    """Raise a ``ValueError`` unless there are weights of the model, which are copies."""
    named = dict(model.named_parameters())
    if named.keys().isdisjoint(before):
        raise ValueError(
            f"before has none of the model's parameters, got {next(iter(before))!r} and not "
            f"{next(iter(named), None)!r}: take both from the same module"
        )
    for name, past in before.items():
        p = named.get(name)
        is_trained = p is not None and p.requires_grad and p.numel() > 0
        if is_trained and local(past).data_ptr() == local(p).data_ptr():
            raise ValueError(f"before[{name!r}] is the parameter itself: pass a clone")


@contextmanager
def _undone_on_error(
    model: nn.Module, optimizer: Optimizer, rule: MergeRule | None = None
) -> Iterator[None]:
    """Restore what a merge changes if it is interrupted or fails inside."""
    trained = [p for p in model.parameters() if p.requires_grad or p in optimizer.state]
    tensors = [*trained, *model.buffers()]
    copies = [tensor.detach().clone() for tensor in tensors]
    state, memory = dict(optimizer.state), dict(vars(rule)) if rule else {}
    try:
        yield
    except BaseException:
        with defer_interrupt():
            for tensor, copy in zip(tensors, copies, strict=True):
                tensor.data.copy_(copy)  # CoVON takes a counted change for new weights
            optimizer.state.update(state)
            if rule is not None:
                rule.__dict__ = memory
        raise


def in_shape(past: Tensor | None, fresh: Tensor) -> Tensor:
    """A copy of what is known of a parameter, in its present shape, with fresh values where it has
    grown or nothing is known.

    :raises ValueError: if the parameter has shrunk.
    """
    return fresh.clone() if past is None else embed(past.to(fresh), fresh)
