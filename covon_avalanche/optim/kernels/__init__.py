"""The arithmetic of CoVON's step, and the ways to run it.

``formulas`` is Algorithm 1 as pure functions, which the others are tested against;
``foreach`` runs it with torch operations, ``compiled`` in one pass on a CPU, ``fused_cuda``
in one launch on a GPU.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Literal, get_args

import torch

from covon_avalanche.optim.buffers import BLOCK
from covon_avalanche.optim.kernels.kernel import ForeachKernel, FusedKernel, Kernel

Implementation = Literal["auto", "eager", "foreach", "compiled", "triton"]

_LARGE_BLOCK = 2**24  # on accelerators launches cost more than memory


def check_implementation(implementation: str) -> None:
    """Raise a ``ValueError`` for an unknown implementation."""
    known = get_args(Implementation)
    if implementation not in known:
        raise ValueError(f"implementation must be one of {known}, got {implementation!r}")


def choose_kernel(implementation: str, device: torch.device) -> Kernel:
    """The kernel for parameters on a device; importing (and compiling) it if need be.

    :raises ValueError: where the implementation does not work on the device.
    :raises ImportError: where the package it needs is not installed.
    """
    if implementation == "auto":
        implementation = _best(device.type)
    match implementation:
        case "eager":
            return ForeachKernel(BLOCK)
        case "foreach":
            return ForeachKernel(_LARGE_BLOCK)
        case "compiled":
            _needs("cpu", device, implementation)
            from covon_avalanche.optim.kernels import compiled

            return FusedKernel(compiled)
    _needs("cuda", device, implementation)
    from covon_avalanche.optim.kernels import fused_cuda

    return FusedKernel(fused_cuda)


def _best(device_type: str) -> str:
    if device_type == "cpu":
        return "compiled" if find_spec("numba") else "eager"
    if device_type == "cuda" and find_spec("triton"):
        return "triton"
    return "foreach"


def _needs(expected: str, device: torch.device, implementation: str) -> None:
    if device.type != expected:
        raise ValueError(
            f"implementation={implementation!r} is for parameters on {expected}, "
            f"got {device.type}: use 'auto', 'eager' or 'foreach'"
        )


__all__ = ["Implementation", "Kernel", "check_implementation", "choose_kernel"]
