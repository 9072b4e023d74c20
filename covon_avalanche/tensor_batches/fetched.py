"""Examples that had to be fetched one by one, kept as tensors."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import torch
from avalanche.benchmarks.utils.data import AvalancheDataset
from torch import Tensor

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
        chunks = [fetch(dataset, part) for part in torch.arange(len(dataset)).split(256)]
        if any(chunk is None or len(chunk) != len(probed) for chunk in chunks):
            return None
        rows = Columns([torch.cat(column) for column in zip(*chunks, strict=True)])
        self._kept[key] = (flat, rows, size)  # the data is held, so that its id stays its own
        return rows


def fetch(dataset: AvalancheDataset, indices: Tensor) -> list[Tensor] | None:
    """Examples one by one, as a batch; ``None`` where its columns are no tensors."""
    columns = dataset.collate_fn([dataset[i] for i in indices.tolist()])
    tensors = isinstance(columns, list | tuple) and all(isinstance(c, Tensor) for c in columns)
    return list(columns) if tensors else None
