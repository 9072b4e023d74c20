"""A parameter of an optimizer, and whether anyone but the optimizer has changed it.

Nothing here is under ``torch.no_grad``, since an interrupt while that begins or ends would leave
gradients off.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from covon_avalanche.optim.sharding import local


class NamedParam:
    """A parameter of an optimizer: its name, its group, and its number over all groups.

    torch counts the changes of a tensor in place, except those of ``p.data``.
    """

    __slots__ = ("_grad", "_samples", "_stepped", "_values", "group", "name", "number", "param")

    def __init__(self, name: str, param: Tensor, group: dict[str, Any], number: int) -> None:
        self.name, self.param, self.group, self.number = name, param, group, number
        self._samples = 0  # changes by samples, which put back the mean
        self._stepped: int | None = None  # the version after the last step of the task
        self._values: Tensor | None = None  # a few entries then
        self._grad: tuple[weakref.ref[Tensor], int, Any] | None = None

    @property
    def version(self) -> int:
        """Changes of the parameter so far, other than by samples."""
        return self.param._version - self._samples

    @version.setter
    def version(self, version: int) -> None:
        """Count all later changes as those of a sample."""
        self._samples = self.param._version - version

    def forget_step(self) -> None:
        """Count the present values as those after the last step."""
        self._stepped = self._values = None

    def note_grad(self, unused: Any = False) -> None:
        """Remember the present gradient.

        :param unused: whether it must be cleared before a step, as a bool or a tensor. One that a
            step has used, or zeros, need not be.
        """
        grad = self.param.grad
        self._grad = None if grad is None else (weakref.ref(grad), grad._version, unused)

    def note_unreached(self) -> None:
        """Forget a noted gradient that a backward pass has reached."""
        if not self.has_noted_grad:
            self._grad = None

    @property
    def has_noted_grad(self) -> bool:
        """Whether there is a gradient that no backward pass has reached since it was noted."""
        grad, noted = self.param.grad, self._grad
        return noted is not None and noted[0]() is grad is not None and noted[1] == grad._version

    @property
    def was_reached(self) -> bool:
        """Whether a backward pass has reached the parameter since its gradient was noted."""
        return self._grad is not None and not self.has_noted_grad

    @property
    def unused_grad(self) -> Any:
        """Whether the noted gradient must be cleared and is still there, as a bool or a tensor."""
        noted = self._grad
        return noted is not None and noted[0]() is self.param.grad is not None and noted[2]


def note_step(stepped: list[NamedParam]) -> None:
    """Remember the versions of parameters after a step, and a few values of the first, the last and
    single weights."""
    for named in stepped:
        named._stepped = named.version
        ends = named is stepped[0] or named is stepped[-1]
        few = ends or named.param.numel() == 1
        named._values = _first_values(named.param).clone() if few else None


def changed(params: Iterable[NamedParam]) -> list[NamedParam]:
    """Those that others have changed since their last step. Values that were put back, as after an
    evaluation with averaged weights, count as unchanged: changed twice or more, and a few values
    compared. So does a single weight with its value, such as a clamped temperature."""
    times = {n: n.version - n._stepped for n in params if n._stepped is not None}
    found = [named for named, changes in times.items() if changes]
    noted = ((n, n._values) for n in found if n._values is not None)
    same = {n: torch.equal(_first_values(n.param), values) for n, values in noted}
    if same and all(same.values()) and all(times[named] > 1 for named in found):
        for named in found:  # some may have no more step
            named._stepped = named.version
        return []
    return [named for named in found if named.param.numel() > 1 or not same[named]]


def _first_values(p: Tensor) -> Tensor:
    """A few entries, which tell weights apart."""
    return local(p).detach().flatten()[:16]
