"""Examples that had to be fetched one by one, kept as tensors."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from avalanche.benchmarks.utils.data import AvalancheDataset
from torch import Tensor
from torch.utils.data import default_collate

from covon_avalanche.tensor_batches.rows import Columns


class FetchedExamples:
    """Datasets whose examples had to be fetched one by one, least recently used first.

    :param limit: bytes in all.
    """

    def __init__(self, limit: int = 0) -> None:
        self.limit = limit
        self._kept: OrderedDict[tuple, tuple[Any, Columns, int]] = OrderedDict()

    def __reduce__(self) -> tuple:
        return FetchedExamples, (self.limit,)  # copies and checkpoints fetch anew

    def get(self, dataset: AvalancheDataset, probed: Sequence[Tensor]) -> Columns | None:
        """A dataset's examples; ``None`` if they would take more than the limit.

        :param probed: columns of some examples, which tell the size of all.
        """
        flat = dataset._flat_data
        key = (id(flat._indices), flat._transform_groups.current_group, *map(id, flat._datasets))
        if key in self._kept:
            self._kept.move_to_end(key)
            return self._kept[key][1]
        size = sum(c.nbytes for c in probed) // len(probed[0]) * len(dataset)
        if size > self.limit:
            return None
        while self._kept and size + sum(s for *_, s in self._kept.values()) > self.limit:
            self._kept.popitem(last=False)
        at_once = 256 if dataset.collate_fn is default_collate else 1  # others may pad
        parts = torch.arange(len(dataset)).split(at_once)
        columns = join(fetch(dataset, part) for part in parts)
        if columns is None:
            return None
        rows = Columns(columns)
        self._kept[key] = (flat, rows, size)  # the data is held, so that its id stays its own
        return rows


def fetch(dataset: AvalancheDataset, indices: Tensor) -> list[Tensor] | None:
    """Examples one by one, as a batch; ``None`` where its columns are no tensors of rows."""
    examples = [dataset[i] for i in indices.tolist()]
    try:
        columns = dataset.collate_fn(examples)
    except Exception:  # if Avalanche's loader meets it, too, it is told there
        return None
    if not isinstance(columns, list | tuple):
        return None
    rows = all(isinstance(c, Tensor) and c.shape[:1] == indices.shape for c in columns)
    return list(columns) if rows else None


def join(batches: Iterable[list[Tensor] | None]) -> list[Tensor] | None:
    """Batches one after another; ``None`` where their columns differ in more than length."""
    found: list[list[Tensor]] = []
    for batch in batches:
        if batch is None or (found and _kinds(batch) != _kinds(found[0])):
            return None
        found.append(batch)
    return [torch.cat(column) for column in zip(*found, strict=True)]


def _kinds(batch: list[Tensor]) -> list[tuple]:
    return [(column.shape[1:], column.dtype, column.device) for column in batch]
