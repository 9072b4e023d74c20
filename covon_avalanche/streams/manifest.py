"""Manifests: CSV tables of images with domain, label and split, for ``DomainFolders``.

Since version 2 a manifest begins with two comments, its version and the class names by id, so
that it keeps the class ids of the stream that it lists.
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Iterator, Sequence
from itertools import takewhile
from pathlib import Path

VERSION = 2
_TITLE = "# covon_avalanche manifest, version "
_CLASSES = "# classes: "
_COLUMNS = ("file", "domain", "label", "split")


def header(classes: Sequence[str]) -> str:
    """The two comments before the table.

    :param classes: names by class id.
    """
    return f"{_TITLE}{VERSION}\n{_CLASSES}{json.dumps(list(classes))}\n"


def read_table(file: Path) -> tuple[list[str] | None, list[dict[str, str]]]:
    """Read a manifest or any CSV table with the same columns.

    :return: the class names by id, if the table lists them, and its rows.
    :raises ValueError: naming the file, the line and what is wrong with it.
    """
    try:
        with file.open(encoding="utf-8-sig", newline="") as handle:  # Excel writes a BOM
            lines = list(handle)
    except OSError as error:
        raise ValueError(f"{file} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} is not text in UTF-8: {error}") from error
    comments = list(takewhile(lambda line: line.startswith("#"), map(_unquoted, lines)))
    return _classes(file, comments), list(_rows(file, lines, len(comments)))


def _unquoted(line: str) -> str:
    """A comment as it was before a spreadsheet quoted its cells and padded its row."""
    text = line.strip()
    if text.startswith('"'):
        text = ",".join(next(csv.reader([text])))
    return text.rstrip(",")


def _classes(file: Path, comments: Sequence[str]) -> list[str] | None:
    first, second = [*comments[:2], "", ""][:2]
    title = re.fullmatch(rf"{_TITLE}(\d+)", first)
    if title is None or title[1] == "1":
        return None
    if int(title[1]) > VERSION:
        raise ValueError(
            f"{file} is a manifest of version {title[1]}, which is newer than this package "
            f"supports ({VERSION})"
        )
    try:
        names = json.loads(second.removeprefix(_CLASSES))
    except ValueError:
        names = None
    if not (isinstance(names, list) and all(isinstance(name, str) for name in names)):
        raise ValueError(f'{file}, line 2: expected {_CLASSES}["NAME", ...], got {second!r}')
    return names


def _rows(file: Path, lines: Sequence[str], comments: int) -> Iterator[dict[str, str]]:
    reader = csv.DictReader(lines[comments:])
    columns = reader.fieldnames or ()
    missing = [c for c in _COLUMNS if c not in columns]
    if missing:
        raise ValueError(f"{file} lacks the columns {missing}")
    for row in reader:
        where = f"{file}, line {comments + reader.line_num}"
        if None in row or None in row.values():  # DictReader's marks for too many or too few
            raise ValueError(f"{where}: expected {len(columns)} values: {', '.join(columns)}")
        if row["split"] not in ("train", "test"):
            raise ValueError(f"{where}: split must be train or test, got {row['split']!r}")
        yield row
