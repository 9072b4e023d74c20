"""Decoded images kept on disk: the same pixels, never stale, never half, never foreign."""

import copy
import errno
import json
import logging
import os
import pickle
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from avalanche.benchmarks.datasets import dataset_utils
from miniature import OWN_CODES, core50, own, pacs, paint
from PIL import Image
from safetensors.torch import save_file
from small_recipes import STRATEGIES, small_recipe
from test_image_streams import check_labels, open_stream, seen
from torch.utils.data import DataLoader

from covon_avalanche.backbones import create_backbone
from covon_avalanche.experiment.build import build_benchmark, build_model
from covon_avalanche.streams import (
    PACS,
    CORe50,
    DomainFolders,
    image_transforms,
    pixel_cache,
)
from covon_avalanche.streams.image_datasets import (
    ImageArray,
    ImageFiles,
    decode_image,
    decode_pixels,
)
from covon_avalanche.streams.pixel_cache import cached


def picture(file: Path, width: int, height: int, seed: int, **options) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    small = np.random.default_rng(seed).integers(0, 256, (5, 5, 3), dtype=np.uint8)
    Image.fromarray(small).resize((width, height), Image.Resampling.BICUBIC).save(file, **options)
    return file


@pytest.fixture
def pictures(tmp_path) -> ImageFiles:
    """Larger and smaller than what is kept, upright and lying, of several kinds."""
    shapes = {"a.png": (80, 50), "b.jpg": (40, 90), "c.jpg": (20, 20), "d.png": (32, 32)}
    files = [
        picture(tmp_path / "images" / name, *shape, seed)
        for seed, (name, shape) in enumerate(shapes.items())
    ]
    return ImageFiles(files, [0, 1, 2, 3])


def opened(images, folder, size=32, **options):
    return cached(images, folder, size, "some", **options)[0]


def kept_files(folder):
    return sorted(p.name for p in Path(folder).iterdir() if not p.name.startswith("."))


def counting(monkeypatch):
    """Names of the files that are decoded from now on."""
    names = []

    def decode(file):
        names.append(file.name)
        return decode_pixels(file)

    monkeypatch.setattr(pixel_cache, "decode_pixels", decode)
    return names


def test_small_images_stay_and_large_ones_are_resized_once(pictures, tmp_path, monkeypatch):
    names = counting(monkeypatch)
    evaluation = image_transforms(28)[1]  # resizes to 32
    for _ in range(2):
        images = opened(pictures, tmp_path / "cache")
        assert sorted(names) == ["a.png", "b.jpg", "c.jpg", "d.png"]
        shapes = [tuple(images.pixels(i).shape) for i in range(4)]
        assert shapes == [(3, 32, 51), (3, 72, 32), (3, 20, 20), (3, 32, 32)]
        for i in range(4):
            assert torch.equal(evaluation(images.pixels(i)), evaluation(pictures.pixels(i)))
            image, label = images[i]
            assert label == i
            assert torch.equal(evaluation(image), evaluation(images.pixels(i)))
        for i in (2, 3):
            assert torch.equal(images.pixels(i), pictures.pixels(i))
    some = images.take([3, 0])
    assert torch.equal(some.pixels(0), images.pixels(3))
    assert (some.files, some.labels) == ([pictures.files[3], pictures.files[0]], [3, 0])


def test_other_sizes_are_near_what_they_would_be_without(real_data, tmp_path):
    """Resized twice instead of once: a few levels on average, as documented."""
    root = real_data("PACS") / "PACS"
    options = {"dataset_root": root, "domains": ["photo"], "limit": 3}
    _, evaluation = image_transforms(56, mean=(0, 0, 0), std=(1, 1, 1))
    plain, small = (
        PACS(eval_transform=evaluation, **options, **more).test_stream[0].dataset
        for more in ({}, {"cache": tmp_path, "cache_size": 96})
    )
    gaps = torch.stack([(a[0] - b[0]).abs().mean() for a, b in zip(plain, small, strict=True)])
    assert 0 < gaps.max() < 0.03


def test_real_pacs_is_the_same_with_and_without(real_data, tmp_path):
    options = {"dataset_root": real_data("PACS") / "PACS", "limit": 2, "validation_size": 0.2}
    plain, fast = (PACS(**options, **more) for more in ({}, {"cache": tmp_path}))
    for stream in ("train", "test", "valid"):
        pairs = zip(plain.streams[stream], fast.streams[stream], strict=True)
        for a, b in pairs:
            assert (a.domain, a.classes_in_this_experience) == (
                b.domain,
                b.classes_in_this_experience,
            )
            assert list(a.dataset.targets) == list(b.dataset.targets)
            for kind in ("train", "eval"):
                torch.manual_seed(0)
                first = list(getattr(a.dataset, kind)())
                torch.manual_seed(0)
                second = list(getattr(b.dataset, kind)())
                for x, y in zip(first, second, strict=True):
                    assert torch.equal(x[0], y[0])
                    assert x[1:] == y[1:]


