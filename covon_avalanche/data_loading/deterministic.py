"""Decide whether the examples of a data set are deterministic, judging by types.

Fetching some examples twice does not prove it: a random transform may have its own generator and
change few examples. So a transform or data set counts as deterministic only if its type is known,
or if it has an attribute ``deterministic = True``.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from avalanche.benchmarks.classic.cmnist import PixelsPermutation
from avalanche.benchmarks.utils import FilelistDataset, PathsDataset
from avalanche.benchmarks.utils.classification_dataset import _TensorClassificationDataset, lookup
from avalanche.benchmarks.utils.data import AvalancheDataset, _FlatDataWithTransform
from torch.utils.data import ConcatDataset, Subset, TensorDataset
from torchvision import transforms
from torchvision.datasets.vision import StandardTransform
from torchvision.transforms import v2

_COMPOSED = (transforms.Compose, v2.Compose, torch.nn.Sequential)
_NAMES = (
    *("CenterCrop", "ConvertImageDtype", "FiveCrop", "Grayscale", "LinearTransformation"),
    *("Normalize", "Pad", "PILToTensor", "Resize", "TenCrop", "ToPILImage", "ToTensor"),
)
_TRANSFORMS = frozenset(
    [PixelsPermutation, v2.Identity, v2.ToDtype, v2.ToImage, v2.ToPureTensor]
    + [getattr(module, name) for module in (transforms, v2) for name in _NAMES]
)
_DATASETS = frozenset([TensorDataset, _TensorClassificationDataset, PathsDataset, FilelistDataset])
_DATASET_PACKAGES = (
    "avalanche.benchmarks.datasets.",
    "covon_avalanche.streams.",
    "torchvision.datasets.",
)


def may_be_cached(dataset: AvalancheDataset) -> bool:
    """Whether an example that was fetched once may be used again.

    True for evaluation; in training, all data sets and transforms must be deterministic.
    """
    group = dataset._flat_data._transform_groups.current_group
    return group == "eval" or _is_known(dataset._flat_data, group)


def active_transforms(data: _FlatDataWithTransform, group: str) -> list[Any]:
    """The transforms that one of Avalanche's wrappers applies in a transform group."""
    both = (data._transform_groups, data._frozen_transform_groups)
    return [t for groups in both if (t := groups.transform_groups[group]) is not None]


def _is_known(data: Any, group: str) -> bool:
    """Whether a data set, including its transforms and parts, is deterministic."""
    if getattr(type(data), "__getitem__", None) is AvalancheDataset.__getitem__:
        return may_be_cached(data)
    if isinstance(data, _FlatDataWithTransform):
        active = active_transforms(data, group)
        applied = [t for a in active for i in (0, 1) for t in a.flat_transforms(i)]
        known = all(map(_is_deterministic, applied))
        return known and all(_is_known(part, group) for part in data._datasets)
    if type(data) is ConcatDataset:
        return all(_is_known(part, group) for part in data.datasets)
    if type(data) is Subset:
        return _is_known(data.dataset, group)
    known = getattr(data, "deterministic", False) is True or type(data) in _DATASETS
    known = known or type(data).__module__.startswith(_DATASET_PACKAGES)
    names = ("transform", "target_transform", "transforms")
    return known and all(_is_deterministic(getattr(data, name, None)) for name in names)


def _is_deterministic(transform: Any) -> bool:
    if transform is None or getattr(transform, "deterministic", False) is True:
        return True
    if type(transform) is StandardTransform:  # torchvision's pair for inputs and targets
        both = (transform.transform, transform.target_transform)
        return all(map(_is_deterministic, both))
    if isinstance(transform, partial):
        return transform.func is lookup  # Avalanche's mapping of class ids
    if type(transform) in _COMPOSED:
        return all(map(_is_deterministic, getattr(transform, "transforms", transform)))
    return type(transform) in _TRANSFORMS  # a subclass may be random
