"""Domain-incremental benchmarks from images on disk: what all such streams share."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from avalanche.benchmarks import CLScenario, benchmark_from_datasets, with_classes_timeline
from avalanche.benchmarks.scenarios.task_aware import with_task_labels
from avalanche.benchmarks.utils import AvalancheDataset, _make_taskaware_classification_dataset
from PIL import Image, UnidentifiedImageError
from torch.utils.data import Dataset
from torchvision import transforms

Transform = Callable[[Image.Image], Any]

IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".bmp", ".webp", ".ppm"})


class Images(Protocol):
    """Labelled images: rows are an RGB ``PIL.Image`` and its class id."""

    labels: Sequence[int]

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> tuple[Image.Image, int]: ...

    def take(self, indices: Sequence[int]) -> Images:
        """Some of them, in this order."""


class ImageFiles(Dataset):
    """Images in files of their own."""

    def __init__(self, files: Sequence[Path], labels: Sequence[int]) -> None:
        self.files, self.labels = files, labels

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[Image.Image, int]:
        file = self.files[index]
        try:
            with Image.open(file) as image:
                return image.convert("RGB"), self.labels[index]
        except (UnidentifiedImageError, OSError, SyntaxError) as error:
            raise ValueError(f"the image {file} cannot be decoded: {error}") from error

    def take(self, indices: Sequence[int]) -> ImageFiles:
        """Some of them, in this order."""
        return ImageFiles([self.files[i] for i in indices], [self.labels[i] for i in indices])


def image_transforms(size: int = 224) -> tuple[Transform, Transform]:
    """The usual transforms for networks pretrained on ImageNet.

    :param size: height and width of what the network sees.
    :return: for training, a random crop and flip; for evaluation, the central crop of the
        image resized to ``size * 8 / 7``. Both normalise with ImageNet's mean and deviation.
    """
    last = [transforms.ToTensor(), transforms.Normalize(*IMAGENET)]
    train = [transforms.RandomResizedCrop(size), transforms.RandomHorizontalFlip()]
    evaluation = [transforms.Resize(size * 8 // 7), transforms.CenterCrop(size)]
    return transforms.Compose(train + last), transforms.Compose(evaluation + last)


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
) -> CLScenario:
    """A benchmark with one experience per domain, in this order.

    Task identities are not used: every experience has task label 0, and all classes share one
    head, whether a domain has images of all of them or not. ``benchmark.n_classes`` and
    ``benchmark.classes`` tell them, ``experience.domain`` the domain's name, and
    ``benchmark.images[stream][domain]`` has the images before any limit.

    :param train: images to train on by domain.
    :param test: images to test on by domain, as a rule the same domains in the same order.
    :param classes: names by class id.
    :param validation_size: fraction of each domain's training images, class by class, to put
        into a third stream, ``benchmark.streams["valid"]``; 0 for none.
    :param limit: most images per class and domain in each stream, for small machines.
    :param seed: of the validation split and of what a limit leaves out.
    :param train_transform: from a PIL image to a tensor; by default :func:`image_transforms`.
    :param eval_transform: the same for validation and test.
    :raises ValueError: for a domain without images, or values out of range.
    """
    if not 0 <= validation_size < 1:
        raise ValueError(f"validation_size must be a fraction in [0, 1), got {validation_size}")
    if limit is not None and limit < 1:
        raise ValueError(f"limit must be >= 1, got {limit}")
    default_train, default_eval = image_transforms()
    train_transform = train_transform or default_train
    groups = {
        "train": (train_transform, None),
        "eval": (eval_transform or default_eval, None),
    }

    def dataset(images: Images, name: str, stream: str) -> AvalancheDataset:
        if len(images) == 0:
            raise ValueError(f"the domain {name!r} has no images for the {stream!r} stream")
        if limit is not None:
            images = _limited(images, limit, seed)
        wrapped = _make_taskaware_classification_dataset(
            images, task_labels=0, transform_groups=groups, targets=list(images.labels)
        )
        return wrapped if stream == "train" else wrapped.eval()

    streams: dict[str, Mapping[str, Images]] = {"train": train, "test": test}
    if validation_size:
        parts = {name: _split(images, validation_size, seed) for name, images in train.items()}
        streams["train"] = {name: kept for name, (kept, _) in parts.items()}
        streams["valid"] = {name: held_out for name, (_, held_out) in parts.items()}
    benchmark = benchmark_from_datasets(
        **{
            stream: [dataset(images, name, stream) for name, images in domains.items()]
            for stream, domains in streams.items()
        }
    )
    benchmark = with_task_labels(with_classes_timeline(benchmark))
    for stream, domains in streams.items():
        for experience, name in zip(benchmark.streams[stream], domains, strict=True):
            experience.domain = name
    benchmark.n_classes = len(classes)
    benchmark.classes = list(classes)
    benchmark.images = {stream: dict(domains) for stream, domains in streams.items()}
    return benchmark


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
    """All images below a folder, sorted by path; links that lead out of it do not count.

    :raises ValueError: if there is no such folder.
    """
    if not folder.is_dir():
        raise ValueError(f"there is no folder {folder}")
    return sorted(p for p in folder.rglob("*") if p.suffix.lower() in SUFFIXES and p.is_file())


def class_folders(folder: Path, classes: Sequence[str]) -> ImageFiles:
    """The images of ``folder/CLASS/*``, with class ids from a fixed table of names.

    :raises ValueError: for a subfolder that is no class.
    """
    if not folder.is_dir():
        raise ValueError(f"there is no folder {folder}")
    ids = {name: i for i, name in enumerate(classes)}
    found = sorted(p.name for p in folder.iterdir() if p.is_dir() and not p.name.startswith("."))
    unknown = [name for name in found if name not in ids]
    if unknown:
        raise ValueError(f"{folder} has folders that are no classes: {unknown}")
    pairs = [(file, ids[name]) for name in found for file in image_files(folder / name)]
    return ImageFiles([file for file, _ in pairs], [label for _, label in pairs])


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
        held_out.update(_shuffled(rows, seed, label)[: round(fraction * len(rows))])
    others, chosen = _without(images, held_out)
    return images.take(others), images.take(chosen)


def _limited(images: Images, limit: int, seed: int) -> Images:
    kept: set[int] = set()
    for label, rows in _by_class(images).items():
        kept.update(_shuffled(rows, seed, label)[:limit])
    return images.take(sorted(kept))
