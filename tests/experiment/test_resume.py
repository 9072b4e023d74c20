"""Runs that are stopped anywhere go on to the very same result."""

import contextlib
import itertools
import json
import logging
import shutil
import subprocess
import sys
import time
from functools import partial
from importlib.metadata import version

import pytest
import torch
from avalanche.training.supervised import Naive
from miniature import pacs
from small_recipes import STRATEGIES, small_recipe
from torch import nn

from covon_avalanche.experiment import checkpoint, resumable
from covon_avalanche.experiment import run as running
from covon_avalanche.experiment.build import build_benchmark
from covon_avalanche.experiment.checkpoint import (
    CheckpointError,
    Point,
    load_checkpoint,
    save_checkpoint,
    stored_points,
)
from covon_avalanche.experiment.data_fingerprint import data_fingerprint
from covon_avalanche.experiment.result import Epoch
from covon_avalanche.experiment.resumable import Checkpoints
from covon_avalanche.experiment.run import run_in_folder, run_strategy
from covon_avalanche.experiment.run_folder import RunFolder, run_hash
from covon_avalanche.experiment.state import StateError, Surroundings, capture, restore


class OwnOptimizer(Naive):
    """Makes it itself."""

    def __init__(self, *, model, optimizer, lr, **kwargs):
        optimizer = torch.optim.Adagrad(model.parameters(), lr)
        super().__init__(model=model, optimizer=optimizer, **kwargs)


# Methods that iterate over a memory: from the start of the epoch, of the domain, or of the run.
STOPS = {"replay": 3, "der": 1, "er-ace": 1, "agem": 0}
COVON = {**STRATEGIES["covon"], "later_hess_init": None}
VARIANTS = {
    "sgd": dict(kind="finetune", lr=0.1, optimizer="sgd", momentum=0.9),
    "own-optimizer": dict(
        kind="custom",
        lr=1.0,
        implementation=f"{__name__}:OwnOptimizer",
        arguments={"lr": 0.05},
    ),
    "auto": {**COVON, "hess_approx": "auto"},
    "by-inputs": {**COVON, "consolidation": "inputs"},
    "two-samples": {**COVON, "mc_samples": 2},
}


class Killed(BaseException):
    """In place of a signal."""


@pytest.fixture
def killed_at(monkeypatch):
    """Stop the run right after so many checkpoints, or never."""
    store = Checkpoints._store

    def set_limit(limit):
        left = iter(range(limit)) if limit else None

        def counted(self):
            stored = store(self)
            if left is not None and next(left, None) is None:
                raise Killed
            return stored

        monkeypatch.setattr(Checkpoints, "_store", counted)

    return set_limit


def recipe_of(name, **changes):
    """Three domains of two epochs of six batches."""
    stream = {"name": "PermutedDigits", "n_experiences": 3}
    model = {"hidden_size": 12, "hidden_layers": 1}
    changes = {"epochs": 2, "train_mb_size": 256, "stream": stream, "model": model, **changes}
    return small_recipe({name: (STRATEGIES | VARIANTS)[name]}, **changes)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", [*STRATEGIES, *VARIANTS])
def test_a_run_stopped_at_many_places_has_the_result_of_a_whole_one(
    name, tmp_path, killed_at, caplog
):
    recipe = recipe_of(name)
    whole = run_strategy(recipe, name, 0)
    stops = 0
    for limit in (1, 5, 6, 7, None):  # in domain 1, 2, 3
        killed_at(limit)
        try:
            result = run_in_folder(recipe, name, 0, tmp_path, seconds=0, share=1)
            break
        except Killed:
            stops += 1
    assert result.outcome() == whole.outcome()
    assert result.continued == stops
    assert "before it is used" not in caplog.text  # none was refused
    assert stops >= STOPS.get(name, 4)
    assert not list(tmp_path.rglob("*.safetensors"))


def test_storing_is_no_training(tmp_path, monkeypatch):
    save, slept = resumable.save_checkpoint, []

    def slow(*arguments):
        time.sleep(0.1)
        slept.append(0.1)
        save(*arguments)

    monkeypatch.setattr(resumable, "save_checkpoint", slow)
    result = run_in_folder(recipe_of("finetune"), "finetune", 0, tmp_path, seconds=0, share=1)
    assert len(slept) == 3 * (2 * 6 + 2 + 1)  # after batches, epochs and domains
    assert sum(epoch.seconds for epoch in result.epochs) <= sum(result.train_seconds)
    assert sum(result.train_seconds) < sum(slept) / 2


