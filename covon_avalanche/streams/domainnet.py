"""DomainNet: 345 classes in six domains, about 587,000 images.

Peng et al., "Moment Matching for Multi-Source Domain Adaptation" (ICCV 2019), cleaned version.
Class ids always come from the official table (``domainnet_classes.txt``): painting has no
training image of *t-shirt* and no test image of *syringe*, so that ids derived from the folders
would be shifted, differently in training and test.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from avalanche.benchmarks import CLScenario
from typing_extensions import Unpack

from covon_avalanche.streams.image_benchmark import ImageOptions, data_root, published_benchmark
from covon_avalanche.streams.image_files import (
    TrainAndTest,
    class_folders,
    class_table,
    listed_split,
)

#: The 345 class names by official class id.
CLASSES = class_table("domainnet")


def DomainNet(
    *,
    dataset_root: str | os.PathLike[str] | None = None,
    domains: Sequence[str] | None = None,
    **options: Unpack[ImageOptions],
) -> CLScenario:
    """DomainNet: clipart, infograph, painting, quickdraw, real, sketch.

    Two layouts are recognised: the official one, ``DOMAIN/CLASS/*.jpg`` with the lists
    ``DOMAIN_train.txt`` and ``DOMAIN_test.txt`` in the root, and ``DOMAIN/{train,test}/CLASS/*``.
    Counts other than those of the cleaned version raise a warning. Task identities are not used.

    :param dataset_root: by default ``domainnet`` in Avalanche's data folder.
    :param domains: some of the domains, in the order in which they are learned; by default all, in
        the order above.

    See :func:`image_benchmark` for the other parameters.
    """
    root = data_root(dataset_root, "domainnet")
    return published_benchmark("DomainNet", root, domains, _split, CLASSES, **options)


def _split(root: Path, name: str) -> TrainAndTest:
    if listed := listed_split(root, [f"{name}_train.txt", f"{name}_test.txt"], CLASSES):
        return listed
    train, test = (class_folders([root / name / part], CLASSES) for part in ("train", "test"))
    return train, test
