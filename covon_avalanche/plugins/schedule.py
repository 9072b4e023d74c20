"""Hyperparameters that change from one experience to the next."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from avalanche.training.plugins import LRSchedulerPlugin

from covon_avalanche.checks import check_positive, check_whole
from covon_avalanche.did_you_mean import did_you_mean

Values = Mapping[str, float]
#: Settings of each experience, in the order of training. A value that an experience does not set
#: stays as in the experience before.
Schedule = Sequence[Values]

SHARED = frozenset({"lr", "epochs"})  # may be scheduled with any optimizer


def check_schedule(schedule: Schedule | None, allowed: frozenset[str]) -> None:
    """Raise a ``ValueError`` unless it is a list of settings with known names."""
    if schedule is None:
        return
    if not isinstance(schedule, Sequence):
        raise ValueError(
            f"a schedule must be a list of dicts, one per experience, got {schedule!r}"
        )
    for values in schedule:
        unknown = sorted(set(values) - allowed)
        if unknown:
            similar = did_you_mean(unknown[0], allowed)
            raise ValueError(f"a schedule may set {sorted(allowed)}, got {unknown}{similar}")


def scheduled_values(schedule: Schedule | None, strategy: Any) -> Values:
    """The settings of the experience that begins, empty if the schedule has none."""
    experience = strategy.clock.train_exp_counter
    return schedule[experience] if schedule and experience < len(schedule) else {}


def apply_values(strategy: Any, values: Mapping[str, Any]) -> None:
    """Set the number of epochs, and all other values in the groups of the optimizer; the learning
    rate in LR schedulers, too.

    A torch scheduler scales the ``base_lrs`` it was constructed with, and Avalanche's
    ``LRSchedulerPlugin`` resets the groups to them after each experience. As after that
    reset, a scheduler's factor applies from its first step on.

    :raises ValueError: naming value and rule, before anything is set.
    """
    for name in {"lr", "weight_decay"} & values.keys():
        check_positive(name, values[name], zero=True)
    if "epochs" in values:
        check_whole("epochs", values["epochs"])
        strategy.train_epochs = values["epochs"]
    for group in strategy.optimizer.param_groups:
        group.update({name: value for name, value in values.items() if name != "epochs"})
        if "lr" in values and "initial_lr" in group:
            group["initial_lr"] = values["lr"]
    for plugin in strategy.plugins:
        if "lr" in values and isinstance(plugin, LRSchedulerPlugin):
            for scheduler in (plugin.scheduler, *getattr(plugin.scheduler, "_schedulers", ())):
                scheduler.base_lrs = [values["lr"] for _ in strategy.optimizer.param_groups]
