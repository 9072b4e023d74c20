"""Build a domain-incremental benchmark from images on disk."""

from __future__ import annotations

import functools
import os
import re
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TypedDict

import torch
from avalanche.benchmarks import CLScenario, benchmark_from_datasets, with_classes_timeline
from avalanche.benchmarks.datasets import default_dataset_location
from avalanche.benchmarks.scenarios.task_aware import with_task_labels
from avalanche.benchmarks.utils import AvalancheDataset, _make_taskaware_classification_dataset
from torch.utils.data import Dataset
from torchvision.transforms import Compose, ToPILImage
from typing_extensions import Unpack

from covon_avalanche.checks import check_whole
from covon_avalanche.did_you_mean import did_you_mean
from covon_avalanche.domain_orders import COUNTS
from covon_avalanche.streams.image_files import (
    Decoder,
    ImageFiles,
    TrainAndTest,
    held_out_groups,
    name_of,
)
from covon_avalanche.streams.pixel_cache import cached
from covon_avalanche.streams.transforms import Transform, image_transforms

_Images = dict[tuple[str, str], ImageFiles]  # by stream and domain


class ImageOptions(TypedDict, total=False):
    """Options that all image streams share, see :func:`image_benchmark`."""

    train_transform: Transform | None
    eval_transform: Transform | None
    validation_size: float
    limit: int | None
    train_limit: int | None
    seed: int
    cache: str | os.PathLike[str] | None
    cache_size: int


def image_benchmark(
    train: Mapping[str, ImageFiles],
    test: Mapping[str, ImageFiles],
    classes: Sequence[str],
    *,
    train_transform: Transform | None = None,
    eval_transform: Transform | None = None,
    validation_size: float = 0,
    limit: int | None = None,
    train_limit: int | None = None,
    seed: int = 0,
    cache: str | os.PathLike[str] | None = None,
    cache_size: int = 256,
) -> CLScenario:
    """A benchmark with one experience per domain.

    Task identities are not used: every experience has task label 0, and all classes share one
    head, even if a domain lacks some of them.

    The benchmark has these attributes: ``n_classes``; ``classes``, the names by class id;
    ``images[stream][domain]``, the image files in use. An experience has the attribute
    ``domain``, its name.

    :param train: training images by domain, in the order in which the domains are learned.
    :param test: test images by domain; usually the same domains in the same order.
    :param classes: names by class id.
    :param train_transform: maps a PIL image to a tensor; by default :func:`image_transforms`. A
        transform with an attribute ``takes_pixels = True`` gets a uint8 tensor of shape
        (3, height, width) instead, which it must not write to.
    :param eval_transform: the same for validation and test.
    :param validation_size: fraction of each domain's training images, class by class, for a
        third stream, ``benchmark.streams["valid"]``; 0 for none. At least one image is held out
        of every class with two or more. If images have groups, it is the fraction of groups, and
        a group is held out in all domains and classes.
    :param limit: maximal number of images per class, domain and stream.
    :param train_limit: the same for the training stream alone, after validation images are held
        out; the validation and test streams stay whole, or as ``limit`` leaves them.
    :param seed: of the validation split and of the choice of images under a limit.
    :param cache: a folder for decoded images, one file per domain and stream, built on first
        use; by default there is no cache, because it needs disk space (about 200 kB per image at
        256 pixels) and because random crops are then taken from resized images. With a limit,
        only the images within it are cached, separately for each seed.
    :param cache_size: shorter side of cached images; larger images are resized to it, smaller
        ones stay as they are. Evaluation is unchanged by the cache if ``eval_transform`` resizes
        to the same size; :func:`image_transforms` resizes to ``size * 8 / 7``.
    :raises ValueError: for a domain without images, an image or group for training and testing, an
        image of two classes, a value out of range, or an image that cannot be decoded (when the
        cache is built; otherwise when it is read).
    """
    if not 0 <= validation_size < 1:
        raise ValueError(f"validation_size must be a fraction in [0, 1), got {validation_size}")
    for option, most in (("limit", limit), ("train_limit", train_limit)):
        if most is not None:
            check_whole(option, most)
    check_whole("cache_size", cache_size)
    if isinstance(classes, str) or len(set(classes)) < len(classes):
        raise ValueError(f"classes must be a list of distinct names, got {classes!r}")
    _warn_of_case("classes", classes)
    _warn_of_case("domains", {**train, **test})

    def from_cache(images: _Images) -> _Images:
        if cache is None:
            return images
        return {key: cached(some, cache, cache_size, "-".join(key)) for key, some in images.items()}

    read = Decoder()  # of all images: it warns once
    both = ("train", train), ("test", test)
    images = {
        (stream, name): ImageFiles(some.names, some.labels, read, some.groups)
        for stream, domains in both
        for name, some in domains.items()
    }
    _check_distinct(images, classes)
    labels = {s: {i for n in domains for i in images[s, n].labels} for s, domains in both}
    if unknown := sorted(labels["test"] - labels["train"]):
        names = [classes[label] for label in unknown]
        warnings.warn(f"the classes {names} have test images, but none for training", stacklevel=3)
    limits = dict.fromkeys(("train", "valid", "test"), limit)
    if train_limit is not None:
        limits["train"] = train_limit if limit is None else min(limit, train_limit)
    limited = any(most is not None for most in limits.values())
    if not limited:  # otherwise only the images within the limits are cached
        images = from_cache(images)
    held_out = held_out_groups(
        (images["train", name] for name in train), validation_size, f"{seed}/"
    )
    for name in train if validation_size else ():
        whole = images["train", name]
        drawn = _draw(whole, seed, lambda n: round(validation_size * n) or int(n > 1))
        parts = whole.split(drawn) if whole.groups is None else whole.split_groups(held_out)
        images["train", name], images["valid", name] = parts
    if limited:
        within = {key: _at_most(limits[key[0]], some, seed) for key, some in images.items()}
        images = from_cache(within)
    streams: dict[str, dict[str, ImageFiles]] = {}
    for (stream, name), some in images.items():
        if not some:
            raise ValueError(f"the domain {name!r} has no images for the {stream!r} stream")
        streams.setdefault(stream, {})[name] = some
    default_train, default_eval = image_transforms()
    groups = {
        "train": (_of_pixels(train_transform or default_train), None),
        "eval": (_of_pixels(eval_transform or default_eval), None),
    }
    datasets = {stream: [(d, d.labels) for d in streams[stream].values()] for stream in streams}
    benchmark = one_head_benchmark(datasets, groups, classes)
    for stream, domains in streams.items():
        for experience, name in zip(benchmark.streams[stream], domains, strict=True):
            experience.domain = name
    benchmark.images = streams
    return benchmark


