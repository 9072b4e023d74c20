"""Batches by index from tensors, instead of example by example, for Avalanche strategies.

``class FastNaive(TensorBatches, Naive)`` trains as ``Naive`` does, on the same batches in the
same order. Where an experience's data are tensors behind Avalanche's wrappers, a batch is one
``index_select``; where they are something else with deterministic transforms (images on
disk), the examples are fetched once and kept as tensors. Where neither holds, because
transforms are random, the data is too large, or several tasks are balanced, Avalanche's own
loader stays.
"""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, Protocol

import numpy as np
import torch
from avalanche.benchmarks.utils.data import AvalancheDataset, _FlatDataWithTransform
from avalanche.distributed import DistributedHelper
from torch import Tensor
from torch.utils.data import TensorDataset

_PROBES = 6  # examples on which the fast way is compared with the slow one


class TensorBatches:
    """Mixin for Avalanche strategies, to be named before the strategy's own class.

    A dataset of your own takes part if it has a method ``tensor_batch(indices)`` that returns its
    columns for an int64 tensor of indices, as ``__getitem__`` would row by row.

    ``tensor_batches_bytes`` is the most memory that fetched examples may take.
    """

    tensor_batches_bytes: ClassVar[int] = 2**31

    def make_train_dataloader(
        self,
        num_workers: int = 0,
        shuffle: bool = True,
        pin_memory: bool | None = None,
        persistent_workers: bool = False,
        drop_last: bool = False,
        **kwargs: Any,
    ) -> None:
        """Avalanche's loader, or one that gives the same batches from tensors."""
        strategy: Any = super()
        strategy.make_train_dataloader(
            num_workers=num_workers,
            shuffle=shuffle,
            pin_memory=pin_memory,
            persistent_workers=persistent_workers,
            drop_last=drop_last,
            **kwargs,
        )
        self._take_over(self.train_mb_size, shuffle, drop_last)  # type: ignore[attr-defined]

    def make_eval_dataloader(
        self,
        num_workers: int = 0,
        shuffle: bool = False,
        pin_memory: bool | None = None,
        persistent_workers: bool = False,
        **kwargs: Any,
    ) -> None:
        """Avalanche's loader, or one that gives the same batches from tensors."""
        strategy: Any = super()
        strategy.make_eval_dataloader(
            num_workers=num_workers,
            shuffle=shuffle,
            pin_memory=pin_memory,
            persistent_workers=persistent_workers,
            **kwargs,
        )
        self._take_over(self.eval_mb_size, shuffle, drop_last=False)  # type: ignore[attr-defined]

    def _take_over(self, batch_size: int, shuffle: bool, drop_last: bool) -> None:
        strategy: Any = self
        kept = vars(self).setdefault("_fetched_examples", FetchedExamples())
        kept.limit = self.tensor_batches_bytes
        rows = None if DistributedHelper.is_distributed else rows_of(strategy.adapted_dataset, kept)
        if rows is not None:
            strategy.dataloader = TensorLoader(rows, batch_size, shuffle, drop_last)


class Rows(Protocol):
    """Examples that can be asked for by their indices."""

    def __len__(self) -> int: ...

    def tensor_batch(self, indices: Tensor) -> Sequence[Tensor]:
        """Columns (inputs, targets, ...) of these examples, in order."""


class TensorLoader:
    """Batches of rows, drawing the order as torch's ``DataLoader`` would."""

    def __init__(self, rows: Rows, batch_size: int, shuffle: bool, drop_last: bool) -> None:
        self.rows, self.batch_size = rows, batch_size
        self.shuffle, self.drop_last = shuffle, drop_last

    def __len__(self) -> int:
        full, rest = divmod(len(self.rows), self.batch_size)
        return full + (rest > 0 and not self.drop_last)

    def __iter__(self) -> Iterator[list[Tensor]]:
        _draw_seed()  # a DataLoader draws one for its workers first
        order = torch.arange(len(self.rows))
        if self.shuffle:
            generator = torch.Generator().manual_seed(_draw_seed())
            order = torch.randperm(len(self.rows), generator=generator)
        for indices in order.split(self.batch_size)[: len(self)]:
            yield list(self.rows.tensor_batch(indices))


def _draw_seed() -> int:
    return int(torch.empty((), dtype=torch.int64).random_().item())


# From Avalanche's datasets to rows ------------------------------------------------------


def rows_of(dataset: AvalancheDataset, kept: FetchedExamples) -> Rows | None:
    """The examples of a dataset as rows, or ``None`` where Avalanche must fetch them.

    :param kept: examples that had to be fetched, now or earlier.
    """
    tasks = getattr(dataset, "targets_task_labels", None)
    if len(dataset) == 0 or (tasks is not None and len(tasks.uniques) != 1):
        return None
    probes = torch.linspace(0, len(dataset) - 1, min(_PROBES, len(dataset))).long()
    with _same_randomness_afterwards():
        expected, random_transform = _probe(dataset, probes)
        if expected is None or random_transform:
            return None
        rows = _with_attributes(dataset)
        if rows is not None and _equal(rows.tensor_batch(probes), expected):
            return rows
        fetched = kept.get(dataset, expected)
        return (
            fetched
            if fetched is not None and _equal(fetched.tensor_batch(probes), expected)
            else None
        )


