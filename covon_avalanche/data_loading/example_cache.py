"""Cache evaluation examples that Avalanche must fetch one by one, as tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from avalanche.benchmarks.utils.data import AvalancheDataset, _FlatDataWithTransform
from torch import Tensor
from torch.utils.data import DataLoader, default_collate

from covon_avalanche.data_loading.rows import Columns

_CHUNK = 32  # examples that are collated, or sent by a worker, together


class ExampleCache:
    """Data sets as tensors, up to a limit.

    Cached data sets stay, because every evaluation covers the same domains again.

    :param limit: bytes in total.
    """

    def __init__(self, limit: int = 0) -> None:
        self.limit = limit
        self._entries: dict[tuple[int, ...], tuple[list[Any], Columns]] = {}

    def __reduce__(self) -> tuple:
        return ExampleCache, (self.limit,)  # copies and checkpoints start empty

    def get(
        self, dataset: AvalancheDataset, sample: Sequence[Tensor], workers: int = 0
    ) -> Columns | None:
        """The examples of a data set, fetched now if necessary; ``None`` if they do not fit.

        :param sample: columns of some examples, as :func:`fetch` returns them.
        :param workers: processes that fetch; 0 for the current one.
        """
        sources = _sources(dataset)  # kept alive, because their ids are the key
        key = tuple(map(id, sources))
        if key not in self._entries:
            used = sum(c.nbytes for _, rows in self._entries.values() for c in rows.columns)
            size = sum(c.nbytes for c in sample) // len(sample[0]) * len(dataset)
            columns = _fetch_all(dataset, sample, workers) if used + size <= self.limit else None
            if columns is None:
                return None
            self._entries[key] = sources, Columns(columns)
        return self._entries[key][1]


def _sources(dataset: AvalancheDataset) -> list[Any]:
    """The objects that determine the examples; new wrappers of the same data share them."""
    flat = dataset._flat_data
    attributes = [a for a in dataset._data_attributes.values() if a.use_in_getitem]
    return [flat._indices, *flat._datasets, *active_transforms(flat, "eval"), *attributes]


def active_transforms(data: _FlatDataWithTransform, group: str) -> list[Any]:
    """The transforms that one of Avalanche's wrappers applies in a transform group."""
    both = (data._transform_groups, data._frozen_transform_groups)
    transforms = [groups.transform_groups[group] for groups in both]
    return [t for t in transforms if any(getattr(t, "transforms", [t]))]  # not (None, None)


def fetch(dataset: AvalancheDataset, indices: Tensor) -> list[Tensor] | None:
    """Columns of examples that are fetched one by one; ``None`` if they are anything else."""
    return _columns([dataset[i] for i in indices.tolist()])


def _fetch_all(
    dataset: AvalancheDataset, sample: Sequence[Tensor], workers: int
) -> list[Tensor] | None:
    """All columns, each allocated once; ``None`` if examples differ in shape or type."""
    columns = [c.new_empty((len(dataset), *c.shape[1:])) for c in sample]
    loader = DataLoader(
        dataset,
        batch_size=_CHUNK,
        num_workers=workers,
        collate_fn=_columns,
        generator=torch.Generator(),  # leaves the global one alone
    )
    start = 0
    for batch in loader:
        if batch is None or _types(batch) != _types(columns):
            return None
        for column, part in zip(columns, batch, strict=True):
            column[start : start + len(part)] = part
        start += len(batch[0])
    return columns


def _columns(examples: list) -> list[Tensor] | None:
    """A batch as tensors with one row per example; ``None`` if it is anything else."""
    try:
        columns = default_collate(examples)
    except (RuntimeError, TypeError):  # of different shapes, or not tensors or numbers
        return None
    valid = isinstance(columns, list | tuple) and all(isinstance(c, Tensor) for c in columns)
    return list(columns) if valid else None


def _types(columns: Sequence[Tensor]) -> list[tuple]:
    return [(column.shape[1:], column.dtype, column.device) for column in columns]
