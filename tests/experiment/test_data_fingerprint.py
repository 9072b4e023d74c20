"""Runs are not resumed with other data."""

import shutil

import pytest
from miniature import pacs
from small_recipes import STRATEGIES, small_recipe

from covon_avalanche.experiment.build import build_benchmark
from covon_avalanche.experiment.checkpoint import Point, save_checkpoint
from covon_avalanche.experiment.data_fingerprint import data_fingerprint
from covon_avalanche.experiment.run import run_in_folder
from covon_avalanche.experiment.run_folder import RunFolder
from covon_avalanche.experiment.run_options import RunOptions


@pytest.fixture
def checked(tmp_path):
    """Compare the images (or weights) with those that a run was begun with."""
    pacs(tmp_path / "data/PACS")

    def check(root=tmp_path / "data", weights=""):
        recipe = small_recipe(
            {"finetune": STRATEGIES["finetune"]},
            stream={"name": "PACS", "domains": ["sketch", "photo"], "image_size": 32},
            model={"backbone": "squeezenet", "weights": weights},
        )
        benchmark = build_benchmark(recipe, seed=0, dataset_root=root)
        folder = RunFolder(tmp_path / "runs", recipe, "finetune", 0)
        folder.check_data(data_fingerprint(recipe, benchmark, root))
        save_checkpoint(folder.checkpoint_folder, Point(1), {}, {}, "run")

    return check


@pytest.mark.parametrize(
    "change",
    [
        lambda photo: (photo / "dog/0.jpg").unlink(),
        lambda photo: (photo / "dog/0.jpg").rename(photo / "horse/dog.jpg"),
        lambda photo: (photo / "dog/0.jpg").rename(photo / "dog/new.jpg"),
    ],
)
def test_other_images_are_an_error_until_the_folder_is_removed(checked, tmp_path, change):
    checked()
    checked()
    change(tmp_path / "data/PACS/photo")
    with pytest.raises(ValueError, match=r"seed-0-.* begun with other data: the .* of photo were"):
        checked()
    shutil.rmtree(tmp_path / "runs")
    checked()


def test_data_that_have_moved_are_the_same(checked, tmp_path):
    checked()
    (tmp_path / "data").rename(tmp_path / "elsewhere")
    checked(tmp_path / "elsewhere")


def test_weights_of_another_size_are_other_data(checked, tmp_path):
    weights = tmp_path / "data/mine.safetensors"
    weights.write_bytes(bytes(5))
    checked(weights=weights.name)
    weights.write_bytes(bytes(6))
    with pytest.raises(ValueError, match="weights were 5 bytes and are 6 bytes now"):
        checked(weights=weights.name)


def test_without_a_checkpoint_the_data_may_change_and_a_finished_run_does_not_look(tmp_path):
    pacs(tmp_path / "PACS")
    recipe = small_recipe(
        {"finetune": STRATEGIES["finetune"]},
        epochs=1,
        train_mb_size=12,
        stream={"name": "PACS", "domains": ["photo"], "image_size": 32},
        model={"backbone": "squeezenet", "weights": ""},
    )
    image = tmp_path / "PACS/photo/dog/1.jpg"
    image.write_bytes(b"broken")
    options = RunOptions(dataset_root=tmp_path)
    with pytest.raises(ValueError, match=r"1\.jpg"):
        run_in_folder(recipe, "finetune", 0, tmp_path / "runs", options)
    image.unlink()
    first = run_in_folder(recipe, "finetune", 0, tmp_path / "runs", options)
    assert first.continued == 1
    shutil.rmtree(tmp_path / "PACS")
    assert run_in_folder(recipe, "finetune", 0, tmp_path / "runs", options) == first
