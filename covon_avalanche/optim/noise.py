"""Where the noise of posterior samples comes from."""

from __future__ import annotations

import torch
from torch import Tensor


class NoiseSource:
    """Standard normals, or the keys that counter-based kernels make them from.

    Without a generator of the user's, one is made at the first use, seeded by torch's global
    one: then the global seed decides, but what else draws from it between two steps
    (dropout, data augmentation) does not touch the noise.

    :param generator: on any device, or ``None``.
    """

    def __init__(self, generator: torch.Generator | None) -> None:
        self.given = generator
        self.generator = generator

    def fill(self, out: Tensor) -> None:
        """Replace all entries by standard normals."""
        generator = self._generator()
        if generator.device != out.device:
            generator = torch.Generator(out.device).manual_seed(self.key())
        out.normal_(generator=generator)

    def key(self) -> int:
        """The next 63-bit key. Asking for it never waits for an accelerator."""
        generator = self._generator()
        if generator.device.type == "cuda":  # its state, seed and offset, is on the host
            offset = generator.get_offset()
            generator.set_offset(offset + 4)
            return _mix(generator.initial_seed(), offset)
        drawn = torch.randint(2**63 - 1, (), generator=generator, device=generator.device)
        return int(drawn.item())

    def peek(self) -> int:
        """What :meth:`key` would return now."""
        state = self.state()
        try:
            return self.key()
        finally:
            self.restore(state)

    def state(self) -> Tensor:
        """On what all later noise depends."""
        return self._generator().get_state()

    def restore(self, state: Tensor) -> None:
        """Go on from an earlier :meth:`state`."""
        self._generator().set_state(state)

    def _generator(self) -> torch.Generator:
        if self.generator is None:
            seed = int(torch.randint(2**63 - 1, (), device="cpu").item())
            self.generator = torch.Generator("cpu").manual_seed(seed)
        return self.generator


def _mix(seed: int, offset: int) -> int:
    """Seed and offset as one key: SplitMix64 (Steele et al. 2014), a bijection of either."""
    mask = 2**64 - 1
    z = (seed + offset * 0x9E3779B97F4A7C15) & mask
    z = ((z ^ z >> 30) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ z >> 27) * 0x94D049BB133111EB) & mask
    return (z ^ z >> 31) >> 1
