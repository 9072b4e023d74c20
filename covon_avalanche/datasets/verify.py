"""Verify that all images of a data set exist and can be decoded, and write a manifest of them."""

from __future__ import annotations

import hashlib
import io
import os
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
from joblib import cpu_count
from PIL import Image

from covon_avalanche.safe_text import in_utf8
from covon_avalanche.streams import manifest
from covon_avalanche.streams.image_files import MISSING_ALLOWED, reason
from covon_avalanche.streams.transforms import pixels_of

COLUMNS = ("file", "domain", "label", "split", "bytes", "sha256")


@dataclass
class Report:
    """The result of :func:`verify`."""

    classes: list[str]
    """Names by class id."""
    images: pd.DataFrame
    """A row per image, with ``COLUMNS`` and ``problem``, which is empty for a good image."""
    notes: list[str]
    """Warnings about counts that differ from those of the published data set."""

    @property
    def problems(self) -> list[str]:
        """One sentence for each note and each missing, empty or damaged image."""
        both = zip(self.images["file"], self.images["problem"], strict=True)
        return [*self.notes, *(f"{file}: {problem}" for file, problem in both if problem)]


def verify(
    stream: Callable[..., Any],
    root: Path,
    *,
    progress: Callable[[int, int], None] = lambda done, total: None,
    **options: Any,
) -> Report:
    """Read every image of a stream once.

    :param stream: a function of ``covon_avalanche.streams`` for images on disk.
    :param root: its ``dataset_root``.
    :param progress: called with the number of images read so far and of all images.
    :param options: other arguments of the stream.
    :raises ValueError: if there are no data.
    """
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        context = copy_context()
        context.run(MISSING_ALLOWED.set, True)
        benchmark = context.run(stream, dataset_root=root, **options)
    notes = [str(w.message) for w in caught if w.category is UserWarning]
    listed = [
        (file, domain, benchmark.classes[label], split)
        for split, domains in benchmark.images.items()
        for domain, images in domains.items()
        for file, label in zip(images.files, images.labels, strict=True)
    ]
    rows = []
    with ThreadPoolExecutor(cpu_count()) as pool:
        for row, found in zip(listed, pool.map(_read, (file for file, *_ in listed)), strict=True):
            rows.append(row + found)
            progress(len(rows), len(listed))
    table = pd.DataFrame(rows, columns=[*COLUMNS, "problem"])
    return Report(benchmark.classes, table, notes)


def write_manifest(report: Report, file: Path) -> None:
    """Write the good images and the class ids to a CSV table for ``DomainFolders``, atomically."""
    good = report.images[report.images["problem"] == ""]
    paths = [in_utf8(os.path.relpath(f.resolve(), file.parent.resolve())) for f in good["file"]]
    manifest.write_manifest(file, report.classes, good.assign(file=paths)[[*COLUMNS]])


def _read(file: Path) -> tuple[int, str, str]:
    """Size and hash of an image, and its problem."""
    try:
        data = file.read_bytes()
    except FileNotFoundError:
        return 0, "", "is missing"
    except OSError as error:
        return 0, "", f"cannot be read: {error.strerror}"
    if not data:
        return 0, "", "is empty"
    try:
        with Image.open(io.BytesIO(data)) as image:
            pixels_of(image)
    except Exception as error:  # decoders raise all kinds of errors on damaged files
        return 0, "", f"cannot be decoded: {reason(error)}"
    return len(data), hashlib.sha256(data).hexdigest(), ""
