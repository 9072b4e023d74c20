"""Labelled image files: found in class folders and official lists, split by name, decoded."""

from __future__ import annotations

import hashlib
import os
import re
import unicodedata
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextvars import ContextVar
from functools import cache, cached_property
from importlib import resources
from pathlib import Path

from PIL import Image, UnidentifiedImageError
from torch import Tensor
from torch.utils.data import Dataset

from covon_avalanche.safe_text import in_utf8
from covon_avalanche.streams.transforms import pixels_of

#: The suffixes that torchvision's ``ImageFolder`` accepts.
SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp"})

#: Whether lists may name files that do not exist: ``covon data verify`` reports each of them.
MISSING_ALLOWED = ContextVar("MISSING_ALLOWED", default=False)


def decode(file: Path, on_transparent: Callable[[], None] = lambda: None) -> Tensor:
    """Decode an image file to a uint8 tensor of shape (3, height, width), in RGB, on white.

    torchvision's decoder gives the same pixels and is faster, but deprecated.

    :param on_transparent: called if the image is transparent anywhere.
    :raises ValueError: naming the file, if it cannot be read.
    """
    try:
        with Image.open(file) as image:
            return pixels_of(image, on_transparent)
    except Exception as error:  # decoders raise all kinds of errors on damaged files
        raise ValueError(f"the image {file} cannot be decoded: {reason(error)}") from error


def reason(error: Exception) -> str:
    """Why an image cannot be decoded; Pillow's own words may name an object in memory."""
    if isinstance(error, UnidentifiedImageError):
        return "its format is unknown"
    return getattr(error, "strerror", None) or str(error)


class Decoder:
    """:func:`decode` for the files of one data set, with one warning if images are transparent."""

    warned = False

    def __call__(self, file: Path) -> Tensor:
        def warn() -> None:
            if not self.warned:
                self.warned = True
                warnings.warn(f"transparent images, such as {file}, are put on white", stacklevel=2)

        return decode(file, warn)


class ImageFiles(Dataset):
    """Labelled image files; an item is the pixels of an image and its class id.

    :param names: paths of the files; half a million are made faster as strings.
    :param read: returns the pixels of a file, as :func:`decode` does.
    :param groups: the group of each image, if images of a group are to stay together.
    """

    def __init__(
        self,
        names: Sequence[str | Path],
        labels: Sequence[int],
        read: Callable[[Path], Tensor] = decode,
        groups: Sequence[str] | None = None,
    ) -> None:
        self.names, self.labels, self.read, self.groups = names, labels, read, groups

    @cached_property
    def files(self) -> list[Path]:
        """The paths of the files."""
        return [Path(name) for name in self.names]

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.read(Path(self.names[index])), self.labels[index]

    def take(self, indices: Sequence[int]) -> ImageFiles:
        """The images at these indices, in this order."""
        names, labels = [self.names[i] for i in indices], [self.labels[i] for i in indices]
        groups = None if self.groups is None else [self.groups[i] for i in indices]
        return ImageFiles(names, labels, self.read, groups)

    def split(self, indices: Collection[int]) -> tuple[ImageFiles, ImageFiles]:
        """The images at all other indices, and those at these; both in their present order."""
        rest = sorted({*range(len(self))} - {*indices})
        return self.take(rest), self.take(sorted(indices))

    def split_groups(self, held_out: Collection[str]) -> tuple[ImageFiles, ImageFiles]:
        """The images of all other groups, and those of these."""
        return self.split([i for i, group in enumerate(self.groups or ()) if group in held_out])

    def indices_by_class(self) -> dict[int, list[int]]:
        """The indices of the images of each class id."""
        indices: dict[int, list[int]] = {}
        for i, label in enumerate(self.labels):
            indices.setdefault(label, []).append(i)
        return indices


def image_files(folder: Path) -> list[Path]:
    """All images below a folder, sorted by path, without :func:`hidden` files and folders.

    Symbolic links are followed, except to a folder that contains them.

    :raises ValueError: if the folder does not exist.
    """
    if not folder.is_dir():
        raise ValueError(f"there is no folder {folder}")
    return sorted(filter(is_image, _walk(folder)))


def _walk(
    folder: Path, parents: Sequence[Path] = (), gone: list[Path] | None = None
) -> Iterator[Path]:
    """The files below a folder; ``gone`` gets broken links."""
    parents = [*parents, folder.resolve()]
    for entry in os.scandir(folder):
        path = folder / entry.name
        if hidden(entry.name):
            continue
        if entry.is_dir():
            target = path.resolve()
            if not any(parent.is_relative_to(target) for parent in parents):
                yield from _walk(path, parents, gone)
        elif entry.is_file():
            yield path
        elif gone is not None and entry.is_symlink():
            gone.append(path)


def hidden(name: str) -> bool:
    """Whether a file or folder is to be ignored: ``.name``, and what macOS and Windows add."""
    return name.startswith(".") or name in ("__MACOSX", "Thumbs.db", "desktop.ini")


