"""Deprecated, removed in the next release: use :class:`covon_avalanche.merging.RegMean`."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping

from torch import Tensor, nn

from covon_avalanche.merging import RegMean, Task
from covon_avalanche.merging.rule import Batch


class InputMoments(RegMean):
    """Deprecated: :class:`RegMean` with the former methods."""

    def __init__(self) -> None:
        warnings.warn(
            "InputMoments is deprecated: use covon_avalanche.merging.RegMean with merge_into",
            DeprecationWarning,
            stacklevel=2,
        )
        super().__init__()

    def add(self, model: nn.Module, batches: Iterable[Batch]) -> None:
        """Add the moments of a task's data; now :meth:`RegMean.observe`."""
        self.observe(Task(model, {}, lambda: batches))

    def merged(
        self, model: nn.Module, old: Mapping[str, Tensor], batches: Iterable[Batch]
    ) -> dict[Tensor, Tensor]:
        """Merged weights by parameter; now :meth:`RegMean.merge`."""
        parameters = dict(model.named_parameters())
        merged = self.merge(Task(model, old, lambda: batches))
        return {parameters[name]: value for name, value in merged.items()}
