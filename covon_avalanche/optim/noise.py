"""The noise of posterior samples: a function of a key, a tensor's number and the place in it."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from covon_avalanche.optim.buffers import is_dense


class NoiseSource:
    """Gives out the keys that noise is made from.

    Without a generator of the user's, one is made at the first use, seeded by torch's global
    one: then the global seed decides, but what else draws from it between two steps
    (dropout, data augmentation) does not touch the noise.

    :param generator: on any device, or ``None``.
    """

    def __init__(self, generator: torch.Generator | None) -> None:
        self.given = generator
        self.generator = generator
        self._drawn: Tensor | None = None  # memory for a key

    def key(self) -> int:
        """The next 63-bit key. Asking for it never waits for an accelerator."""
        generator = self._generator()
        if generator.device.type == "cuda":  # its state, seed and offset, is on the host
            offset = generator.get_offset()
            generator.set_offset(offset + 4)
            return _mix(generator.initial_seed(), offset)
        if self._drawn is None:
            self._drawn = torch.empty((), dtype=torch.int64, device=generator.device)
        return int(self._drawn.random_(generator=generator).item())

    def peek(self) -> int:
        """What :meth:`key` would return now."""
        generator = self._generator()
        state = generator.get_state()
        try:
            return self.key()
        finally:
            generator.set_state(state)

    def _generator(self) -> torch.Generator:
        if self.generator is None:
            seed = int(torch.randint(2**63 - 1, (), device="cpu").item())
            self.generator = torch.Generator("cpu").manual_seed(seed)
        return self.generator


def fill_normal(out: Tensor, key: int, number: int, start: int = 0) -> None:
    """Replace all entries of a tensor, or of a part of one, by standard normals.

    On a CPU they are those of the compiled kernel. Elsewhere, for tensors of other classes, and
    where numba does not work, they are of a torch generator that is seeded anew for each part.

    :param out: written in order of memory if there are no gaps, else in order of entries.
    :param key: of the draw, 63 bits; see :meth:`NoiseSource.key`.
    :param number: of the tensor, below 2**32.
    :param start: entries of the tensor before this part.
    """
    plain = type(out) is Tensor  # others may have no memory of their own
    fill = compiled_fill() if plain and out.device.type == "cpu" else None
    if plain and not is_dense(out):
        whole = torch.empty(out.shape, dtype=out.dtype, device=out.device)
        fill_normal(whole, key, number, start)
        out.copy_(whole)
    elif fill is None:
        seed = _mix(_mix(key, number), start)
        flat = out.as_strided((out.numel(),), (1,)) if plain else out
        flat.normal_(generator=torch.Generator(out.device).manual_seed(seed))
    elif out.dtype == torch.float32:
        fill(out.data_ptr(), out.numel(), key, number, start)
    else:
        narrow = torch.empty_like(out, dtype=torch.float32)
        fill_normal(narrow, key, number, start)
        out.copy_(narrow)


@cache
def compiled_fill() -> Callable | None:
    """``threefry.fill``, or ``None`` where numba does not work; tried once."""
    try:
        import numba

        from covon_avalanche.optim.kernels.threefry import fill
    except ImportError:  # numba is missing, or not made for this Python yet
        return None
    except RuntimeError as error:  # it finds no folder that it may write to
        warnings.warn(
            f"numba does not work here ({error}): CoVON runs on torch operations, slower and with "
            "other noise. NUMBA_CACHE_DIR may name a folder for its files",
            stacklevel=2,
        )
        return None
    return None if numba.config.DISABLE_JIT else fill  # type: ignore[attr-defined]


def _mix(seed: int, offset: int) -> int:
    """Seed and offset as one key: SplitMix64 (Steele et al. 2014), a bijection of either."""
    mask = 2**64 - 1
    z = (seed + offset * 0x9E3779B97F4A7C15) & mask
    z = ((z ^ z >> 30) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ z >> 27) * 0x94D049BB133111EB) & mask
    return (z ^ z >> 31) >> 1
