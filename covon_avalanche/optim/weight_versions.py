"""Notices when anyone but their optimizer changes parameters.

Nothing here is under ``torch.no_grad``, since an interrupt while that begins or ends would leave
gradients off.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from covon_avalanche.optim.samples import SampleBuffer, bump_versions
from covon_avalanche.optim.sharding import local


class WeightVersions:
    """The versions of parameters, with which torch counts changes in place. Changes of ``p.data``
    are not counted."""

    def __init__(self) -> None:
        self._own: dict[Tensor, int] = {}  # changes by samples, which put back the mean
        self._versions: dict[Tensor, int] = {}  # after the last step, without those
        self._sums: dict[Tensor, Tensor] = {}  # after the last step, of a few entries

    def version(self, p: Tensor) -> int:
        """Changes of a parameter so far, other than by samples."""
        return p._version - self._own.get(p, 0)

    def swapped(self, buffers: Mapping[Tensor, SampleBuffer], counted: bool = True) -> None:
        """Count all changes since samples were drawn as theirs, see :func:`bump_versions`.

        :param counted: ``False`` for a swap that will be undone, without backward pass between.
        """
        bump_versions(buffers if counted else ())
        for p, buffer in buffers.items():
            self._own[p] = p._version - buffer.version

    def note(self, params: Iterable[Tensor]) -> None:
        """Remember parameters after a step."""
        params = list(params)
        self._versions.update((p, self.version(p)) for p in params)
        single = [p for p in params if p.numel() == 1]
        self._sums = {p: _first_sum(p) for p in (*params[:1], *params[-1:], *single)}

    def forget(self, p: Tensor) -> None:
        """Take the present values of a parameter for those after a step."""
        self._versions.pop(p, None)

    def changed(self) -> set[Tensor]:
        """Those that others have changed since the last step. Values that were put back, as after
        an evaluation with averaged weights, count as unchanged: changed twice or more, and a few
        entries compared. So does a single weight with its value, such as a clamped temperature."""
        times = {p: self.version(p) - version for p, version in self._versions.items()}
        found = {p for p, changes in times.items() if changes}
        compared = found & self._sums.keys()
        same = {p for p in compared if torch.equal(_first_sum(p), self._sums[p])}
        if compared and compared == same and all(times[p] > 1 for p in found):
            return set()
        return found - {p for p in same if p.numel() == 1}


def _first_sum(p: Tensor) -> Tensor:
    """The sum of a few entries, which tells weights apart; a scalar."""
    return local(p).detach().flatten()[:16].sum()
