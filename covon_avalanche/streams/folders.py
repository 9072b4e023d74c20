"""Your own images as a domain-incremental benchmark."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import pandas as pd
from avalanche.benchmarks import CLScenario
from typing_extensions import Unpack

from covon_avalanche.streams.image_benchmark import ImageOptions, choose_domains, image_benchmark
from covon_avalanche.streams.image_files import (
    ImageFiles,
    TrainAndTest,
    class_folders,
    image_files,
    split_by_name,
    subfolders,
)
from covon_avalanche.streams.manifest import read_manifest

_TEST_FOLDERS = ("test", "val", "valid")


def DomainFolders(
    dataset_root: str | os.PathLike[str],
    *,
    classes: Sequence[str] | None = None,
    domains: Sequence[str] | None = None,
    **options: Unpack[ImageOptions],
) -> CLScenario:
    """A benchmark from folders or a CSV table; a domain may lack some of the classes.

    Three layouts are recognised:

    - ``DOMAIN/CLASS/*``: one fifth of each class is for testing, chosen by file name.
    - ``DOMAIN/{train,test}/CLASS/*``: ``val`` or ``valid`` may replace ``test``, and is ignored
      next to it.
    - a CSV file with the columns ``file`` (relative to the table), ``domain``, ``label`` and
      ``split`` (train or test), as written by ``covon data verify --manifest``. A domain may be
      for training or testing only.

    :param dataset_root: the folder of the domains, or the CSV file.
    :param classes: names by class id; by default those of the manifest, or those of which the
        chosen domains have images, sorted. List the classes if other choices of domains are to
        have the same class ids, or if a class has the name of a split, such as ``train``.
    :param domains: some of the domains, in the order in which they are learned; by default all,
        sorted (in a CSV file, in order of appearance). The ``cache`` may be in the same folder.

    See :func:`image_benchmark` for the other parameters.
    """
    root = Path(dataset_root)
    if root.suffix == ".csv":
        listed, table = read_manifest(root)
        wanted = choose_domains(domains, table["domain"].unique().tolist(), str(root))
        table = table[table["domain"].isin(wanted)]
        names = list(classes or listed or sorted({*table["label"]}))
        parts = {name: _from_table(root, table, name, names) for name in wanted}
        train = {name: images for name, (images, _) in parts.items() if images}
        test = {name: images for name, (_, images) in parts.items() if images}
    else:
        if not root.is_dir():
            raise ValueError(f"there is no folder {root}")
        cache = options.get("cache")
        hidden = None if cache is None else Path(cache).resolve()
        known = [name for name in subfolders(root) if (root / name).resolve() != hidden]
        wanted = choose_domains(domains, known, str(root))
        splits = {name: _split_folders(root / name, classes or ()) for name in wanted}
        names = sorted(_all_classes(root, splits)) if classes is None else list(classes)
        parts = {name: _from_folders(root, name, splits[name], names) for name in wanted}
        train = {name: images for name, (images, _) in parts.items()}
        test = {name: images for name, (_, images) in parts.items()}
    return image_benchmark(train, test, names, **options)


def _split_folders(domain: Path, classes: Sequence[str]) -> list[str]:
    """Names of a domain's training and test folder; empty if it has class folders.

    :raises ValueError: for a mixture of both, or other ambiguities.
    """
    found = set(subfolders(domain))
    parts = found & {"train", *_TEST_FOLDERS}
    if not parts or found <= set(classes):
        return []
    test = [name for name in _TEST_FOLDERS if name in parts]
    clear = "test" in parts or len(test) == 1
    if not (clear and "train" in parts and parts == found):
        raise ValueError(
            f"{domain} has the folders {sorted(found)}: expected train with test, val or valid and "
            "nothing else, or classes alone, those called like a split named in `classes`"
        )
    return ["train", test[0]]


def _all_classes(root: Path, splits: dict[str, list[str]]) -> set[str]:
    folders = [root / domain / part for domain, parts in splits.items() for part in parts or ["."]]
    return {name for folder in folders for name in subfolders(folder) if image_files(folder / name)}


def _from_folders(root: Path, domain: str, split: list[str], classes: list[str]) -> TrainAndTest:
    if not split:
        return split_by_name(class_folders(root / domain, classes), root)
    train, test = (class_folders(root / domain / part, classes) for part in split)
    return train, test


def _from_table(file: Path, table: pd.DataFrame, domain: str, classes: list[str]) -> TrainAndTest:
    ids = {name: i for i, name in enumerate(classes)}
    unknown = sorted({*table["label"]} - ids.keys())
    if unknown:
        raise ValueError(f"{file} has labels that are not classes: {unknown}")

    def images(split: str) -> ImageFiles:
        chosen = table[(table["domain"] == domain) & (table["split"] == split)]
        files = [file.parent / name for name in chosen["file"]]
        return ImageFiles(files, [ids[label] for label in chosen["label"]])

    return images("train"), images("test")
