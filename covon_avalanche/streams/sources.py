"""Where images come from: files of their own, or rows of one array."""

from __future__ import annotations

import errno
from collections.abc import Sequence
from mmap import mmap
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset
from torchvision.io import ImageReadMode, decode_jpeg, read_file

from covon_avalanche.streams.transforms import pixels_of

#: What the system says of files that are damaged (a place before their beginning) or not there.
#: Pillow's own errors have no number.
_OF_THE_FILE = (None, errno.EINVAL, errno.ENOENT)


class Images(Protocol):
    """Labelled images: rows are an RGB ``PIL.Image`` and its class id."""

    labels: Sequence[int]

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> tuple[Image.Image, int]: ...

    def pixels(self, index: int) -> Tensor:
        """The same image as bytes, uint8 of shape (3, height, width)."""

    def take(self, indices: Sequence[int]) -> Images:
        """Some of them, in this order."""


class ImageFiles(Dataset):
    """Images in files of their own."""

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
        """Some of them, in this order."""
        return ImageFiles([self.files[i] for i in indices], [self.labels[i] for i in indices])


class ImageRows(Dataset):
    """Images in one array on disk.

    :param array: uint8 of shape (n, height, width, 3), as a rule memory-mapped.
    """

    def __init__(self, array: np.ndarray, rows: Sequence[int], labels: Sequence[int]) -> None:
        self.array, self.rows, self.labels = array, rows, labels

    def __len__(self) -> int:
        return len(self.rows)

    def __reduce__(self) -> tuple:
        file = _npy_file(self.array)
        if file is not None:
            return _mapped_rows, (file, self.rows, self.labels)  # copies no pixels
        return ImageRows, (self.array, self.rows, self.labels)

    def __getitem__(self, index: int) -> tuple[Image.Image, int]:
        return Image.fromarray(np.asarray(self.array[self.rows[index]])), self.labels[index]

    def pixels(self, index: int) -> Tensor:
        """See :class:`Images`."""
        return torch.from_numpy(np.array(self.array[self.rows[index]])).permute(2, 0, 1)

    def take(self, indices: Sequence[int]) -> ImageRows:
        """Some of them, in this order."""
        labels = [self.labels[i] for i in indices]
        return ImageRows(self.array, [self.rows[i] for i in indices], labels)


def _npy_file(array: np.ndarray) -> str | None:
    """The ``.npy`` file whose array, the whole of it, is mapped here for reading."""
    if not (isinstance(array, np.memmap) and isinstance(array.base, mmap)):  # a part's is the whole
        return None
    file = str(array.filename)
    return file if array.mode == "r" and file.endswith(".npy") else None


def _mapped_rows(file: str, rows: Sequence[int], labels: Sequence[int]) -> ImageRows:
    return ImageRows(np.load(file, mmap_mode="r"), rows, labels)


class PixelRows(Dataset):
    """Images as bytes instead of PIL images, for transforms that take them."""

    def __init__(self, images: Images) -> None:
        self.images = images

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.images.pixels(index), self.images.labels[index]

    def raw_batch(self, indices: Tensor) -> tuple[list[Tensor], Tensor]:
        """Images, each uint8 of shape (3, height, width), and labels of these indices."""
        rows = indices.tolist()
        labels = torch.tensor([self.images.labels[i] for i in rows])
        return [self.images.pixels(i) for i in rows], labels


def decode_image(file: Path) -> Image.Image:
    """An image file as RGB.

    :raises ValueError: naming the file.
    :raises OSError: naming the file, if it cannot be read now, whatever is in it.
    """
    try:
        with Image.open(file) as image:
            return image.convert("RGB")
    except MemoryError:
        raise  # says nothing about the file
    except Exception as error:  # decoders raise whatever they like on damaged input
        if isinstance(error, OSError) and error.errno not in _OF_THE_FILE:
            error.filename = str(file)  # which reading does not tell
            raise
        raise ValueError(f"the image {file} cannot be decoded: {error}") from error


def decode_pixels(file: Path) -> Tensor:
    """An image file as bytes, uint8 of shape (3, height, width).

    JPEG files go through torchvision's decoder, which is faster than Pillow's and gives the
    same bytes; what it refuses, and all other formats, through Pillow. (Pillow's draft mode,
    faster still for large files, gives other pixels.)

    :raises ValueError: naming the file.
    :raises OSError: naming the file, if it cannot be read now, whatever is in it.
    """
    if file.suffix.lower() in (".jpg", ".jpeg"):
        try:
            content = read_file(str(file))
            if content[:2].tolist() == [0xFF, 0xD8]:
                pixels = decode_jpeg(content, mode=ImageReadMode.UNCHANGED)
                if len(pixels) == 3:
                    return pixels
                if len(pixels) == 1:  # grey
                    return pixels.expand(3, -1, -1)
        except RuntimeError:
            pass  # Pillow decodes it, or says what is wrong
    return pixels_of(decode_image(file))
