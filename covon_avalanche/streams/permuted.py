"""Permuted pixels: the same images in every experience, each time in another pixel order.

By default the first experience is not permuted (Goodfellow et al., "An Empirical Investigation of
Catastrophic Forgetting in Gradient-Based Neural Networks", 2013).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypedDict

import torch
from avalanche.benchmarks import CLScenario
from filelock import FileLock
from torch import Tensor
from torch.utils.data import Dataset
from torchvision.datasets import MNIST
from torchvision.transforms import Normalize
from typing_extensions import Unpack

from covon_avalanche.checks import check_whole
from covon_avalanche.streams.image_benchmark import data_root, one_head_benchmark

Transform = Callable[[Tensor], Tensor]


class PermutedImages(Dataset):
    """Images in one pixel order; all orders share the same bytes.

    An item is a float tensor of shape (1, height, width) and its class id.

    :param images: uint8 of shape (n, height, width).
    :param targets: int64 of shape (n,).
    :param order: int64 of shape (height * width,): the source of each pixel.
    :param scale: largest pixel value, which becomes 1.
    :param normalisation: mean and standard deviation of the scaled pixels, to standardise them.
    """

    def __init__(
        self,
        images: Tensor,
        targets: Tensor,
        order: Tensor,
        scale: float,
        normalisation: tuple[float, float] = (0.0, 1.0),
    ) -> None:
        self.images, self.targets, self.order = images, targets, order
        mean, std = normalisation
        self._factor, self._shift = 1 / (scale * std), -mean / std

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        x, y = self.tensor_batch(torch.tensor([index], dtype=torch.int64, device="cpu"))
        return x[0], int(y[0])

    def tensor_batch(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Images, float32 of shape (batch, 1, height, width), and class ids at these indices."""
        pixels = self.images.index_select(0, indices).flatten(1)
        pixels = pixels.gather(1, self.order.expand(len(indices), -1))
        images = pixels.float().mul_(self._factor).add_(self._shift)
        return images.view(len(indices), 1, *self.images.shape[1:]), self.targets[indices]


class PermutedOptions(TypedDict, total=False):
    """Options that both streams share, see :func:`PermutedDigits`."""

    seed: int
    permute_first: bool
    validation_size: int | float
    train_transform: Transform | None
    eval_transform: Transform | None


def PermutedDigits(n_experiences: int = 5, **options: Unpack[PermutedOptions]) -> CLScenario:
    """Scikit-learn's 1,797 handwritten digits of 8 x 8 pixels; nothing is downloaded.

    1,437 images are for training and 360 for testing, in a fixed stratified split. Task
    identities are not used: every experience has task label 0 and all ten classes.

    :param n_experiences: number of experiences, each with its own pixel order; the first has
        the natural order.
    :param seed: of the permutations and the validation split; 0 by default.
    :param permute_first: permute the first experience, too.
    :param validation_size: images (or their fraction) of each training experience for a third
        stream, ``benchmark.streams["valid"]``; 0 for none.
    :param train_transform: applied to a permuted image (a float tensor of shape (1, 8, 8) in
        [0, 1]) in training; by default images are standardised.
    :param eval_transform: the same for validation and test.
    :return: a benchmark with ``n_classes = 10`` and ``classes``, the digits as text.
    """
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    digits = load_digits()
    images = torch.from_numpy(digits.images).to(torch.uint8)
    targets = torch.from_numpy(digits.target).long()
    rows = train_test_split(
        range(len(images)), test_size=360, random_state=0, stratify=digits.target
    )
    train, test = ((images[part], targets[part]) for part in rows)
    return _benchmark(train, test, 16, (0.3053, 0.3760), n_experiences, **options)


def PermutedMNIST(
    n_experiences: int = 10,
    *,
    dataset_root: str | os.PathLike[str] | None = None,
    **options: Unpack[PermutedOptions],
) -> CLScenario:
    """MNIST: 60,000 training and 10,000 test images of 28 x 28 pixels.

    The images are stored once, as bytes, and permuted and standardised batch by batch.

    :param dataset_root: the folder of ``MNIST/raw`` in torchvision's layout; by default
        ``mnist`` in Avalanche's data folder. Missing files are downloaded.

    See :func:`PermutedDigits` for the other parameters; images have shape (1, 28, 28).
    """
    parts = _mnist(data_root(dataset_root, "mnist"))
    train, test = ((part.data, part.targets) for part in parts)
    return _benchmark(train, test, 255, (0.1307, 0.3081), n_experiences, **options)


def _mnist(root: Path) -> list[MNIST]:
    """Training and test data; one process downloads missing files, the others wait.

    :raises ValueError: if they cannot be downloaded.
    """
    try:
        return [MNIST(root, train=part) for part in (True, False)]
    except (RuntimeError, ValueError):  # missing, or just being downloaded
        root.mkdir(parents=True, exist_ok=True)
        with FileLock(root / ".MNIST.lock"):
            try:
                return [MNIST(root, train=part, download=True) for part in (True, False)]
            except (RuntimeError, OSError) as error:
                what = " ".join(str(error).split())
                raise ValueError(f"MNIST cannot be downloaded to {root}: {what}") from error


def _benchmark(
    train: tuple[Tensor, Tensor],
    test: tuple[Tensor, Tensor],
    scale: float,
    normalisation: tuple[float, float],
    n_experiences: int,
    *,
    seed: int = 0,
    permute_first: bool = False,
    validation_size: int | float = 0,
    train_transform: Transform | None = None,
    eval_transform: Transform | None = None,
) -> CLScenario:
    check_whole("n_experiences", n_experiences)
    images, targets = train
    fraction = isinstance(validation_size, float)
    n_valid = round(validation_size * len(targets)) if fraction else int(validation_size)
    if not 0 <= n_valid < len(targets):
        raise ValueError(
            f"validation_size must be a fraction in [0, 1) or a number of images below "
            f"{len(targets)}, got {validation_size}"
        )
    options: Any = {"generator": torch.Generator().manual_seed(seed), "device": "cpu"}
    n_pixels = images[0].numel()
    orders = [torch.arange(n_pixels, device="cpu")]
    orders += [torch.randperm(n_pixels, **options) for _ in range(n_experiences - 1)]
    shuffled = torch.randperm(len(targets), **options)
    if permute_first:
        orders[0] = torch.randperm(n_pixels, **options)

    kept, held_out = shuffled[n_valid:].sort().values, shuffled[:n_valid].sort().values
    streams = {"train": (images[kept], targets[kept]), "test": test}
    if n_valid:
        streams["valid"] = (images[held_out], targets[held_out])
    groups = None
    if train_transform or eval_transform:  # otherwise PermutedImages standardises, faster
        standardise = Normalize(*([value] for value in normalisation))
        normalisation = (0.0, 1.0)
        groups = {
            "train": (train_transform or standardise, None),
            "eval": (eval_transform or standardise, None),
        }
    datasets = {
        stream: [
            (PermutedImages(x, y, order, scale, normalisation), y.tolist()) for order in orders
        ]
        for stream, (x, y) in streams.items()
    }
    return one_head_benchmark(datasets, groups, "0123456789")
