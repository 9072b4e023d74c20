"""The parameters of an optimizer with their names, groups and numbers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from torch import Tensor
from torch.optim import Optimizer

Group = dict[str, Any]
State = dict[str, Any]


class Place(NamedTuple):
    """A parameter of an optimizer: its name, its group, and its number over all groups."""

    name: str
    parameter: Tensor
    group: Group
    number: int


class NamedOptimizer(Optimizer):
    """A torch optimizer that knows its parameters by name.

    The names are those it was constructed with (``model.named_parameters()``), else
    ``"group.index"``.
    """

    def _places(self) -> Iterator[Place]:
        number = 0
        for i, group in enumerate(self.param_groups):
            names = group.get("param_names", ())
            for j, p in enumerate(group["params"]):
                name = names[j] if len(names) == len(group["params"]) else f"{i}.{j}"
                yield Place(name, p, group, number)
                number += 1

    def _names(self, named_parameters: Iterable[tuple[str, Tensor]] | None) -> dict[Tensor, str]:
        names = {p: name for name, p, *_ in self._places()}
        if named_parameters is None:
            return names
        given = {p: name for name, p in named_parameters}
        strange = sorted(n for p, n in given.items() if p not in names)
        if strange:
            raise ValueError(f"these parameters are not in the optimizer: {strange}")
        return given
