"""Anyone's own images as a domain-incremental benchmark."""

from __future__ import annotations

import csv
import os
from collections.abc import Iterator, Mapping, Sequence
from itertools import takewhile
from pathlib import Path

from avalanche.benchmarks import CLScenario

from covon_avalanche.streams.images import (
    choose_domains,
    class_folders,
    hidden,
    image_benchmark,
    split_by_name,
)
from covon_avalanche.streams.manifest import as_written, classes_of
from covon_avalanche.streams.sources import ImageFiles
from covon_avalanche.streams.transforms import Transform

_COLUMNS = ("file", "domain", "label", "split")
_TESTED = ("test", "val", "valid")
_Split = tuple[()] | tuple[str, str]


def DomainFolders(
    dataset_root: str | os.PathLike[str],
    *,
    classes: Sequence[str] | None = None,
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
    """A benchmark from folders or a table; a domain may lack some of the classes.

    :param dataset_root: a folder with ``DOMAIN/CLASS/*`` (one fifth of each class is for tests,
        chosen by file name) or ``DOMAIN/{train,test}/CLASS/*``, where ``val`` or ``valid`` may
        stand for ``test``, and is not used beside it; or a CSV file with the columns
        ``file`` (relative to it), ``domain``, ``label`` and ``split`` (train or test), such as
        ``covon data verify --manifest`` writes; lines before the columns that begin with ``#`` do
        not count.
    :param classes: names by class id; by default those of the manifest, or those found in any
        domain, sorted. A class that is called like a split, such as ``train``, must be among them.
    :param domains: some of the domains, in the order to learn them; by default all, sorted (in
        a CSV file, in order of appearance). The ``cache`` may lie among them.

    See :func:`image_benchmark` for the other parameters.
    """
    root = Path(dataset_root)
    from_table = root.suffix == ".csv"  # where a domain may be for training or tests alone
    if from_table:
        stored, rows = _table(root)
        if classes is None:
            classes = sorted({row["label"] for row in rows}) if stored is None else stored
        names = list(classes)
        known = list(dict.fromkeys(row["domain"] for row in rows))
        wanted = choose_domains(domains, known, str(root))
        parts = {name: _from_rows(root, rows, name, names) for name in wanted}
    else:
        if not root.is_dir():
            raise ValueError(f"there is no folder {root}")
        known = [name for name in _folders(root) if not _is_same(root / name, cache)]
        wanted = choose_domains(domains, known, str(root))
        splits = {name: _split_of(root / name, classes or ()) for name in known}
        names = _class_names(root, splits) if classes is None else list(classes)
        parts = {name: _from_folders(root, name, splits[name], names) for name in wanted}
    return image_benchmark(
        {name: train for name, (train, _) in parts.items() if train or not from_table},
        {name: test for name, (_, test) in parts.items() if test or not from_table},
        names,
        validation_size=validation_size,
        limit=limit,
        seed=seed,
        train_transform=train_transform,
        eval_transform=eval_transform,
        cache=cache,
        cache_size=cache_size,
        skip_broken=skip_broken,
    )


def _folders(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir() if p.is_dir() and not hidden(p.name))


def _is_same(folder: Path, other: str | os.PathLike[str] | None) -> bool:
    return other is not None and folder.resolve() == Path(other).resolve()


def _split_of(folder: Path, classes: Sequence[str]) -> _Split:
    """Names of a domain's folders to train and to test on; none if it has classes at once.

    :raises ValueError: where it could be read as both.
    """
    found = set(_folders(folder))
    parts = found & {"train", *_TESTED}
    if not parts or found <= set(classes):
        return ()
    tested = [name for name in _TESTED if name in parts]
    clear = "test" in parts or len(tested) == 1
    if not (clear and "train" in parts and parts == found):
        raise ValueError(
            f"{folder} has the folders {sorted(found)}: expected train with test, val or valid and "
            "nothing else, or classes alone, those called like a split named in `classes`"
        )
    return "train", tested[0]


def _class_names(root: Path, splits: Mapping[str, _Split]) -> list[str]:
    names: set[str] = set()
    for domain, split in splits.items():
        for folder in split or (".",):
            names.update(_folders(root / domain / folder))
    return sorted(names)


def _from_folders(
    root: Path, domain: str, split: _Split, classes: Sequence[str]
) -> tuple[ImageFiles, ImageFiles]:
    if not split:
        return split_by_name(class_folders(root / domain, classes), root)
    train, test = (class_folders(root / domain / part, classes) for part in split)
    return train, test


def _table(file: Path) -> tuple[list[str] | None, list[dict[str, str]]]:
    """Names by class id, if the table tells them, and its rows."""
    try:
        with file.open(encoding="utf-8-sig", newline="") as handle:  # as Excel writes it, too
            lines = list(handle)
    except OSError as error:
        raise ValueError(f"{file} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} is not text in UTF-8: {error}") from error
    return classes_of(file, lines), list(_rows(file, lines))


def _rows(file: Path, lines: Sequence[str]) -> Iterator[dict[str, str]]:
    comments = len(list(takewhile(lambda line: as_written(line).startswith("#"), lines)))
    reader = csv.DictReader(lines[comments:])
    columns = reader.fieldnames or ()
    missing = [c for c in _COLUMNS if c not in columns]
    if missing:
        raise ValueError(f"{file} lacks the columns {missing}")
    for row in reader:
        place = f"{file}, line {comments + reader.line_num}"
        if None in row or None in row.values():  # what is too much, and what is not there
            raise ValueError(f"{place}: expected {len(columns)} values: {', '.join(columns)}")
        if row["split"] not in ("train", "test"):
            raise ValueError(f"{place}: split must be train or test, got {row['split']!r}")
        yield row


def _from_rows(
    file: Path, rows: Sequence[dict[str, str]], domain: str, classes: Sequence[str]
) -> tuple[ImageFiles, ImageFiles]:
    ids = {name: i for i, name in enumerate(classes)}
    unknown = sorted({row["label"] for row in rows} - ids.keys())
    if unknown:
        raise ValueError(f"{file} has labels that are no classes: {unknown}")

    def some(split: str) -> ImageFiles:
        chosen = [row for row in rows if row["domain"] == domain and row["split"] == split]
        files = [file.parent / row["file"] for row in chosen]
        return ImageFiles(files, [ids[row["label"]] for row in chosen])

    return some("train"), some("test")
