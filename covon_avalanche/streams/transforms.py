"""From an image to what a network sees: torchvision's usual steps, on bytes as long as possible.

The usual transforms spend more time on turning bytes to floats and normalising them than on
decoding a small JPEG file. Here crop, resize and flip work on bytes, with torch's own kernels,
and scaling and normalisation are one multiplication and one addition, in place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torchvision.transforms import InterpolationMode, RandomResizedCrop
from torchvision.transforms.v2.functional import resize

Transform = Callable[[Any], Any]

IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


def image_transforms(
    size: int = 224,
    *,
    mean: Sequence[float] = IMAGENET[0],
    std: Sequence[float] = IMAGENET[1],
) -> tuple[Transform, Transform]:
    """The usual transforms for pretrained networks.

    They draw the same random numbers as torchvision's ``RandomResizedCrop``,
    ``RandomHorizontalFlip``, ``ToTensor`` and ``Normalize`` (``Resize`` and ``CenterCrop`` for
    evaluation) on PIL images, and differ from them by at most 2/255 of the range of a pixel,
    because torch resizes bytes with coefficients of another precision.

    :param size: height and width of what the network sees.
    :param mean: of red, green and blue, in [0, 1], to be taken out; by default ImageNet's.
        ``backbones.normalisation`` tells those of a network.
    :param std: the same for the standard deviation.
    :return: for training, a random crop and flip; for evaluation, the central crop of the
        image resized to ``size * 8 / 7``. Both take a PIL image or its bytes, a uint8 tensor of
        shape (3, height, width), and give a float tensor of shape (3, size, size).
    """
    if size < 1:
        raise ValueError(f"size must be >= 1, got {size}")
    if not (len(mean) == len(std) == 3 and all(s > 0 for s in std)):
        raise ValueError(f"mean and std must be three numbers each, std > 0, got {mean}, {std}")
    return RandomView(size, mean, std), CentralView(size, mean, std)


class _View:
    """A part of an image, as floats.

    ``takes_pixels`` tells a stream that it may hand out bytes instead of PIL images.
    """

    takes_pixels = True

    def __init__(self, size: int, mean: Sequence[float], std: Sequence[float]) -> None:
        self.size = size
        self.mean, self.std = tuple(map(float, mean)), tuple(map(float, std))
        means, deviations = (torch.tensor(x).view(3, 1, 1) for x in (self.mean, self.std))
        self._factor, self._shift = 1 / (255 * deviations), -means / deviations

    def __call__(self, image: Image.Image | Tensor) -> Tensor:
        return self.batch([image if isinstance(image, Tensor) else pixels_of(image)])[0]

    def batch(self, images: Sequence[Tensor]) -> Tensor:
        """Several images at once, each uint8 of shape (3, height, width)."""
        views = torch.empty(len(images), 3, self.size, self.size)
        for view, image in zip(views, images, strict=True):
            view.copy_(self._part(image)).mul_(self._factor).add_(self._shift)
        return views

    def _part(self, image: Tensor) -> Tensor:
        raise NotImplementedError

    def __repr__(self) -> str:
        return f"{type(self).__name__}(size={self.size}, mean={self.mean}, std={self.std})"

    def __eq__(self, other: object) -> bool:  # Avalanche compares transforms
        return repr(self) == repr(other)

    __hash__ = None  # type: ignore[assignment]


class RandomView(_View):
    """A random part of the image, of random shape, mirrored half of the time."""

    def _part(self, image: Tensor) -> Tensor:
        top, left, height, width = RandomResizedCrop.get_params(
            image, scale=[0.08, 1.0], ratio=[3 / 4, 4 / 3]
        )
        part = image[:, top : top + height, left : left + width]
        part = resize(part, [self.size, self.size], InterpolationMode.BILINEAR, antialias=True)
        return part.flip(-1) if torch.rand(1) < 0.5 else part


class CentralView(_View):
    """The middle of the image; chance has no part in it."""

    deterministic = True

    def _part(self, image: Tensor) -> Tensor:
        image = resize_shorter(image, self.size * 8 // 7)
        top, left = (round((side - self.size) / 2) for side in image.shape[1:])
        return image[:, top : top + self.size, left : left + self.size]


def resize_shorter(image: Tensor, size: int) -> Tensor:
    """Bytes of an image whose shorter side becomes ``size``, as torchvision's ``Resize``."""
    if min(image.shape[1:]) == size:
        return image
    return resize(image, [size], InterpolationMode.BILINEAR, antialias=True)


def pixels_of(image: Image.Image) -> Tensor:
    """A PIL image's red, green and blue: uint8 of shape (3, height, width)."""
    return torch.from_numpy(np.array(image.convert("RGB"))).permute(2, 0, 1)
