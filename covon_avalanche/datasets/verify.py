"""Verify that all images of a data set exist and can be decoded, and write a manifest of them."""

from __future__ import annotations

import hashlib
import io
import os
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pandas as pd
from joblib import cpu_count
from PIL import Image

from covon_avalanche.streams import manifest
from covon_avalanche.streams.image_files import image_files

COLUMNS = ("file", "domain", "label", "split", "bytes", "sha256")


@dataclass(frozen=True)
class Entry:
    """A row of a manifest; ``problem`` is empty for a good image."""

    file: Path
    domain: str
    label: str
    split: str
    bytes: int = 0
    sha256: str = ""
    problem: str = ""


@dataclass
class Report:
    """The result of :func:`verify`."""

    classes: list[str]
    """Names by class id."""
    entries: list[Entry] = field(default_factory=list)
    extra: list[Path] = field(default_factory=list)
    """Images in the folders of the domains that belong to no split."""
    notes: list[str] = field(default_factory=list)
    """Warnings about counts that differ from those of the published data set."""

    @property
    def problems(self) -> list[str]:
        """One sentence for each note and each missing, empty, damaged or extra image."""
        bad = [f"{e.file}: {e.problem}" for e in self.entries if e.problem]
        return [*self.notes, *bad, *(f"{file}: belongs to no split" for file in self.extra)]


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
        benchmark = stream(dataset_root=root, **options)
    notes = [str(w.message) for w in caught if w.category is UserWarning]
    report = Report(benchmark.classes, notes=notes)
    listed = [
        Entry(file, domain, benchmark.classes[label], split)
        for split, domains in benchmark.images.items()
        for domain, images in domains.items()
        for file, label in zip(images.files, images.labels, strict=True)
    ]
    with ThreadPoolExecutor(cpu_count()) as pool:
        for entry in pool.map(_read, listed):
            report.entries.append(entry)
            progress(len(report.entries), len(listed))
    folders = {folder for folder in _searched(root, listed) if folder.is_dir()}
    found = {file for folder in folders for file in image_files(folder)}
    report.extra = sorted(found - {entry.file for entry in listed})
    return report


def write_manifest(report: Report, file: Path) -> None:
    """Write the good images and the class ids to a CSV table for ``DomainFolders``, atomically."""
    good = [entry for entry in report.entries if not entry.problem]
    table = pd.DataFrame(good, columns=[*COLUMNS])
    table["file"] = [os.path.relpath(e.file.resolve(), file.parent.resolve()) for e in good]
    manifest.write_manifest(file, report.classes, table)


def _read(entry: Entry) -> Entry:
    """The entry with size and hash, or with its problem."""
    try:
        data = entry.file.read_bytes()
    except FileNotFoundError:
        return replace(entry, problem="is missing")
    except OSError as error:
        return replace(entry, problem=f"cannot be read: {error.strerror}")
    if not data:
        return replace(entry, problem="is empty")
    try:
        with Image.open(io.BytesIO(data)) as image:
            image.load()
    except Exception as error:  # decoders raise all kinds of errors on damaged files
        return replace(entry, problem=f"cannot be decoded: {error}")
    return replace(entry, bytes=len(data), sha256=hashlib.sha256(data).hexdigest())


def _searched(root: Path, listed: list[Entry]) -> Iterator[Path]:
    """The folders of the images, or the domain's folder that contains all of a split."""
    parts: dict[tuple[str, str], set[Path]] = {}
    for entry in listed:
        parts.setdefault((entry.domain, entry.split), set()).add(entry.file.parent)
    for (domain, _), folders in parts.items():
        shared = Path(os.path.commonpath(folders))
        of_domain = shared.is_relative_to(root) and domain in shared.relative_to(root).parts
        yield from [shared] if of_domain else folders
