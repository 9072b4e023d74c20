"""PACS: seven classes in photographs, paintings, cartoons and sketches.

Li et al., "Deeper, Broader and Artier Domain Generalization" (ICCV 2017).
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
    listed_split,
    split_by_name,
)

CLASSES = ("dog", "elephant", "giraffe", "guitar", "horse", "house", "person")


def PACS(
    *,
    dataset_root: str | os.PathLike[str] | None = None,
    domains: Sequence[str] | None = None,
    **options: Unpack[ImageOptions],
) -> CLScenario:
    """PACS: 9,991 images of seven classes in four domains.

    The split follows the official lists (``DOMAIN_train_kfold.txt``,
    ``DOMAIN_crossval_kfold.txt``) if they are in the root or its folder ``splits``; otherwise one
    fifth of each class is for testing, chosen by file name. Incomplete data raise a warning. Task
    identities are not used.

    :param dataset_root: the folder with ``photo/dog/*.jpg`` and so on; by default ``PACS`` in
        Avalanche's data folder.
    :param domains: some of ``photo``, ``art_painting``, ``cartoon``, ``sketch``, in the order in
        which they are learned; by default all, in this order.

    See :func:`image_benchmark` for the other parameters.
    """
    root = data_root(dataset_root, "PACS")
    return published_benchmark("PACS", root, domains, _split, CLASSES, **options)


def _split(root: Path, name: str) -> TrainAndTest:
    for folder in ("", "splits/"):
        lists = [f"{folder}{name}_{part}_kfold.txt" for part in ("train", "crossval")]
        if listed := listed_split(root, lists, CLASSES, first_id=1):
            return listed
    return split_by_name(class_folders([root / name], CLASSES, complete=True), root)
