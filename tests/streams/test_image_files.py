"""Which files are images, which folders are searched, and how images are decoded."""

import itertools
import re
import warnings

import numpy as np
import pytest
import torch
from miniature import paint, picture
from PIL import ExifTags, Image
from torchvision.datasets.folder import IMG_EXTENSIONS

from covon_avalanche.streams import DomainFolders, image_transforms
from covon_avalanche.streams.image_files import SUFFIXES, class_folders, decode, image_files
from covon_avalanche.streams.transforms import resize_shorter


def test_links_are_followed_but_not_in_cycles(tmp_path):
    elsewhere, root = tmp_path / "elsewhere" / "cat", tmp_path / "day"
    paint(elsewhere / "0.png", 0)
    (elsewhere / "back").symlink_to(root / "fox")
    paint(root / "fox" / "0.png", 1)
    (root / "fox" / "1.png").symlink_to(elsewhere / "0.png")
    (root / "fox" / "circle").symlink_to(root)
    (root / "fox" / "gone").symlink_to(root / "nowhere")
    (root / "fox" / "gone.png").symlink_to(root / "nowhere.png")
    (root / "fox" / "more").symlink_to(elsewhere)
    expected = ["fox/0.png", "fox/1.png", "fox/more/0.png"]
    says = r"^2 files such as .*/fox/gone(\.png)? are ignored \(broken links\)$"
    with pytest.warns(UserWarning, match=says):
        assert class_folders([root], ["cat", "fox"]).files == [root / name for name in expected]


def test_a_broken_link_to_a_class_folder_is_warned_of(tmp_path):
    paint(tmp_path / "cat" / "0.png", 0)
    (tmp_path / "fox").symlink_to(tmp_path / "nowhere")
    with pytest.warns(UserWarning, match="/fox is a broken link, ignored$"):
        assert len(class_folders([tmp_path], ["cat", "fox"]).files) == 1


def test_every_suffix_that_torchvision_accepts_is_found_and_decoded(tmp_path):
    assert {*SUFFIXES} == {*IMG_EXTENSIONS}
    for suffix in SUFFIXES:
        Image.new("L" if suffix == ".pgm" else "RGB", (4, 4)).save(tmp_path / f"1{suffix.upper()}")
    files = image_files(tmp_path)
    assert len(files) == len(SUFFIXES)
    assert all(decode(file).shape == (3, 4, 4) for file in files)


def test_hidden_files_and_folders_do_not_count(tmp_path):
    for name in ("1.jpg", "._1.jpg", ".ipynb_checkpoints/1-checkpoint.jpg", "a/.b/c/1.jpg"):
        paint(tmp_path / ".data" / "cat" / name, 0)
    found = class_folders([tmp_path / ".data"], ["cat"]).files
    assert found == [tmp_path / ".data" / "cat" / "1.jpg"]


def test_files_that_are_not_images_are_a_warning(tmp_path):
    root = tmp_path / "day"
    for name in ("cat/1.jpg", "cat/Thumbs.db", "dog/2.PNG"):
        paint(root / name, 0)
    class_folders([root], ["cat", "dog"])
    (root / "dog/2.gif").touch()
    with pytest.warns(UserWarning, match=r"^/.*dog/2\.gif is ignored \(no images, expected"):
        found = class_folders([root], ["cat", "dog"])
    assert found.files == [root / "cat/1.jpg", root / "dog/2.PNG"]
    (root / "dog/2.gif").rename(root / "3.jpg")
    with pytest.warns(UserWarning, match=r"day/3\.jpg is ignored \(in no class folder\)$"):
        class_folders([root], ["cat", "dog"])
    (root / "3.jpg").rename(root / "dog/2.gif")
    (root / "cat/a.heic").touch()
    with pytest.warns(UserWarning, match=r"^2 files such as /.*/cat/a\.heic are ignored"):
        class_folders([root], ["cat", "dog"])


