"""Decoded images kept on disk: the same pixels, others after changes, never half."""

import copy
import json
import os
import pickle
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from miniature import OWN_CODES, check_labels, open_stream, own, pacs, picture
from small_recipes import NETWORK, STRATEGIES, small_recipe
from torch.utils.data import DataLoader

from covon_avalanche.experiment.build import build_benchmark
from covon_avalanche.streams import PACS, DomainFolders, image_files, image_transforms, pixel_cache
from covon_avalanche.streams.image_files import Decoder, ImageFiles, decode
from covon_avalanche.streams.pixel_cache import cached


@pytest.fixture
def pictures(tmp_path) -> ImageFiles:
    """Images larger and smaller than 32 pixels, in portrait and landscape format."""
    shapes = {"a.png": (80, 50), "b.jpg": (40, 90), "c.jpg": (20, 20), "d.png": (32, 32)}
    sizes = enumerate(shapes.items())
    files = [picture(tmp_path / "images" / name, *shape, seed) for seed, (name, shape) in sizes]
    return ImageFiles(files, [0, 1, 2, 3])


def opened(images, folder):
    return cached(ImageFiles(images.files, images.labels, Decoder()), folder, 32, "some")


def pixel_files(folder):
    return sorted(p.name for p in Path(folder).glob("*.pixels"))


def same_pixels(a, b):
    return all(torch.equal(a[i][0], b[i][0]) for i in range(len(a)))


@pytest.fixture
def decoded(monkeypatch):
    """Names of the files that are decoded."""
    names = []

    def counting(file, on_transparent):
        names.append(file.name)
        return decode(file, on_transparent)

    monkeypatch.setattr(image_files, "decode", counting)
    return names


def test_small_images_stay_and_large_ones_are_resized_once(pictures, tmp_path, decoded):
    evaluation = image_transforms(28)[1]  # resizes to 32
    for _ in range(2):
        images = opened(pictures, tmp_path / "cache")
        assert sorted(decoded) == ["a.png", "b.jpg", "c.jpg", "d.png"]
        shapes = [tuple(images[i][0].shape) for i in range(4)]
        assert shapes == [(3, 32, 51), (3, 72, 32), (3, 20, 20), (3, 32, 32)]
        for i in range(4):
            assert torch.equal(evaluation(images[i][0]), evaluation(pictures[i][0]))
            assert images[i][1] == i
        for i in (2, 3):
            assert torch.equal(images[i][0], pictures[i][0])
    assert same_pixels(images.take([3, 0]), [images[3], images[0]])


def test_what_a_killed_process_has_written_is_removed(pictures, tmp_path):
    opened(pictures, tmp_path / "cache")
    (file,) = (tmp_path / "cache").glob("*.pixels")
    file.rename(tmp_path / f"cache/.{file.name}.0a1b.part")
    old, new = (tmp_path / f"cache/.{name}.pixels.0a1b.part" for name in ("old", "new"))
    for other in (old, new):  # of other caches; the new one may still be written
        other.touch()
    os.utime(old, (0, 0))
    opened(pictures, tmp_path / "cache")
    left = [path for path in sorted((tmp_path / "cache").iterdir()) if path != new]
    assert [path.suffix for path in left] == [".lock", ".pixels"]
    assert new.exists()


def test_a_benchmark_is_the_same_with_and_without(tmp_path):
    root, rows = pacs(tmp_path / "PACS"), []
    for seed, file in enumerate(root.rglob("*.jpg")):
        picture(file, 10, 8, seed)  # not of one colour, so that random transforms differ
    options = {"domains": ["photo"], "validation_size": 0.2}
    options["train_transform"] = image_transforms(7)[0]
    for more in ({}, {"cache": tmp_path / "cache"}):
        streams = open_stream(PACS, root, **options, **more).streams
        torch.manual_seed(0)
        data = [streams[name][0].dataset.train() for name in ("train", "valid", "test")]
        rows.append([x for part in data for x, *_ in part])
    assert all(torch.equal(a, b) for a, b in zip(*rows, strict=True))


