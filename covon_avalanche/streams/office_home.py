"""Office-Home: 65 kinds of objects in art, clip art, product pictures and photographs.

Venkateswara et al., "Deep Hashing Network for Unsupervised Domain Adaptation" (CVPR 2017).
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from avalanche.benchmarks import CLScenario
from typing_extensions import Unpack

from covon_avalanche.streams.image_benchmark import ImageOptions, data_root, published_benchmark
from covon_avalanche.streams.image_files import (
    TrainAndTest,
    class_folders,
    class_table,
    listed_split,
    split_by_name,
)

#: The 65 class names by class id: sorted.
CLASSES = class_table("office_home")


def OfficeHome(
    *,
    dataset_root: str | os.PathLike[str] | None = None,
    domains: Sequence[str] | None = None,
    split_seed: int = 0,
    **options: Unpack[ImageOptions],
) -> CLScenario:
    """Office-Home: 15,588 images of 65 classes in four domains.

    There is no official split. It follows the lists ``DOMAIN_train.txt`` and ``DOMAIN_test.txt``
    (lines ``Art/Alarm_Clock/00001.jpg 0``) if they are in the root; otherwise 30 % of each class
    are for testing, chosen by file name and ``split_seed``, the same on every machine. Incomplete
    data raise a warning. Task identities are not used.

    :param dataset_root: the folder with ``Art/Alarm_Clock/*.jpg`` and so on; by default
        ``OfficeHome`` in Avalanche's data folder. ``Real_World`` may stand for ``Real World``.
    :param domains: some of ``Art``, ``Clipart``, ``Product``, ``Real World``, in the order in which
        they are learned; by default all, in this order. ``domain_orders.OFFICE_HOME_DUCT`` has
        those of DUCT.
    :param split_seed: of the choice of test images where there are no lists. It does not depend on
        ``seed``, so that runs with different seeds have the same test images.

    See :func:`image_benchmark` for the other parameters.
    """
    root = data_root(dataset_root, "OfficeHome")
    split = partial(_split, seed=split_seed)
    return published_benchmark("OfficeHome", root, domains, split, CLASSES, **options)


def _split(root: Path, name: str, seed: int) -> TrainAndTest:
    spellings = (name, name.replace(" ", "_"))
    for spelling in spellings:
        lists = [f"{spelling}_train.txt", f"{spelling}_test.txt"]
        if listed := listed_split(root, lists, CLASSES):
            return listed
    folder = next((root / s for s in spellings if (root / s).is_dir()), root / name)
    images = class_folders([folder], CLASSES, complete=True)
    return split_by_name(images, folder, 0.3, salt=f"{seed}/{name}/")
