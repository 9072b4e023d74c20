"""Where the noise of posterior samples comes from: a torch generator, or the global one."""

from __future__ import annotations

import torch
from torch import Tensor


class NoiseSource:
    """Standard normals, or the keys that counter-based kernels make them from.

    :param generator: on any device; ``None`` for torch's global generator.
    """

    def __init__(self, generator: torch.Generator | None) -> None:
        self.generator = generator

    def fill(self, out: Tensor) -> None:
        """Replace all entries by standard normals."""
        device = out.device if self.generator is None else self.generator.device
        if device == out.device:
            out.normal_(generator=self.generator)
        else:
            noise = torch.randn(out.shape, generator=self.generator, device=device, dtype=out.dtype)
            out.copy_(noise)

    def key(self, device: torch.device) -> int:
        """The next 63-bit key. Reading it never waits for an accelerator."""
        generator = self._generator(device)
        if generator.device.type == "cuda":  # its state, seed and offset, is on the host
            offset = generator.get_offset()
            generator.set_offset(offset + 4)
            return _mix(generator.initial_seed(), offset)
        return int(torch.randint(2**63 - 1, (), generator=generator).item())

    def peek(self, device: torch.device) -> int:
        """What :meth:`key` would return now."""
        generator = self._generator(device)
        state = generator.get_state()
        try:
            return self.key(device)
        finally:
            generator.set_state(state)

    def _generator(self, device: torch.device) -> torch.Generator:
        if self.generator is not None:
            return self.generator
        if device.type == "cuda":
            torch.cuda.init()
            return torch.cuda.default_generators[device.index or 0]
        return torch.default_generator


def _mix(seed: int, offset: int) -> int:
    """Seed and offset as one key: SplitMix64 (Steele et al. 2014), a bijection of either."""
    mask = 2**64 - 1
    z = (seed + offset * 0x9E3779B97F4A7C15) & mask
    z = ((z ^ z >> 30) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ z >> 27) * 0x94D049BB133111EB) & mask
    return (z ^ z >> 31) >> 1