def test_labels_splits_and_users_own_transforms_stay(tmp_path, decoded):
    root = own(tmp_path / "data", "split")
    for seed in range(3):  # the split is another each time, the cache the same
        options = {"validation_size": 0.25, "seed": seed, "cache": tmp_path / "cache"}
        check_labels(open_stream(DomainFolders, root, **options), OWN_CODES)
        assert len(decoded) == 40
    limited = open_stream(DomainFolders, root, limit=2, cache=tmp_path / "other")
    check_labels(limited, OWN_CODES)
    assert len(decoded) == 40 + 16  # only what is used


def resized(file):
    picture(file, 41, 90, 9)


def touched(file):
    """As many bytes as before, at another time."""
    os.utime(file, ns=(1, 1))


@pytest.mark.parametrize("change", [resized, touched])
def test_changed_images_are_decoded_again(pictures, tmp_path, decoded, change):
    before = opened(pictures, tmp_path / "cache")
    change(pictures.files[1])
    images = opened(pictures, tmp_path / "cache")
    assert len(decoded) == 8
    assert same_pixels(images, opened(pictures, tmp_path / "fresh"))
    assert before[1][0].shape == (3, 72, 32)  # who uses the earlier file still has it


@pytest.mark.parametrize("size", [-1, 33, 3, 0])
def test_a_truncated_cache_is_an_error(pictures, tmp_path, size):
    opened(pictures, tmp_path / "cache")
    (file,) = (tmp_path / "cache").glob("*.pixels")
    file.write_bytes(file.read_bytes()[:size])
    with pytest.raises(ValueError, match=r"some-32-.*pixels is damaged: remove it"):
        opened(pictures, tmp_path / "cache")


def test_nothing_is_left_of_a_cache_that_was_not_finished(pictures, tmp_path):
    pictures.files[2].write_bytes(b"\xff\xd8 no image")
    with pytest.raises(ValueError, match=r"images/c.jpg cannot be decoded"):
        opened(pictures, tmp_path / "cache")
    assert {p.suffix for p in (tmp_path / "cache").iterdir()} == {".lock"}
    pictures.files[2].unlink()
    with pytest.raises(ValueError, match=r"cannot be used: .*No such file.*images/c.jpg"):
        opened(pictures, tmp_path / "cache")
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="cannot be used"):
        opened(pictures.take([0]), tmp_path / "file")


def test_one_process_builds_a_cache_and_the_others_wait(pictures, tmp_path, decoded):
    with ThreadPoolExecutor(3) as pool:  # file locks work between threads, too
        made = list(pool.map(lambda _: opened(pictures, tmp_path / "cache"), range(3)))
    assert sorted(decoded) == ["a.png", "b.jpg", "c.jpg", "d.png"]
    assert all(same_pixels(images, made[0]) for images in made)
    assert len(pixel_files(tmp_path / "cache")) == 1


def test_an_existing_cache_is_only_read(pictures, tmp_path, monkeypatch):
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
        assert same_pixels(again, images)
    fetched = [DataLoader(images, None, num_workers=n) for n in (0, 1)]
    assert all(torch.equal(a[0], b[0]) for a, b in zip(*fetched, strict=True))


def test_the_cache_of_a_recipe_lies_below_the_folder_of_the_data(tmp_path, monkeypatch):
    """Avalanche's, where none is named."""
    (tmp_path / ".avalanche").mkdir()
    config = json.dumps({"dataset_location": str(tmp_path)})
    (tmp_path / ".avalanche/config.json").write_text(config, encoding="utf-8")
    monkeypatch.setenv("HOME", str(tmp_path))
    pacs(tmp_path / "PACS")
    stream = {"name": "PACS", "domains": ["photo"], "image_size": 32, "cache_size": 20}
    recipe = small_recipe({"finetune": STRATEGIES["finetune"]}, stream=stream, model=NETWORK)
    build_benchmark(recipe, seed=0)
    assert pixel_files(tmp_path / "cache")
