"""Decode images once, on all cores, into the file of a pixel cache."""

from __future__ import annotations

import logging
import secrets
import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from joblib import cpu_count
from PIL import Image
from torch import Tensor

from covon_avalanche.atomic_write import replaced_when_whole, write_atomically
from covon_avalanche.disk_space import require_space
from covon_avalanche.streams.pixel_cache import Header, stored
from covon_avalanche.streams.sources import decode_pixels
from covon_avalanche.streams.transforms import resize_shorter

_CHUNK = 256  # images in memory at a time
_log = logging.getLogger(__name__)


def build(
    target: Path, files: Sequence[Path], size: int, fingerprint: str, skip_broken: bool
) -> Header:
    """Write pixels, then the header: both complete or not at all.

    The caller holds the cache's lock. A file with pixels that is in use elsewhere is never
    written to: each build makes a new one, and removes those of earlier builds at the end.

    :param target: the header's file.
    :param size: shorter side of what is kept; smaller images stay as they are.
    :param fingerprint: of the image files.
    :param skip_broken: list images that cannot be decoded, instead of raising.
    :raises ValueError: naming such an image, or for a disk without room.
    :raises OSError: if an image cannot be read now, which is not kept.
    """
    for left_over in target.parent.glob(f".{target.stem}.*.part"):
        left_over.unlink()
    require_space(target.parent, _estimate(files, size))
    data = target.with_name(f"{target.stem}.{secrets.token_hex(4)}.pixels")
    header = Header(
        size=size, fingerprint=fingerprint, data=data.name, shapes=[], checksums=[], broken={}
    )
    with replaced_when_whole(data) as part, part.open("wb") as out:
        for i, image in enumerate(decoded(files, size)):
            if isinstance(image, ValueError):
                if not skip_broken:
                    raise image
                header.broken[i] = str(image)
                header.shapes.append((0, 0))
                header.checksums.append(0)
                continue
            content = stored(image)
            out.write(content)
            header.shapes.append((image.shape[1], image.shape[2]))
            header.checksums.append(zlib.crc32(content))
            if (i + 1) % 10_000 == 0:
                _log.info("%s: %d of %d images decoded", target.stem, i + 1, len(files))
    write_atomically(target, header.model_dump_json())
    for earlier in target.parent.glob(f"{target.stem}.*.pixels"):
        if earlier != data:
            earlier.unlink()
    return header


def decoded(files: Sequence[Path], size: int | None) -> Iterator[Tensor | ValueError]:
    """Each image as bytes, resized if its shorter side is above ``size``, or what is wrong."""

    def one(file: Path) -> Tensor | ValueError:
        try:
            image = decode_pixels(file)
        except ValueError as error:
            return error
        small = size is None or min(image.shape[1:]) <= size
        return image if small else resize_shorter(image, size)  # type: ignore[arg-type]

    with ThreadPoolExecutor(cpu_count()) as pool:
        for start in range(0, len(files), _CHUNK):
            yield from pool.map(one, files[start : start + _CHUNK])


def _estimate(files: Sequence[Path], size: int) -> int:
    """Bytes that the pixels will take, from the headers of some of the files."""
    some = files[:: max(1, len(files) // 200)]
    total = 0
    for file in some:
        try:
            with Image.open(file) as image:
                width, height = image.size
        except Exception:  # it is reported when it is decoded
            continue
        shrink = min(1.0, size / min(width, height))
        total += round(3 * width * height * shrink**2)
    return total * len(files) // max(1, len(some))
