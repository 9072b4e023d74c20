"""Decoded images kept on disk: the same pixels, never stale, never half, never foreign."""

import copy
import json
import logging
import os
import pickle
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from avalanche.benchmarks.datasets import dataset_utils
from miniature import OWN_CODES, check_labels, core50, open_stream, own, pacs, picture, pictures
from safetensors.torch import save_file
from small_recipes import STRATEGIES, small_recipe
from torch.utils.data import DataLoader

from covon_avalanche.backbones import create_backbone
from covon_avalanche.experiment.build import build_benchmark, build_model
from covon_avalanche.streams import PACS, CORe50, DomainFolders, image_transforms, pixel_cache
from covon_avalanche.streams.image_datasets import ImageFiles, decode_pixels
from covon_avalanche.streams.pixel_cache import cached


@pytest.fixture(name="pictures")
def _pictures(tmp_path) -> ImageFiles:
    return pictures(tmp_path / "images")


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
    options["domains"] = ["photo", "sketch"]
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


def test_nothing_is_left_of_a_cache_that_was_not_finished(pictures, tmp_path):
    pictures.files[2].write_bytes(b"\xff\xd8 no image")
    with pytest.raises(ValueError, match=r"images/c.jpg cannot be decoded"):
        opened(pictures, tmp_path / "cache")
    assert kept_files(tmp_path / "cache") == []
    assert not list((tmp_path / "cache").glob(".*.part"))
    (tmp_path / "cache" / "file").write_text("")
    with pytest.raises(ValueError, match="cannot be used"):
        opened(pictures, tmp_path / "cache" / "file")


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
