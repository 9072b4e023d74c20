"""Decode images once, and read their pixels from a memory-mapped file from then on.

The name of a cache file contains a hash of the image files' paths, sizes and times of modification,
so that images for which one of these has changed get another file. A file appears only when it is
complete.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate
from pathlib import Path

import numpy as np
import torch
from filelock import FileLock
from joblib import cpu_count
from torch import Tensor

from covon_avalanche.atomic_write import atomic_replace, remove_stale
from covon_avalanche.streams.image_files import ImageFiles
from covon_avalanche.streams.transforms import resize_shorter

_CHUNK = 256  # decoded images in memory at a time


class PixelCache:
    """The pixels of image files, by file.

    :param path: has the images one after another, each uint8 of shape (height, width, 3), and at
        the end all heights and widths, int32 of shape (n, 2).
    :param files: the n image files.
    """

    def __init__(self, path: Path, files: Sequence[Path]) -> None:
        self.path, self.files = path, files
        # Copy on write, because torch warns about read-only memory; the file is never changed.
        content = np.memmap(path, np.uint8, "c") if path.stat().st_size else np.empty(0, np.uint8)
        shapes = content[-8 * len(files) :]
        whole = len(shapes) == 8 * len(files)
        self._shapes = shapes.view(np.int32).reshape(-1, 2).tolist() if whole else []
        self._ends = [0, *accumulate(3 * h * w for h, w in self._shapes)]
        if not whole or len(content) != self._ends[-1] + 8 * len(files):
            raise ValueError(f"the cache {path} is damaged: remove it")
        self._pixels = torch.from_numpy(content)
        self._rows = {file: row for row, file in enumerate(files)}

    def __reduce__(self) -> tuple:
        return PixelCache, (self.path, self.files)  # maps the file again

    def __call__(self, file: Path) -> Tensor:
        """An image as uint8 of shape (3, height, width); do not write to it."""
        row = self._rows[file]
        height, width = self._shapes[row]
        image = self._pixels[self._ends[row] : self._ends[row + 1]]
        return image.view(height, width, 3).permute(2, 0, 1)


def cached(images: ImageFiles, folder: str | os.PathLike[str], size: int, name: str) -> ImageFiles:
    """The same images with their pixels from a cache, which is built if there is none.

    Several processes may ask for the same cache: one builds it, the others wait. An existing cache
    is only read, so that it may be on a read-only disk.

    :param folder: where the cache is kept.
    :param size: shorter side to which larger images are resized; smaller images stay as they are.
    :param name: beginning of the cache's file name.
    :raises ValueError: naming an image that cannot be decoded, or why the cache cannot be used.
    """
    try:
        content = hashlib.sha256(b"3\n")  # versions 1 and 2 ignored orientation and transparency
        for file in images.files:
            status = file.stat()
            line = f"{file.absolute()}\0{status.st_size}\0{status.st_mtime_ns}\n"
            content.update(line.encode(errors="surrogateescape"))
        stem = f"{re.sub(r'[^A-Za-z0-9_-]+', '_', name)}-{size}-{content.hexdigest()[:16]}"
        path = Path(folder) / f"{stem}.pixels"
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            with FileLock(path.with_name(f".{stem}.lock")):
                if not path.exists():  # another process may have built it
                    for part in path.parent.glob(f".{path.name}.*.part"):
                        part.unlink(missing_ok=True)  # of a process that was killed
                    remove_stale(path.parent, ".*.pixels.*.part")  # of other caches
                    _build(path, images, size)
        pixels = PixelCache(path, images.files)
        return ImageFiles(images.files, images.labels, pixels, images.groups)
    except OSError as error:
        raise ValueError(f"the cache in {folder} cannot be used: {error}") from error


def _build(path: Path, images: ImageFiles, size: int) -> None:
    def decode_resized(file: Path) -> np.ndarray:
        image = images.read(file)
        if min(image.shape[1:]) > size:
            image = resize_shorter(image, size)
        return image.permute(1, 2, 0).numpy()

    shapes = []
    with (
        atomic_replace(path) as part,
        part.open("wb") as out,
        ThreadPoolExecutor(cpu_count()) as pool,
    ):
        for start in range(0, len(images), _CHUNK):
            for pixels in pool.map(decode_resized, images.files[start : start + _CHUNK]):
                out.write(pixels.tobytes())
                shapes.append(pixels.shape[:2])
        out.write(np.array(shapes, np.int32).tobytes())
