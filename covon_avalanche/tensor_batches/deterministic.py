"""Whether chance can have a part in a dataset's examples, as far as its transforms tell.

A transform with a random generator of its own gives itself away neither by torch's, NumPy's or
Python's generator, nor, if it seldom changes anything, by some examples that are fetched twice.
So it counts as deterministic only if its type is known, or if it says so itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from avalanche.benchmarks.classic.cmnist import PixelsPermutation
from avalanche.benchmarks.utils.classification_dataset import lookup
from avalanche.benchmarks.utils.data import AvalancheDataset, _FlatDataWithTransform
from torchvision import transforms
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


def may_be_kept(dataset: AvalancheDataset) -> bool:
    """Whether examples that were fetched once may be taken again.

    Transforms for evaluation are trusted; all others must be known.
    """
    group = dataset._flat_data._transform_groups.current_group
    return group == "eval" or all(map(is_deterministic, _transforms(dataset._flat_data, group)))


def is_deterministic(transform: Any) -> bool:
    """Whether a transform is known to be; one of your own has ``deterministic = True``."""
    if transform is None or getattr(transform, "deterministic", False) is True:
        return True
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


def _transforms(data: Any, group: str) -> Iterator[Any]:
    """All that are applied to inputs or targets: Avalanche's, and those of the data within."""
    if isinstance(data, _FlatDataWithTransform):
        for active in active_transforms(data, group):
            yield from active.flat_transforms(0)
            yield from active.flat_transforms(1)
        for part in data._datasets:
            yield from _transforms(part, group)
    elif isinstance(data, torch.utils.data.Subset):
        yield from _transforms(data.dataset, group)
    else:
        yield getattr(data, "transform", None)
        yield getattr(data, "target_transform", None)
