"""Loss, accuracy and speed of training, epoch by epoch."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from typing import Any

import torch
from avalanche.training.plugins import SupervisedPlugin

from covon_avalanche.experiment.result import Epoch

_log = logging.getLogger(__name__)


class EpochLog(SupervisedPlugin):
    """Loss, accuracy and speed of each epoch, and the seconds of each experience.

    :param on_progress: called after each batch with its number in the epoch, counted from 1, and
        after each epoch with 0.
    """

    not_stored = frozenset({"on_progress", "_since"})

    def __init__(self, on_progress: Callable[[int], None] = lambda batch: None) -> None:
        super().__init__()
        self.on_progress = on_progress
        self.epochs: list[dict[str, Any]] = []
        self.seconds: list[float] = []
        """Seconds of training by experience, without interruptions."""
        self._since = 0.0
        self._begin()

    def _begin(self) -> None:
        self._loss = torch.zeros((), dtype=torch.float32, device="cpu")
        self._hits = torch.zeros((), dtype=torch.int64, device="cpu")
        self._images = 0

    def before_training(self, strategy: Any, **kwargs: Any) -> None:
        self.seconds.append(0.0)
        self._begin()
        self._since = time.perf_counter()

    def _tick(self) -> float:
        now = time.perf_counter()
        passed, self._since = now - self._since, now
        self.seconds[-1] += passed
        return passed

    @torch.no_grad()
    def after_training_iteration(self, strategy: Any, **kwargs: Any) -> None:
        images = len(strategy.mb_y)
        hits = (strategy.mb_output.argmax(1) == strategy.mb_y).sum()
        self._loss = self._loss.to(hits.device) + images * strategy.loss.detach()
        self._hits = self._hits.to(hits.device) + hits
        self._images += images
        self.on_progress(strategy.clock.train_epoch_iterations + 1)

    def after_training_epoch(self, strategy: Any, **kwargs: Any) -> None:
        if self._images == 0:  # a loop of the strategy's own, without Avalanche's callbacks
            return
        experience = len(self.seconds) - 1
        number = sum(epoch["experience"] == experience for epoch in self.epochs)
        epoch = Epoch(
            experience=experience,
            epoch=number,
            loss=float(self._loss) / self._images,
            accuracy=float(self._hits) / self._images,
            images=self._images,
            seconds=self._tick(),
        )
        if not math.isfinite(epoch.loss):
            raise FloatingPointError(
                f"the loss is {epoch.loss} in domain {experience + 1}, epoch {number + 1}: the "
                "training has diverged, or the data have values that are not finite"
            )
        self.epochs.append(epoch.model_dump())
        about = experience + 1, number + 1, epoch.loss, 100 * epoch.accuracy, epoch.seconds
        _log.info("domain %d, epoch %d: loss %.4g, accuracy %.2f %%, %.1f s", *about)
        self._begin()
        self.on_progress(0)
        self._since = time.perf_counter()  # the call does not count as training

    def after_training(self, strategy: Any, **kwargs: Any) -> None:
        self._tick()
