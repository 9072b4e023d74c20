"""Images decoded once and kept, resized, in one file on disk that is mapped into memory.

A cache is a header, ``NAME.json``, and the file with the pixels that it names. The header says
for which image files (path, size, time of change) the pixels were made; where that, the length,
or the checksums of a sample of images do not fit, the cache is made anew. Nothing in it can
run code.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from pydantic import BaseModel
from torch import Tensor

VERSION = 1
_SAMPLE = 64  # images whose checksum is compared when a cache is opened


class Header(BaseModel):
    """What ``NAME.json`` holds."""

    format: Literal["covon_avalanche pixels"] = "covon_avalanche pixels"
    version: int = VERSION
    size: int
    fingerprint: str
    """Of the paths, sizes and times of change of the image files."""
    data: str
    """Name of the file with the pixels, beside the header."""
    shapes: list[tuple[int, int]]
    """Height and width of each image; both 0 for one that cannot be decoded."""
    checksums: list[int]
    broken: dict[int, str]
    """Why images cannot be decoded, by their place in the list."""


class PixelCache:
    """Pixels of a list of images.

    :param file: has the images one after another, each uint8 of shape (height, width, 3).
    :param header: their shapes.
    """

    def __init__(self, file: Path, header: Header) -> None:
        self.file, self.header = file, header
        self._ends = [0, *accumulate(3 * h * w for h, w in header.shapes)]
        # copy on write: torch wants memory that it may write to, the file is never written
        mapped = np.memmap(file, np.uint8, "c") if self._ends[-1] else np.zeros(0, np.uint8)
        self._pixels = torch.from_numpy(mapped)

    def __len__(self) -> int:
        return len(self.header.shapes)

    def __reduce__(self) -> tuple:
        return PixelCache, (self.file, self.header)  # maps the file again, copies no pixels

    def pixels(self, row: int) -> Tensor:
        """An image as uint8 of shape (3, height, width); not to be written to."""
        height, width = self.header.shapes[row]
        image = self._pixels[self._ends[row] : self._ends[row + 1]]
        return image.view(height, width, 3).permute(2, 0, 1)

    def changed(self) -> list[int]:
        """Those of a sample of images whose checksum is another."""
        sample = np.linspace(0, len(self) - 1, min(_SAMPLE, len(self))).astype(int).tolist()
        return [i for i in sample if zlib.crc32(stored(self.pixels(i))) != self.header.checksums[i]]


def open_cache(target: Path, wanted: str) -> tuple[PixelCache | None, str]:
    """The cache if it is there and fits; else, if it is there, what does not fit.

    :param target: the header's file.
    :param wanted: fingerprint of the image files.
    :raises ValueError: if what is there is no header.
    """
    if not target.exists():
        return None, ""
    try:
        header = Header.model_validate_json(target.read_bytes())
        if Path(header.data).name != header.data:
            raise ValueError(f"{header.data!r} is no file beside it")
    except ValueError as error:  # pydantic's, too
        raise ValueError(
            f"{target} is not the header of a pixel cache: remove it, or name another folder"
        ) from error
    return _checked(target.with_name(header.data), header, wanted)


def _checked(data: Path, header: Header, wanted: str) -> tuple[PixelCache | None, str]:
    if header.version != VERSION:
        return None, f"it has version {header.version} instead of {VERSION}"
    if header.fingerprint != wanted:
        return None, "image files have changed since"
    expected, found = 3 * sum(h * w for h, w in header.shapes), -1
    if data.is_file():
        found = data.stat().st_size
    if found != expected or len(header.checksums) != len(header.shapes):
        return None, f"{data.name} is not there with {expected} bytes"
    cache = PixelCache(data, header)
    changed = cache.changed()
    return (None, f"the pixels of image {changed[0]} have changed") if changed else (cache, "")


def fingerprint(files: Sequence[Path], size: int) -> str:
    """Of image files (path, bytes, time of change) and the size they are kept in."""
    digest = hashlib.sha256(f"{size}\n".encode())
    for file in files:
        try:
            status = file.stat()
            digest.update(f"{file}\0{status.st_size}\0{status.st_mtime_ns}\n".encode())
        except OSError:
            digest.update(f"{file}\0missing\n".encode())
    return digest.hexdigest()


def stored(image: Tensor) -> bytes:
    """What the file has of an image, uint8 of shape (3, height, width): row by row, rgb rgb."""
    return image.permute(1, 2, 0).numpy().tobytes()