def name_of(text: str) -> str:
    """The name of a class or domain: macOS decomposes those of folders, and not all are UTF-8."""
    return unicodedata.normalize("NFC", in_utf8(str(text)))


def part_of(name: str) -> str:
    """``"train"``, ``"test"`` or ``"valid"`` for a usual name of such a part, else ``""``."""
    usual = r"(?:(train|test)(?:ing)?|val(?:id(?:ation)?)?)[ _-]?(?:set|data|split)?"
    found = re.fullmatch(usual, name.casefold())
    return found[1] or "valid" if found else ""


def subfolders(folders: Sequence[Path]) -> dict[str, list[Path]]:
    """The folders in some folders by :func:`name_of`, sorted, without :func:`hidden` ones."""
    found: dict[str, list[Path]] = {}
    for folder in folders:
        if not folder.is_dir():
            if folder.is_file():
                raise ValueError(f"{folder} is neither a folder nor a .csv or .tsv table")
            raise ValueError(f"there is no folder {folder}")
        for path in sorted(folder.iterdir()):
            if path.is_dir() and not hidden(path.name):
                found.setdefault(name_of(path.name), []).append(path)
            elif path.is_symlink() and not path.exists() and not is_image(path):
                warnings.warn(f"{path} is a broken link, ignored", stacklevel=5)
    return dict(sorted(found.items()))


def class_table(name: str) -> tuple[str, ...]:
    """The class names of a stream by class id, from its ``NAME_classes.txt``."""
    table = resources.files("covon_avalanche.streams") / f"{name}_classes.txt"
    return tuple(table.read_text(encoding="utf-8").split())


def is_image(file: Path) -> bool:
    """Whether a file has one of the :data:`SUFFIXES`, in whatever case."""
    return file.suffix.lower() in SUFFIXES


def files_by_class(
    folders: Sequence[Path], gone: list[Path] | None = None
) -> dict[str, list[Path]]:
    """The files of ``FOLDER/CLASS/*``, images and others, of classes that have any.

    :param gone: gets broken links.
    """
    found = {
        name: sorted(file for path in paths for file in _walk(path, gone=gone))
        for name, paths in subfolders(folders).items()
    }
    return {name: files for name, files in found.items() if files}


def class_folders(
    folders: Sequence[Path], classes: Sequence[str], *, complete: bool = False
) -> ImageFiles:
    """The images of ``FOLDER/CLASS/*``, with class ids from a fixed table of names.

    Other files and broken links are ignored, with a warning, as are images beside the classes.

    :param complete: whether there must be images of all classes.
    :raises ValueError: for a subfolder with images that is not a class, or a class without images.
    """
    ids = {name: i for i, name in enumerate(classes)}
    gone: list[Path] = []
    found = files_by_class(folders, gone)
    others = [file for files in found.values() for file in files if not is_image(file)]
    found = {name: [*filter(is_image, files)] for name, files in found.items()}
    unknown = [name for name, files in found.items() if files and name not in ids]
    if unknown:
        raise ValueError(f"{folders[0]} has subfolders that are not classes: {unknown}")
    kinds = ", ".join(sorted(SUFFIXES))
    if empty := [name for name, files in found.items() if not files and name in ids]:
        raise ValueError(
            f"{folders[0] / empty[0]} has files, but no images: expected {kinds}, or classes=... "
            "without this folder"
        )
    _warn_ignored(others, f"no images, expected {kinds}")
    _warn_ignored(gone, "broken links")
    beside = [path for folder in folders for path in folder.iterdir() if is_image(path)]
    loose = sorted(path for path in beside if path.is_file() and not hidden(path.name))
    _warn_ignored(loose, "in no class folder")
    pairs = [(file, ids[name]) for name, files in found.items() for file in files]
    if complete and (missing := sorted({*range(len(classes))} - {label for _, label in pairs})):
        names = [classes[label] for label in missing]
        raise ValueError(f"{folders[0]} has no images of the classes {names}")
    return ImageFiles([file for file, _ in pairs], [label for _, label in pairs])


def _warn_ignored(files: Sequence[Path], why: str) -> None:
    if files:
        what = f"{files[0]} is" if len(files) == 1 else f"{len(files)} files such as {files[0]} are"
        warnings.warn(f"{what} ignored ({why})", stacklevel=5)


TrainAndTest = tuple[ImageFiles, ImageFiles]


def listed_split(
    root: Path, lists: Sequence[str], classes: Sequence[str], *, first_id: int | None = 0
) -> TrainAndTest | None:
    """The training and test images of two official lists, or ``None`` if one does not exist.

    Each line has a path and a class id: ``clipart/aircraft_carrier/clipart_001_000005.jpg 0``.

    :param root: the paths in the lists, and those of the lists, are relative to it.
    :param lists: the files of the training and of the test images.

    :param first_id: the lowest class id in the list; ``None`` if the list numbers the classes in
        another way, which is then ignored.
    :raises ValueError: naming a line whose class id is not that of its class folder, or an
        image that does not exist.
    """
    train, test = (root / name for name in lists)
    if not (train.is_file() and test.is_file()):
        return None
    return _listed(root, train, classes, first_id), _listed(root, test, classes, first_id)


