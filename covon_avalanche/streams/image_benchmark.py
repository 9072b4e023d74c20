"""Build a domain-incremental benchmark from images on disk."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypedDict

import torch
from avalanche.benchmarks import CLScenario, benchmark_from_datasets, with_classes_timeline
from avalanche.benchmarks.scenarios.task_aware import with_task_labels
from avalanche.benchmarks.utils import AvalancheDataset, _make_taskaware_classification_dataset

from covon_avalanche.streams.image_datasets import ImageFiles, Images, PixelDataset
from covon_avalanche.streams.image_files import indices_by_class
from covon_avalanche.streams.pixel_cache import cached, decoded
from covon_avalanche.streams.transforms import Transform, image_transforms

_Domains = Mapping[str, Images]


class ImageOptions(TypedDict, total=False):
    """Options that all image streams share, see :func:`image_benchmark`."""

    validation_size: float
    limit: int | None
    seed: int
    cache: str | os.PathLike[str] | None
    cache_size: int
    skip_broken: bool


def image_benchmark(
    train: _Domains,
    test: _Domains,
    classes: Sequence[str],
    *,
    train_transform: Transform | None = None,
    eval_transform: Transform | None = None,
    validation_size: float = 0,
    limit: int | None = None,
    seed: int = 0,
    cache: str | os.PathLike[str] | None = None,
    cache_size: int = 256,
    skip_broken: bool = False,
) -> CLScenario:
    """A benchmark with one experience per domain.

    Task identities are not used: every experience has task label 0, and all classes share one
    head, even if a domain lacks some of them.

    The benchmark has these attributes: ``n_classes``; ``classes``, the names by class id;
    ``images[stream][domain]``, all images before ``limit``; ``broken``, the skipped files. An
    experience has the attribute ``domain``, its name.

    :param train: training images by domain, in the order in which the domains are learned.
    :param test: test images by domain; usually the same domains in the same order.
    :param classes: names by class id.
    :param train_transform: maps a PIL image to a tensor; by default :func:`image_transforms`.
    :param eval_transform: the same for validation and test.
    :param validation_size: fraction of each domain's training images, class by class, for a
        third stream, ``benchmark.streams["valid"]``; 0 for none. At least one image is held out
        of every class with two or more.
    :param limit: maximal number of images per class, domain and stream.
    :param seed: of the validation split and of the choice of images under a limit.
    :param cache: a folder for decoded images, one file per domain and stream, built on first
        use; by default there is no cache, because it needs disk space (about 200 kB per image at
        256 pixels) and because random crops are then taken from resized images. With a limit,
        only the images within it are cached, separately for each seed.
    :param cache_size: shorter side of cached images; larger images are resized to it, smaller
        ones stay as they are. Evaluation is unchanged by the cache if ``eval_transform`` resizes
        to the same size; :func:`image_transforms` resizes to ``size * 8 / 7``.
    :param skip_broken: decode every image at the beginning and leave out those that cannot be
        decoded, with a warning. By default such an image raises an error, when it is read or
        when the cache is built.
    :raises ValueError: for a domain without images, or a value out of range.
    """
    if not 0 <= validation_size < 1:
        raise ValueError(f"validation_size must be a fraction in [0, 1), got {validation_size}")
    if limit is not None and limit < 1:
        raise ValueError(f"limit must be >= 1, got {limit}")
    if cache_size < 1:
        raise ValueError(f"cache_size must be >= 1, got {cache_size}")
    streams: dict[str, _Domains] = {"train": train, "test": test}
    broken: list[Path] = []

    def read(streams: dict[str, _Domains]) -> dict[str, _Domains]:
        """Use the cache, and leave out broken images."""
        return {
            stream: {
                name: _read(images, f"{stream}-{name}", cache, cache_size, skip_broken, broken)
                for name, images in domains.items()
            }
            for stream, domains in streams.items()
        }

    if limit is None:  # otherwise only the images within the limit are read
        streams = read(streams)
    if validation_size:
        parts = {n: _split(images, validation_size, seed) for n, images in streams["train"].items()}
        streams["train"] = {name: kept for name, (kept, _) in parts.items()}
        streams["valid"] = {name: held_out for name, (_, held_out) in parts.items()}
    used = streams
    if limit is not None:
        used = read(
            {
                stream: {name: _limited(images, limit, seed) for name, images in domains.items()}
                for stream, domains in streams.items()
            }
        )
    if broken:
        warnings.warn(
            f"{len(broken)} images cannot be decoded and are skipped (benchmark.broken), the "
            f"first is {broken[0]}",
            stacklevel=3,
        )
    default_train, default_eval = image_transforms()
    transforms = (train_transform or default_train, eval_transform or default_eval)
    benchmark = benchmark_from_datasets(
        **{
            stream: [_dataset(images, name, stream, transforms) for name, images in domains.items()]
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


def choose_domains(domains: Sequence[str] | None, known: Sequence[str], stream: str) -> list[str]:
    """The given domains, or all known ones.

    :raises ValueError: for unknown, repeated or no domains.
    """
    if domains is None:
        return list(known)
    unknown = [name for name in domains if name not in known]
    if unknown:
        raise ValueError(f"{stream} has the domains {list(known)}, got {unknown}")
    if len(set(domains)) < len(domains) or not domains:
        raise ValueError(f"domains must be distinct and at least one, got {list(domains)}")
    return list(domains)


def _read(
    images: Images,
    name: str,
    cache: str | os.PathLike[str] | None,
    size: int,
    skip_broken: bool,
    broken: list[Path],
) -> Images:
    """The images from the cache, if any, without broken ones, which are added to ``broken``."""
    if not isinstance(images, ImageFiles) or len(images) == 0:
        return images
    if cache is not None:
        images, skipped = cached(images, cache, size, name, skip_broken=skip_broken)
        broken += skipped
    elif skip_broken:
        good = []
        for i, image in enumerate(decoded(images.files)):
            if isinstance(image, ValueError):
                broken.append(images.files[i])
            else:
                good.append(i)
        images = images.take(good)
    return images


def _split(images: Images, fraction: float, seed: int) -> tuple[Images, Images]:
    """Training and validation images."""
    held_out: set[int] = set()
    for label, indices in indices_by_class(images).items():
        n = round(fraction * len(indices)) or int(len(indices) > 1)
        held_out.update(_shuffled(indices, seed, label)[:n])
    kept = [i for i in range(len(images)) if i not in held_out]
    return images.take(kept), images.take(sorted(held_out))


def _limited(images: Images, limit: int, seed: int) -> Images:
    kept: set[int] = set()
    for label, indices in indices_by_class(images).items():
        kept.update(_shuffled(indices, seed, label)[:limit])
    return images.take(sorted(kept))


def _shuffled(indices: list[int], seed: int, label: int) -> list[int]:
    generator = torch.Generator().manual_seed(1_000_003 * seed + label)
    return [indices[i] for i in torch.randperm(len(indices), generator=generator).tolist()]


def _dataset(
    images: Images, name: str, stream: str, transforms: tuple[Transform, Transform]
) -> AvalancheDataset:
    if len(images) == 0:
        raise ValueError(f"the domain {name!r} has no images for the {stream!r} stream")
    train, evaluation = transforms
    accept_tensors = all(getattr(transform, "takes_pixels", False) for transform in transforms)
    dataset = _make_taskaware_classification_dataset(
        PixelDataset(images) if accept_tensors else images,
        task_labels=0,
        transform_groups={"train": (train, None), "eval": (evaluation, None)},
        targets=list(images.labels),
    )
    return dataset if stream == "train" else dataset.eval()
