"""Examples that had to be fetched one by one, kept as tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from avalanche.benchmarks.utils.data import AvalancheDataset
from torch import Tensor
from torch.utils.data import DataLoader, default_collate

from covon_avalanche.data_loading.deterministic import active_transforms
from covon_avalanche.data_loading.rows import Columns

_AT_ONCE = 32  # as much as workers hand over at a time


@dataclass(frozen=True)
class _Kept:
    made_of: list[Any]
    """Held, so that the ids in the key stay their own."""
    rows: Columns
    size: int
    training: bool


class FetchedExamples:
    """Datasets whose examples had to be fetched one by one, as long as there is room.

    What is kept stays, because evaluations go over the same domains again and again. Only
    training data, which are read in every epoch, take the place of others, earlier training data
    first.

    :param limit: bytes in all.
    """

    def __init__(self, limit: int = 0) -> None:
        self.limit = limit
        self._kept: dict[tuple, _Kept] = {}

    def __reduce__(self) -> tuple:
        return FetchedExamples, (self.limit,)  # copies and checkpoints fetch anew

    def get(
        self, dataset: AvalancheDataset, probed: Sequence[Tensor], workers: int = 0
    ) -> Columns | None:
        """A dataset's examples; ``None`` if there is no room for them.

        :param probed: columns of some examples, which tell the size of all.
        :param workers: processes that fetch, if it must be done; 0 for this one.
        """
        group = dataset._flat_data._transform_groups.current_group
        made_of = _made_of(dataset, group)
        key = (group, *map(id, made_of))
        if key in self._kept:
            return self._kept[key].rows
        size = sum(c.nbytes for c in probed) // len(probed[0]) * len(dataset)
        training = group == "train"
        if not self._make_room(size, training):
            return None
        columns = join(_fetch_all(dataset, workers), len(dataset))
        if columns is None:
            return None
        self._kept[key] = _Kept(made_of, Columns(columns), size, training)
        return self._kept[key].rows

    def _make_room(self, size: int, training: bool) -> bool:
        """Whether so many bytes more may be kept."""
        if size > self.limit:
            return False
        leaving = sorted(self._kept, key=lambda key: not self._kept[key].training)
        while training and leaving and size > self._room():
            del self._kept[leaving.pop(0)]
        return size <= self._room()

    def _room(self) -> int:
        return self.limit - sum(kept.size for kept in self._kept.values())


def _made_of(dataset: AvalancheDataset, group: str) -> list[Any]:
    """All that decides what the examples are; new wrappers of the same data share it."""
    flat = dataset._flat_data
    attributes = [a for a in dataset._data_attributes.values() if a.use_in_getitem]
    transforms = active_transforms(flat, group)
    return [flat._indices, dataset.collate_fn, *flat._datasets, *transforms, *attributes]


def fetch(dataset: AvalancheDataset, indices: Tensor) -> list[Tensor] | None:
    """Examples one by one, as a batch; ``None`` where its columns are no tensors of rows."""
    return _collated(dataset.collate_fn, [dataset[i] for i in indices.tolist()])


def _fetch_all(dataset: AvalancheDataset, workers: int) -> Iterable[list[Tensor] | None]:
    return DataLoader(
        dataset,
        batch_size=_AT_ONCE if dataset.collate_fn is default_collate else 1,  # others may pad
        num_workers=workers,
        collate_fn=partial(_collated, dataset.collate_fn),
    )


def _collated(collate: Callable[[list], Any], examples: list) -> list[Tensor] | None:
    try:
        columns = collate(examples)
    except Exception:  # if Avalanche's loader meets it, too, it is told there
        return None
    if not isinstance(columns, list | tuple):
        return None
    rows = all(isinstance(c, Tensor) and c.shape[:1] == (len(examples),) for c in columns)
    return list(columns) if rows else None


def join(batches: Iterable[list[Tensor] | None], length: int) -> list[Tensor] | None:
    """Batches one after another; ``None`` where their columns differ in more than length.

    :param length: of all together, so that there is memory for one copy only.
    """
    columns: list[Tensor] = []
    start = 0
    for batch in batches:
        if batch is None:
            return None
        if not columns:
            columns = [c.new_empty((length, *c.shape[1:])) for c in batch]
        if _kinds(batch) != _kinds(columns):
            return None
        end = start + len(batch[0])
        for column, part in zip(columns, batch, strict=True):
            column[start:end] = part
        start = end
    return columns


def _kinds(batch: list[Tensor]) -> list[tuple]:
    return [(column.shape[1:], column.dtype, column.device) for column in batch]
