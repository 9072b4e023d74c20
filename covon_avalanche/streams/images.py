"""Domain-incremental benchmarks from images on disk: what all such streams share."""

from __future__ import annotations

import hashlib
import os
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from avalanche.benchmarks import CLScenario, benchmark_from_datasets, with_classes_timeline
from avalanche.benchmarks.scenarios.task_aware import with_task_labels
from avalanche.benchmarks.utils import AvalancheDataset, _make_taskaware_classification_dataset

from covon_avalanche.streams.cache_building import decoded
from covon_avalanche.streams.cached_images import cached
from covon_avalanche.streams.sources import ImageFiles, Images, PixelRows
from covon_avalanche.streams.transforms import Transform, image_transforms

#: Of the files that torchvision's ``ImageFolder`` takes for images.
SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp"})
_Streams = dict[str, Mapping[str, Images]]


def image_benchmark(
    train: Mapping[str, Images],
    test: Mapping[str, Images],
    classes: Sequence[str],
    *,
    validation_size: float = 0,
    limit: int | None = None,
    seed: int = 0,
    train_transform: Transform | None = None,
    eval_transform: Transform | None = None,
    cache: str | os.PathLike[str] | None = None,
    cache_size: int = 256,
    skip_broken: bool = False,
) -> CLScenario:
    """A benchmark with one experience per domain, in this order.

    Task identities are not used: every experience has task label 0, and all classes share one
    head, whether a domain has images of all of them or not. ``benchmark.n_classes`` and
    ``benchmark.classes`` tell them, ``experience.domain`` the domain's name, and
    ``benchmark.images[stream][domain]`` has the images before any limit, ``benchmark.broken``
    the files that were skipped.

    :param train: images to train on by domain.
    :param test: images to test on by domain, as a rule the same domains in the same order.
    :param classes: names by class id.
    :param validation_size: fraction of each domain's training images, class by class, to put
        into a third stream, ``benchmark.streams["valid"]``; 0 for none. Of a class with two
        images or more, at least one is.
    :param limit: most images per class and domain in each stream, for small machines.
    :param seed: of the validation split and of what a limit leaves out.
    :param train_transform: from a PIL image to a tensor; by default :func:`image_transforms`.
    :param eval_transform: the same for validation and test.
    :param cache: a folder for decoded images, which are kept there from the first time on, in
        one file per domain and stream; by default none, because it takes much disk (as a rule
        200 kB an image at 256 pixels), and because training then crops from smaller images.
        With a limit, only the images within it are kept, those of each seed apart.
    :param cache_size: shorter side of what is kept; larger images are resized to it, smaller
        ones stay. At the size to which ``eval_transform`` resizes, evaluation sees the same
        pixels with and without; :func:`image_transforms` resizes to ``size * 8 / 7``.
    :param skip_broken: decode every image once at the beginning, leave out those that cannot
        be decoded, with a warning that counts them. By default such an image is an error,
        when it is asked for or when the cache is made.
    :raises ValueError: for a domain without images, or values or labels out of range.
    """
    if not 0 <= validation_size < 1:
        raise ValueError(f"validation_size must be a fraction in [0, 1), got {validation_size}")
    if limit is not None and limit < 1:
        raise ValueError(f"limit must be >= 1, got {limit}")
    if cache_size < 1:
        raise ValueError(f"cache_size must be >= 1, got {cache_size}")
    default_train, default_eval = image_transforms()
    both = (train_transform or default_train, eval_transform or default_eval)
    groups = {"train": (both[0], None), "eval": (both[1], None)}
    by_pixels = all(getattr(transform, "takes_pixels", False) for transform in both)
    broken: list[Path] = []

    def readable(streams: _Streams) -> _Streams:
        return {
            stream: {
                name: _readable(images, f"{stream}-{name}", cache, cache_size, skip_broken, broken)
                for name, images in domains.items()
            }
            for stream, domains in streams.items()
        }

    def dataset(images: Images, name: str, stream: str) -> AvalancheDataset:
        if len(images) == 0:
            raise ValueError(f"the domain {name!r} has no images for the {stream!r} stream")
        wrapped = _make_taskaware_classification_dataset(
            PixelRows(images) if by_pixels else images,
            task_labels=0,
            transform_groups=groups,
            targets=list(images.labels),
        )
        return wrapped if stream == "train" else wrapped.eval()

    streams: _Streams = {"train": train, "test": test}
    for domains in streams.values():
        for name, images in domains.items():
            _check_labels(images, name, len(classes))
    if limit is None:  # else what is left over is neither read nor kept
        streams = readable(streams)
    if validation_size:
        parts = {n: _split(images, validation_size, seed) for n, images in streams["train"].items()}
        streams["train"] = {name: kept for name, (kept, _) in parts.items()}
        streams["valid"] = {name: held_out for name, (_, held_out) in parts.items()}
    used = streams
    if limit is not None:
        used = readable({s: _limited(domains, limit, seed) for s, domains in streams.items()})
    if broken:
        warnings.warn(
            f"{len(broken)} images cannot be decoded and are skipped (benchmark.broken), the "
            f"first is {broken[0]}",
            stacklevel=3,
        )
    benchmark = benchmark_from_datasets(
        **{
            stream: [dataset(images, name, stream) for name, images in domains.items()]
            for stream, domains in used.items()
        }
    )
    benchmark = with_task_labels(with_classes_timeline(benchmark))
    for stream, domains in used.items():
        for experience, name in zip(benchmark.streams[stream], domains, strict=True):
            experience.domain = name
    benchmark.n_classes = len(classes)
    benchmark.classes = list(classes)
    benchmark.images = {stream: dict(domains) for stream, domains in streams.items()}
    benchmark.broken = broken
    return benchmark


