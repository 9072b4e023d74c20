"""Per-experience values of hyperparameters."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from avalanche.training.plugins import LRSchedulerPlugin

from covon_avalanche.optim.checks import check_positive, check_whole

Values = Mapping[str, float]
#: A list of settings by position, a mapping by experience index, or a callable of the index.
#: A value that an experience does not set stays as in the experience before.
Schedule = Sequence[Values] | Mapping[int, Values] | Callable[[int], Values]


SHARED = frozenset({"lr", "epochs"})  # may be scheduled with any optimizer


def check_schedule(schedule: Schedule | None, allowed: Iterable[str]) -> None:
    """Raise a ``ValueError`` naming the unknown key and the known ones."""
    if schedule is None or callable(schedule):
        return
    entries = schedule.values() if isinstance(schedule, Mapping) else schedule
    for values in entries:
        _check_keys(values, allowed)


def values_for(schedule: Schedule | None, experience: int, allowed: Iterable[str]) -> Values:
    """The settings of one experience, empty if the schedule has none.

    :param experience: its index in training order, from 0.
    :raises ValueError: naming an unknown key and the known ones.
    """
    if schedule is None:
        return {}
    if callable(schedule):
        values = schedule(experience)
    elif isinstance(schedule, Mapping):
        values = schedule.get(experience, {})
    else:
        values = schedule[experience] if experience < len(schedule) else {}
    _check_keys(values, allowed)
    return values


def apply_shared(strategy: Any, values: Values) -> None:
    """Set the learning rate and the number of epochs, if given.

    :raises ValueError: naming value and rule, before anything is set.
    """
    if "lr" in values:
        check_positive("lr", values["lr"], zero=True)
    if "epochs" in values:
        check_whole("epochs", values["epochs"])
        strategy.train_epochs = values["epochs"]
    if "lr" in values:
        set_lr(strategy, values["lr"])


def set_lr(strategy: Any, lr: float) -> None:
    """Set the learning rate of all groups, and of LR schedulers, which start from it.

    A torch scheduler scales the ``base_lrs`` it was constructed with, and Avalanche's
    ``LRSchedulerPlugin`` resets the groups to them after each experience. As after that
    reset, a scheduler's factor applies from its first step on.
    """
    for group in strategy.optimizer.param_groups:
        group["lr"] = lr
        if "initial_lr" in group:
            group["initial_lr"] = lr
    for plugin in strategy.plugins:
        if isinstance(plugin, LRSchedulerPlugin):
            for scheduler in (plugin.scheduler, *getattr(plugin.scheduler, "_schedulers", ())):
                scheduler.base_lrs = [lr for _ in strategy.optimizer.param_groups]


def _check_keys(values: Values, allowed: Iterable[str]) -> None:
    unknown = sorted(set(values) - set(allowed))
    if unknown:
        raise ValueError(f"a schedule may set {sorted(allowed)}, got {unknown}")
