"""Your own images as a domain-incremental benchmark."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from itertools import chain
from pathlib import Path

import pandas as pd
from avalanche.benchmarks import CLScenario
from typing_extensions import Unpack

from covon_avalanche.streams import image_files as files
from covon_avalanche.streams.image_benchmark import ImageOptions, choose_domains, image_benchmark
from covon_avalanche.streams.manifest import COLUMNS, check_cells, is_table, read_manifest

_LAYOUTS = "DOMAIN/CLASS/*, DOMAIN/{train,test}/CLASS/* or {train,test}/DOMAIN/CLASS/*"
_Folders = list[list[Path]]  # that contain class folders: for training and for testing, or for both


def DomainFolders(
    dataset_root: str | os.PathLike[str],
    *,
    classes: Sequence[str] | None = None,
    domains: Sequence[str] | None = None,
    groups: str | None = None,
    **options: Unpack[ImageOptions],
) -> CLScenario:
    """A benchmark from folders or a CSV table; a domain may lack some of the classes.

    Four layouts are recognised; all others are errors:

    - ``DOMAIN/CLASS/*``: one fifth of each class is for testing, chosen by file name.
    - ``DOMAIN/{train,test}/CLASS/*``: ``val`` or ``valid`` may replace ``test``, and is ignored
      next to it; ``Training``, ``test_set`` and ``validation`` are the same.
    - ``{train,test}/DOMAIN/CLASS/*``: likewise.
    - a CSV file with the columns ``file`` (relative to the table), ``domain``, ``label`` and
      ``split`` (train or test), as written by ``covon data verify --manifest``. A domain may be
      for training or testing only. With ``groups`` it needs no ``split``.

    :param dataset_root: the folder of the domains, or the CSV file.
    :param classes: names by class id; by default those of the manifest, or those of which the
        chosen domains have images, sorted. List the classes if other choices of domains are to
        have the same class ids, if a class has the name of a split, such as ``train``, or if all
        images of a class are in subfolders of its folder.
    :param domains: some of the domains, in the order in which they are learned; by default all,
        sorted (in a CSV file, in order of appearance). The ``cache`` may be in the same folder.
        A domain with the name of a split must be listed.
    :param groups: keeps images of one group, such as the photographs of an object, together: all
        are for training, for validation or for testing, in every domain. A column of the CSV file,
        or a regular expression that is searched for in each file name; the group is what its
        parentheses match, or all of the match. Unless the layout gives the split, one fifth of the
        groups of each class and chosen domain is for testing, at least one of two.

    See :func:`image_benchmark` for the other parameters.
    """
    root = Path(dataset_root)
    named = [*map(files.name_of, classes or ())]
    if is_table(root):
        listed, table = read_manifest(root, COLUMNS if groups is None else COLUMNS[:3])
        wanted = choose_domains(domains, table["domain"].unique().tolist(), str(root))
        table = table[table["domain"].isin(wanted)]
        names = list(named or listed or sorted({*table["label"]}))
        column = table.get(groups)
        parts = {name: _from_table(root, table, name, names, column) for name in wanted}
    else:
        cache = options.get("cache")
        hidden = None if cache is None else Path(cache).resolve()
        known = {n: p for n, p in files.subfolders([root]).items() if p[0].resolve() != hidden}
        folders = _folders(root, known, domains, named)
        names = _class_names(root, folders.values()) if classes is None else named
        parts = {
            name: [files.class_folders(paths, names) for paths in of_domain]
            for name, of_domain in folders.items()
        }
    if groups is not None:
        for images in chain.from_iterable(parts.values()):
            images.groups = images.groups or _groups_by_name(images, groups)
    whole = {name: part[0] for name, part in parts.items() if len(part) == 1}
    held_out = files.held_out_groups(whole.values(), 0.2)
    if groups is not None and whole and not held_out:
        raise ValueError(
            f"groups = {groups!r} leaves no group for testing: each class of a domain "
            "needs at least two groups"
        )
    for name, images in whole.items():
        grouped = images.split_groups(held_out)
        parts[name] = [*(files.split_by_name(images, root) if groups is None else grouped)]
        if images and not parts[name][1] and groups is None:
            raise ValueError(
                f"the domain {name!r} has no images for testing: a fifth of each class is held "
                "out, which takes three images"
            )
    train, test = ({name: part[i] for name, part in parts.items()} for i in (0, 1))
    if is_table(root):
        train, test = ({n: some for n, some in part.items() if some} for part in (train, test))
        for part, purpose in ((train, "training"), (test, "testing")):
            if not part:
                raise ValueError(f"{root} has no images for {purpose}")
    return image_benchmark(train, test, names, **options)


def _groups_by_name(images: files.ImageFiles, pattern: str) -> list[str]:
    """The group of each image, from its file name."""
    names = [files.name_of(Path(name).name) for name in images.names]
    try:
        found = [re.search(pattern, name) for name in names]
    except re.error as error:
        what = f"neither a column of a table nor a regular expression: {error}"
        raise ValueError(f"groups = {pattern!r} is {what}") from error
    if None in found:
        what = f"not a column of a table, nor found in the file name {names[found.index(None)]!r}"
        raise ValueError(f"groups = {pattern!r} is {what}")
    return ["/".join(match.groups("")) or match[0] for match in found if match]


def _folders(
    root: Path, known: dict[str, list[Path]], domains: Sequence[str] | None, classes: Sequence[str]
) -> dict[str, _Folders]:
    """The folders of each chosen domain."""
    listed = domains and known.keys() >= {*map(files.name_of, domains)}
    if split := [] if listed else _split(root, known, "domains"):
        train, test = map(files.subfolders, split)
        if alone := sorted(train.keys() ^ test.keys()):
            raise ValueError(f"{root} has domains for training or for testing only: {alone}")
        wanted = choose_domains(domains, [*train], str(root))
        return {name: [train[name], test[name]] for name in wanted}
    folders = {name: [known[name]] for name in choose_domains(domains, [*known], str(root))}
    for name, (paths,) in folders.items():
        if not (inner := files.subfolders(paths)).keys() <= {*classes}:
            folders[name] = _split(paths[0], inner, "classes") or [paths]
    return folders


def _split(folder: Path, inner: dict[str, list[Path]], otherwise: str) -> _Folders:
    """A folder's subfolders for training and for testing; none if no name is that of a split."""
    by_part: dict[str, list[list[Path]]] = {"train": [], "test": [], "valid": [], "": []}
    for name, paths in inner.items():
        by_part[files.part_of(name)].append(paths)
    train, test, valid, others = by_part.values()
    chosen = [*train, *(test or valid)]
    if not chosen:
        _check_names(folder, inner, otherwise)
        return []
    if others or len(train) != 1 or len(chosen) != 2:
        raise ValueError(
            f"{folder} has the folders {[*inner]}: expected train with test, val or valid and "
            f"nothing else, or {otherwise} alone, those called like a split named in `{otherwise}`"
        )
    return chosen


def _check_names(folder: Path, inner: Iterable[str], otherwise: str) -> None:
    """Raise a ``ValueError`` for names that differ only in the split, such as ``photo_train``."""
    words = {name: re.split(r"[ _.-]+", name) for name in inner}
    rest = {name: [word for word in words[name] if not files.part_of(word)] for name in words}
    for name in words:
        alike = [other for other in words if rest[other] == rest[name]]
        if len(alike) > 1 and rest[name] != words[name]:
            raise ValueError(
                f"{folder} has the folders {alike}, which seem to be splits: expected {_LAYOUTS}, "
                f"or those called like a split named in `{otherwise}`"
            )


def _class_names(root: Path, domains: Iterable[_Folders]) -> list[str]:
    """The names of the class folders, sorted; each must itself have images, if it has any."""
    names: set[str] = set()
    for paths in chain.from_iterable(domains):
        found = files.files_by_class(paths)
        names |= found.keys()
        for own in found.values() or [files.image_files(paths[0])]:
            images = [*filter(files.is_image, own)]
            if images and not any(file.parent.parent in paths for file in images):
                folders = images[0].relative_to(root).parts[:-1]
                layout = "/".join("{train,test}" if files.part_of(n) else "FOLDER" for n in folders)
                raise ValueError(
                    f"{images[0]} is in the layout {layout}/*: expected {_LAYOUTS}; if images are "
                    "in subfolders of their class folder, pass `classes`"
                )
    return sorted(names)


def _from_table(
    file: Path, table: pd.DataFrame, domain: str, classes: list[str], groups: pd.Series | None
) -> list[files.ImageFiles]:
    """The training and the test images of a domain, or all of them if the table does not tell."""
    ids = {name: i for i, name in enumerate(classes)}
    unknown = sorted({*table["label"]} - ids.keys())
    if unknown:
        raise ValueError(f"{file} has labels that are not classes: {unknown}")

    if groups is not None:
        check_cells(file, groups.to_frame())
    own, parts = table[table["domain"] == domain], []
    splits = [own["split"] == name for name in ("train", "test")] if "split" in own else [own.index]
    for chosen in (own.loc[rows] for rows in splits):
        paths = files.listed_files(file, file.parent, chosen["file"].tolist())
        labels = [ids[label] for label in chosen["label"]]
        in_groups = None if groups is None else groups[chosen.index].tolist()
        parts.append(files.ImageFiles(paths, labels, groups=in_groups))
    return parts