class OwnEpoch(Naive):
    """Has a loop of its own, with a place in it that nobody else sees."""

    def training_epoch(self, **kwargs):
        weights, batches = itertools.count(1), self.dataloader
        for self.mbatch in batches:
            self._unpack_minibatch()
            self.optimizer.zero_grad()
            self.mb_output = self.forward()
            self.loss = next(weights) * self.criterion()
            self.backward()
            self.optimizer_step()
            self._after_training_iteration(**kwargs)


@pytest.mark.filterwarnings("ignore")
def test_a_strategy_with_its_own_loop_goes_on_where_the_loop_begins(tmp_path, killed_at):
    own = {"kind": "custom", "lr": 0.01, "implementation": f"{__name__}:OwnEpoch"}
    recipe = small_recipe({"own": own}, epochs=2, train_mb_size=256)
    whole = run_strategy(recipe, "own", 0)
    killed_at(1)
    with pytest.raises(Killed):
        run_in_folder(recipe, "own", 0, tmp_path, seconds=0, share=1)
    killed_at(None)
    assert run_in_folder(recipe, "own", 0, tmp_path).outcome() == whole.outcome()


@pytest.mark.filterwarnings("ignore")
def test_replay_goes_on_alike_with_dropout(tmp_path, killed_at, monkeypatch):
    """The memory is shuffled anew within an epoch, with a seed from where dropout draws, too."""
    build = running.build_model
    monkeypatch.setattr(
        running, "build_model", lambda *args: nn.Sequential(build(*args), nn.Dropout(0.5))
    )
    recipe = small_recipe(
        {"replay": {**STRATEGIES["replay"], "mem_size": 400}}, epochs=2, train_mb_size=256
    )
    whole = run_strategy(recipe, "replay", 0)
    killed_at(17)  # with points inside epochs: amid the second pass over the memory
    with pytest.raises(Killed):
        run_in_folder(recipe, "replay", 0, tmp_path, seconds=0, share=1)
    killed_at(None)
    assert run_in_folder(recipe, "replay", 0, tmp_path).outcome() == whole.outcome()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["covon", "ewc-star"])
def test_images_whose_weights_have_channels_last_go_on_alike(name, tmp_path, killed_at):
    pacs(tmp_path / "PACS")
    recipe = recipe_of(
        name,
        stream={"name": "PACS", "domains": ["sketch", "photo"], "image_size": 32},
        model={"backbone": "squeezenet", "weights": ""},
        train_mb_size=12,
    )
    whole = run_strategy(recipe, name, 0, dataset_root=tmp_path)
    for limit in (3, 5, 2, None):
        killed_at(limit)
        with contextlib.suppress(Killed):
            result = run_in_folder(
                recipe, name, 0, tmp_path / "runs", dataset_root=tmp_path, seconds=0, share=1
            )
    assert result.outcome() == whole.outcome()
    assert result.continued == 3


@pytest.fixture
def on_images(tmp_path, killed_at):
    """A run on images that stops after so many checkpoints."""
    pacs(tmp_path / "data/PACS")
    recipe = recipe_of(
        "finetune",
        stream={"name": "PACS", "domains": ["sketch", "photo"], "image_size": 32},
        model={"backbone": "squeezenet", "weights": ""},
        train_mb_size=12,
    )

    def run(limit=None, data=tmp_path / "data"):
        killed_at(limit)
        return run_in_folder(
            recipe, "finetune", 0, tmp_path / "runs", dataset_root=data, seconds=0, share=1
        )

    return run


@pytest.mark.parametrize(
    "change",
    [
        lambda photo: (photo / "dog/0.jpg").unlink(),
        lambda photo: (photo / "dog/0.jpg").rename(photo / "horse/dog.jpg"),
        lambda photo: (photo / "dog/0.jpg").rename(photo / "dog/new.jpg"),
    ],
)
def test_a_run_does_not_go_on_with_other_images(on_images, tmp_path, change):
    with pytest.raises(Killed):
        on_images(3)
    change(tmp_path / "data/PACS/photo")
    with pytest.raises(ValueError, match=r"seed-0-.* begun with other data: the .* of photo were"):
        on_images()
    shutil.rmtree(tmp_path / "runs")
    on_images()
    (tmp_path / "data/PACS/photo/dog/1.jpg").unlink()
    assert on_images().continued == 0  # finished: the data are not looked at


def test_data_that_have_moved_are_the_same(on_images, tmp_path):
    with pytest.raises(Killed):
        on_images(3)
    (tmp_path / "data").rename(tmp_path / "elsewhere")
    assert on_images(data=tmp_path / "elsewhere").continued == 1