@pytest.mark.parametrize(
    ("name", "most"), [("x.png", 65535), ("x.tif", 65535), ("x.pgm", 65535), ("x.pgm", 255 * 16)]
)
def test_sixteen_bits_become_eight_and_an_unknown_range_is_refused(tmp_path, name, most):
    values = (np.arange(256) * (most // 255)).astype(np.uint16).reshape(16, 16)
    if name == "x.pgm":  # which Pillow does not write
        header = f"P5 16 16 {most}\n".encode()
        (tmp_path / name).write_bytes(header + values.astype(">u2").tobytes())
    else:
        Image.fromarray(values).save(tmp_path / name)
    pixels = decode(tmp_path / name)
    assert torch.equal(pixels, torch.arange(256, dtype=torch.uint8).view(1, 16, 16).repeat(3, 1, 1))
    for dtype in (np.int32, np.float32):
        Image.fromarray(values.astype(dtype)).save(tmp_path / "y.tif")
        with pytest.raises(ValueError, match=r"y\.tif cannot be decoded: its pixels have 32 bits"):
            decode(tmp_path / "y.tif")


@pytest.mark.parametrize("suffix", ["jpg", "png", "tif", "webp"])
def test_images_are_turned_as_exif_says_and_read_if_that_is_damaged(tmp_path, suffix):
    with Image.open(picture(tmp_path / "x.png", 33, 47, 1)) as image:
        upright = torch.from_numpy(np.array(image)).permute(2, 0, 1).float()
        exif = Image.Exif()
        exif[ExifTags.Base.Orientation] = 6  # a camera held upright
        image.transpose(Image.Transpose.ROTATE_90).save(tmp_path / f"turned.{suffix}", exif=exif)
        if suffix != "tif":
            image.save(tmp_path / f"junk.{suffix}", exif=b"Exif\x00\x00junk", dpi=(72, 72))
            assert decode(tmp_path / f"junk.{suffix}").shape == (3, 47, 33)
    pixels = decode(tmp_path / f"turned.{suffix}")
    assert pixels.shape == (3, 47, 33)
    assert (pixels - upright).abs().mean() < 8  # some formats are lossy


@pytest.mark.parametrize("suffix", ["bmp", "gif", "jpg", "pgm", "png", "ppm", "tif"])
def test_huge_images_are_refused_in_every_format(tmp_path, monkeypatch, suffix):
    Image.new("L", (64, 64)).save(tmp_path / f"x.{suffix}")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1000)
    with pytest.raises(ValueError, match="decompression bomb"):
        decode(tmp_path / f"x.{suffix}")


@pytest.mark.parametrize("shape", [(3001, 30), (1, 101), (30_000, 1)])
def test_extreme_aspect_ratios_are_refused_before_decoding(tmp_path, monkeypatch, shape):
    Image.new("L", (2000, 20)).save(tmp_path / "x.png")
    assert decode(tmp_path / "x.png").shape == (3, 20, 2000)
    Image.new("L", shape).save(tmp_path / "x.png")
    monkeypatch.setattr(Image.Image, "load", lambda _: pytest.fail("decoded"))
    monkeypatch.setattr("PIL.ImageFile.ImageFile.load", lambda _: pytest.fail("decoded"))
    message = "x.png cannot be decoded: the aspect ratio must be at most 100, got the size "
    message = rf"{message}\({shape[0]}, "
    with pytest.raises(ValueError, match=message):
        decode(tmp_path / "x.png")
    with (
        Image.open(tmp_path / "x.png") as image,
        pytest.raises(ValueError, match="aspect ratio must be at most 100"),
    ):
        image_transforms(224)[0](image)


def test_images_that_scaling_would_make_huge_are_refused():
    wide = torch.zeros(3, 10, 1000, dtype=torch.uint8)
    assert resize_shorter(wide, 20).shape == (3, 20, 2000)
    with pytest.raises(ValueError, match=r"10 x 1000 pixels are too large with .* of 1001"):
        resize_shorter(wide, 1001)
    with pytest.raises(ValueError, match="too large with a shorter side of 1200"):
        image_transforms(1050)[1](wide)


@pytest.mark.parametrize("name", ["RGB.jpg", "L.jpg", "CMYK.jpg", "P.png", "RGBA.png"])
def test_every_mode_is_decoded_to_rgb(tmp_path, name):
    with Image.open(picture(tmp_path / "x.png", 33, 47, 1)) as image:
        converted = image.convert(name.partition(".")[0])
    converted.save(tmp_path / name)
    pixels = decode(tmp_path / name)
    assert (pixels.shape, pixels.dtype) == ((3, 47, 33), torch.uint8)
    want = torch.from_numpy(np.array(converted.convert("RGB"))).permute(2, 0, 1)
    assert (pixels.float() - want.float()).abs().mean() < (8 if "jpg" in name else 1e-6)  # lossy
    (tmp_path / name).write_bytes((tmp_path / name).read_bytes()[:-200])
    with pytest.raises(ValueError, match=f"{name} cannot be decoded"):
        decode(tmp_path / name)


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P"])
def test_transparent_pictures_are_put_on_white(tmp_path, mode):
    alpha = np.tile(np.linspace(0, 255, 20).astype(np.uint8), (10, 1))
    grey = Image.new("L", (20, 10), 40)
    picture = Image.merge("LA", (grey, Image.fromarray(alpha))).convert("RGBA")
    if mode == "P":
        picture = picture.quantize(64)
        picture.save(tmp_path / "x.png", transparency=bytes(range(64)))
    else:
        picture.convert(mode).save(tmp_path / "x.png")
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # of Pillow
        pixels = decode(tmp_path / "x.png").permute(1, 2, 0).double().numpy()
    with Image.open(tmp_path / "x.png") as image:
        rgba = np.array(image.convert("RGBA"), float)
    assert rgba[..., 3].min() < 100
    a = rgba[..., 3:] / 255
    assert np.abs(pixels - (a * rgba[..., :3] + (1 - a) * 255)).max() <= 1


def test_a_data_set_with_transparent_pictures_raises_one_warning(tmp_path):
    for domain, name, i in itertools.product(("day", "night"), ("cat", "dog"), range(5)):
        (tmp_path / domain / name).mkdir(parents=True, exist_ok=True)
        alpha = 255 if (domain, i) == ("day", 0) else 9  # opaque: no warning
        Image.new("RGBA", (4, 4), (9, 9, 9, alpha)).save(tmp_path / domain / name / f"{i}.png")
    for options in ({}, {"cache": tmp_path / "cache"}):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            benchmark = DomainFolders(tmp_path, **options)
            for domain in benchmark.train_stream:
                assert len([*domain.dataset]) == 8
        assert len(caught) == 1
        assert re.search("transparent images, such as .*png, are", str(caught[0].message))
