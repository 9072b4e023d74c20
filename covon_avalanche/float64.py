"""Computing with float64 where it exists: Apple's GPUs and some of Intel's do not support it."""

from __future__ import annotations

import torch
from torch import Tensor

_SUPPORTED = frozenset({"cpu", "cuda", "meta"})  # device types


def in_double(tensor: Tensor) -> Tensor:
    """Convert to float64, on the CPU if the tensor's device does not support it."""
    return (tensor if tensor.device.type in _SUPPORTED else tensor.cpu()).double()


def exact_sum(tensor: Tensor) -> Tensor:
    """The sum of all entries, accumulated in float64 where the device supports it: a scalar."""
    return tensor.sum(dtype=torch.float64 if tensor.device.type in _SUPPORTED else torch.float32)
