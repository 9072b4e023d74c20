"""The folder of a run: its status, its log, its hash, existing results, changed data."""

import errno
import math
import os
import warnings
from pathlib import Path

import pytest
from filelock import FileLock
from interrupted_runs import run_until_killed
from made_up_results import made_up
from small_recipes import FEW, STRATEGIES, reproducible, run_strategy, small_recipe

from covon_avalanche.experiment import run_folder
from covon_avalanche.experiment.checkpoint import Point, save_checkpoint
from covon_avalanche.experiment.data_settings import ImageStream, data_folder
from covon_avalanche.experiment.result import Result, ResultError
from covon_avalanche.experiment.run import run_in_folder
from covon_avalanche.experiment.run_folder import RunFolder, RunningElsewhere, other_data
from covon_avalanche.experiment.run_settings import run_hash


def test_the_status_can_be_read_in_a_read_only_folder(recipe, tmp_path, monkeypatch):
    folder = RunFolder(tmp_path, recipe, "finetune", 0)
    folder.path.mkdir(parents=True)
    folder.write_status(run_folder.Status(domains=1))
    real = os.open

    def read_only(path, flags, *arguments, **options):
        if flags & os.O_CREAT:
            raise OSError(errno.EROFS, "Read-only file system")
        return real(path, flags, *arguments, **options)

    monkeypatch.setattr(os, "open", read_only)
    assert not folder.is_running()
    assert folder.status() == run_folder.Status(domains=1)


def test_the_status_is_that_of_the_latest_epoch_and_of_the_error(recipe, tmp_path):
    folder = RunFolder(tmp_path, recipe, "finetune", 0)
    assert folder.status() == run_folder.Status()
    status = run_folder.Status(domains=1, of_domains=2, share=0.625, text="domain 2/2, epoch 1/4")
    with pytest.raises(OSError, match="no such luck"), folder.opened():
        assert folder.is_running()
        folder.write_status(status)
        assert folder.status() == status
        raise OSError(errno.ENOSPC, "no such luck")
    assert not folder.is_running()
    assert folder.status() == status.model_copy(update={"error": "no such luck"})
    run_in_folder(folder)
    assert folder.status() == run_folder.Status()


def test_the_log_has_the_warnings_of_a_run(recipe, tmp_path):
    folder = RunFolder(tmp_path, recipe, "finetune", 0)
    with folder.opened(), folder.logged():
        warnings.warn("the posterior is flat", stacklevel=1)
    assert "UserWarning: the posterior is flat" in folder.log_file.read_text()
    with pytest.warns(UserWarning, match="afterwards"):
        warnings.warn("afterwards", stacklevel=1)
    assert "afterwards" not in folder.log_file.read_text()


def test_a_finished_run_is_not_repeated_but_takes_the_names_of_its_recipe(recipe, tmp_path):
    folder = RunFolder(tmp_path, recipe, "finetune", 0)
    first = run_in_folder(folder)
    first.model_copy(update={"calibration": {"nll": math.nan}}).save(folder.result_file)
    written = folder.result_file.stat().st_mtime_ns
    assert run_in_folder(folder).accuracy == first.accuracy
    assert folder.result_file.stat().st_mtime_ns == written
    renamed = recipe.model_copy(update={"name": "mine", "title": "Mine"})
    named = run_in_folder(RunFolder(tmp_path, renamed, "finetune", 0))
    for one in (named, Result.load(folder.result_file)):
        assert (one.recipe, one.settings["name"], one.settings["title"]) == ("mine", "mine", "Mine")
        assert one.accuracy == first.accuracy
    folder.result_file.write_text("{")
    with pytest.raises(ResultError, match=r"result\.json is not a result: it is not JSON"):
        run_in_folder(folder)


