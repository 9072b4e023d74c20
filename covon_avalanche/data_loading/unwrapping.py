"""Find the tensors behind Avalanche's data sets, if that gives the same examples."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from avalanche.benchmarks.utils.classification_dataset import _TensorClassificationDataset
from avalanche.benchmarks.utils.data import AvalancheDataset, _FlatDataWithTransform
from avalanche.benchmarks.utils.data_attribute import DataAttribute
from torch import Tensor
from torch.utils.data import TensorDataset, default_collate

from covon_avalanche.data_loading.example_cache import ExampleCache, active_transforms, fetch
from covon_avalanche.data_loading.rows import Columns, Concatenation, Rows, Subset, WithColumns

_N_COMPARED = 6  # examples that are compared with those that Avalanche fetches
_TENSOR_GETITEMS = (TensorDataset.__getitem__, _TensorClassificationDataset.__getitem__)


def rows_of(dataset: AvalancheDataset, cache: ExampleCache, *, workers: int = 0) -> Rows | None:
    """The examples of a data set as rows, or ``None`` if Avalanche must fetch them.

    :param cache: keeps evaluation examples that must be fetched.
    :param workers: processes that fetch them; 0 for the current one.
    """
    tasks = getattr(dataset, "targets_task_labels", None)
    if (
        type(dataset).__getitem__ is not AvalancheDataset.__getitem__
        or dataset.collate_fn is not default_collate
        or len(dataset) == 0
        or (tasks is not None and len(tasks.uniques) != 1)
    ):
        return None
    group = dataset._flat_data._transform_groups.current_group
    rows = _with_attributes(dataset, group)
    if rows is None and group != "eval":  # transforms may be random
        return None
    indices = torch.linspace(0, len(dataset) - 1, min(_N_COMPARED, len(dataset))).long()
    expected = fetch(dataset, indices)
    if expected is None:
        return None
    rows = rows or cache.get(dataset, expected, workers)
    return rows if rows and _equal(rows.tensor_batch(indices), expected) else None


def _equal(a: Sequence[Tensor], b: Sequence[Tensor]) -> bool:
    return len(a) == len(b) and all(
        (x.dtype, x.device) == (y.dtype, y.device) and torch.equal(x, y)
        for x, y in zip(a, b, strict=True)
    )


def _with_attributes(dataset: AvalancheDataset, group: str) -> Rows | None:
    """The wrapped data with the columns that Avalanche appends, such as task labels."""
    rows = _unwrapped(dataset._flat_data, group)
    if rows is None:
        return None
    attributes = [a for a in dataset._data_attributes.values() if a.use_in_getitem]
    columns = [column for a in attributes if (column := _column(a)) is not None]
    if len(columns) < len(attributes):
        return None
    return WithColumns(rows, Columns(columns)) if columns else rows


def _column(attribute: DataAttribute) -> Tensor | None:
    """The values of a data attribute as a tensor, if they have one shape."""
    try:
        unique = attribute.uniques
        values = list(unique) * len(attribute) if len(unique) == 1 else list(attribute)
        column = default_collate(values)
    except (RuntimeError, TypeError):  # of different shapes, or unhashable
        return None
    return column if isinstance(column, Tensor) else None


def _unwrapped(data: Any, group: str) -> Rows | None:
    """The data behind Avalanche's subsets, concatenations and empty transforms."""
    if isinstance(data, _FlatDataWithTransform):
        if active_transforms(data, group):
            return None
        parts = [_unwrapped(part, group) for part in data._datasets]
        if not parts or any(part is None for part in parts):
            return None
        rows: Any = parts[0] if len(parts) == 1 else Concatenation(parts)
        indices = data._indices
        return rows if indices is None else Subset(rows, torch.as_tensor(np.array(list(indices))))
    if isinstance(data, TensorDataset) and type(data).__getitem__ in _TENSOR_GETITEMS:
        return Columns(data.tensors)
    return data if _has_current_tensor_batch(data) else None


def _has_current_tensor_batch(data: Any) -> bool:
    """Whether a data set has ``tensor_batch``, and no subclass overrides ``__getitem__`` alone."""
    for cls in type(data).__mro__:
        if "tensor_batch" in vars(cls) or "__getitem__" in vars(cls):
            return "tensor_batch" in vars(cls)
    return False