def test_labels_splits_and_users_own_transforms_stay(tmp_path, monkeypatch):
    root = own(tmp_path / "data", "split")
    names = counting(monkeypatch)
    for seed in range(3):  # the split is another each time, the cache the same
        options = {"validation_size": 0.25, "seed": seed, "cache": tmp_path / "cache"}
        benchmark = open_stream(DomainFolders, root, **options)
        check_labels(benchmark, OWN_CODES)
        assert len(names) == 40
    limited = open_stream(DomainFolders, root, limit=2, cache=tmp_path / "other")
    check_labels(limited, OWN_CODES)
    assert len(names) == 40 + 16  # only what is used
    assert benchmark.broken == []


def test_an_array_needs_no_cache(tmp_path):
    (tmp_path / "data").mkdir()
    codes = core50(tmp_path / "data", "archive")
    benchmark = open_stream(CORe50, tmp_path / "data", cache=tmp_path / "cache")
    check_labels(benchmark, codes)
    assert not (tmp_path / "cache").exists()
    plain = CORe50(dataset_root=tmp_path / "data", domains=["s1"])
    assert plain.train_stream[0].dataset[0][0].shape == (3, 224, 224)


# What does not fit is made anew ------------------------------------------------------------


def touch(cache, pictures):
    picture(pictures.files[1], 41, 90, 9)


def touch_alike(cache, pictures):
    """As many bytes as before, later."""
    content = pictures.files[0].read_bytes()
    pictures.files[0].write_bytes(content)
    os.utime(pictures.files[0], ns=(1, 1))


def truncate(cache, pictures):
    (data,) = cache.glob("*.pixels")
    data.write_bytes(data.read_bytes()[:-1])


def remove(cache, pictures):
    for data in cache.glob("*.pixels"):
        data.unlink()


def change_version(cache, pictures):
    (file,) = cache.glob("*.json")
    file.write_text(json.dumps({**json.loads(file.read_text()), "version": 0}))


FAULTS = {
    touch: "image files have changed",
    touch_alike: "image files have changed",
    truncate: "is missing or does not have",
    remove: "is missing or does not have",
    change_version: "it has version 0 instead of 1",
}


@pytest.mark.parametrize("damage", FAULTS)
def test_a_cache_that_does_not_fit_is_made_anew(pictures, tmp_path, damage, caplog):
    cache = tmp_path / "cache"
    before = opened(pictures, cache)
    damage(cache, pictures)
    with caplog.at_level(logging.WARNING):
        images = opened(pictures, cache)
    assert FAULTS[damage] in caplog.text
    again = cached(pictures, tmp_path / "fresh", 32, "some")[0]
    assert all(torch.equal(images.pixels(i), again.pixels(i)) for i in range(4))
    assert sorted(name.rpartition(".")[2] for name in kept_files(cache)) == ["json", "pixels"]
    if damage is touch:  # who uses the earlier file still has it
        assert before.pixels(1).shape == (3, 72, 32)


@pytest.mark.parametrize(
    "content", ["", "[1]", '{"format": "another"}', "outside"], ids=["empty", "list", "other", ".."]
)
def test_what_is_foreign_is_refused(pictures, tmp_path, content):
    opened(pictures, tmp_path / "cache")
    (file,) = (tmp_path / "cache").glob("*.json")
    if content == "outside":  # a header that would lead elsewhere
        content = json.dumps({**json.loads(file.read_text()), "data": "../images/a.png"})
    file.write_text(content)
    with pytest.raises(ValueError, match=r"some-32-.*json is not the header of a pixel cache"):
        opened(pictures, tmp_path / "cache")
    assert file.read_text() == content


def test_nothing_is_left_of_a_cache_that_was_not_finished(pictures, tmp_path, monkeypatch):
    pictures.files[2].write_bytes(b"\xff\xd8 no image")
    with pytest.raises(ValueError, match=r"images/c.jpg cannot be decoded"):
        opened(pictures, tmp_path / "cache")
    assert kept_files(tmp_path / "cache") == []
    assert not list((tmp_path / "cache").glob(".*.part"))
    (tmp_path / "cache" / "file").write_text("")
    with pytest.raises(ValueError, match="cannot be used"):
        opened(pictures, tmp_path / "cache" / "file")
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: shutil._ntuple_diskusage(1, 1, 10**6))
    with pytest.raises(ValueError, match=r"needs 0.3 GB of free disk, has 0.0"):
        opened(pictures, tmp_path / "cache")