@pytest.mark.parametrize("change", [{"run_hash": "0123456789"}, {"strategy": "lwf"}, {"seed": 1}])
def test_a_copied_result_of_another_run_is_named(recipe, tmp_path, change):
    folder = RunFolder(tmp_path, recipe, "finetune", 0)
    other = run_in_folder(folder).model_copy(update=change)
    other.save(folder.result_file)
    with pytest.raises(ResultError, match=r"result\.json is of another run .*; remove it to run"):
        run_in_folder(folder)
    assert Result.load(folder.result_file) == other


@pytest.fixture
def images(tmp_path):
    """A recipe with images in a folder, and results, begun and finished."""
    strategies = {"finetune": STRATEGIES["finetune"]}
    stream = {"name": "DomainFolders", "folder": "mine", "domains": ["a"]}
    network = {"backbone": "squeezenet", "weights": "mine/w.pth"}
    return small_recipe(strategies, stream=stream, model=network, workers=2, epochs=5)


def finished(folder):
    """A run folder with a result."""
    folder.path.mkdir(parents=True)
    folder.write_start({})
    result = made_up("finetune", folder.seed, [[0.5]], run_hash=folder.hash)
    folder.write_result(result.model_copy(update={"settings": folder.settings}))
    return result


def test_settings_without_effect_and_other_spellings_of_paths_are_no_other_run(images, tmp_path):
    runs = tmp_path / "runs"
    first = RunFolder(runs, images, "finetune", 0, tmp_path)
    result = finished(first)
    stream = images.stream.model_copy(update={"folder": str(tmp_path / "x/../mine/")})
    model = images.model.model_copy(update={"weights": "./mine/w.pth"})
    spelled = images.model_copy(update={"stream": stream, "model": model})
    for other in (images.model_copy(update={"workers": 0, "eval_mb_size": 7}), spelled):
        again = RunFolder(runs, other, "finetune", 0, tmp_path)
        assert again.path == first.path
        assert again.hash == first.hash != run_hash(other, "finetune", 0)
        assert again.result().accuracy == result.accuracy
        assert again.result().settings == again.settings
        assert first.result().settings == first.settings
        (found,) = run_folder.finished_runs(other, runs, tmp_path)
        assert found.settings == again.settings
    assert RunFolder(runs, spelled, "finetune", 0, tmp_path / "elsewhere").path != first.path
    assert RunFolder(runs, spelled, "finetune", 1, tmp_path).path != first.path
    changed = images.model_copy(update={"epochs": 8})
    assert RunFolder(runs, changed, "finetune", 0, tmp_path).path != first.path


def test_arguments_that_a_class_can_tell_apart_are_another_run(tmp_path):
    def folder_of(value):
        own = {"kind": "custom", "lr": 0.1, "implementation": "m:C", "arguments": {"x": value}}
        return RunFolder(tmp_path, small_recipe({"own": own}), "own", 0)

    first = folder_of(1)
    first.path.mkdir(parents=True)
    first.write_start({})
    for value in (True, 1.0, [1]):
        assert folder_of(value).path != first.path
        assert folder_of(value).differences(first.path) == {"strategy.arguments.x": (1, value)}
    assert folder_of(1).differences(first.path) == {}


def test_a_classifier_in_closed_form_is_not_repeated_for_epochs_and_batches(tmp_path):
    strategies = {name: STRATEGIES[name] for name in ("ridge", "finetune")}
    strategies["adapted"] = {"kind": "ranpac", "adapter": 4}
    first = small_recipe(strategies, stream=FEW, train_mb_size=64, epochs=1)
    changes = {"train_mb_size": 50, "epochs": 3, "final_lr_factor": 0.5}
    other = first.model_copy(update=changes)
    ridge, result = RunFolder(tmp_path, first, "ridge", 0), run_strategy(first, "ridge", 0)
    assert run_until_killed(0, ridge)
    again = RunFolder(tmp_path, other, "ridge", 0)
    assert again.path == ridge.path
    resumed = run_in_folder(again)
    assert resumed.accuracy == result.accuracy
    assert RunFolder(tmp_path, first, "ridge", 0).result().settings == ridge.settings
    assert again.result().settings == again.settings
    assert run_folder.other_settings([again]) == []
    for name in ("finetune", "adapted"):
        RunFolder(tmp_path, first, name, 0).path.mkdir(parents=True)
        RunFolder(tmp_path, first, name, 0).write_start({})
        now, before = (RunFolder(tmp_path, recipe, name, 0) for recipe in (other, first))
        assert now.path != before.path
        assert now.differences(before.path).keys() == changes.keys()