def test_a_run_that_has_learned_nothing_yet_may_begin_with_other_images(on_images, tmp_path):
    image = tmp_path / "data/PACS/sketch/dog/1.jpg"
    image.write_bytes(b"broken")
    with pytest.raises(ValueError, match=r"1\.jpg"):
        on_images()
    image.unlink()
    assert on_images().continued == 1


def test_weights_of_another_size_are_other_data(tmp_path):
    pacs(tmp_path / "PACS")
    recipe = recipe_of(
        "finetune",
        stream={"name": "PACS", "domains": ["photo"], "image_size": 32},
        model={"backbone": "squeezenet", "weights": "mine.safetensors"},
    )
    benchmark = build_benchmark(recipe, seed=0, dataset_root=tmp_path)
    folder = RunFolder(tmp_path / "runs", recipe, "finetune", 0)
    weights = tmp_path / "mine.safetensors"
    weights.write_bytes(bytes(5))
    folder.check_data(data_fingerprint(recipe, benchmark, tmp_path))
    save_checkpoint(folder.checkpoints, Point(1), {}, {}, "run")
    weights.write_bytes(bytes(6))
    with pytest.raises(ValueError, match="weights were 5 bytes and are 6 bytes now"):
        folder.check_data(data_fingerprint(recipe, benchmark, tmp_path))


def test_a_run_goes_on_inside_an_epoch_instead_of_starting_again(tmp_path, killed_at, caplog):
    recipe = recipe_of("covon")
    killed_at(10)  # of 7 + 7 in the first domain
    with pytest.raises(Killed):
        run_in_folder(recipe, "covon", 0, tmp_path, seconds=0, share=1)
    killed_at(None)
    with caplog.at_level(logging.INFO, "covon_avalanche"):
        run_in_folder(recipe, "covon", 0, tmp_path)
    assert "going on at epoch 1, batch 4" in caplog.text


@pytest.mark.parametrize("name", ["covon", "joint", "agem"])
def test_epochs_are_written_as_they_come_and_once(name, tmp_path, killed_at, monkeypatch):
    monkeypatch.setattr(running, "_PAUSE", 0.0)
    recipe = recipe_of(name)
    file = RunFolder(tmp_path, recipe, name, 0).path / "metrics.jsonl"

    def written():
        lines = file.read_text(encoding="utf-8").splitlines()
        return [Epoch.model_validate_json(line) for line in lines]

    def watch(epoch, epochs):
        assert written()[-1] == epoch
        assert [(e.experience, e.epoch) for e in written()] == sorted(
            {(e.experience, e.epoch) for e in written()}
        )

    for limit in (3, 9, None):
        killed_at(limit)
        with contextlib.suppress(Killed):
            result = run_in_folder(recipe, name, 0, tmp_path, watch=watch, seconds=1e9, share=1)
    assert written() == result.epochs


@pytest.mark.parametrize(
    "what", ["truncated", "changed", "state changed", "of another run", "newer"]
)
def test_a_bad_checkpoint_is_named_and_the_one_before_it_is_used(what, tmp_path, killed_at, caplog):
    recipe = recipe_of("covon")
    whole = run_strategy(recipe, "covon", 0)
    killed_at(20)
    with pytest.raises(Killed):
        run_in_folder(recipe, "covon", 0, tmp_path, seconds=0, share=1)
    folder = RunFolder(tmp_path, recipe, "covon", 0).checkpoints
    latest, before, *_ = stored_points(folder)
    spoil(folder / f"{latest}.json", what)
    killed_at(None)
    result = run_in_folder(recipe, "covon", 0, tmp_path)
    assert str(latest) in caplog.text
    assert "the one before it is used" in caplog.text
    assert result.outcome() == whole.outcome()
    assert before < latest


def spoil(file, what):
    data = file.with_suffix(".safetensors")
    if what == "truncated":
        data.write_bytes(data.read_bytes()[:-5])
    elif what == "changed":
        content = bytearray(data.read_bytes())
        content[-1] ^= 1
        data.write_bytes(content)
    elif what == "state changed":
        file.write_text(file.read_text().replace("train_epochs", "train_epoch_"))
    elif what == "of another run":
        state, tensors = load_checkpoint(file.parent, point_of(file), run_of(file))
        save_checkpoint(file.parent, point_of(file), state, tensors, "another")
    else:
        import hashlib

        body = json.dumps(json.loads(json.loads(file.read_text())["body"]) | {"format": 99})
        digest = hashlib.sha256(body.encode()).hexdigest()
        file.write_text(json.dumps({"digest": digest, "body": body}))


