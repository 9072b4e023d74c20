"""Find the tensors behind Avalanche's data sets, if that gives the same examples."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from avalanche.benchmarks.utils.classification_dataset import _TensorClassificationDataset
from avalanche.benchmarks.utils.data import AvalancheDataset, _FlatDataWithTransform
from torch import Tensor
from torch.utils.data import TensorDataset, default_collate

Rows = Callable[[Tensor], Sequence[Tensor]]
"""Gives the columns (inputs, targets, ...) of the examples at some int64 indices, in order."""
_N_COMPARED = 6  # examples that are compared with those that Avalanche fetches
_TENSOR_GETITEMS = (TensorDataset.__getitem__, _TensorClassificationDataset.__getitem__)


def rows_of(dataset: AvalancheDataset) -> Rows | None:
    """The examples of a data set as rows, or ``None`` if Avalanche must fetch them."""
    tasks = dataset._data_attributes.get("targets_task_labels")
    appended = [a for a in dataset._data_attributes.values() if a.use_in_getitem]
    if (
        type(dataset).__getitem__ is not AvalancheDataset.__getitem__
        or dataset.collate_fn is not default_collate
        or len(dataset) == 0
        or (tasks is not None and len(tasks.uniques) != 1)  # Avalanche balances tasks
        or any(attribute is not tasks for attribute in appended)
    ):
        return None
    flat = dataset._flat_data
    rows = _unwrapped(flat, flat._transform_groups.current_group)
    if rows is None:
        return None
    if appended:
        (label,) = tasks.uniques
        rows = partial(_with_task, rows, label)
    n = min(_N_COMPARED, len(dataset))
    indices = torch.arange(n, device="cpu") * (len(dataset) - 1) // max(1, n - 1)
    expected = default_collate([dataset[i] for i in indices.tolist()])
    return rows if _equal(rows(indices), expected) else None


def _equal(a: Sequence[Tensor], b: Sequence[Tensor]) -> bool:
    return len(a) == len(b) and all(
        (x.dtype, x.device) == (y.dtype, y.device) and torch.equal(x, y)
        for x, y in zip(a, b, strict=True)
    )


def _unwrapped(data: Any, group: str) -> Rows | None:
    """The data behind Avalanche's subsets, concatenations and empty transforms."""
    if isinstance(data, _FlatDataWithTransform):
        if _has_transform(data, group):
            return None
        parts = [_unwrapped(part, group) for part in data._datasets]
        known = [part for part in parts if part is not None]
        if not known or len(known) < len(parts):
            return None
        rows = known[0]
        if len(known) > 1:
            ends = torch.from_numpy(np.cumsum([len(part) for part in data._datasets]))
            rows = partial(_concatenation, known, ends)
        if data._indices is None:
            return rows
        return partial(_subset, rows, torch.from_numpy(np.array(list(data._indices))))
    if isinstance(data, TensorDataset) and type(data).__getitem__ in _TENSOR_GETITEMS:
        return partial(_columns, data.tensors)
    return data.tensor_batch if _has_current_tensor_batch(data) else None


def _columns(tensors: Sequence[Tensor], indices: Tensor) -> list[Tensor]:
    return [tensor.index_select(0, indices.to(tensor.device)) for tensor in tensors]


def _with_task(rows: Rows, label: int, indices: Tensor) -> list[Tensor]:
    return [*rows(indices), torch.full_like(indices, label)]


def _subset(rows: Rows, chosen: Tensor, indices: Tensor) -> Sequence[Tensor]:
    return rows(chosen.index_select(0, indices))


def _concatenation(parts: Sequence[Rows], ends: Tensor, indices: Tensor) -> list[Tensor]:
    owners = torch.bucketize(indices, ends, right=True)
    starts = torch.cat([ends.new_zeros(1), ends])
    order, pieces = [], []
    for owner in owners.unique().tolist():
        (mine,) = torch.nonzero(owners == owner, as_tuple=True)
        order.append(mine)
        pieces.append(parts[owner](indices[mine] - starts[owner]))
    inverse = torch.cat(order).argsort()
    return [torch.cat(column)[inverse] for column in zip(*pieces, strict=True)]


def _has_transform(data: _FlatDataWithTransform, group: str) -> bool:
    """Whether one of Avalanche's wrappers applies a transform in a transform group."""
    both = (data._transform_groups, data._frozen_transform_groups)
    transforms = [groups.transform_groups[group] for groups in both]
    return any(any(getattr(t, "transforms", [t])) for t in transforms)  # not (None, None)


def _has_current_tensor_batch(data: Any) -> bool:
    """Whether a data set has ``tensor_batch``, and no subclass overrides ``__getitem__`` alone."""
    for cls in type(data).__mro__:
        if "tensor_batch" in vars(cls) or "__getitem__" in vars(cls):
            return "tensor_batch" in vars(cls)
    return False