def _listed(root: Path, file: Path, classes: Sequence[str], first_id: int | None) -> ImageFiles:
    ids = {name: i for i, name in enumerate(classes)}
    paths, labels = [], []

    @cache
    def label_of(folder: str) -> int | None:
        return ids.get(re.split(r"[/\\]", folder)[-1])

    for number, line in enumerate(file.read_text(encoding="utf-8-sig").splitlines(), start=1):
        if not line.strip():
            continue
        path, _, given = line.strip().rpartition(" ")
        label = label_of(path[: max(path.rfind("/"), path.rfind("\\"), 0)])
        if label is None or (first_id is not None and given != str(label + first_id)):
            raise ValueError(
                f"{file}, line {number}: expected a path {'' if first_id is None else 'DOMAIN/'}"
                f"CLASS/FILE and the official id of that class, got {line!r}"
            )
        paths.append(path)
        labels.append(label)
    return ImageFiles(listed_files(file, root, paths), labels)


def listed_files(source: Path, root: Path, names: Sequence[str]) -> list[str]:
    """The files that a list or table names, relative to ``root``; all must exist."""

    @cache
    def content(folder: str) -> set[str]:
        if not Path(folder).is_dir():
            return set()
        return {entry.name for entry in os.scandir(folder or ".") if entry.is_file()}

    def exists(path: str) -> bool:
        folder, file = os.path.split(path)
        return file in content(folder) or Path(path).is_file()  # on disks that ignore case

    folder = str(root)
    files = [os.path.join(folder, name) for name in names]  # noqa: PTH118  # faster than Path
    unknown = [i for i, file in enumerate(files) if not exists(file)]
    for i in unknown:
        files[i] = next(filter(exists, _spellings(root, names[i])), files[i])
    missing = [files[i] for i in unknown if not exists(files[i])]
    if missing and not MISSING_ALLOWED.get():
        raise ValueError(
            f"there is no file {missing[0]}, which {source} names ({len(missing)} of {len(files)} "
            f"files are missing; paths are relative to {root})"
        )
    return files


def _spellings(root: Path, name: str) -> Iterator[str]:
    """Alternative paths of a listed file: Windows' separators, a manifest's escapes, NFC and
    NFD."""
    unescaped = re.sub(r"\\udc([89a-f][0-9a-f])", lambda byte: chr(0xDC00 + int(byte[1], 16)), name)
    yield str(root / unescaped)
    for form in ("NFC", "NFD"):
        yield str(root / unicodedata.normalize(form, name.replace("\\", "/")))


def split_by_name(
    images: ImageFiles, root: Path, test_fraction: float = 0.2, *, salt: str = ""
) -> TrainAndTest:
    """Split a domain without official lists into training and test images.

    The split is the same on every machine: of each class, the images whose path below ``root``
    has the lowest SHA-256 are for testing.

    :param salt: comes before the path; another one gives another split.
    """

    def rank(index: int) -> str:
        name = unicodedata.normalize("NFC", images.files[index].relative_to(root).as_posix())
        return hashlib.sha256((salt + name).encode(errors="surrogateescape")).hexdigest()

    test: set[int] = set()
    for indices in images.indices_by_class().values():
        test.update(sorted(indices, key=rank)[: round(test_fraction * len(indices))])
    return images.split(test)


def held_out_groups(images: Iterable[ImageFiles], fraction: float, salt: str = "") -> set[str]:
    """Groups whose images are held out together, in every domain and class.

    The choice is the same on every machine: the groups with the lowest SHA-256 that a class of a
    domain still needs, as long as each of their classes keeps another group in each domain.

    :param images: those of each domain; without groups none is held out.
    :param fraction: of the groups of each class of a domain, at least one of two.
    :param salt: comes before the group's name; another one gives another choice.
    """

    def rank(group: str) -> str:
        return hashlib.sha256((salt + group).encode(errors="surrogateescape")).hexdigest()

    by_group: dict[str, list[int]] = {}
    kept: list[int] = []
    wanted: list[int] = []
    for some in images:
        named = some.groups or ()
        for indices in some.indices_by_class().values() if named else ():
            groups = {named[i] for i in indices}
            for group in groups:
                by_group.setdefault(group, []).append(len(kept))
            kept.append(len(groups))
            wanted.append(round(fraction * len(groups)) or int(len(groups) > 1))
    held_out = set()
    for group in sorted(by_group, key=rank):
        own = by_group[group]
        if any(wanted[i] > 0 for i in own) and all(kept[i] > 1 for i in own):
            held_out.add(group)
            for i in own:
                wanted[i], kept[i] = wanted[i] - 1, kept[i] - 1
    return held_out
