"""Training that can be left at any batch and taken up again, with the same result bit by bit."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from avalanche.training.templates import BaseSGDTemplate
from avalanche.training.templates.update_type import SGDUpdate

from covon_avalanche.experiment.checkpoint import (
    CheckpointError,
    OtherVersionsError,
    Point,
    load_checkpoint,
    refuse,
    remove_outdated,
    save_checkpoint,
    stored_points,
)
from covon_avalanche.experiment.state import StateError, Surroundings, capture, restore

_log = logging.getLogger(__name__)


class Resumable:
    """Mixin for Avalanche strategies, to be named before the strategy's own class.

    Without ``checkpoints`` it changes nothing. With them ``train`` goes on inside an
    experience where a checkpoint says so: the callbacks before the first epoch run as ever (they
    make loaders and closures, which are not stored), then everything takes the stored values.
    """

    checkpoints: ClassVar[Checkpoints | None] = None

    def _train_exp(self, experience: Any, eval_streams: Any = None, **kwargs: Any) -> None:
        strategy: Any = self
        if self.checkpoints is None:
            super()._train_exp(experience, eval_streams, **kwargs)  # type: ignore[misc]
            return
        start = self.checkpoints.enter(strategy)
        for epoch in range(start.epoch, strategy.train_epochs):
            if start.batch == 0 or epoch > start.epoch:
                strategy._before_training_epoch(**kwargs)
                if strategy._stop_training:
                    strategy._stop_training = False
                    break
                self.checkpoints.begin_epoch(epoch)
                strategy.training_epoch(**kwargs)
            else:
                whole = strategy.dataloader
                strategy.dataloader = self.checkpoints.rest_of(whole, start.batch)
                strategy.training_epoch(**kwargs)
                strategy.dataloader = whole
            strategy._after_training_epoch(**kwargs)
            self.checkpoints.end_epoch(epoch)

    def _after_training_iteration(self, **kwargs: Any) -> None:
        super()._after_training_iteration(**kwargs)  # type: ignore[misc]
        if self.checkpoints is not None:
            self.checkpoints.end_batch()


class Checkpoints:
    """When a run is stored and from where it goes on.

    Stored are the points between experiences, the ends of epochs, and points inside an epoch
    where it lasts longer than ``seconds``, unless batches of a memory are mixed in. Storing takes
    no more than about ``share`` of the time: ends of epochs are passed over until the last storing
    has been paid for.

    What cannot be stored inside an experience (a method that is in the middle of its own
    iteration over a memory) goes on from the start of the experience; what cannot be stored at
    all, from the start of the run.

    :param folder: for the files.
    :param run: identity of the run; checkpoints of others are not used.
    :param root: ``"model"``, ``"strategy"`` and what else belongs to the state; all of it is
        changed in place.
    :param seconds: between two points inside an epoch.
    :param share: largest fraction of the time; 1 stores at every end of an epoch.
    :param stored: called after each storing with the seconds that it took.
    """

    def __init__(
        self,
        folder: Path,
        run: str,
        root: dict[str, Any],
        surroundings: Surroundings,
        *,
        seconds: float = 300.0,
        share: float = 0.02,
        stored: Callable[[float], None] = lambda seconds: None,
    ) -> None:
        self.folder, self.run, self.root, self.surroundings = folder, run, root, surroundings
        self.seconds, self.share, self.stored = seconds, share, stored
        self._inside = _is_plain(root["strategy"])
        self._between = True
        self._point = Point(0)
        self._epoch_start: Any = None
        self._now: Any = None
        self._stored_at = time.monotonic()
        self._cost = 0.0

    # Going on --------------------------------------------------------------------------

    def resume(self) -> int:
        """Take the latest usable point between experiences.

        :return: index of the experience that comes next. 0: nothing was there, and nothing was
            changed.
        :raises StateError: if a checkpoint fits only in part: the run must be built anew, and
            the point is not tried again.
        """
        for point in self._points():
            if point == Point(point.experience) and point.experience and self._load(point):
                self._point = point
                return point.experience
        return 0

    def enter(self, strategy: Any) -> Point:
        """At the start of an experience: take the latest point inside it, if there is one.

        :return: the epoch and batch that come next.
        """
        here = self._point
        for point in self._points():
            if point.experience == here.experience and point > here and self._load(point):
                _log.info("going on at epoch %d, batch %d", point.epoch, point.batch)
                self._point = point
                break
        self._stored_at = time.monotonic()
        return self._point

    def _points(self) -> Iterator[Point]:
        """Stored ones, latest first; without those that are refused in the meantime."""
        for point in stored_points(self.folder):
            if point in stored_points(self.folder):
                yield point

    def _load(self, point: Point) -> bool:
        try:
            state, tensors = load_checkpoint(self.folder, point, self.run)
        except OtherVersionsError as error:
            _log.warning("%s; the run starts anew", error)
            for other in stored_points(self.folder):
                refuse(self.folder, other)
            return False
        except CheckpointError as error:
            _log.warning("%s; the one before it is used", error)
            refuse(self.folder, point)
            return False
        passed: dict[str, Any] = {}
        try:
            root = {**self.root, "passed": passed}
            restore(state, tensors, root, self.surroundings)
            self._epoch_start, self._now = passed["epoch_start"], passed["now"]
            _set_randomness(self._now)
        except (MemoryError, torch.OutOfMemoryError):
            raise  # says nothing about the checkpoint
        except Exception as error:
            refuse(self.folder, point)
            if isinstance(error, StateError):
                raise
            reason = f"{type(error).__name__}: {error}"
            raise StateError(f"the checkpoint {point} does not fit this run: {reason}") from error
        return True

    def rest_of(self, loader: Any, batches: int) -> Iterator[Any]:
        """The batches of an epoch that come after so many, in the order they had."""
        _set_randomness(self._epoch_start)
        iterator = iter(loader)
        for _ in range(batches):
            next(iterator)
        _set_randomness(self._now)
        return iterator

    # Storing ---------------------------------------------------------------------------

    def begin_epoch(self, epoch: int) -> None:
        """Before the first batch is drawn."""
        self._point = Point(self._point.experience, epoch)
        self._epoch_start = _randomness()

    def end_batch(self) -> None:
        """After each step."""
        self._point = self._point._replace(batch=self._point.batch + 1)
        due = time.monotonic() - self._stored_at >= self.seconds
        if due and not _shuffles_again(self.root["strategy"].dataloader):
            self._store_inside()

    def end_epoch(self, epoch: int) -> None:
        """After all callbacks of an epoch."""
        self._point = Point(self._point.experience, epoch + 1)
        if self.share * (time.monotonic() - self._stored_at) >= self._cost * (1 - self.share):
            self._store_inside()

    def end_experience(self) -> None:
        """After the evaluation of what was trained."""
        self._point = Point(self._point.experience + 1)
        self._between = self._between and self._store()

    def _store_inside(self) -> None:
        if self._inside and self._between:
            self._inside = self._store()

    def _store(self) -> bool:
        start = time.monotonic()
        try:
            passed = {"epoch_start": self._epoch_start, "now": _randomness()}
            state, tensors = capture({**self.root, "passed": passed}, self.surroundings)
        except StateError as error:
            here = self._point
            where = "between" if here == Point(here.experience) else "inside"
            _log.warning("no checkpoints %s experiences: %s", where, error)
            return False
        save_checkpoint(self.folder, self._point, state, tensors, self.run)
        remove_outdated(self.folder)
        self._stored_at = time.monotonic()
        self._cost = self._stored_at - start
        self.stored(self._cost)
        return True


def _is_plain(strategy: Any) -> bool:
    """Whether the strategy trains experiences and epochs as Avalanche's templates do."""
    return all(
        next(c for c in type(strategy).__mro__ if method in vars(c) and c is not Resumable) is owner
        for method, owner in (("_train_exp", BaseSGDTemplate), ("training_epoch", SGDUpdate))
    )


def _shuffles_again(loader: Any) -> bool:
    """Whether a smaller dataset may begin anew within the epoch: in an order that depends on what
    else has drawn from torch's generator, such as dropout."""
    return getattr(loader, "oversample_small_datasets", False) and len(loader.datasets) > 1


def _randomness() -> dict[str, Any]:
    """The states of all global generators."""
    accelerator = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    return {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
        "cuda": accelerator,
    }


def _set_randomness(states: dict[str, Any]) -> None:
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    torch.set_rng_state(states["torch"])
    if states["cuda"]:
        torch.cuda.set_rng_state_all(states["cuda"])


__all__ = ["Checkpoints", "Resumable"]
