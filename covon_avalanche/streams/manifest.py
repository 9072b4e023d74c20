"""Manifests: CSV tables of images with domain, label and split, for ``DomainFolders``.

A manifest begins with two comments, its version and the class names by id, so that it keeps the
class ids of the stream that it lists. Any other table may have comments above its header, too.
"""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path

import pandas as pd

from covon_avalanche.atomic_write import write_atomically
from covon_avalanche.safe_text import ESCAPE
from covon_avalanche.streams.image_files import name_of, part_of

_TITLE = "# covon_avalanche manifest, version 2"
_CLASSES = "# classes: "
COLUMNS = ("file", "domain", "label", "split")
_ALSO = {"file": "path", "label": "class"}  # as ``covon data list`` calls them


def is_table(path: Path) -> bool:
    """Whether a path names a table of images, by its suffix."""
    return path.suffix.lower() in (".csv", ".tsv")


def write_manifest(file: Path, classes: Sequence[str], table: pd.DataFrame) -> None:
    """Write a manifest, atomically.

    :param classes: names by class id.
    """
    comments = f"{_TITLE}\n{_CLASSES}{json.dumps(list(classes))}\n"
    write_atomically(file, comments + table.to_csv(index=False))


def check_cells(file: Path, table: pd.DataFrame) -> None:
    """Raise a ``ValueError`` that names the first row with an empty cell, and its column."""
    empty = table.isna().stack()
    if empty.any():
        row, column = empty.idxmax()
        raise ValueError(f"{file}: row {row + 1} after the header has no {column!r}")


def read_manifest(
    file: Path, columns: Sequence[str] = COLUMNS, splits: Sequence[str] = ("train", "test")
) -> tuple[list[str] | None, pd.DataFrame]:
    """Read a manifest or any CSV table with the same columns, also with semicolons or tabs.

    :param columns: those that it must have.
    :param splits: those that may be in the column ``split``.
    :return: the class names by id, if the table lists them, and its rows.
    :raises ValueError: naming the file and what is wrong with it.
    """
    try:
        text = file.read_text(encoding="utf-8-sig")  # Excel writes a BOM
        comments = list(takewhile(lambda line: line.startswith("#"), text.splitlines()))
        header = "".join(text.splitlines()[len(comments) : len(comments) + 1])
        table = pd.read_csv(
            io.StringIO(text),
            sep=max(",;\t", key=header.count),
            skiprows=len(comments),
            dtype=str,
            keep_default_na=False,  # "NA" may be a name
            na_values=[""],
        )
    except (OSError, ValueError) as error:  # pandas and decoders raise ValueErrors
        raise ValueError(f"{file} is not a table in UTF-8: {error}") from error
    bare = {str(c).strip().lower(): c for c in table}  # spreadsheets have " File "
    also: dict[str, str] = {}  # names by heading
    for name in [c for c in COLUMNS if c not in table]:
        other = _ALSO.get(name, name)
        heading = other if other in table else bare.get(name, bare.get(other))
        also |= {heading: name} if heading is not None else {}
    table = table.rename(columns=also)
    missing = [c for c in columns if c not in table]
    if missing:
        raise ValueError(f"{file} lacks the columns {missing}, found {[*table.columns[:6]]}")
    if not isinstance(table.index, pd.RangeIndex):  # pandas took a column for the index
        raise ValueError(f"{file} has rows with more than {len(table.columns)} values")
    table = table.dropna(how="all")  # as at the end of a spreadsheet
    known = [c for c in COLUMNS if c in table]
    check_cells(file, table[known].rename(columns={v: k for k, v in also.items()}))
    table = table.reset_index(drop=True)
    table[known] = table[known].replace(ESCAPE, "", regex=True)  # as ``covon data list`` writes
    names = table.columns.intersection(["domain", "label"])
    table[names] = table[names].map(name_of)
    if "split" in table:
        parts = table["split"].map(part_of)
        if unknown := sorted({*table["split"][~parts.isin(splits)]}):
            raise ValueError(f"{file}: split must be {' or '.join(splits)}, got {unknown}")
        table["split"] = parts
    classes = next((line for line in comments if line.startswith(_CLASSES)), None)
    if classes is None:
        return None, table
    try:
        return [name_of(str(name)) for name in json.loads(classes.removeprefix(_CLASSES))], table
    except (TypeError, ValueError) as error:
        raise ValueError(f'{file}: expected {_CLASSES}["NAME", ...], got {classes!r}') from error