def test_one_process_builds_a_cache_and_the_others_wait(pictures, tmp_path, monkeypatch):
    names = counting(monkeypatch)
    with ThreadPoolExecutor(3) as pool:  # file locks work between threads, too
        made = list(pool.map(lambda _: opened(pictures, tmp_path / "cache"), range(3)))
    assert sorted(names) == ["a.png", "b.jpg", "c.jpg", "d.png"]
    for images in made:
        assert all(torch.equal(images.pixels(i), made[0].pixels(i)) for i in range(4))
    assert len(kept_files(tmp_path / "cache")) == 2


def test_a_cache_that_fits_is_only_read(pictures, tmp_path, monkeypatch):
    """Without the lock, too, so that a shared folder may be read-only."""
    opened(pictures, tmp_path / "cache")

    def refuse(path):
        raise PermissionError(13, "read-only")

    monkeypatch.setattr(pixel_cache, "FileLock", refuse)
    assert len(opened(pictures, tmp_path / "cache")) == 4
    with pytest.raises(ValueError, match=r"cannot be used: .*read-only"):
        opened(pictures, tmp_path / "other")


def test_copies_map_the_file_and_workers_read_it(pictures, tmp_path):
    images = opened(pictures, tmp_path / "cache")
    content = pickle.dumps(images)
    assert len(content) < 5000  # far from the pixels
    for again in (pickle.loads(content), copy.deepcopy(images)):
        assert all(torch.equal(again.pixels(i), images.pixels(i)) for i in range(4))
    root = own(tmp_path / "data", "split")
    data = DomainFolders(root, cache=tmp_path / "c").test_stream[0].dataset
    batches = [
        torch.cat([x for x, *_ in DataLoader(data, 3, num_workers=n, collate_fn=data.collate_fn)])
        for n in (0, 2)
    ]
    assert torch.equal(*batches)


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


# Images that cannot be decoded --------------------------------------------------------------


@pytest.mark.parametrize("cache", [True, False])
@pytest.mark.parametrize("limit", [None, 8])
def test_broken_images_are_errors_or_skipped_and_counted(tmp_path, cache, limit):
    root = own(tmp_path / "data", "split")
    good = open_stream(DomainFolders, root)
    broken = [root / "day" / "train" / "cat" / "2.png", root / "night" / "test" / "fox" / "0.png"]
    broken[0].write_bytes(b"no image")
    broken[1].write_bytes(b"")
    options = {"limit": limit, **({"cache": tmp_path / "cache"} if cache else {})}
    if cache:
        with pytest.raises(ValueError, match=r"day/train/cat/2.png cannot be decoded"):
            open_stream(DomainFolders, root, **options)
    for _ in range(2):  # the second time from the cache
        with pytest.warns(UserWarning, match=r"2 images cannot be decoded.*cat/2.png"):
            benchmark = DomainFolders(root, skip_broken=True, **options)
        assert benchmark.broken == broken
        lengths = [len(e.dataset) for e in benchmark.train_stream]
        assert lengths == [15, 16]
        assert [len(e.dataset) for e in benchmark.test_stream] == [4, 3]
        assert len(list(benchmark.train_stream[0].dataset)) == 15
    if cache:
        with pytest.raises(ValueError, match=r"day/train/cat/2.png cannot be decoded"):
            open_stream(DomainFolders, root, **options)
    again = open_stream(DomainFolders, root, skip_broken=True, **options)
    left = [row for e in good.train_stream[1:] for row in seen(e)]
    assert left == seen(again.train_stream[1])


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


def test_a_domain_of_broken_images_alone_is_an_error(tmp_path):
    for part in ("train", "test"):
        paint(tmp_path / "day" / part / "cat" / "0.png", 0)
    (tmp_path / "day" / "test" / "cat" / "0.png").write_bytes(b"")
    with (
        pytest.warns(UserWarning, match="1 images cannot be decoded"),
        pytest.raises(ValueError, match="domain 'day' has no images for the 'test' stream"),
    ):
        DomainFolders(tmp_path, skip_broken=True)


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


def test_the_cache_of_a_recipe_lies_below_the_folder_of_the_data(tmp_path, monkeypatch):
    """Avalanche's, where none is named; and so do weights."""
    monkeypatch.setitem(dataset_utils.AVALANCHE_CONFIG, "dataset_location", str(tmp_path))
    pacs(tmp_path / "PACS")
    stream = {"name": "PACS", "domains": ["photo"], "image_size": 32, "cache_size": 20}
    model = {"backbone": "squeezenet", "weights": "mine.safetensors"}
    recipe = small_recipe({"finetune": STRATEGIES["finetune"]}, stream=stream, model=model)
    benchmark = build_benchmark(recipe, seed=0)
    assert kept_files(tmp_path / "cache")
    mine = create_backbone("squeezenet", benchmark.n_classes)
    save_file(mine.state_dict(), tmp_path / "mine.safetensors")
    built = build_model(recipe.model, benchmark)
    pairs = zip(mine.parameters(), built.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
