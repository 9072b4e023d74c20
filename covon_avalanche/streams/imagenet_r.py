"""ImageNet-R: 200 classes of ImageNet in 15 kinds of renditions.

Hendrycks et al., "The Many Faces of Robustness: A Critical Analysis of Out-of-Distribution
Generalization" (ICCV 2021). As a domain-incremental stream it is used by C-Prompt (Liu et al.,
"Compositional Prompting for Anti-Forgetting in Domain Incremental Learning", IJCV 2024) and later
methods. The rendition is the prefix of a file's name: ``n01443537/art_0.jpg``.
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
    ImageFiles,
    TrainAndTest,
    class_folders,
    class_table,
    listed_split,
    split_by_name,
)

#: The 200 WordNet ids by class id: sorted.
CLASSES = class_table("imagenet_r")


def ImageNetR(
    *,
    dataset_root: str | os.PathLike[str] | None = None,
    domains: Sequence[str] | None = None,
    split_seed: int = 0,
    **options: Unpack[ImageOptions],
) -> CLScenario:
    """ImageNet-R: 30,000 images of 200 classes in 15 domains, which lack some of the classes.

    There is no official split. It follows the lists ``DOMAIN_train.txt`` and ``DOMAIN_test.txt``
    (lines ``n01443537/art_0.jpg 12``) if they are in the root; class ids are always those of the
    sorted WordNet ids, because published lists number the classes differently. Without lists, one
    fifth of each class and domain is for testing, chosen by file name and ``split_seed``, the same
    on every machine. Incomplete data raise a warning. Task identities are not used.

    :param dataset_root: the folder with ``n01443537/art_0.jpg`` and so on; by default
        ``imagenet-r`` in Avalanche's data folder.
    :param domains: some of the domains, in the order in which they are learned; by default all,
        sorted.
    :param split_seed: of the choice of test images where there are no lists. It does not depend on
        ``seed``, so that runs with different seeds have the same test images.

    See :func:`image_benchmark` for the other parameters.
    """
    root = data_root(dataset_root, "imagenet-r")
    split = partial(_split, everything=class_folders([root], CLASSES), seed=split_seed)
    return published_benchmark("ImageNetR", root, domains, split, CLASSES, **options)


def _split(root: Path, name: str, everything: ImageFiles, seed: int) -> TrainAndTest:
    lists = [f"{name}_train.txt", f"{name}_test.txt"]
    if listed := listed_split(root, lists, CLASSES, first_id=None):
        for file, images in zip(lists, listed, strict=True):
            if wrong := [path for path in images.files if _rendition(path) != name]:
                raise ValueError(f"{file} has images of other domains than {name!r}: {wrong[0]}")
        return listed
    images = everything.take([i for i, f in enumerate(everything.files) if _rendition(f) == name])
    return split_by_name(images, root, salt=f"{seed}/")


def _rendition(file: Path) -> str:
    return file.name.partition("_")[0]
