"""How much may run at a time."""

from __future__ import annotations

import os


def usable_cores() -> int:
    """Cores that this process may use: a container, a job of a cluster or ``taskset`` may leave
    fewer than the machine has."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def runs_at_a_time(device: str) -> int:
    """One per core, or one on an accelerator, whose memory several would share.

    :param device: of the recipe.
    """
    return usable_cores() if device == "cpu" else 1
