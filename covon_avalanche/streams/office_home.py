"""Office-Home: 65 kinds of objects in art, clip art, product pictures and photographs.

Venkateswara et al., "Deep Hashing Network for Unsupervised Domain Adaptation" (CVPR 2017).
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from importlib import resources
from pathlib import Path

from avalanche.benchmarks import CLScenario
from typing_extensions import Unpack

from covon_avalanche import domain_orders
from covon_avalanche.streams.image_benchmark import (
    ImageOptions,
    check_counts,
    choose_domains,
    data_root,
    image_benchmark,
)
from covon_avalanche.streams.image_files import (
    ImageFiles,
    class_folders,
    listed_files,
    split_by_name,
)

#: Training and test images of each domain together.
COUNTS = {"Art": 2427, "Clipart": 4365, "Product": 4439, "Real World": 4357}


def office_home_classes() -> list[str]:
    """The 65 class names by class id: sorted."""
    table = resources.files("covon_avalanche.streams") / "office_home_classes.txt"
    return table.read_text(encoding="utf-8").split()


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
    names = choose_domains(domains, domain_orders.OFFICE_HOME, "OfficeHome")
    classes = office_home_classes()
    parts = {name: _train_and_test(root, name, classes, split_seed) for name in names}
    for name, (train, test) in parts.items():
        check_counts(f"OfficeHome's {name}", COUNTS[name], len(train) + len(test))
    return image_benchmark(
        {name: train for name, (train, _) in parts.items()},
        {name: test for name, (_, test) in parts.items()},
        classes,
        **options,
    )


def _train_and_test(root: Path, name: str, classes: list[str], seed: int) -> Sequence[ImageFiles]:
    spellings = (name, name.replace(" ", "_"))
    for spelling in spellings:
        lists = [root / f"{spelling}_{part}.txt" for part in ("train", "test")]
        if all(file.is_file() for file in lists):
            return [listed_files(root, file, classes) for file in lists]
    folder = next((root / s for s in spellings if (root / s).is_dir()), root / name)
    images = class_folders(folder, classes)
    missing = [classes[label] for label in range(len(classes)) if label not in images.labels]
    if missing:
        raise ValueError(f"{folder} has no images of the classes {missing}")
    return split_by_name(images, folder, 0.3, salt=f"{seed}/{name}/")
