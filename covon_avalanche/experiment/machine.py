"""Versions, hardware and memory of a run."""

from __future__ import annotations

import gc
import os
import platform
from contextlib import suppress
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from covon_avalanche.experiment.precision import cpuinfo

_PACKAGES = ("covon_avalanche", "torch", "avalanche-lib", "scikit-learn", "numpy")


@cache
def versions() -> dict[str, str]:
    """Versions of Python and of the packages that affect results."""
    return {"python": platform.python_version(), **{p: version(p) for p in _PACKAGES}}


def machine(device: str = "cuda") -> dict[str, Any]:
    """Processor, threads, and the accelerator in use, if the device is one."""
    found = {
        "platform": platform.platform(),
        "processor": cpuinfo("model name") or platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
    }
    if _in_use(device):
        found["accelerator"] = torch.cuda.get_device_name(device)
    return found


def check_device(name: str) -> None:
    """Check that this machine has a recipe's device.

    :raises ValueError: if it has none.
    """
    kind, _, index = name.partition(":")
    counts = {"cpu": 1, "cuda": torch.cuda.device_count(), "mps": torch.mps.device_count()}
    if int(index or 0) >= counts[kind]:
        raise ValueError(f'device = "{name}": this machine has {counts[kind]} {kind} devices')


def _in_use(device: str) -> bool:
    return device.startswith("cuda") and torch.cuda.is_initialized()


def free_memory() -> None:
    """Free memory held by earlier runs of this process: strategies contain reference cycles, which
    only the garbage collector frees."""
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def reset_peak_memory(device: str) -> None:
    """Start to measure, where the system supports it."""
    if _in_use(device):
        torch.cuda.reset_peak_memory_stats(device)
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def peak_memory(device: str) -> int | None:
    """Bytes of the device if it is an accelerator, else of this process; ``None`` where the system
    does not report it."""
    if _in_use(device):
        return int(torch.cuda.max_memory_allocated(device))
    try:
        lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
        return next(1024 * int(ln.split()[1]) for ln in lines if ln.startswith("VmHWM"))
    except (OSError, StopIteration):
        return None
