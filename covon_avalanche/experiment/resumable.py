"""Training that resumes bit-exactly from checkpoints between and inside epochs."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import numpy as np
import torch
from avalanche.training.templates import BaseSGDTemplate
from avalanche.training.templates.update_type import SGDUpdate

from covon_avalanche.experiment.checkpoint import (
    Point,
    load_checkpoint,
    save_checkpoint,
    stored_points,
)
from covon_avalanche.experiment.run_folder import RunFolder
from covon_avalanche.experiment.run_options import RunOptions
from covon_avalanche.experiment.state import StateError, capture, restore

_log = logging.getLogger(__name__)


class Resumable:
    """Mixin for Avalanche strategies, to be named before the strategy's own class.

    Without a ``checkpointer``, or with a ``_train_exp`` of the strategy's own, it changes nothing.
    Otherwise ``train`` may resume inside an experience: the callbacks before the first epoch run as
    usual (they create loaders and closures, which are not stored), then everything is set to the
    stored values.
    """

    checkpointer: ClassVar[Checkpointer | None] = None

    def _train_exp(self, experience: Any, eval_streams: Any = None, **kwargs: Any) -> None:
        strategy: Any = self
        if self.checkpointer is None or not _is_from(BaseSGDTemplate, self, "_train_exp"):
            super()._train_exp(experience, eval_streams, **kwargs)  # type: ignore[misc]
            return
        start = self.checkpointer.enter()
        for epoch in range(start.epoch, strategy.train_epochs):
            skipped = start.batch if epoch == start.epoch else 0
            if skipped == 0:
                strategy._before_training_epoch(**kwargs)
                if strategy._stop_training:
                    strategy._stop_training = False
                    break
                self.checkpointer.begin_epoch()
            whole = strategy.dataloader
            if skipped > 0:
                strategy.dataloader = self.checkpointer.remaining(whole, skipped)
            strategy.training_epoch(**kwargs)
            strategy.dataloader = whole
            strategy._after_training_epoch(**kwargs)
            self.checkpointer.end_epoch()

    def _after_training_iteration(self, **kwargs: Any) -> None:
        super()._after_training_iteration(**kwargs)  # type: ignore[misc]
        if self.checkpointer is not None:
            self.checkpointer.end_batch()


class Checkpointer:
    """Decides when a run is stored, and where it resumes.

    It stores the points between experiences and, ``checkpoint_seconds`` after the last storing, the
    next point inside one: the end of a batch or, if batches of a memory are mixed in, of an epoch.

    A method with an open iterator over its memory is only stored between experiences. A strategy
    that cannot be stored at all restarts from the beginning.

    :param folder: the run's, whose hash is its identity: checkpoints of others are not used.
    :param root: ``"model"``, ``"strategy"`` and what else belongs to the state; all of it is
        changed in place.
    :param data: the benchmark's, see :func:`~covon_avalanche.experiment.state.benchmark_data`.
    """

    def __init__(
        self,
        folder: RunFolder,
        root: dict[str, Any],
        data: dict[str, Any],
        options: RunOptions,
    ) -> None:
        self.folder, self.run = folder.checkpoint_folder, folder.hash
        self.root, self.data = root, data
        self.options = options
        self._inside = _is_plain(root["strategy"])
        self._device = root["strategy"].device
        self._between = True
        self._point = Point(0)
        self._epoch_start: Any = None
        self._now: Any = None
        self._stored_at = time.monotonic()

    def resume(self) -> int:
        """Restore the latest usable point between experiences.

        :return: index of the experience that comes next; 0 if nothing was restored.
        :raises StateError: if a checkpoint cannot be used: the run must be built again. That
            checkpoint is not tried again.
        """
        self._restore_latest(lambda point: point.is_between and point.experience > 0)
        return self._point.experience

    def enter(self) -> Point:
        """At the start of an experience: restore the latest point inside it, if there is one.

        :return: the epoch and batch that come next.
        """
        here = self._point
        self._restore_latest(lambda point: point.experience == here.experience and point > here)
        self._stored_at = time.monotonic()
        return self._point

    def _restore_latest(self, fits: Callable[[Point], bool]) -> None:
        point = next(filter(fits, stored_points(self.folder)), None)
        if point is None:
            return
        generators: dict[str, Any] = {}
        try:
            state = load_checkpoint(self.folder, point, self.run)
            restore(state, {**self.root, "generators": generators}, self.data)
            self._epoch_start, self._now = generators["epoch_start"], generators["now"]
            _set_generator_states(self._now, self._device)
        except (MemoryError, torch.OutOfMemoryError):
            raise  # says nothing about the checkpoint
        except Exception as error:
            file = point.file(self.folder)
            file.replace(file.with_name(f"{file.name}.unusable"))
            if isinstance(error, StateError):
                raise
            reason = f"cannot be read or does not fit this run: {type(error).__name__}: {error}"
            raise StateError(f"the checkpoint {file} {reason}") from error
        _log.info("resumed at domain %d, epoch %d, batch %d", *(number + 1 for number in point))
        self._point = point

    def remaining(self, loader: Any, batches: int) -> Iterator[Any]:
        """The batches of an epoch after the first ``batches``, in their original order."""
        _set_generator_states(self._epoch_start, self._device)
        iterator = iter(loader)
        for _ in range(batches):
            next(iterator)
        _set_generator_states(self._now, self._device)
        return iterator

    def begin_epoch(self) -> None:
        """Note the generators' states, before the first batch is drawn."""
        self._epoch_start = _generator_states(self._device)

    def end_batch(self) -> None:
        """Count a step, and store a checkpoint if the last one is old enough."""
        self._point = self._point._replace(batch=self._point.batch + 1)
        if not _shuffles_again(self.root["strategy"].dataloader):
            self._store_if_due()

    def end_epoch(self) -> None:
        """Count an epoch, after all its callbacks, and store a checkpoint as after a batch."""
        self._point = Point(self._point.experience, self._point.epoch + 1)
        self._store_if_due()

    def end_experience(self) -> None:
        """Count an experience, after its evaluation, and store a checkpoint."""
        self._point = Point(self._point.experience + 1)
        self._between = self._between and self._store()

    def _store_if_due(self) -> None:
        due = time.monotonic() - self._stored_at >= self.options.checkpoint_seconds
        if due and self._inside and self._between:
            self._inside = self._store()

    def _store(self) -> bool:
        try:
            generators = {"epoch_start": self._epoch_start, "now": _generator_states(self._device)}
            state = capture({**self.root, "generators": generators}, self.data)
            save_checkpoint(self.folder, self._point, state, self.run)
        except StateError as error:
            where = "between" if self._point.is_between else "inside"
            _log.warning("no checkpoints %s experiences: %s", where, error)
            return False
        self._stored_at = time.monotonic()
        return True