def point_of(file):
    return Point(*map(int, file.stem.split("-")))


def run_of(file):
    return json.loads(json.loads(file.read_text())["body"])["run"]


def test_a_checkpoint_of_another_model_starts_the_run_again(tmp_path, killed_at, caplog):
    recipe = recipe_of("covon")
    killed_at(9)
    with pytest.raises(Killed):
        run_in_folder(recipe, "covon", 0, tmp_path, seconds=0, share=1)
    folder = RunFolder(tmp_path, recipe, "covon", 0).checkpoints
    other = recipe_of("covon", model={"hidden_size": 13, "hidden_layers": 1})
    theirs = RunFolder(tmp_path, other, "covon", 0)
    theirs.checkpoints.mkdir(parents=True)
    for point in stored_points(folder):
        state, tensors = load_checkpoint(folder, point, run_hash(recipe, "covon", 0))
        save_checkpoint(theirs.checkpoints, point, state, tensors, theirs.hash)
    killed_at(None)
    result = run_in_folder(other, "covon", 0, tmp_path)
    assert "this is another model" in caplog.text
    assert result.outcome() == run_strategy(other, "covon", 0).outcome()


def test_files_that_name_code_are_refused(tmp_path):
    state = {"root": {"#": 0}, "nodes": [{"is": "function", "name": "os:system"}]}
    save_checkpoint(tmp_path, Point(0), state, {"t0": torch.zeros(1)}, "run")
    stored, tensors = load_checkpoint(tmp_path, Point(0), "run")
    for node in (
        stored["nodes"][0],
        {"is": "object", "class": "subprocess:Popen", "attributes": {}},
        {"is": "function", "name": "torch:load"},
        {"is": "enum", "class": "os:environ", "name": "PATH"},
        {"is": "function", "name": "covon_avalanche.atomic_write:os.system"},
        {"is": "function", "name": "covon_avalanche.datasets.unpack:shutil.rmtree"},
        {"is": "function", "name": "covon_avalanche.atomic_write:write_atomically"},
        {"is": "object", "class": "covon_avalanche.experiment.cluster:ClusterRun"},
        {"is": "object", "class": "covon_avalanche.posterior.gaussian:Tensor"},
        {"is": "object", "class": "covon_avalanche.posterior.gaussian:dataclass"},
        {"is": "enum", "class": "covon_avalanche.posterior.gaussian:DiagGaussian", "name": "a"},
        {"is": "tuple", "class": "covon_avalanche.posterior.gaussian:DiagGaussian", "items": []},
        {"is": "dtype", "name": "load"},
    ):
        with pytest.raises(StateError, match=r"is not made from a file|there is no torch\.load"):
            restore({**stored, "nodes": [node]}, tensors, None, Surroundings({}))


def test_a_function_of_the_run_does_not_come_back_with_other_arguments():
    there = {"own": shutil.rmtree, "partial": None}
    state, tensors = capture({**there, "partial": partial(shutil.rmtree, "x")}, Surroundings({}))
    with pytest.raises(StateError, match="a shutil:rmtree is not made from a file"):
        restore(state, tensors, there, Surroundings({}))


def test_a_forged_checkpoint_is_refused_and_the_run_starts_anew(tmp_path, killed_at, caplog):
    recipe = recipe_of("finetune")
    killed_at(6)
    with pytest.raises(Killed):
        run_in_folder(recipe, "finetune", 0, tmp_path, seconds=1e9, share=1)
    victim, run = tmp_path / "victim", RunFolder(tmp_path, recipe, "finetune", 0)
    victim.mkdir()
    for point in stored_points(run.checkpoints):
        state, tensors = load_checkpoint(run.checkpoints, point, run.hash)
        nodes = state["nodes"]
        (schedule,) = [n for n in nodes if n.get("class", "").endswith(":LambdaLR")]
        first = len(nodes)
        nodes[schedule["attributes"]["lr_lambdas"]["#"]]["items"] = [{"#": first}]
        nodes += [
            {"is": "partial", "parts": [{"#": first + i} for i in (1, 2, 3)]},
            {"is": "function", "name": "covon_avalanche.datasets.unpack:shutil.rmtree"},
            {"is": "tuple", "items": [str(victim)]},
            {"is": "dict", "items": []},
        ]
        save_checkpoint(run.checkpoints, point, state, tensors, run.hash)
    killed_at(None)
    result = run_in_folder(recipe, "finetune", 0, tmp_path)
    assert victim.exists()
    assert result.outcome() == run_strategy(recipe, "finetune", 0).outcome()
    assert "rmtree is not made from a file" in caplog.text


