"""The usual image transforms for pretrained networks, on uint8 tensors.

torchvision's transforms spend more time on converting bytes to floats and normalising them than on
decoding a small JPEG file. Here crop, resize and flip work on bytes, and scaling and
normalisation are one multiplication and one addition, in place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor
from torchvision.transforms import InterpolationMode, RandomResizedCrop
from torchvision.transforms.v2.functional import resize

from covon_avalanche.checks import check_whole

Transform = Callable[[Any], Any]
_FLOAT32_CPU: Any = dict(dtype=torch.float32, device="cpu")

IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


def image_transforms(
    size: int = 224, *, mean: Sequence[float] = IMAGENET[0], std: Sequence[float] = IMAGENET[1]
) -> tuple[Transform, Transform]:
    """The transforms for training and evaluation.

    Training: a random crop, resized and randomly flipped. Evaluation: the central crop of the
    image resized to ``size * 8 / 7``. They draw the same random numbers as torchvision's
    ``RandomResizedCrop``, ``RandomHorizontalFlip``, ``ToTensor`` and ``Normalize`` (``Resize``
    and ``CenterCrop`` for evaluation) on PIL images, and differ from them by at most 2/255 of a
    pixel's range, because torch resizes bytes with coefficients of another precision.

    :param size: height and width of the network's input.
    :param mean: of red, green and blue, in [0, 1]; by default ImageNet's.
        ``backbones.normalisation`` returns those of a network.
    :param std: standard deviations, in the same units.
    :return: two functions of a PIL image or a uint8 tensor of shape (3, height, width), which
        return a float tensor of shape (3, size, size).
    """
    check_whole("size", size)
    if not (len(mean) == len(std) == 3 and all(s > 0 for s in std)):
        raise ValueError(f"mean and std must be three numbers each, std > 0, got {mean}, {std}")
    colours = tuple(map(float, mean)), tuple(map(float, std))
    return ImageTransform(random_crop, size, *colours), ImageTransform(central_crop, size, *colours)


@dataclass  # Avalanche compares transforms
class ImageTransform:
    """A part of an image, normalised.

    ``takes_pixels`` tells a stream that the transform accepts tensors instead of PIL images.

    :param crop: returns the part, of this size.
    """

    crop: Callable[[Tensor, int], Tensor]
    size: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    takes_pixels = True

    def __post_init__(self) -> None:
        mean, std = (torch.tensor(x, **_FLOAT32_CPU).view(3, 1, 1) for x in (self.mean, self.std))
        self._factor, self._shift = 1 / (255 * std), -mean / std

    def __call__(self, image: Image.Image | Tensor) -> Tensor:
        part = self.crop(image if isinstance(image, Tensor) else pixels_of(image), self.size)
        out = torch.empty(3, self.size, self.size, **_FLOAT32_CPU)
        return out.copy_(part).mul_(self._factor).add_(self._shift)


def random_crop(image: Tensor, size: int) -> Tensor:
    """A random part of the image with a random aspect ratio, flipped half of the time."""
    top, left, height, width = RandomResizedCrop.get_params(
        image, scale=[0.08, 1.0], ratio=[3 / 4, 4 / 3]
    )
    part = image[:, top : top + height, left : left + width]
    part = resize(part, [size, size], InterpolationMode.BILINEAR, antialias=True)
    return part.flip(-1) if torch.rand(1, **_FLOAT32_CPU) < 0.5 else part


def central_crop(image: Tensor, size: int) -> Tensor:
    """The middle of the resized image."""
    image = resize_shorter(image, size * 8 // 7)
    top, left = (round((side - size) / 2) for side in image.shape[1:])
    return image[:, top : top + size, left : left + size]


def resize_shorter(image: Tensor, size: int) -> Tensor:
    """Resize a uint8 image so that its shorter side is ``size``, as torchvision's ``Resize``."""
    shorter, longer = sorted(image.shape[1:])
    if shorter == size:
        return image
    if size * size * longer > 10**8 * shorter:
        raise ValueError(f"{shorter} x {longer} pixels are too large with a shorter side of {size}")
    return resize(image, [size], InterpolationMode.BILINEAR, antialias=True)


def pixels_of(image: Image.Image, on_transparent: Callable[[], None] = lambda: None) -> Tensor:
    """A PIL image as a uint8 tensor of shape (3, height, width), in RGB; 16 bits become 8, a
    transparent image is put on white, and it is rotated according to its EXIF orientation.

    :param on_transparent: called if it is transparent anywhere.
    :raises ValueError: for 32-bit pixels, whose range is unknown, or an extreme aspect ratio.
    """
    if max(image.size) > 100 * min(image.size):  # of the header: nothing is decoded yet
        raise ValueError(f"the aspect ratio must be at most 100, got the size {image.size}")
    image.load()  # which turns a TIFF
    # Pillow gives the 16 bits of a PGM file the mode of 32.
    has_16_bits = image.mode.startswith("I;16") or (image.format, image.mode) == ("PPM", "I")
    with suppress(Exception):  # damaged EXIF data raise all kinds of errors
        image = ImageOps.exif_transpose(image)
    if has_16_bits:  # convert() would clip at 255
        image = Image.fromarray((np.asarray(image) / 257).round().astype(np.uint8))
    if image.mode in ("I", "F"):
        raise ValueError(f"its pixels have 32 bits (mode {image.mode}): save it with 8 or 16")
    if "A" in image.getbands() or "transparency" in image.info:
        image = image.convert("RGBA")
        if image.getchannel("A").getextrema() != (255, 255):
            on_transparent()
            image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return torch.from_numpy(np.array(image.convert("RGB"))).permute(2, 0, 1)
