"""Decode images once, and read their pixels from a memory-mapped file from then on.

A cache consists of a header, ``NAME.json``, and the file of pixels that it names. The header
records the image files (path, size, time of modification) that the pixels were decoded from. The
cache is rebuilt when they have changed, or when the pixel file is missing or truncated.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from filelock import FileLock
from joblib import cpu_count
from PIL import Image
from pydantic import BaseModel
from torch import Tensor

from covon_avalanche.atomic_write import atomic_replace, write_atomically
from covon_avalanche.streams.image_datasets import ImageFiles, decode_pixels
from covon_avalanche.streams.transforms import resize_shorter

VERSION = 1
_CHUNK = 256  # decoded images in memory at a time
_log = logging.getLogger(__name__)


class Header(BaseModel):
    """The content of ``NAME.json``."""

    format: Literal["covon_avalanche pixels"] = "covon_avalanche pixels"
    version: int = VERSION
    size: int
    """Shorter side to which larger images were resized."""
    fingerprint: str
    """Hash of paths, sizes and times of modification of the image files."""
    data: str
    """Name of the pixel file, in the same folder."""
    shapes: list[tuple[int, int]]
    """Height and width of each image; (0, 0) for one that cannot be decoded."""
    broken: dict[int, str]
    """Error messages of the images that cannot be decoded, by index."""


class PixelCache:
    """The pixels of a list of images.

    :param file: the images one after another, each uint8 of shape (height, width, 3).
    """

    def __init__(self, file: Path, header: Header) -> None:
        self.file, self.header = file, header
        self._ends = [0, *accumulate(3 * h * w for h, w in header.shapes)]
        # Copy on write, because torch warns about read-only memory; the file is never changed.
        mapped = np.memmap(file, np.uint8, "c") if self._ends[-1] else np.zeros(0, np.uint8)
        self._pixels = torch.from_numpy(mapped)

    def __reduce__(self) -> tuple:
        return PixelCache, (self.file, self.header)  # maps the file again

    def pixels(self, row: int) -> Tensor:
        """An image as uint8 of shape (3, height, width); do not write to it."""
        height, width = self.header.shapes[row]
        image = self._pixels[self._ends[row] : self._ends[row + 1]]
        return image.view(height, width, 3).permute(2, 0, 1)


class CachedImages(ImageFiles):
    """Image files whose pixels come from a cache.

    :param rows: the index of each image in the cache.
    """

    def __init__(
        self, files: Sequence[Path], labels: Sequence[int], cache: PixelCache, rows: Sequence[int]
    ) -> None:
        super().__init__(files, labels)
        self.cache, self.rows = cache, rows

    def __getitem__(self, index: int) -> tuple[Image.Image, int]:
        image = self.pixels(index).permute(1, 2, 0).numpy()
        return Image.fromarray(image), self.labels[index]

    def pixels(self, index: int) -> Tensor:
        """See :class:`Images`."""
        return self.cache.pixels(self.rows[index])

    def take(self, indices: Sequence[int]) -> CachedImages:
        """See :class:`Images`."""
        some = super().take(indices)
        return CachedImages(some.files, some.labels, self.cache, [self.rows[i] for i in indices])


def cached(
    images: ImageFiles,
    folder: str | os.PathLike[str],
    size: int,
    name: str,
    *,
    skip_broken: bool = False,
) -> tuple[CachedImages, list[Path]]:
    """Open the cache of these images; build it first if there is none that fits.

    Several processes may ask for the same cache: one builds it, the others wait. A cache that fits
    is only read, so that it may be on a read-only disk.

    :param folder: where the cache is kept.
    :param size: shorter side to which larger images are resized; smaller images stay as they are.
    :param name: beginning of the cache's file names; size and a hash of the paths are added.
    :param skip_broken: leave out images that cannot be decoded.
    :return: the images, and the files that were left out.
    :raises ValueError: naming an image that cannot be decoded, or why the cache cannot be used.
    """
    files = [file.absolute() for file in images.files]
    paths = hashlib.sha256("\n".join(map(str, files)).encode()).hexdigest()
    stem = f"{re.sub(r'[^A-Za-z0-9_-]+', '_', name)}-{size}-{paths[:12]}"
    target = Path(folder) / f"{stem}.json"
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        expected = _fingerprint(files, size)
        cache, fault = _open(target, expected)
        if cache is None:
            with FileLock(target.with_name(f".{stem}.lock")):
                cache, fault = _open(target, expected)  # another process may have built it
                if cache is None:
                    if fault:
                        _log.warning("rebuilding the cache %s: %s", target, fault)
                    cache = _build(target, files, size, expected, skip_broken)
    except OSError as error:
        raise ValueError(f"the cache in {folder} cannot be used: {error}") from error
    broken = cache.header.broken
    if broken and not skip_broken:
        raise ValueError(next(iter(broken.values())))
    rows = [i for i in range(len(files)) if i not in broken]
    everything = CachedImages(images.files, images.labels, cache, range(len(files)))
    return everything.take(rows), [images.files[i] for i in sorted(broken)]


def decoded(files: Sequence[Path], size: int | None = None) -> Iterator[Tensor | ValueError]:
    """Decode images in parallel; for a broken image, the error instead of its pixels.

    :param size: resize images whose shorter side is larger; ``None`` to resize none.
    """

    def decode(file: Path) -> Tensor | ValueError:
        try:
            image = decode_pixels(file)
        except ValueError as error:
            return error
        return (
            image if size is None or min(image.shape[1:]) <= size else resize_shorter(image, size)
        )

    with ThreadPoolExecutor(cpu_count()) as pool:
        for start in range(0, len(files), _CHUNK):
            yield from pool.map(decode, files[start : start + _CHUNK])


def _open(target: Path, fingerprint: str) -> tuple[PixelCache | None, str]:
    """The cache with this header, or why it does not fit (empty if there is none)."""
    if not target.exists():
        return None, ""
    try:
        header = Header.model_validate_json(target.read_bytes())
        if Path(header.data).name != header.data:
            raise ValueError(f"{header.data!r} is in another folder")
    except ValueError as error:  # pydantic's, too
        raise ValueError(
            f"{target} is not the header of a pixel cache: remove it, or choose another folder"
        ) from error
    if header.version != VERSION:
        return None, f"it has version {header.version} instead of {VERSION}"
    if header.fingerprint != fingerprint:
        return None, "image files have changed since"
    data = target.with_name(header.data)
    expected = 3 * sum(h * w for h, w in header.shapes)
    if not data.is_file() or data.stat().st_size != expected:
        return None, f"{data.name} is missing or does not have {expected} bytes"
    return PixelCache(data, header), ""


def _build(
    target: Path, files: Sequence[Path], size: int, fingerprint: str, skip_broken: bool
) -> PixelCache:
    """Write pixels, then the header; both atomically. The caller holds the lock."""
    for left_over in target.parent.glob(f".{target.stem}.*.part"):
        left_over.unlink()
    data = target.with_name(f"{target.stem}.{fingerprint[:8]}.pixels")
    header = Header(size=size, fingerprint=fingerprint, data=data.name, shapes=[], broken={})
    with atomic_replace(data) as part, part.open("wb") as out:
        for i, image in enumerate(decoded(files, size)):
            if isinstance(image, ValueError):
                if not skip_broken:
                    raise image
                header.broken[i] = str(image)
                header.shapes.append((0, 0))
                continue
            out.write(image.permute(1, 2, 0).numpy().tobytes())
            header.shapes.append((image.shape[1], image.shape[2]))
            if (i + 1) % 10_000 == 0:
                _log.info("%s: %d of %d images decoded", target.stem, i + 1, len(files))
    write_atomically(target, header.model_dump_json())
    for earlier in target.parent.glob(f"{target.stem}.*.pixels"):
        if earlier != data:
            earlier.unlink()
    return PixelCache(data, header)


def _fingerprint(files: Sequence[Path], size: int) -> str:
    digest = hashlib.sha256(f"{size}\n".encode())
    for file in files:
        try:
            status = file.stat()
            digest.update(f"{file}\0{status.st_size}\0{status.st_mtime_ns}\n".encode())
        except OSError:
            digest.update(f"{file}\0missing\n".encode())
    return digest.hexdigest()
