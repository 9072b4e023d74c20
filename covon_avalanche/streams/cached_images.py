"""Images whose pixels come from a cache, made when it is not there yet."""

from __future__ import annotations

import hashlib
import logging
import os
import re
from collections.abc import Sequence
from pathlib import Path

from filelock import FileLock
from PIL import Image
from torch import Tensor

from covon_avalanche.streams.cache_building import build
from covon_avalanche.streams.pixel_cache import PixelCache, fingerprint, open_cache
from covon_avalanche.streams.sources import ImageFiles

_log = logging.getLogger(__name__)


class CachedImages(ImageFiles):
    """Images in files of their own, whose pixels come from a cache."""

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
        """Some of them, in this order."""
        rows = [self.rows[i] for i in indices]
        some = super().take(indices)
        return CachedImages(some.files, some.labels, self.cache, rows)


def cached(
    images: ImageFiles,
    folder: str | os.PathLike[str],
    size: int,
    name: str,
    *,
    skip_broken: bool = False,
) -> tuple[CachedImages, list[Path]]:
    """Images whose pixels are decoded now, unless they have been before.

    :param folder: where the cache is kept.
    :param size: shorter side of what is kept; smaller images stay as they are.
    :param name: of the cache's files, to which size and a hash of the paths are added.
    :param skip_broken: leave out images that cannot be decoded.
    :return: the images, and the files left out.
    :raises ValueError: naming an image that cannot be decoded, or why there can be no cache.
    """
    files = [file.absolute() for file in images.files]
    paths = hashlib.sha256("\n".join(map(str, files)).encode()).hexdigest()
    stem = f"{re.sub(r'[^A-Za-z0-9_-]+', '_', name)}-{size}-{paths[:12]}"
    target = Path(folder) / f"{stem}.json"
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        wanted = fingerprint(files, size)
        cache, fault = open_cache(target, wanted)  # a shared folder may be read-only
        if cache is None:
            with FileLock(target.with_name(f".{stem}.lock")):
                cache, fault = open_cache(target, wanted)  # another process may have made it
                if fault:
                    _log.warning("the cache %s is made anew: %s", target, fault)
                if cache is None:
                    header = build(target, files, size, wanted, skip_broken)
                    cache = PixelCache(target.with_name(header.data), header)
    except OSError as error:
        raise ValueError(f"the cache in {folder} cannot be used: {error}") from error
    broken = cache.header.broken
    if broken and not skip_broken:
        raise ValueError(next(iter(broken.values())))
    rows = [i for i in range(len(files)) if i not in broken]
    everything = CachedImages(images.files, images.labels, cache, range(len(files)))
    return everything.take(rows), [images.files[i] for i in sorted(broken)]
