"""Whether chance can have a part in a dataset's examples, as far as types tell.

A transform or dataset with a random generator of its own gives itself away neither by torch's,
NumPy's or Python's generator, nor, if it seldom changes anything, by some examples that are
fetched twice. So it counts as deterministic only if its type is known, or if it says so itself.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from avalanche.benchmarks.classic.cmnist import PixelsPermutation
from avalanche.benchmarks.utils import FilelistDataset, PathsDataset
from avalanche.benchmarks.utils.classification_dataset import (
    _TensorClassificationDataset,
    lookup,
)
from avalanche.benchmarks.utils.data import AvalancheDataset, _FlatDataWithTransform
from torch.utils.data import ConcatDataset, Subset, TensorDataset
from torchvision import transforms
from torchvision.datasets.vision import StandardTransform
from torchvision.transforms import v2

_COMPOSED = (transforms.Compose, v2.Compose, torch.nn.Sequential)
_KNOWN = (
    *("CenterCrop", "ConvertImageDtype", "FiveCrop", "Grayscale", "LinearTransformation"),
    *("Normalize", "Pad", "PILToTensor", "Resize", "TenCrop", "ToPILImage", "ToTensor"),
)
_DETERMINISTIC = frozenset(
    [PixelsPermutation, v2.Identity, v2.ToDtype, v2.ToImage, v2.ToPureTensor]
    + [getattr(module, name) for module in (transforms, v2) for name in _KNOWN]
)
_DATASETS = frozenset([TensorDataset, _TensorClassificationDataset, PathsDataset, FilelistDataset])
_PACKAGES_OF_DATASETS = (
    "avalanche.benchmarks.datasets.",
    "covon_avalanche.streams.",
    "torchvision.datasets.",
)


def may_be_kept(dataset: AvalancheDataset) -> bool:
    """Whether examples that were fetched once may be taken again.

    Evaluation is trusted; elsewhere datasets and transforms must be known.
    """
    group = dataset._flat_data._transform_groups.current_group
    return group == "eval" or _is_known(dataset._flat_data, group)


def is_deterministic(transform: Any) -> bool:
    """Whether a transform is known to be; one of your own has ``deterministic = True``."""
    if transform is None or getattr(transform, "deterministic", False) is True:
        return True
    if type(transform) is StandardTransform:  # of inputs and targets
        return is_deterministic(transform.transform) and is_deterministic(
            transform.target_transform
        )
    if isinstance(transform, partial):
        return transform.func is lookup  # of class ids
    if type(transform) in _COMPOSED:
        parts = getattr(transform, "transforms", transform)
        return all(map(is_deterministic, parts))
    return type(transform) in _DETERMINISTIC  # a subclass may be random


def active_transforms(data: _FlatDataWithTransform, group: str) -> list[Any]:
    """Those that a wrapper applies, of a group."""
    both = (data._transform_groups, data._frozen_transform_groups)
    return [t for groups in both if (t := groups.transform_groups[group]) is not None]


def _is_known(data: Any, group: str) -> bool:
    """Whether all datasets and transforms that make the examples are known."""
    if getattr(type(data), "__getitem__", None) is AvalancheDataset.__getitem__:
        return may_be_kept(data)
    if isinstance(data, _FlatDataWithTransform):
        active = active_transforms(data, group)
        applied = [t for a in active for i in (0, 1) for t in a.flat_transforms(i)]
        return all(map(is_deterministic, applied)) and _are_known(data._datasets, group)
    if type(data) is ConcatDataset:
        return _are_known(data.datasets, group)
    if type(data) is Subset:
        return _is_known(data.dataset, group)
    names = ("transform", "target_transform", "transforms")
    applied = [getattr(data, name, None) for name in names]
    return _is_known_source(data) and all(map(is_deterministic, applied))


def _are_known(parts: Iterable[Any], group: str) -> bool:
    return all(_is_known(part, group) for part in parts)


def _is_known_source(data: Any) -> bool:
    """Whether a dataset is known, its transforms apart; a subclass may be random."""
    if getattr(data, "deterministic", False) is True:
        return True
    return type(data) in _DATASETS or type(data).__module__.startswith(_PACKAGES_OF_DATASETS)
