"""How much may run at a time."""

from __future__ import annotations

import os
from pathlib import Path

_GROUPS = Path("/sys/fs/cgroup")


def usable_cores() -> int:
    """Cores that this process may use: a container, a job of a cluster or ``taskset`` may leave
    fewer than the machine has."""
    affinity = getattr(os, "sched_getaffinity", None)
    cores = len(affinity(0)) if affinity else os.cpu_count() or 1
    quota = _quota(_GROUPS)
    return cores if quota is None else max(1, min(cores, round(quota)))


def _quota(groups: Path) -> float | None:
    """Cores' worth of time that a container has (Linux, cgroups of version 2 or 1), if limited."""
    try:
        if (both := groups / "cpu.max").is_file():
            quota, period = both.read_text().split()
        else:
            quota, period = (
                (groups / "cpu" / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period")
            )
        return None if quota.strip() in ("max", "-1") else int(quota) / int(period)
    except (OSError, ValueError):
        return None


def runs_at_a_time(device: str) -> int:
    """One per core, or one on an accelerator, whose memory several would share.

    :param device: of the recipe.
    """
    return usable_cores() if device == "cpu" else 1