def _readable(
    images: Images,
    name: str,
    cache: str | os.PathLike[str] | None,
    size: int,
    skip_broken: bool,
    broken: list[Path],
) -> Images:
    """From the cache, and without the broken ones, which are listed, as far as is asked for."""
    if not isinstance(images, ImageFiles) or len(images) == 0:
        return images
    if cache is not None:
        images, skipped = cached(images, cache, size, name, skip_broken=skip_broken)
        broken += skipped
    elif skip_broken:
        good = []
        for i, image in enumerate(decoded(images.files, None)):
            if isinstance(image, ValueError):
                broken.append(images.files[i])
            else:
                good.append(i)
        images = images.take(good)
    return images


def choose_domains(domains: Sequence[str] | None, known: Sequence[str], stream: str) -> list[str]:
    """The wanted domains, in the wanted order; all of them by default.

    :raises ValueError: naming an unknown or repeated one and the known ones.
    """
    if domains is None:
        return list(known)
    unknown = [name for name in domains if name not in known]
    if unknown:
        raise ValueError(f"{stream} has the domains {list(known)}, got {unknown}")
    if len(set(domains)) < len(domains) or not domains:
        raise ValueError(f"domains must be distinct and at least one, got {list(domains)}")
    return list(domains)


def image_files(folder: Path) -> list[Path]:
    """All images below a folder, sorted by path; what is :func:`hidden` does not count.

    Links are followed, but not back to a folder on the way to them, which would be a circle.

    :raises ValueError: if there is no such folder.
    """
    if not folder.is_dir():
        raise ValueError(f"there is no folder {folder}")
    found: list[Path] = []
    ways: dict[Path, list[Path]] = {}  # the folders that lead to each, without links
    for place, folders, names in os.walk(folder, followlinks=True):
        here = Path(place)
        ways[here] = [*ways.get(here.parent, []), here.resolve()]
        folders[:] = [n for n in folders if not (hidden(n) or _leads_back(here / n, ways[here]))]
        found += [here / n for n in names if not hidden(n) and Path(n).suffix.lower() in SUFFIXES]
    return sorted(file for file in found if file.is_file())


def hidden(name: str) -> bool:
    """Whether a file or folder is none of the user's: ``.name``, or what macOS packs beside it."""
    return name.startswith(".") or name == "__MACOSX"


def _leads_back(folder: Path, way: Sequence[Path]) -> bool:
    target = folder.resolve()
    return any(place.is_relative_to(target) for place in way)


