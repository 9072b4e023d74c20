"""Decoding, and copies of images on disk."""

import copy
import errno
import pickle

import numpy as np
import pytest
import torch
from miniature import picture, pictures
from PIL import Image

from covon_avalanche.streams.image_datasets import (
    ImageArray,
    ImageFiles,
    decode_image,
    decode_pixels,
)
from covon_avalanche.streams.pixel_cache import cached


@pytest.fixture(name="pictures")
def _pictures(tmp_path) -> ImageFiles:
    return pictures(tmp_path / "images")


def opened(images, folder, size=32, **options):
    return cached(images, folder, size, "some", **options)[0]


def test_copies_of_an_array_on_disk_map_it_again(tmp_path):
    array = np.random.default_rng(0).integers(0, 256, (9, 64, 64, 3), dtype=np.uint8)
    np.save(tmp_path / "a.npy", array)
    images = ImageArray(tmp_path / "a.npy", range(9), range(9)).take([8, 2])
    content = pickle.dumps(images)
    assert len(content) < 1000  # far from the pixels
    for again in (images, pickle.loads(content), copy.deepcopy(images)):
        for i, row in enumerate((8, 2)):
            assert np.array_equal(again.pixels(i).permute(1, 2, 0), array[row])
            assert np.array_equal(again[i][0], array[row])
            assert again[i][1] == row


@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        (OSError(errno.EMFILE, "Too many open files"), r"Too many open files: '.*/a.png'"),
        (PermissionError(errno.EACCES, "Permission denied"), r"Permission denied: '.*/a.png'"),
        (OSError(errno.EINVAL, "Invalid argument"), r"a.png cannot be decoded"),
        (OSError("image file is truncated"), r"a.png cannot be decoded"),
        (MemoryError("no room"), "no room"),
    ],
)
def test_what_fails_now_alone_is_not_called_broken(
    pictures, tmp_path, monkeypatch, fault, expected
):
    def fail(file):
        raise fault

    of_the_file = "decoded" in expected
    with monkeypatch.context() as patch:
        patch.setattr(Image, "open", fail)
        with pytest.raises(ValueError if of_the_file else type(fault), match=expected):
            decode_image(pictures.files[0])
        if of_the_file:
            return
        with pytest.raises((ValueError, MemoryError), match=expected):
            opened(pictures.take([0]), tmp_path / "cache", skip_broken=True)
    assert len(opened(pictures.take([0]), tmp_path / "cache", skip_broken=True)) == 1


@pytest.mark.parametrize("name", ["RGB.jpg", "L.jpg", "CMYK.jpg", "P.png", "RGBA.png"])
def test_every_mode_is_decoded_to_rgb(tmp_path, name):
    file = picture(tmp_path / "x.png", 33, 47, 1)
    with Image.open(file) as image:
        converted = image.convert(name.partition(".")[0])
        converted.save(tmp_path / name)
    pixels = decode_pixels(tmp_path / name)
    assert (pixels.shape, pixels.dtype) == ((3, 47, 33), torch.uint8)
    want = torch.from_numpy(np.array(converted.convert("RGB"))).permute(2, 0, 1)
    assert (pixels.float() - want.float()).abs().mean() < (8 if "jpg" in name else 1e-6)  # lossy
    (tmp_path / name).write_bytes((tmp_path / name).read_bytes()[:-200])
    with pytest.raises(ValueError, match=f"{name} cannot be decoded"):
        decode_pixels(tmp_path / name)