def test_an_interrupted_run_is_resumed_with_another_number_of_workers(recipe, tmp_path):
    first = RunFolder(tmp_path, recipe, "finetune", 0)
    assert run_until_killed(5, first)
    more = RunFolder(tmp_path, recipe.model_copy(update={"workers": 1}), "finetune", 0)
    whole = reproducible(run_strategy(recipe, "finetune", 0))
    named = {"settings": more.settings, "run_hash": first.hash}
    assert reproducible(run_in_folder(more)) == whole | named
    assert "resumed at domain" in first.log_file.read_text()
    assert first.result().resumed == 1


def test_the_next_run_removes_what_a_killed_process_was_writing(recipe, tmp_path):
    folder = RunFolder(tmp_path, recipe, "finetune", 0)
    part = folder.checkpoint_folder / ".1.pt.0123456789abcdef.part"
    part.parent.mkdir(parents=True)
    part.touch()
    with FileLock(folder.path / ".lock"), pytest.raises(RunningElsewhere, match="another process"):
        run_in_folder(folder)
    assert part.exists()
    run_in_folder(folder)
    assert not part.exists()


def test_a_result_that_cannot_be_read_is_not_to_be_removed(recipe, tmp_path, monkeypatch):
    folder = RunFolder(tmp_path, recipe, "finetune", 0)
    finished(folder)

    def denied(path):
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(Path, "read_bytes", denied)
    with pytest.raises(ResultError, match=r"result\.json cannot be read: Permission denied$"):
        folder.result()


def test_finished_runs_with_other_settings_are_named(images, tmp_path):
    for seed in (0, 1):
        finished(RunFolder(tmp_path, images, "finetune", seed))
    own = images.strategies["finetune"]
    lower = {"finetune": own.model_copy(update={"lr": 0.5, "weight_decay": 0.25})}
    finished(RunFolder(tmp_path, images.model_copy(update={"strategies": lower}), "finetune", 0))
    (tmp_path / "finetune/seed-7-damaged").mkdir()
    (tmp_path / "finetune/seed-7-damaged/result.json").touch()
    changed = images.model_copy(update={"epochs": 8, "workers": 0, "title": "Another"})
    folders = [RunFolder(tmp_path, changed, "finetune", seed) for seed in range(3)]
    sentences = run_folder.other_settings(folders)
    assert sorted(sentences) == [
        "1 finished run of finetune differs in epochs: 5, now 8; lr: 0.5, now 0.01; 1 more",
        "2 finished runs of finetune differ in epochs: 5, now 8",
    ]
    new = images.model_copy(update={"seeds": [2]})
    assert len(run_folder.other_settings([RunFolder(tmp_path, new, "finetune", 2)])) == 1


def test_runs_with_data_in_another_folder_are_named_unless_these_have_moved(images, tmp_path):
    roots = [tmp_path / name for name in "ab"]
    for root in roots:
        (root / "mine").mkdir(parents=True)
    runs, pacs = tmp_path / "runs", ImageStream(name="PACS")
    for name, recipe in ("own", images), ("published", images.model_copy(update={"stream": pacs})):
        first = RunFolder(runs / name, recipe, "finetune", 0, roots[0])
        finished(first)
        for seed in (0, 1):
            again = RunFolder(runs / name, recipe, "finetune", seed, roots[0] / "../a")
            assert other_data([again]) is None
            again = RunFolder(runs / name, recipe, "finetune", seed, roots[1])
            folders = [str(root / data_folder(recipe.stream.model_dump())) for root in roots]
            says = f"{first.path} used {folders[0]}, not {folders[1]}: choose another --out"
            assert other_data([again]) == says
        other = recipe.model_copy(update={"epochs": 8})
        assert other_data([RunFolder(runs / name, other, "finetune", 0, roots[1])]) is None
    roots[0].rename(tmp_path / "c")  # another mount point, or the runs are a copy
    moved = RunFolder(runs / "own", images, "finetune", 0, roots[1])
    assert other_data([moved]) is None
    assert moved.result() is not None


