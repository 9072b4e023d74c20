"""Which devices compute in bfloat16. For CPUs, nothing here imports torch."""

from __future__ import annotations

from pathlib import Path

SLOW = (
    'precision = "bfloat16": this processor has no instructions for bfloat16, so that training is '
    'slower than with "float32"; "auto" decides by the machine'
)


def used_precision(precision: str, device: str) -> str:
    """The ``precision`` of a recipe on this machine, where ``"auto"`` is one of the others."""
    if precision == "auto":
        return "bfloat16" if has_bfloat16(device) else "float32"
    return precision


def is_slow(precision: str, device: str) -> bool:
    """Whether a recipe asks for bfloat16 on a CPU that has to emulate it."""
    return precision == "bfloat16" and device == "cpu" and not has_bfloat16(device)


def has_bfloat16(device: str) -> bool:
    """Whether the device has instructions for bfloat16; for CPUs known on Linux only."""
    if device.startswith("cuda"):
        import torch

        with torch.cuda.device(device):
            return torch.cuda.is_bf16_supported(including_emulation=False)
    flags = f"{cpuinfo('flags')} {cpuinfo('Features')}".split()  # of x86, of ARM
    return device == "cpu" and not {"avx512_bf16", "amx_bf16", "bf16"}.isdisjoint(flags)


def cpuinfo(key: str) -> str:
    """A field of the first processor in Linux's ``/proc/cpuinfo``, or an empty string."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next(ln.split(":", 1)[1].strip() for ln in lines if ln.startswith(key))
    except (OSError, StopIteration):
        return ""