def _is_plain(strategy: Any) -> bool:
    """Whether the strategy trains experiences and epochs as Avalanche's templates do."""
    owners = {"_train_exp": BaseSGDTemplate, "training_epoch": SGDUpdate}
    return all(_is_from(owner, strategy, method) for method, owner in owners.items())


def _is_from(owner: type, strategy: Any, method: str) -> bool:
    """Whether a class defines the strategy's method, apart from :class:`Resumable`."""
    classes = (c for c in type(strategy).__mro__ if method in vars(c) and c is not Resumable)
    return next(classes) is owner


def _shuffles_again(loader: Any) -> bool:
    """Whether a smaller data set may be reshuffled within the epoch, in an order that depends on
    other uses of torch's generator, such as dropout."""
    return getattr(loader, "oversample_small_datasets", False) and len(loader.datasets) > 1


def _generator_states(device: torch.device) -> dict[str, Any]:
    """States of all global random generators. Of GPUs it is that of the strategy's alone, because a
    process that resumes may have another one."""
    return {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
        "cuda": [torch.cuda.get_rng_state(device)] if device.type == "cuda" else [],
    }


def _set_generator_states(states: dict[str, Any], device: torch.device) -> None:
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    torch.set_rng_state(states["torch"])
    for state in states["cuda"]:
        torch.cuda.set_rng_state(state, device)
