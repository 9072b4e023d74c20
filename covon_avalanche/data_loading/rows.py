"""Examples that can be asked for by their indices, and what can be made of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor


class Rows(Protocol):
    """Examples that can be asked for by their indices."""

    def __len__(self) -> int: ...

    def tensor_batch(self, indices: Tensor) -> Sequence[Tensor]:
        """Columns (inputs, targets, ...) of these examples, in order."""


class Columns:
    """Rows of tensors."""

    def __init__(self, columns: Sequence[Tensor]) -> None:
        self.columns = columns

    def __len__(self) -> int:
        return len(self.columns[0])

    def tensor_batch(self, indices: Tensor) -> list[Tensor]:
        """See :class:`Rows`."""
        return [_select(column, indices) for column in self.columns]


class Beside:
    """Rows with more columns."""

    def __init__(self, rows: Rows, columns: list[Tensor]) -> None:
        self.rows, self.columns = rows, columns

    def __len__(self) -> int:
        return len(self.rows)

    def tensor_batch(self, indices: Tensor) -> list[Tensor]:
        """See :class:`Rows`."""
        more = (_select(column, indices) for column in self.columns)
        return [*self.rows.tensor_batch(indices), *more]


class Transformed:
    """Rows of raw inputs behind a transform that takes many at once."""

    def __init__(self, data: Any, batch: Callable[[Sequence[Any]], Tensor]) -> None:
        self.data, self.batch = data, batch

    def __len__(self) -> int:
        return len(self.data)

    def tensor_batch(self, indices: Tensor) -> list[Tensor]:
        """See :class:`Rows`."""
        inputs, targets = self.data.raw_batch(indices)
        return [self.batch(inputs), targets]


class Subset:
    """Some of the rows, in another order."""

    def __init__(self, rows: Rows, indices: Tensor) -> None:
        self.rows, self.indices = rows, indices

    def __len__(self) -> int:
        return len(self.indices)

    def tensor_batch(self, indices: Tensor) -> Sequence[Tensor]:
        """See :class:`Rows`."""
        return self.rows.tensor_batch(self.indices.index_select(0, indices))


class Concatenation:
    """Rows one after another."""

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
        back = torch.cat(order).argsort()
        return [torch.cat(column)[back] for column in zip(*pieces, strict=True)]


def _select(column: Tensor, indices: Tensor) -> Tensor:
    return column.index_select(0, indices.to(column.device))
