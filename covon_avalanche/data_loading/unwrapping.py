"""From Avalanche's datasets to rows, where that gives the same examples."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from avalanche.benchmarks.utils.classification_dataset import _TensorClassificationDataset
from avalanche.benchmarks.utils.data import AvalancheDataset, _FlatDataWithTransform
from avalanche.benchmarks.utils.data_attribute import DataAttribute
from torch import Tensor
from torch.utils.data import TensorDataset, default_collate

from covon_avalanche.data_loading.deterministic import active_transforms, may_be_kept
from covon_avalanche.data_loading.fetched import FetchedExamples, fetch, join
from covon_avalanche.data_loading.rows import (
    Beside,
    Columns,
    Concatenation,
    Rows,
    Subset,
    Transformed,
)

_PROBES = 6  # examples on which the fast way is compared with the slow one
_ROWS_OF_TENSORS = (TensorDataset.__getitem__, _TensorClassificationDataset.__getitem__)


def rows_of(dataset: AvalancheDataset, kept: FetchedExamples, *, workers: int = 0) -> Rows | None:
    """The examples of a dataset as rows, or ``None`` where Avalanche must fetch them.

    :param kept: examples that had to be fetched, now or earlier.
    :param workers: processes that fetch what is kept. Where there are any, this one makes no
        batches of what is not: Avalanche's loader is faster.
    """
    tasks = getattr(dataset, "targets_task_labels", None)
    if type(dataset).__getitem__ is not AvalancheDataset.__getitem__:
        return None
    if len(dataset) == 0 or (tasks is not None and len(tasks.uniques) != 1):
        return None
    probes = torch.linspace(0, len(dataset) - 1, min(_PROBES, len(dataset))).long()
    with _same_randomness_afterwards():
        expected = _probe(dataset, probes)
        if expected is None:
            return None
        rows = _with_attributes(dataset)
        if rows is not None and _equal(rows.tensor_batch(probes), expected):
            return rows
        fetched = kept.get(dataset, expected, workers) if may_be_kept(dataset) else None
        if fetched is not None:
            return fetched if _equal(fetched.tensor_batch(probes), expected) else None
        rows = _with_attributes(dataset, transformed=True) if workers == 0 else None
        return rows if rows is not None and _equal(rows.tensor_batch(probes), expected) else None


def _probe(dataset: AvalancheDataset, probes: Tensor) -> list[Tensor] | None:
    """Some examples as Avalanche gives them; ``None`` if they vary, by chance or by batch."""
    before = _random_states()
    first = fetch(dataset, probes)
    second = join((fetch(dataset, probe) for probe in probes.split(1)), len(probes))
    same = first is not None and second is not None and _equal(first, second)
    return first if same and before == _random_states() else None


def _equal(a: Sequence[Tensor], b: Sequence[Tensor]) -> bool:
    return len(a) == len(b) and all(
        (x.dtype, x.device) == (y.dtype, y.device) and torch.equal(x, y)
        for x, y in zip(a, b, strict=True)
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


def _with_attributes(dataset: AvalancheDataset, transformed: bool = False) -> Rows | None:
    """The rows of the wrapped data with the columns that Avalanche appends (task labels)."""
    rows = _unwrapped(dataset._flat_data, transformed)
    if rows is None:
        return None
    attributes = [a for a in dataset._data_attributes.values() if a.use_in_getitem]
    columns = [column for a in attributes if (column := _column(a)) is not None]
    if len(columns) < len(attributes):
        return None
    return Beside(rows, columns) if columns else rows


def _column(attribute: DataAttribute) -> Tensor | None:
    """Its values as batches have them; ``None`` where they are no tensor."""
    try:
        unique = attribute.uniques
        values = list(unique) * len(attribute) if len(unique) == 1 else list(attribute)
        column = default_collate(values)
    except (RuntimeError, TypeError):  # of different shapes, or unhashable
        return None
    return column if isinstance(column, Tensor) else None


def _unwrapped(data: Any, transformed: bool) -> Rows | None:
    """Look through Avalanche's subsets, concatenations and idle transforms.

    :param transformed: look also through transforms that take many inputs at once.
    """
    if isinstance(data, _FlatDataWithTransform):
        active = _active(data)
        if not active:
            parts = [_unwrapped(part, transformed) for part in data._datasets]
        elif transformed and (batch := _batch_transform(active)) is not None:
            whole = [_bare(part) for part in data._datasets]
            found = all(_speaks_for_rows(part, "raw_batch") for part in whole)
            parts = [Transformed(part, batch) for part in whole] if found else []
        else:
            return None
        if not parts or any(part is None for part in parts):
            return None
        rows: Any = parts[0] if len(parts) == 1 else Concatenation(parts)
        indices = data._indices
        return rows if indices is None else Subset(rows, torch.as_tensor(np.array(list(indices))))
    if isinstance(data, TensorDataset) and type(data).__getitem__ in _ROWS_OF_TENSORS:
        return Columns(data.tensors)
    return data if _speaks_for_rows(data, "tensor_batch") else None


def _speaks_for_rows(data: Any, method: str) -> bool:
    """Whether a dataset has this method, and no subclass has changed ``__getitem__`` only."""
    for cls in type(data).__mro__:
        if method in vars(cls) or "__getitem__" in vars(cls):
            return method in vars(cls)
    return False


def _active(data: _FlatDataWithTransform) -> list[Any]:
    return active_transforms(data, data._transform_groups.current_group)


def _bare(data: Any) -> Any:
    """Look through a wrapper that does nothing."""
    while isinstance(data, _FlatDataWithTransform):
        if _active(data) or data._indices is not None or len(data._datasets) != 1:
            break
        (data,) = data._datasets
    return data


def _batch_transform(active: Sequence[Any]) -> Callable[[Sequence[Any]], Tensor] | None:
    """The transform of inputs by batches, where there is no other transform."""
    inputs, targets = ([t for a in active for t in a.flat_transforms(i)] for i in (0, 1))
    if len(inputs) != 1 or targets:
        return None
    batch = getattr(inputs[0], "batch", None)
    return batch if callable(batch) else None
