"""Labelled images on disk: one file per image, or all images in one array."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset

from covon_avalanche.streams.transforms import pixels_of

#: Error numbers of a missing or damaged file. Pillow's own errors have none.
_FILE_AT_FAULT = (None, errno.EINVAL, errno.ENOENT)


class Images(Protocol):
    """Labelled images; an item is an RGB ``PIL.Image`` and its class id."""

    labels: Sequence[int]

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> tuple[Image.Image, int]: ...

    def pixels(self, index: int) -> Tensor:
        """The image as a uint8 tensor of shape (3, height, width)."""

    def take(self, indices: Sequence[int]) -> Images:
        """The images at these indices, in this order."""


class ImageFiles(Dataset):
    """One file per image."""

    def __init__(self, files: Sequence[Path], labels: Sequence[int]) -> None:
        self.files, self.labels = files, labels

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[Image.Image, int]:
        return decode_image(self.files[index]), self.labels[index]

    def pixels(self, index: int) -> Tensor:
        """See :class:`Images`."""
        return decode_pixels(self.files[index])

    def take(self, indices: Sequence[int]) -> ImageFiles:
        """See :class:`Images`."""
        return ImageFiles([self.files[i] for i in indices], [self.labels[i] for i in indices])


class ImageArray(Dataset):
    """Rows of one array in a ``.npy`` file, which is memory-mapped.

    :param file: holds a uint8 array of shape (n, height, width, 3).
    :param rows: the row of each image.
    """

    def __init__(
        self, file: str | os.PathLike[str], rows: Sequence[int], labels: Sequence[int]
    ) -> None:
        self.file, self.rows, self.labels = file, rows, labels
        self._array = np.load(file, mmap_mode="r")

    def __len__(self) -> int:
        return len(self.rows)

    def __reduce__(self) -> tuple:
        return ImageArray, (self.file, self.rows, self.labels)  # maps the file again

    def __getitem__(self, index: int) -> tuple[Image.Image, int]:
        return Image.fromarray(np.asarray(self._array[self.rows[index]])), self.labels[index]

    def pixels(self, index: int) -> Tensor:
        """See :class:`Images`."""
        return torch.from_numpy(np.array(self._array[self.rows[index]])).permute(2, 0, 1)

    def take(self, indices: Sequence[int]) -> ImageArray:
        """See :class:`Images`."""
        rows, labels = [self.rows[i] for i in indices], [self.labels[i] for i in indices]
        return ImageArray(self.file, rows, labels)


class PixelDataset(Dataset):
    """Images as uint8 tensors instead of PIL images, for transforms that accept tensors."""

    def __init__(self, images: Images) -> None:
        self.images = images

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.images.pixels(index), self.images.labels[index]


def decode_image(file: Path) -> Image.Image:
    """Decode an image file to RGB.

    :raises ValueError: naming the file, if it is missing or damaged.
    :raises OSError: naming the file, if the system cannot read it at the moment.
    """
    try:
        with Image.open(file) as image:
            return image.convert("RGB")
    except MemoryError:
        raise  # not the file's fault
    except Exception as error:  # decoders raise all kinds of errors on damaged files
        if isinstance(error, OSError) and error.errno not in _FILE_AT_FAULT:
            error.filename = str(file)
            raise
        raise ValueError(f"the image {file} cannot be decoded: {error}") from error


def decode_pixels(file: Path) -> Tensor:
    """Decode an image file to a uint8 tensor of shape (3, height, width), see :func:`decode_image`.

    torchvision's decoder gives the same pixels and is faster, but deprecated.
    """
    return pixels_of(decode_image(file))