def _warn_of_case(what: str, names: Iterable[str]) -> None:
    known: dict[str, str] = {}
    for name in names:
        plain = re.sub(r"(?<=\w)[\s_-]+(?=\w)", " ", name.casefold().strip())
        if (other := known.setdefault(plain, name)) != name:
            only = "case" if name.casefold() == other.casefold() else "spaces, _, - or case"
            warnings.warn(f"the {what} {other!r} and {name!r} differ in {only} only", stacklevel=4)


def _check_distinct(images: _Images, classes: Sequence[str]) -> None:
    """Check that an image has one label and stream, and is in a domain once, whatever its path; and
    that a group has one stream."""
    parts: dict[str, str] = {}
    resolved = functools.cache(os.path.realpath)
    known: dict[tuple[str, str], tuple[str, str, int]] = {}
    for (stream, domain), some in images.items():
        for file, label in zip(some.names, some.labels, strict=True):
            is_link = os.path.islink(file)  # noqa: PTH114  # faster than Path
            folder, name = os.path.split(os.path.realpath(file) if is_link else file)
            first = known.setdefault((resolved(folder), name), use := (stream, domain, label))
            if first[0] != stream:
                raise ValueError(f"{file} is a training image and a test image")
            if first is not use and (first[1] == domain or first[2] != label):
                both = " and ".join(sorted({repr(classes[first[2]]), repr(classes[label])}))
                link = f", a link to {os.path.realpath(file)}," if is_link else ""
                raise ValueError(f"{file}{link} is listed twice, as {both}")
        for group in some.groups or ():
            if parts.setdefault(group, stream) != stream:
                raise ValueError(f"the group {group!r} has training images and test images")


