"""The noise of posterior samples: a pure function of seed, draw and parameter number."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor


def noise_key(seed: int, draw: int) -> int:
    """The 64-bit key of a draw: SplitMix64's output number ``draw`` (Steele et al., 2014)."""
    mask = 2**64 - 1
    z = (seed + (draw + 1) * 0x9E3779B97F4A7C15) & mask
    z = ((z ^ z >> 30) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ z >> 27) * 0x94D049BB133111EB) & mask
    return z ^ z >> 31


def fill_normal_(out: Tensor, key: int, number: int) -> Tensor:
    """Replace all entries of a tensor by standard normals.

    On a CPU with numba they are those of ``cpu_noise``; elsewhere those of a torch generator
    that is seeded by key and number.

    :param out: any shape, dtype and device.
    :param key: of the draw, see :func:`noise_key`.
    :param number: of the parameter within the optimizer.
    """
    fill = compiled_fill() if type(out) is Tensor and out.device.type == "cpu" else None
    if fill is None:
        generator = _generator(out.device)
        return out.normal_(generator=generator.manual_seed(noise_key(key, number)))
    if is_dense(out) and out.dtype == torch.float32:
        fill(out.data_ptr(), out.numel(), key, number)  # in order of memory
        return out
    narrow = torch.empty_like(out, dtype=torch.float32)
    if not is_dense(narrow):  # empty_like closes the gaps of most tensors, not of overlapping ones
        narrow = torch.empty(out.shape)
    fill(narrow.data_ptr(), narrow.numel(), key, number)
    return out.copy_(narrow)


def is_dense(tensor: Tensor) -> bool:
    """Whether the entries fill their memory without gaps, in whatever order."""
    return tensor.is_contiguous() or bool(torch.ops.aten.is_non_overlapping_and_dense(tensor))


@cache
def compiled_fill() -> Callable[[int, int, int, int], None] | None:
    """``cpu_noise.fill_normal``, or ``None`` where numba does not work."""
    try:
        import numba

        from covon_avalanche.optim.cpu_noise import fill_normal
    except ImportError:  # numba is missing, or not available for this Python yet
        return None
    except RuntimeError as error:  # it finds no folder that it may write to
        warnings.warn(
            f"numba does not work here ({error}): CoVON falls back to torch operations, which are "
            "slower and draw other noise. Set NUMBA_CACHE_DIR to a writable folder",
            stacklevel=2,
        )
        return None
    return None if numba.config.DISABLE_JIT else fill_normal  # type: ignore[attr-defined]


@cache
def _generator(device: torch.device) -> torch.Generator:
    return torch.Generator(device)
