"""Whether all images of a data set are there and can be decoded; and a list of them."""

from __future__ import annotations

import csv
import hashlib
import io
import os
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from joblib import cpu_count
from PIL import Image

from covon_avalanche.atomic_write import write_atomically
from covon_avalanche.datasets.download import DataError
from covon_avalanche.streams.manifest import header

COLUMNS = ("file", "domain", "label", "split", "bytes", "sha256")


@dataclass(frozen=True)
class Entry:
    """A line of a manifest; ``problem`` is empty for a good image."""

    file: Path
    domain: str
    label: str
    split: str
    bytes: int = 0
    sha256: str = ""
    problem: str = ""


@dataclass
class Report:
    """What :func:`verify` has found."""

    classes: list[str]
    """Names by class id."""
    entries: list[Entry] = field(default_factory=list)
    extra: list[Path] = field(default_factory=list)
    """Images in the domains' folders that belong to no split."""
    notes: list[str] = field(default_factory=list)
    """Counts that are not those of the real data set."""

    @property
    def problems(self) -> list[str]:
        """One sentence for each missing, empty, undecodable or extra image and each note."""
        bad = [f"{e.file}: {e.problem}" for e in self.entries if e.problem]
        return [*self.notes, *bad, *(f"{file}: belongs to no split" for file in self.extra)]


def verify(
    stream: Callable[..., Any],
    root: Path,
    *,
    threads: int | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
    **options: Any,
) -> Report:
    """Read every image of a stream once.

    :param stream: of ``covon_avalanche.streams``, for images in files of their own.
    :param root: its ``dataset_root``.
    :param threads: that decode at a time; by default one per core.
    :param progress: called with the images read and their number.
    :param options: of the stream.
    :raises DataError: if the data are not there at all.
    """
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            benchmark = stream(dataset_root=root, **options)
        except (ValueError, OSError) as error:
            raise DataError(str(error)) from error
    notes = [str(w.message) for w in caught if w.category is UserWarning]
    report = Report(benchmark.classes, notes=notes)
    listed = list(_listed(benchmark))
    with ThreadPoolExecutor(threads or cpu_count()) as pool:
        for entry in pool.map(_read, listed):
            report.entries.append(entry)
            progress(len(report.entries), len(listed))
    report.extra = _extra(root, listed)
    return report


def write_manifest(report: Report, file: Path) -> None:
    """The good images, with the class ids, as a CSV table that ``DomainFolders`` reads; the file
    is replaced atomically."""
    text = io.StringIO(newline="")
    text.write(header(report.classes))
    table = csv.writer(text)
    table.writerow(COLUMNS)
    for e in report.entries:
        if not e.problem:
            path = _relative(e.file, file.parent)
            table.writerow((path, e.domain, e.label, e.split, e.bytes, e.sha256))
    try:
        write_atomically(file, text.getvalue())
    except OSError as error:
        raise DataError(f"{file} cannot be written: {error.strerror}") from error


def _relative(file: Path, folder: Path) -> str:
    """A path that leads from a folder to a file, where the folder is a link, too."""
    below = file.absolute().is_relative_to(folder.absolute())  # so that both may be moved
    return os.path.relpath(file, folder if below else folder.resolve())  # ".." leaves what is real


def _listed(benchmark: Any) -> Iterator[Entry]:
    for split, domains in benchmark.images.items():
        for domain, images in domains.items():
            files = getattr(images, "files", None)
            if files is None:
                raise DataError(f"the images of {domain!r} are not in files of their own")
            for file, label in zip(files, images.labels, strict=True):
                yield Entry(file, domain, benchmark.classes[label], split)


def _read(entry: Entry) -> Entry:
    """With size and hash, or with what is wrong."""

    def bad(problem: str) -> Entry:
        return Entry(entry.file, entry.domain, entry.label, entry.split, problem=problem)

    try:
        data = entry.file.read_bytes()
    except FileNotFoundError:
        return bad("is missing")
    except OSError as error:
        return bad(f"cannot be read: {error.strerror}")
    if not data:
        return bad("is empty")
    try:
        with Image.open(entry.file) as image:
            image.load()
    except Exception as error:  # decoders raise whatever they like on damaged input
        return bad(f"cannot be decoded: {error}")
    digest = hashlib.sha256(data).hexdigest()
    return Entry(entry.file, entry.domain, entry.label, entry.split, len(data), digest)


def _extra(root: Path, listed: list[Entry]) -> list[Path]:
    from covon_avalanche.streams.images import image_files

    folders = {folder for folder in _searched(root, listed) if folder.is_dir()}
    found = {file for folder in folders for file in image_files(folder)}
    return sorted(found - {entry.file for entry in listed})


def _searched(root: Path, listed: list[Entry]) -> Iterator[Path]:
    """The folder that all images of a domain and split share, where it is the domain's."""
    parts: dict[tuple[str, str], set[Path]] = {}
    for entry in listed:
        parts.setdefault((entry.domain, entry.split), set()).add(entry.file.parent)
    for (domain, _), folders in parts.items():
        shared = Path(os.path.commonpath(folders))
        of_domain = shared.is_relative_to(root) and domain in shared.relative_to(root).parts
        yield from [shared] if of_domain else folders
