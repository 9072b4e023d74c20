"""Cache examples that Avalanche must fetch one by one, as tensors."""

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

_CHUNK = 32  # examples that are collated, or sent by a worker, together


@dataclass(frozen=True)
class _Entry:
    sources: list[Any]
    """Kept alive, because their ids are the key."""
    columns: Columns
    size: int
    training: bool


class ExampleCache:
    """Data sets as tensors, up to a limit.

    Cached data sets stay, because every evaluation covers the same domains again. Only training
    data, which are read in every epoch, replace others: earlier training data first.

    :param limit: bytes in total.
    """

    def __init__(self, limit: int = 0) -> None:
        self.limit = limit
        self._entries: dict[tuple, _Entry] = {}

    def __reduce__(self) -> tuple:
        return ExampleCache, (self.limit,)  # copies and checkpoints start empty

    def get(
        self, dataset: AvalancheDataset, sample: Sequence[Tensor], workers: int = 0
    ) -> Columns | None:
        """The examples of a data set, fetched now if necessary; ``None`` if they do not fit.

        :param sample: columns of some examples, from which the total size is estimated.
        :param workers: processes that fetch; 0 for the current one.
        """
        group = dataset._flat_data._transform_groups.current_group
        sources = _sources(dataset, group)
        key = (group, *map(id, sources))
        if key in self._entries:
            return self._entries[key].columns
        size = sum(c.nbytes for c in sample) // len(sample[0]) * len(dataset)
        training = group == "train"
        if not self._make_room(size, training):
            return None
        columns = concatenate(_fetch_all(dataset, workers), len(dataset))
        if columns is None:
            return None
        self._entries[key] = _Entry(sources, Columns(columns), size, training)
        return self._entries[key].columns

    def _make_room(self, size: int, training: bool) -> bool:
        """Whether a data set of this size fits, after removing others for training data."""
        if size > self.limit:
            return False
        candidates = sorted(self._entries, key=lambda key: not self._entries[key].training)
        while training and candidates and size > self._free():
            del self._entries[candidates.pop(0)]
        return size <= self._free()

    def _free(self) -> int:
        return self.limit - sum(entry.size for entry in self._entries.values())


def _sources(dataset: AvalancheDataset, group: str) -> list[Any]:
    """The objects that determine the examples; new wrappers of the same data share them."""
    flat = dataset._flat_data
    attributes = [a for a in dataset._data_attributes.values() if a.use_in_getitem]
    transforms = active_transforms(flat, group)
    return [flat._indices, dataset.collate_fn, *flat._datasets, *transforms, *attributes]


def fetch(dataset: AvalancheDataset, indices: Tensor) -> list[Tensor] | None:
    """Fetch examples one by one and collate them; ``None`` if that gives no columns."""
    return _collate(dataset.collate_fn, [dataset[i] for i in indices.tolist()])


def _fetch_all(dataset: AvalancheDataset, workers: int) -> Iterable[list[Tensor] | None]:
    return DataLoader(
        dataset,
        batch_size=_CHUNK if dataset.collate_fn is default_collate else 1,  # others may pad
        num_workers=workers,
        collate_fn=partial(_collate, dataset.collate_fn),
    )


def _collate(collate: Callable[[list], Any], examples: list) -> list[Tensor] | None:
    """A batch as columns, tensors with one row per example; ``None`` if it is anything else."""
    try:
        columns = collate(examples)
    except Exception:  # Avalanche's loader will raise it
        return None
    if not isinstance(columns, list | tuple):
        return None
    valid = all(isinstance(c, Tensor) and c.shape[:1] == (len(examples),) for c in columns)
    return list(columns) if valid else None


def concatenate(batches: Iterable[list[Tensor] | None], length: int) -> list[Tensor] | None:
    """Concatenate batches; ``None`` if their columns differ in more than length.

    :param length: of the result, which is allocated once so that no second copy is needed.
    """
    columns: list[Tensor] = []
    start = 0
    for batch in batches:
        if batch is None:
            return None
        if not columns:
            columns = [c.new_empty((length, *c.shape[1:])) for c in batch]
        if _types(batch) != _types(columns):
            return None
        end = start + len(batch[0])
        for column, part in zip(columns, batch, strict=True):
            column[start:end] = part
        start = end
    return columns


def _types(batch: list[Tensor]) -> list[tuple]:
    return [(column.shape[1:], column.dtype, column.device) for column in batch]
