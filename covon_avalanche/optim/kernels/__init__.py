"""The arithmetic of CoVON's step, and the ways to run it.

``formulas`` is Algorithm 1 as pure functions, which the others are tested against;
``eager`` and ``foreach`` run it with torch operations, ``compiled`` in one pass on a CPU,
``fused_cuda`` in one launch on a GPU.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Literal, get_args

import torch

from covon_avalanche.optim.buffers import is_dense
from covon_avalanche.optim.kernels.eager import EagerPlan
from covon_avalanche.optim.kernels.foreach import ForeachPlan
from covon_avalanche.optim.kernels.job import Job
from covon_avalanche.optim.kernels.kernel import Kernel
from covon_avalanche.optim.noise import compiled_fill

Implementation = Literal["auto", "eager", "foreach", "compiled", "triton"]


class KernelsByDevice:
    """The kernels of an optimizer, made when its parameters' devices are known.

    :raises ValueError: for an unknown implementation.
    """

    def __init__(self, implementation: str) -> None:
        known = get_args(Implementation)
        if implementation not in known:
            raise ValueError(f"implementation must be one of {known}, got {implementation!r}")
        self.implementation = implementation
        self._kernels: dict[tuple[torch.device, bool], Kernel] = {}
        self._splits: list[tuple[list[Job], list[tuple[Kernel, list[Job]]]]] = []

    def split(self, jobs: list[Job]) -> list[tuple[Kernel, list[Job]]]:
        """Jobs by device, tensors of other classes and those whose memory has gaps by torch
        operations; for the same list of jobs the same lists."""
        for known, split in self._splits:
            if known is jobs:
                self._splits.sort(key=lambda s: s[0] is not jobs)  # the last used first
                return split
        parts: dict[tuple[torch.device, bool], list[Job]] = {}
        for job in jobs:
            plain = type(job.mean) is torch.Tensor and is_dense(job.mean)
            parts.setdefault((job.mean.device, plain), []).append(job)
        split = [(self._kernel(*kind), some) for kind, some in parts.items()]
        self._splits = [(jobs, split), *self._splits[:1]]  # those drawn and those stepped
        return split

    def _kernel(self, device: torch.device, plain: bool) -> Kernel:
        if (device, plain) not in self._kernels:
            self._kernels[device, plain] = choose_kernel(
                self.implementation if plain else "eager", device
            )
        return self._kernels[device, plain]


def choose_kernel(implementation: str, device: torch.device) -> Kernel:
    """The kernel for parameters on a device; importing (and compiling) it if need be.

    :raises ValueError: where the implementation does not work on the device.
    :raises ImportError: where the package it needs is not installed.
    """
    if implementation == "auto":
        implementation = _best(device.type)
    match implementation:
        case "eager":
            return Kernel(EagerPlan)
        case "foreach":
            return Kernel(ForeachPlan)
        case "compiled":
            _needs("cpu", device, implementation)
            from covon_avalanche.optim.kernels.compiled import CompiledPlan

            return Kernel(CompiledPlan)
    _needs("cuda", device, implementation)
    from covon_avalanche.optim.kernels.fused_cuda import CudaPlan

    return Kernel(CudaPlan)


def _best(device_type: str) -> str:
    if device_type == "cpu":
        return "compiled" if compiled_fill() else "eager"
    if device_type == "cuda" and find_spec("triton"):
        return "triton"
    return "foreach"


def _needs(expected: str, device: torch.device, implementation: str) -> None:
    if device.type != expected:
        raise ValueError(
            f"implementation={implementation!r} is for parameters on {expected}, "
            f"got {device.type}: use 'auto', 'eager' or 'foreach'"
        )


__all__ = ["Implementation", "Kernel", "KernelsByDevice", "choose_kernel"]