def published_benchmark(
    stream: str,
    root: Path,
    domains: Sequence[str] | None,
    split: Callable[[Path, str], TrainAndTest],
    classes: Sequence[str],
    **options: Unpack[ImageOptions],
) -> CLScenario:
    """:func:`image_benchmark` of a data set whose domains and numbers of images are known
    (``domain_orders.COUNTS``); other numbers raise a warning.

    :param split: finds the training and test images of a domain below the root.
    """
    counts = COUNTS[stream]
    parts = {name: split(root, name) for name in choose_domains(domains, [*counts], stream)}
    for name, part in parts.items():
        both, expected = tuple(map(len, part)), counts[name]
        found = both if isinstance(expected, tuple) else sum(both)
        check_counts(f"{stream}'s {name}", expected, found, stacklevel=4)
    train, test = ({name: part[i] for name, part in parts.items()} for i in (0, 1))
    return image_benchmark(train, test, classes, **options)


def one_head_benchmark(
    streams: Mapping[str, Sequence[tuple[Dataset, Sequence[int]]]],
    transform_groups: dict[str, tuple[Transform, None]] | None,
    classes: Sequence[str],
) -> CLScenario:
    """A benchmark with one experience per data set, all with task label 0.

    :param streams: data sets and their targets; all but ``train`` are transformed for evaluation.
    :param classes: names by class id.
    """

    def dataset(data: Dataset, targets: Sequence[int], stream: str) -> AvalancheDataset:
        made = _make_taskaware_classification_dataset(
            data, task_labels=0, transform_groups=transform_groups, targets=list(targets)
        )
        return made if stream == "train" else made.eval()

    benchmark = benchmark_from_datasets(
        **{name: [dataset(*data, name) for data in stream] for name, stream in streams.items()}
    )
    benchmark = with_task_labels(with_classes_timeline(benchmark))
    benchmark.n_classes, benchmark.classes = len(classes), list(classes)
    return benchmark


def data_root(dataset_root: str | os.PathLike[str] | None, default: str) -> Path:
    """The folder of a stream's data, by default one in Avalanche's data folder."""
    return Path(default_dataset_location(default) if dataset_root is None else dataset_root)


def choose_domains(domains: Sequence[str] | None, known: Sequence[str], stream: str) -> list[str]:
    """The given domains, or all known ones.

    :raises ValueError: for unknown, repeated or no domains, or a string.
    """
    if not known:
        raise ValueError(f"there are no domains in {stream}")
    if domains is None:
        return list(known)
    if isinstance(domains, str):
        raise ValueError(f"domains must be a list of names, got {domains!r}")
    domains = [name_of(name) for name in domains]
    unknown = [name for name in domains if name not in known]
    if unknown:
        similar = did_you_mean(unknown[0], known)
        raise ValueError(f"{stream} has the domains {list(known)}, got {unknown}{similar}")
    if len(set(domains)) < len(domains) or not domains:
        raise ValueError(f"domains must be distinct and at least one, got {list(domains)}")
    return list(domains)


def check_counts(what: str, expected: object, found: object, stacklevel: int = 3) -> None:
    """Warn the caller of a stream if the numbers of images differ from the published ones."""
    if found != expected:
        warnings.warn(f"{what} should have {expected} images, found {found}", stacklevel=stacklevel)


def _draw(images: ImageFiles, seed: int, number: Callable[[int], int]) -> list[int]:
    """Indices of randomly drawn images, sorted.

    :param number: how many to draw from a class, given how many it has.
    """
    drawn: list[int] = []
    for label, indices in images.indices_by_class().items():
        generator = torch.Generator().manual_seed((1_000_003 * seed + label) % 2**64)
        order = torch.randperm(len(indices), generator=generator, device="cpu").tolist()
        drawn += [indices[i] for i in order[: number(len(indices))]]
    return sorted(drawn)


def _at_most(limit: int | None, images: ImageFiles, seed: int) -> ImageFiles:
    """Randomly drawn images, so many of each class; all without a limit."""
    return images if limit is None else images.take(_draw(images, seed, lambda n: limit))


def _of_pixels(transform: Transform) -> Transform:
    """A transform of uint8 tensors."""
    takes_pixels = getattr(transform, "takes_pixels", False)
    return transform if takes_pixels else Compose([ToPILImage(), transform])