def class_folders(folder: Path, classes: Sequence[str]) -> ImageFiles:
    """The images of ``folder/CLASS/*``, with class ids from a fixed table of names.

    :raises ValueError: for a subfolder that is no class.
    """
    if not folder.is_dir():
        raise ValueError(f"there is no folder {folder}")
    ids = {name: i for i, name in enumerate(classes)}
    found = sorted(p.name for p in folder.iterdir() if p.is_dir() and not hidden(p.name))
    unknown = [name for name in found if name not in ids]
    if unknown:
        raise ValueError(f"{folder} has folders that are no classes: {unknown}")
    pairs = [(file, ids[name]) for name in found for file in image_files(folder / name)]
    return ImageFiles([file for file, _ in pairs], [label for _, label in pairs])


def listed_files(
    root: Path, file: Path, classes: Sequence[str], *, first_id: int = 0
) -> ImageFiles:
    """Images of an official list: ``clipart/aircraft_carrier/clipart_001_000005.jpg 0``, a line
    an image.

    :param first_id: of the class ids in the list.
    :raises ValueError: naming the line that has no path and id, or another class's id.
    """
    ids = {name: i for i, name in enumerate(classes)}
    files, labels = [], []
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), start=1):
        if not line.strip():
            continue
        path, _, given = line.strip().rpartition(" ")
        label = ids.get(Path(path).parent.name)
        if label is None or given != str(label + first_id):
            raise ValueError(
                f"{file}, line {number}: expected a path DOMAIN/CLASS/FILE and the official id "
                f"of that class, got {line!r}"
            )
        files.append(root / path)
        labels.append(label)
    return ImageFiles(files, labels)


def split_by_name(
    images: ImageFiles, root: Path, test_fraction: float = 0.2
) -> tuple[ImageFiles, ImageFiles]:
    """Training and test images of a domain without official lists, the same everywhere.

    Of each class the share with the lowest SHA-256 of their path below ``root`` is for tests.
    """

    def rank(index: int) -> str:
        name = images.files[index].relative_to(root).as_posix()
        return hashlib.sha256(name.encode()).hexdigest()

    test: set[int] = set()
    for rows in _by_class(images).values():
        test.update(sorted(rows, key=rank)[: round(test_fraction * len(rows))])
    others, chosen = _without(images, test)
    return images.take(others), images.take(chosen)


def _check_labels(images: Images, name: str, n_classes: int) -> None:
    wrong = [label for label in images.labels if not 0 <= label < n_classes]
    if wrong:
        raise ValueError(
            f"labels must be in 0 to {n_classes - 1}, got {wrong[0]} in the domain {name!r}"
        )


def _by_class(images: Images) -> dict[int, list[int]]:
    rows: dict[int, list[int]] = {}
    for i, label in enumerate(images.labels):
        rows.setdefault(label, []).append(i)
    return rows


def _without(images: Images, chosen: set[int]) -> tuple[list[int], list[int]]:
    everything = range(len(images))
    return [i for i in everything if i not in chosen], sorted(chosen)


def _shuffled(rows: list[int], seed: int, label: int) -> list[int]:
    generator = torch.Generator().manual_seed(1_000_003 * seed + label)
    return [rows[i] for i in torch.randperm(len(rows), generator=generator).tolist()]


def _split(images: Images, fraction: float, seed: int) -> tuple[Images, Images]:
    held_out: set[int] = set()
    for label, rows in _by_class(images).items():
        some = round(fraction * len(rows)) or int(len(rows) > 1)
        held_out.update(_shuffled(rows, seed, label)[:some])
    others, chosen = _without(images, held_out)
    return images.take(others), images.take(chosen)


def _limited(domains: Mapping[str, Images], limit: int, seed: int) -> dict[str, Images]:
    limited = {}
    for name, images in domains.items():
        kept: set[int] = set()
        for label, rows in _by_class(images).items():
            kept.update(_shuffled(rows, seed, label)[:limit])
        limited[name] = images.take(sorted(kept))
    return limited