def test_another_version_starts_the_run_anew_with_one_warning(
    tmp_path, killed_at, caplog, monkeypatch
):
    recipe = recipe_of("finetune")
    killed_at(10)
    with pytest.raises(Killed):
        run_in_folder(recipe, "finetune", 0, tmp_path, seconds=0, share=1)
    assert len(stored_points(RunFolder(tmp_path, recipe, "finetune", 0).checkpoints)) > 1
    killed_at(None)
    monkeypatch.setattr(checkpoint, "_versions", lambda: {"torch": "99.0"})
    with caplog.at_level(logging.INFO, "covon_avalanche"):
        result = run_in_folder(recipe, "finetune", 0, tmp_path)
    (warning,) = [r.getMessage() for r in caplog.records if r.name == resumable.__name__]
    assert f"was made by covon_avalanche {version('covon_avalanche')}" in warning
    assert warning.endswith("the run starts anew")
    assert result.outcome() == run_strategy(recipe, "finetune", 0).outcome()


@pytest.mark.parametrize(
    ("function", "error"), [("restore", AttributeError), ("_set_randomness", IndexError)]
)
def test_whatever_goes_wrong_with_a_checkpoint_refuses_it(
    function, error, tmp_path, killed_at, caplog, monkeypatch
):
    recipe = recipe_of("finetune")
    killed_at(6)
    with pytest.raises(Killed):
        run_in_folder(recipe, "finetune", 0, tmp_path, seconds=0, share=1)
    killed_at(None)

    def fail(error):
        def failing(*_):
            raise error("no such thing")

        return failing

    with monkeypatch.context() as patch:  # says nothing about the checkpoint
        patch.setattr(resumable, function, fail(torch.OutOfMemoryError))
        with pytest.raises(torch.OutOfMemoryError):
            run_in_folder(recipe, "finetune", 0, tmp_path)
    assert stored_points(RunFolder(tmp_path, recipe, "finetune", 0).checkpoints)
    monkeypatch.setattr(resumable, function, fail(error))
    result = run_in_folder(recipe, "finetune", 0, tmp_path)
    assert f"does not fit this run: {error.__name__}: no such thing" in caplog.text
    assert result.outcome() == run_strategy(recipe, "finetune", 0).outcome()


@pytest.mark.parametrize("size", [50, 50_000])
def test_where_no_more_can_be_written_the_older_checkpoint_stays(tmp_path, size):
    """A limit on the size of files stands for a full disk."""
    save_checkpoint(tmp_path, Point(1), {}, {"a": torch.ones(3)}, "run")
    code = f"""
import resource, signal, sys, torch
from pathlib import Path
from covon_avalanche.experiment.checkpoint import Point, save_checkpoint
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, ({size}, {size}))
try:
    save_checkpoint(Path({str(tmp_path)!r}), Point(1), {{}}, {{"a": torch.zeros(50_000)}}, "run")
except OSError as error:
    print("OSError", error)
"""
    arguments = [sys.executable, "-W", "ignore", "-c", code]
    done = subprocess.run(arguments, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("OSError")
    assert load_checkpoint(tmp_path, Point(1), "run")[1]["a"].tolist() == [1, 1, 1]
    assert not list(tmp_path.glob(".*.part"))


def test_a_missing_half_of_a_checkpoint_is_said(tmp_path):
    save_checkpoint(tmp_path, Point(1), {}, {"a": torch.ones(3)}, "run")
    (tmp_path / f"{Point(1)}.safetensors").unlink()
    with pytest.raises(CheckpointError, match="cannot be read"):
        load_checkpoint(tmp_path, Point(1), "run")


def test_checkpoints_pay_for_themselves(tmp_path, monkeypatch):
    """Ends of epochs are passed over while storing would take more than its share."""
    recipe, stored, store = recipe_of("finetune", epochs=20), [], Checkpoints._store

    def counted(self):
        stored.append(self._point)
        return store(self)

    monkeypatch.setattr(Checkpoints, "_store", counted)
    run_in_folder(recipe, "finetune", 0, tmp_path / "often", share=1)
    assert len(stored) == 3 * 20 + 3
    stored.clear()
    run_in_folder(recipe, "finetune", 0, tmp_path / "seldom", share=1e-9)
    assert len(stored) == 1 + 3  # the first is free, those between domains are always made
