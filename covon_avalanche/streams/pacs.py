"""PACS: seven classes in photographs, paintings, cartoons and sketches.

Li et al., "Deeper, Broader and Artier Domain Generalization" (ICCV 2017).
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from pathlib import Path

from avalanche.benchmarks import CLScenario
from avalanche.benchmarks.datasets import default_dataset_location

from covon_avalanche import domain_orders
from covon_avalanche.streams.images import (
    choose_domains,
    class_folders,
    image_benchmark,
    listed_files,
    split_by_name,
)
from covon_avalanche.streams.sources import ImageFiles
from covon_avalanche.streams.transforms import Transform

CLASSES = ("dog", "elephant", "giraffe", "guitar", "horse", "house", "person")
#: Images of each domain, to train and to test on together.
COUNTS = {"photo": 1670, "art_painting": 2048, "cartoon": 2344, "sketch": 3929}
_LISTS = ("train_kfold", "crossval_kfold")  # of the official release; class ids from 1


def PACS(
    *,
    dataset_root: str | os.PathLike[str] | None = None,
    domains: Sequence[str] | None = None,
    validation_size: float = 0,
    limit: int | None = None,
    seed: int = 0,
    train_transform: Transform | None = None,
    eval_transform: Transform | None = None,
    cache: str | os.PathLike[str] | None = None,
    cache_size: int = 256,
    skip_broken: bool = False,
) -> CLScenario:
    """PACS: 9,991 images of seven classes in four domains.

    With the official lists (``DOMAIN_train_kfold.txt`` and ``DOMAIN_crossval_kfold.txt``) in
    the root or in its folder ``splits``, they say what trains and what tests; without, one
    fifth of each class is for tests, chosen by file name. Where the counts are not those of the
    whole data set, a warning says so. Task identities are not used.

    :param dataset_root: the folder that has ``photo/dog/*.jpg`` and so on; by default ``PACS``
        in Avalanche's data folder.
    :param domains: some of ``photo``, ``art_painting``, ``cartoon``, ``sketch``, in the order to
        learn them; by default this one.

    See :func:`image_benchmark` for the other parameters.
    """
    root = Path(default_dataset_location("PACS") if dataset_root is None else dataset_root)
    names = choose_domains(domains, domain_orders.PACS, "PACS")
    parts = {name: _train_and_test(root, name) for name in names}
    for name, (train, test) in parts.items():
        found = len(train) + len(test)
        if found != COUNTS[name]:
            warnings.warn(
                f"PACS's {name} should have {COUNTS[name]} images, found {found}", stacklevel=2
            )
    return image_benchmark(
        {name: train for name, (train, _) in parts.items()},
        {name: test for name, (_, test) in parts.items()},
        CLASSES,
        validation_size=validation_size,
        limit=limit,
        seed=seed,
        train_transform=train_transform,
        eval_transform=eval_transform,
        cache=cache,
        cache_size=cache_size,
        skip_broken=skip_broken,
    )


def _train_and_test(root: Path, name: str) -> tuple[ImageFiles, ImageFiles]:
    for folder in (root, root / "splits"):
        train, test = (folder / f"{name}_{kind}.txt" for kind in _LISTS)
        if train.is_file() and test.is_file():
            return (
                listed_files(root, train, CLASSES, first_id=1),
                listed_files(root, test, CLASSES, first_id=1),
            )
    files = class_folders(root / name, CLASSES)
    for label, class_name in enumerate(CLASSES):
        if label not in files.labels:
            raise ValueError(f"{root / name} has no images of the class {class_name!r}")
    return split_by_name(files, root)
