"""Hyperparameters that change from one experience to the next."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from avalanche.training.plugins import LRSchedulerPlugin, SupervisedPlugin

from covon_avalanche.checks import check_positive, check_whole
from covon_avalanche.did_you_mean import did_you_mean
from covon_avalanche.optim import PosteriorOptimizer

_NOT_SETTINGS = {"params", "param_names", "initial_lr", "noise_seed", "noise_draws"}
_NOT_SETTINGS |= {"saved_entries", "saved_squares", "examples", "batch_size"}


class SchedulePlugin(SupervisedPlugin, supports_distributed=True):  # type: ignore[call-arg]
    """Sets hyperparameters at the start of each experience, for any strategy and optimizer::

        schedule = SchedulePlugin([{"lr": 1e-3}, {"lr": 3e-4, "gamma": 0.5, "epochs": 5}])
        Naive(model=model, optimizer=optimizer, plugins=[schedule, CoVONPlugin()])

    It may be anywhere among the plugins: it sets them before the others' ``before_training_exp``.
    """

    def __init__(self, experiences: Sequence[Mapping[str, float]]) -> None:
        """
        :param experiences: settings of each experience, in the order of training: ``epochs``, and
            what the optimizer's parameter groups contain. A setting that an experience leaves out
            stays as it is.
        :raises ValueError: if it is not a list of dicts.
        """
        super().__init__()
        sequence = isinstance(experiences, Sequence)
        if not sequence or not all(isinstance(values, Mapping) for values in experiences):
            raise ValueError(
                f"a schedule must be a list of dicts, one per experience, got {experiences!r}"
            )
        self.experiences = experiences

    def before_training(self, strategy: Any, **kwargs: Any) -> None:
        """Check the names of all settings."""
        groups = strategy.optimizer.param_groups
        allowed = {"epochs"}.union(*groups) - _NOT_SETTINGS
        for values in self.experiences:
            if unknown := sorted(set(values) - allowed):
                similar = did_you_mean(unknown[0], allowed)
                raise ValueError(f"a schedule may set {sorted(allowed)}, got {unknown}{similar}")

    def before_train_dataset_adaptation(self, strategy: Any, **kwargs: Any) -> None:
        """Set the experience's values, or none if one of them is invalid."""
        experience = strategy.clock.train_exp_counter
        if experience < len(self.experiences):
            apply_values(strategy, self.experiences[experience])


def apply_values(strategy: Any, values: Mapping[str, Any]) -> None:
    """Set the number of epochs, and all other values in the groups of the optimizer; the learning
    rate in LR schedulers, too.

    A torch scheduler scales the ``base_lrs`` it was constructed with, and Avalanche's
    ``LRSchedulerPlugin`` resets the groups to them after each experience. As after that
    reset, a scheduler's factor applies from its first step on.

    :raises ValueError: naming value and rule, before anything is set: for ``epochs``, ``lr`` and
        ``weight_decay``, and for all settings of CoVON and VCL. Other optimizers do not check what
        is set later.
    """
    optimizer = strategy.optimizer
    own = {name: value for name, value in values.items() if name != "epochs"}
    for name in {"lr", "weight_decay"} & own.keys():
        check_positive(name, own[name], zero=True)
    if isinstance(optimizer, PosteriorOptimizer):
        for group in optimizer.param_groups:
            optimizer.check_group({**group, **own})
    if "epochs" in values:
        check_whole("epochs", values["epochs"])
        strategy.train_epochs = values["epochs"]
    for group in optimizer.param_groups:
        group.update(own)
        if "lr" in own and "initial_lr" in group:
            group["initial_lr"] = own["lr"]
    for plugin in strategy.plugins:
        if "lr" in own and isinstance(plugin, LRSchedulerPlugin):
            for scheduler in (plugin.scheduler, *getattr(plugin.scheduler, "_schedulers", ())):
                scheduler.base_lrs = [own["lr"] for _ in optimizer.param_groups]
