"""The default transforms: torchvision's usual ones up to rounding, with the same random draws."""

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision import transforms as tv

from covon_avalanche.streams import image_transforms
from covon_avalanche.streams.transforms import pixels_of

MEAN, STD = (0.1, 0.2, 0.3), (0.4, 0.5, 0.6)
LEVELS = 2 / 255  # as documented


def usual(size, mean, std):
    last = [tv.ToTensor(), tv.Normalize(mean, std)]
    train = [tv.RandomResizedCrop(size), tv.RandomHorizontalFlip()]
    evaluation = [tv.Resize(size * 8 // 7), tv.CenterCrop(size)]
    return tv.Compose(train + last), tv.Compose(evaluation + last)


def noise(width, height, seed=0):
    """The hardest of images to resize alike."""
    generator = np.random.default_rng(seed)
    return Image.fromarray(generator.integers(0, 256, (height, width, 3), dtype=np.uint8))


def check(ours, theirs, image, rounds):
    for i in range(rounds):
        torch.manual_seed(i)
        want, after = theirs(image), torch.get_rng_state()
        for given in (image, pixels_of(image)):
            torch.manual_seed(i)
            x = ours(given)
            assert (x.shape, x.dtype, x.stride()) == (want.shape, want.dtype, want.stride())
            difference = (x - want).abs().amax((1, 2)) * torch.tensor(STD)
            assert difference.max() <= LEVELS + 1e-6
            assert torch.equal(torch.get_rng_state(), after)  # the same draws


@pytest.mark.parametrize("shape", [(128, 128), (300, 200), (111, 640), (30, 31), (73, 73)])
@pytest.mark.parametrize("size", [64, 97])
def test_they_equal_torchvisions_up_to_rounding_with_the_same_draws(shape, size):
    pairs = zip(image_transforms(size, mean=MEAN, std=STD), usual(size, MEAN, STD), strict=True)
    for (ours, theirs), rounds in zip(pairs, (8, 1), strict=True):  # evaluation draws nothing
        check(ours, theirs, noise(*shape), rounds)


def test_they_are_compared_by_what_they_do_and_check_their_values():
    assert image_transforms(32) == image_transforms(32)
    assert image_transforms(32)[0] != image_transforms(32)[1]
    assert image_transforms(32) != image_transforms(32, mean=MEAN)
    with pytest.raises(ValueError, match="size must be an integer >= 1, got 0"):
        image_transforms(0)
    with pytest.raises(ValueError, match=r"std > 0, got .*\(1, 1, 0\)"):
        image_transforms(std=(1, 1, 0))
