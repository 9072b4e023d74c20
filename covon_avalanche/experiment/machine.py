"""What a run ran on, and how much memory it took."""

from __future__ import annotations

import os
import platform
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

_PACKAGES = ("covon_avalanche", "torch", "avalanche-lib", "scikit-learn", "numpy")


def versions() -> dict[str, str]:
    """Of Python and the packages that decide a result."""
    return {"python": platform.python_version(), **{p: version(p) for p in _PACKAGES}}


def machine() -> dict[str, Any]:
    """Processor, accelerator and threads."""
    found = {
        "platform": platform.platform(),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
    }
    if torch.cuda.is_initialized():
        found["accelerator"] = torch.cuda.get_device_name()
    return found


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next(ln.split(":", 1)[1].strip() for ln in lines if ln.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def reset_peak_memory() -> None:
    """Begin to measure; without effect where the system does not offer it."""
    if torch.cuda.is_initialized():
        torch.cuda.reset_peak_memory_stats()
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return


def peak_memory() -> int | None:
    """Bytes of the accelerator if one is in use, else of this process; ``None`` where the system
    does not tell."""
    if torch.cuda.is_initialized():
        return int(torch.cuda.max_memory_allocated())
    try:
        lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
        return next(1024 * int(ln.split()[1]) for ln in lines if ln.startswith("VmHWM"))
    except (OSError, StopIteration):
        return None