def test_an_unfinished_run_is_not_resumed_with_other_data(recipe, tmp_path):
    folder = RunFolder(tmp_path, recipe, "finetune", 0)
    folder.checkpoint_folder.mkdir(parents=True)
    for images in (9, 14):  # without a checkpoint the data may change
        folder.check_data({"train": [14, 14], "test": [images]})
    save_checkpoint(folder.checkpoint_folder, Point(1), {}, folder.hash)
    data = {"train": [14, 14], "test": [14], "classes": ["cat"]}
    folder.check_data(data, ["few"])  # without classes, data.json was of an earlier version
    assert folder.data_warnings() == ["few"]
    folder.check_data(data)  # warnings may differ
    with pytest.raises(ValueError, match=r"the data have changed .*\[14, 13\].* remove the folder"):
        folder.check_data({**data, "train": [14, 13]})
    with pytest.raises(ValueError, match=r"it had {'classes': \['cat'\]}, now there are .*'dog'"):
        folder.check_data({**data, "classes": ["dog"]})


@pytest.mark.parametrize("content", ["", '{"train": [14,', "[]", "[" * 100_000])
def test_damaged_files_of_an_unfinished_run_are_named(recipe, tmp_path, content):
    folder = RunFolder(tmp_path, recipe, "finetune", 0)
    folder.checkpoint_folder.mkdir(parents=True)
    save_checkpoint(folder.checkpoint_folder, Point(1), {}, folder.hash)
    (folder.path / "data.json").write_text(content)
    assert folder.data_warnings() == []
    with pytest.raises(ValueError, match=r"data\.json is damaged: remove it, then run"):
        folder.check_data({"train": [14]})
    (folder.path / "data.json").unlink()
    folder.check_data({"train": [14]})
    (folder.path / "run.json").write_text(content)
    with pytest.raises(ValueError, match=r"run\.json is damaged: remove it, then run"):
        folder.write_start({})
    (folder.path / "run.json").unlink()
    assert [folder.write_start({}) for _ in range(3)] == [1, 2, 3]


def test_files_are_found_in_linked_folders_too_and_each_folder_once(tmp_path):
    for name in ("runs/a", "runs/.b/c", "elsewhere/d"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "run.json").touch()
    runs = tmp_path / "runs"
    (runs / "linked").symlink_to(tmp_path / "elsewhere", target_is_directory=True)
    (runs / "again").symlink_to(tmp_path / "elsewhere/d", target_is_directory=True)
    (runs / "a/up").symlink_to(runs, target_is_directory=True)
    (runs / "0").symlink_to(tmp_path, target_is_directory=True)  # which has all of them
    (runs / "1").symlink_to(runs / "a", target_is_directory=True)  # by its own name instead
    found = run_folder.find_files(runs, "run.json")
    assert {file.resolve() for file in found} == {*tmp_path.rglob("run.json")}
    assert len(found) == 3
    assert runs / "a/run.json" in found
    assert run_folder.find_files(tmp_path / "missing", "run.json") == []


def test_a_folder_of_runs_that_cannot_be_read_is_an_error(tmp_path, monkeypatch):
    (tmp_path / "hidden").mkdir()
    scandir = os.scandir

    def readable(path):
        if Path(path).name == "hidden":
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", readable)
    with pytest.raises(PermissionError, match="hidden"):
        run_folder.find_files(tmp_path, "run.json")
