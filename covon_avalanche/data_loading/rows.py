"""Data sets whose examples are requested by a tensor of indices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor


class Rows(Protocol):
    """Examples that are requested by a tensor of indices."""

    def __len__(self) -> int: ...

    def tensor_batch(self, indices: Tensor) -> Sequence[Tensor]:
        """The columns (inputs, targets, ...) of the examples at these int64 indices, in order."""


class Columns:
    """Tensors with one row per example."""

    def __init__(self, columns: Sequence[Tensor]) -> None:
        self.columns = columns

    def __len__(self) -> int:
        return len(self.columns[0])

    def tensor_batch(self, indices: Tensor) -> list[Tensor]:
        """See :class:`Rows`."""
        return [column.index_select(0, indices.to(column.device)) for column in self.columns]


class WithColumns:
    """Rows with additional columns."""

    def __init__(self, rows: Rows, columns: Columns) -> None:
        self.rows, self.columns = rows, columns

    def __len__(self) -> int:
        return len(self.rows)

    def tensor_batch(self, indices: Tensor) -> list[Tensor]:
        """See :class:`Rows`."""
        return [*self.rows.tensor_batch(indices), *self.columns.tensor_batch(indices)]


class Subset:
    """Some of the rows, in any order."""

    def __init__(self, rows: Rows, indices: Tensor) -> None:
        self.rows, self.indices = rows, indices

    def __len__(self) -> int:
        return len(self.indices)

    def tensor_batch(self, indices: Tensor) -> Sequence[Tensor]:
        """See :class:`Rows`."""
        return self.rows.tensor_batch(self.indices.index_select(0, indices))


class Concatenation:
    """Several rows, one after another."""

    def __init__(self, parts: Sequence[Any]) -> None:
        self.parts = parts
        self.ends = torch.tensor([len(part) for part in parts]).cumsum(0)

    def __len__(self) -> int:
        return int(self.ends[-1])

    def tensor_batch(self, indices: Tensor) -> list[Tensor]:
        """See :class:`Rows`."""
        owners = torch.bucketize(indices, self.ends, right=True)
        order, pieces = [], []
        for owner in owners.unique().tolist():
            (mine,) = torch.nonzero(owners == owner, as_tuple=True)
            start = int(self.ends[owner]) - len(self.parts[owner])
            order.append(mine)
            pieces.append(self.parts[owner].tensor_batch(indices[mine] - start))
        inverse = torch.cat(order).argsort()
        return [torch.cat(column)[inverse] for column in zip(*pieces, strict=True)]
