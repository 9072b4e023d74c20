"""Detecting from the training loss that a task is learned."""

from __future__ import annotations

from collections import deque

from covon_avalanche.optim.checks import check_whole


class LossPlateau:
    """Detects that a task is learned: the loss no longer decreases.

    Compares the mean loss of the last ``window`` steps with that of the ``window`` steps before.
    A plateau is reported once; the next is reported only after the loss has risen in between, so
    that a long task is not merged twice (after Aljundi et al., "Task-Free Continual Learning",
    2019).

    :param window: steps to average over.
    :param tolerance: smallest relative change of the mean that still counts as learning.
    :param rise: relative rise above the plateau that starts a new task; a plateau below
        0.1 counts as 0.1 here.
    """

    def __init__(self, window: int = 100, tolerance: float = 0.02, rise: float = 0.5) -> None:
        check_whole("window", window)
        if not 0 <= tolerance < 1:
            raise ValueError(f"tolerance must be in [0, 1), got {tolerance}")
        if not rise > 0:
            raise ValueError(f"rise must be > 0, got {rise}")
        self.window, self.tolerance, self.rise = window, tolerance, rise
        self._losses: deque[float] = deque(maxlen=2 * window)
        self._plateau: float | None = None

    def update(self, loss: float) -> bool:
        """Record the loss of a step; ``True`` if a plateau begins here."""
        self._losses.append(loss)
        if len(self._losses) < 2 * self.window:
            return False
        losses = list(self._losses)
        before = sum(losses[: self.window]) / self.window
        now = sum(losses[self.window :]) / self.window
        if self._plateau is not None:
            if now > self._plateau + self.rise * max(self._plateau, 0.1):
                self._plateau = None
                self._losses.clear()
            return False
        if abs(before - now) > self.tolerance * abs(before):
            return False
        self._plateau = now
        return True