def _probe(dataset: AvalancheDataset, probes: Tensor) -> tuple[list[Tensor] | None, bool]:
    """Some examples as Avalanche gives them, and whether chance had a part in them."""
    before = _random_states()
    first, second = (_fetch(dataset, probes) for _ in range(2))
    same = first is not None and second is not None and _equal(first, second)
    return first, not (same and before == _random_states())


def _fetch(dataset: AvalancheDataset, indices: Tensor) -> list[Tensor] | None:
    columns = dataset.collate_fn([dataset[i] for i in indices.tolist()])
    tensors = isinstance(columns, list | tuple) and all(isinstance(c, Tensor) for c in columns)
    return list(columns) if tensors else None


def _equal(a: Sequence[Tensor], b: Sequence[Tensor]) -> bool:
    return len(a) == len(b) and all(
        x.dtype == y.dtype and torch.equal(x, y) for x, y in zip(a, b, strict=True)
    )


def _random_states() -> tuple:
    _, keys, position, *_ = np.random.get_state()
    return random.getstate(), np.asarray(keys).tobytes(), position, torch.get_rng_state().tolist()


@contextmanager
def _same_randomness_afterwards() -> Iterator[None]:
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])


def _with_attributes(dataset: AvalancheDataset) -> Rows | None:
    """The rows of the wrapped data with the columns that Avalanche appends (task labels)."""
    rows = _unwrapped(dataset._flat_data)
    if rows is None:
        return None
    columns = []
    for attribute in dataset._data_attributes.values():
        if attribute.use_in_getitem:
            unique = attribute.uniques
            values = list(unique) * len(dataset) if len(unique) == 1 else list(attribute)
            columns.append(torch.as_tensor(values))
    return _Beside(rows, columns) if columns else rows


def _unwrapped(data: Any) -> Rows | None:
    """Look through Avalanche's subsets, concatenations and idle transforms."""
    if isinstance(data, _FlatDataWithTransform):
        group = data._transform_groups.current_group
        groups = (data._transform_groups, data._frozen_transform_groups)
        if any(g.transform_groups.get(group) is not None for g in groups):
            return None
        parts = [_unwrapped(part) for part in data._datasets]
        if not parts or any(part is None for part in parts):
            return None
        rows: Any = parts[0] if len(parts) == 1 else _Concatenation(parts)
        indices = data._indices
        return rows if indices is None else _Subset(rows, torch.as_tensor(np.array(list(indices))))
    if isinstance(data, TensorDataset):
        return Columns(data.tensors)
    return data if callable(getattr(data, "tensor_batch", None)) else None


class Columns:
    """Rows of tensors."""

    def __init__(self, columns: Sequence[Tensor]) -> None:
        self.columns = columns

    def __len__(self) -> int:
        return len(self.columns[0])

    def tensor_batch(self, indices: Tensor) -> list[Tensor]:
        """See :class:`Rows`."""
        return [column.index_select(0, indices) for column in self.columns]


class _Beside:
    def __init__(self, rows: Rows, columns: list[Tensor]) -> None:
        self.rows, self.columns = rows, columns

    def __len__(self) -> int:
        return len(self.rows)

    def tensor_batch(self, indices: Tensor) -> list[Tensor]:
        more = (column.index_select(0, indices) for column in self.columns)
        return [*self.rows.tensor_batch(indices), *more]


class _Subset:
    def __init__(self, rows: Rows, indices: Tensor) -> None:
        self.rows, self.indices = rows, indices

    def __len__(self) -> int:
        return len(self.indices)

    def tensor_batch(self, indices: Tensor) -> Sequence[Tensor]:
        return self.rows.tensor_batch(self.indices.index_select(0, indices))


class _Concatenation:
    def __init__(self, parts: Sequence[Any]) -> None:
        self.parts = parts
        self.ends = torch.tensor([len(part) for part in parts]).cumsum(0)

    def __len__(self) -> int:
        return int(self.ends[-1])

    def tensor_batch(self, indices: Tensor) -> list[Tensor]:
        owners = torch.bucketize(indices, self.ends, right=True)
        order, pieces = [], []
        for owner in owners.unique().tolist():
            (mine,) = torch.nonzero(owners == owner, as_tuple=True)
            start = int(self.ends[owner]) - len(self.parts[owner])
            order.append(mine)
            pieces.append(self.parts[owner].tensor_batch(indices[mine] - start))
        back = torch.cat(order).argsort()
        return [torch.cat(column)[back] for column in zip(*pieces, strict=True)]


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
        chunks = [_fetch(dataset, part) for part in torch.arange(len(dataset)).split(256)]
        if any(chunk is None or len(chunk) != len(probed) for chunk in chunks):
            return None
        rows = Columns([torch.cat(column) for column in zip(*chunks, strict=True)])
        self._kept[key] = (flat, rows, size)  # the data is held, so that its id stays its own
        return rows


__all__ = ["Columns", "FetchedExamples", "Rows", "TensorBatches", "TensorLoader", "rows_of"]
