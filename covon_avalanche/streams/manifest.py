"""The first lines of a manifest: its version, and the classes by id.

A manifest is a CSV table for ``DomainFolders``. Since version 2 it keeps the class ids of the
stream that it lists.
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Sequence
from pathlib import Path

VERSION = 2
_TITLE = "# covon_avalanche manifest, version "
_CLASSES = "# classes: "


def header(classes: Sequence[str]) -> str:
    """The lines before the table.

    :param classes: names by class id.
    """
    return f"{_TITLE}{VERSION}\n{_CLASSES}{json.dumps(list(classes))}\n"


def classes_of(file: Path, lines: Sequence[str]) -> list[str] | None:
    """Names by class id, from the lines of a table; none where it does not tell them.

    :raises ValueError: for a manifest of a newer version, or without the classes it should have.
    """
    first, second = map(as_written, [*lines[:2], "", ""][:2])
    title = re.fullmatch(rf"{_TITLE}(\d+)", first)
    if title is None or title[1] == "1":
        return None
    if int(title[1]) > VERSION:
        raise ValueError(
            f"{file} is a manifest of version {title[1]}, of a newer version of this package, "
            f"which knows {VERSION}"
        )
    try:
        names = json.loads(second.removeprefix(_CLASSES))
    except ValueError:
        names = None
    if not (isinstance(names, list) and all(isinstance(name, str) for name in names)):
        raise ValueError(f'{file}, line 2: expected {_CLASSES}["NAME", ...], got {second!r}')
    return names


def as_written(line: str) -> str:
    """A line before the table as it was before Excel, which quotes cells and fills up rows."""
    text = line.strip()
    if text.startswith('"'):
        text = ",".join(next(csv.reader([text])))
    return text.rstrip(",")
