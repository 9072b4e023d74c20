"""Interrupted runs resume bit-exactly; the files of checkpoints."""

import itertools
import logging
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from avalanche.training.supervised import Naive
from interrupted_runs import run_until_killed, run_with_stops
from miniature import pacs
from small_recipes import (
    CLOSED_FORM,
    FEW,
    NETWORK,
    PACS,
    STRATEGIES,
    reproducible,
    run_strategy,
    small_recipe,
)
from torch import nn

from covon_avalanche.experiment import checkpoint, resumable
from covon_avalanche.experiment import run as running
from covon_avalanche.experiment.checkpoint import Point, load_checkpoint, save_checkpoint
from covon_avalanche.experiment.resumable import Checkpointer
from covon_avalanche.experiment.run import run_in_folder
from covon_avalanche.experiment.run_folder import RunFolder
from covon_avalanche.experiment.run_options import RunOptions
from covon_avalanche.experiment.state import StateError

COVON = {**STRATEGIES["covon"], "later_hess_init": None}
CUSTOM, FINETUNE = STRATEGIES["custom"], STRATEGIES["finetune"]


class OwnOptimizer(Naive):
    """Makes it itself."""

    def __init__(self, *, model, optimizer, lr, **kwargs):
        optimizer = torch.optim.Adagrad(model.parameters(), lr)
        super().__init__(model=model, optimizer=optimizer, **kwargs)


class OwnEpoch(Naive):
    """Has a loop of its own, with a state in it that nobody else sees."""

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


class OwnExperience(Naive):
    """Trains the first domain only."""

    def _train_exp(self, experience, eval_streams=None, **kwargs):
        if experience.current_experience == 0:
            super()._train_exp(experience, eval_streams, **kwargs)


VARIANTS = {
    "own-optimizer": CUSTOM
    | {"implementation": f"{__name__}:OwnOptimizer", "arguments": {"lr": 0.05}},
    "own-epoch": CUSTOM | {"implementation": f"{__name__}:OwnEpoch"},
    "own-experience": CUSTOM | {"implementation": f"{__name__}:OwnExperience"},
    "regmean": {**COVON, "merge": "regmean"},
    **{rule: FINETUNE | {"merge": rule} for rule in ("kfac", "average", "fisher", "magmax")},
    "two-samples": {**COVON, "mc_samples": 2},
    "vcl-samples": {**STRATEGIES["vcl"], "mc_samples": 2},
}
# Methods that are not stored inside domains stop after the first one; two have tried it once more.
BETWEEN = ("own-epoch", "own-experience", *CLOSED_FORM)
STOPS = {name: [0] for name in BETWEEN} | {"er-ace": [1], "agem": [1]}
IN_OTHERS = ("covon-nom", "ema")
"""What they store is stored with covon-gradsq, and with covon and slca."""


def recipe_of(name, **changes):
    """Two domains of two epochs of four batches: 11 checkpoints a domain."""
    changes = {"epochs": 2, "train_mb_size": 64, "stream": FEW, **changes}
    changes = {"model": {"hidden_size": 12, "hidden_layers": 1}, **changes}
    return small_recipe({name: (STRATEGIES | VARIANTS)[name]}, **changes)


@cache
def whole(name):
    """The result of a run that nobody stopped."""
    return reproducible(run_strategy(recipe_of(name), name, 0))


@pytest.mark.parametrize("name", [n for n in (*STRATEGIES, *VARIANTS) if n not in IN_OTHERS])
def test_a_run_stopped_at_many_points_has_the_result_of_a_whole_one(name, tmp_path, caplog):
    stops = STOPS.get(name, [5, 5])  # in the second epoch, and in the second domain
    result = run_with_stops(recipe_of(name), name, tmp_path, stops)
    assert reproducible(result) == whole(name)
    assert result.resumed == len(stops)
    assert "before it is used" not in caplog.text  # all could be restored


def test_replay_with_dropout_resumes_bit_exactly(tmp_path, monkeypatch):
    """The memory is reshuffled within an epoch, with a seed from where dropout draws, too."""
    build = running.build_model
    monkeypatch.setattr(
        running, "build_model", lambda *args: nn.Sequential(build(*args), nn.Dropout(0.5))
    )
    settings = {**STRATEGIES["replay"], "mem_size": 50}
    recipe = small_recipe({"replay": settings}, epochs=2, train_mb_size=64, stream=FEW)
    undisturbed = run_strategy(recipe, "replay", 0)
    stops = [11]  # after the first epoch with the memory
    result = run_with_stops(recipe, "replay", tmp_path, stops)
    assert result.resumed == 1
    assert reproducible(result) == reproducible(undisturbed)


@pytest.mark.parametrize(("name", "workers"), [("covon", 0), ("ewc-star", 1)])
def test_augmented_images_and_channels_last_resume_bit_exactly(name, workers, tmp_path):
    pacs(tmp_path / "PACS")
    changes = {"stream": PACS | {"limit": 2}, "model": NETWORK, "train_mb_size": 5, "epochs": 1}
    recipe = recipe_of(name, **changes, workers=workers)
    undisturbed = run_strategy(recipe, name, 0, tmp_path)
    stops = [0, 4]  # inside an epoch of each domain
    result = run_with_stops(recipe, name, tmp_path / "runs", stops, tmp_path)
    assert reproducible(result) == reproducible(undisturbed)
    assert result.resumed == 2


def test_between_domains_and_when_the_time_has_passed_a_checkpoint_is_stored(tmp_path, monkeypatch):
    """By a clock that moves one second a look: at the end of each batch and epoch."""
    stored, store, clock = [], Checkpointer._store, itertools.count()

    def counted(self):
        stored.append(self._point)
        return store(self)

    monkeypatch.setattr(Checkpointer, "_store", counted)
    monkeypatch.setattr(resumable, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    options = RunOptions(checkpoint_seconds=7)
    run_in_folder(RunFolder(tmp_path, recipe_of("finetune"), "finetune", 0), options)
    assert stored == [Point(0, 1, 2), Point(1), Point(1, 1, 2), Point(2)]


@pytest.fixture
def stopped(tmp_path):
    """The folder of a run that was stopped in the second domain, and its recipe."""
    recipe = recipe_of("finetune")
    folder = RunFolder(tmp_path, recipe, "finetune", 0)
    run_until_killed(14, folder)
    return folder, recipe


def truncated(file):
    file.write_bytes(file.read_bytes()[:-5])


def changed(file):
    content = file.read_bytes().replace(b"train_epochs", b"train_epoch_")
    assert content != file.read_bytes()
    file.write_bytes(content)


@pytest.mark.parametrize(
    ("spoil", "says"),
    [(truncated, "BadZipFile"), (changed, "is damaged")]
    + [("another", "belongs to another run"), ("_versions", "by other versions: torch 99.0")],
)
def test_one_before_a_bad_checkpoint_is_used(spoil, says, stopped, tmp_path, caplog, monkeypatch):
    (folder, recipe), run = stopped, stopped[0].hash
    latest, before, *_ = checkpoint.stored_points(folder.checkpoint_folder)
    if spoil in (truncated, changed):
        spoil(latest.file(folder.checkpoint_folder))
    else:
        state = load_checkpoint(folder.checkpoint_folder, latest, run)
        with monkeypatch.context() as patch:
            if spoil == "_versions":
                patch.setattr(checkpoint, spoil, lambda: {"torch": "99.0"})
            else:
                run = spoil
            save_checkpoint(folder.checkpoint_folder, latest, state, run)
    with caplog.at_level(logging.INFO, "covon_avalanche"):
        result = run_in_folder(RunFolder(tmp_path, recipe, "finetune", 0))
    assert says in caplog.text
    assert "the one before it is used" in caplog.text or "the checkpoint before it" in caplog.text
    assert f"epoch {before.epoch + 1}, batch {before.batch + 1}" in caplog.text
    assert reproducible(result) == whole("finetune")


@pytest.mark.parametrize(
    ("function", "error"), [("restore", AttributeError), ("_set_generator_states", IndexError)]
)
def test_without_any_the_run_restarts(function, error, stopped, tmp_path, caplog, monkeypatch):
    def fail(error):
        def failing(*_):
            raise error("no such thing")

        return failing

    folder, recipe = stopped
    with monkeypatch.context() as patch:  # says nothing about the checkpoint
        patch.setattr(resumable, function, fail(torch.OutOfMemoryError))
        with pytest.raises(torch.OutOfMemoryError):
            run_in_folder(RunFolder(tmp_path, recipe, "finetune", 0))
    assert checkpoint.stored_points(folder.checkpoint_folder)
    monkeypatch.setattr(resumable, function, fail(error))
    result = run_in_folder(RunFolder(tmp_path, recipe, "finetune", 0))
    assert f"does not fit this run: {error.__name__}: no such thing" in caplog.text
    assert reproducible(result) == whole("finetune")


def test_a_process_resumes_with_the_generator_of_its_own_gpu(monkeypatch):
    restored = []
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda device: f"state of {device}")
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda *both: restored.append(both))
    first, second = torch.device("cuda", 0), torch.device("cuda", 1)
    resumable._set_generator_states(resumable._generator_states(first), second)
    assert restored == [("state of cuda:0", second)]


def test_a_full_disk_leaves_the_older_checkpoints(tmp_path, monkeypatch):
    for point in (Point(1), Point(2)):
        save_checkpoint(tmp_path, point, {"a": torch.ones(3)}, "run")

    def part_of(path, content):
        with path.open("wb") as file:
            file.write(content[:50])
        raise OSError("no space left on device")

    monkeypatch.setattr(Path, "write_bytes", part_of)
    with pytest.raises(OSError, match="no space left"):
        save_checkpoint(tmp_path, Point(2), {"a": torch.zeros(3)}, "run")
    assert load_checkpoint(tmp_path, Point(2), "run")["a"].tolist() == [1, 1, 1]
    assert len(list(tmp_path.iterdir())) == 2


def test_two_points_between_and_two_inside_domains_are_kept(tmp_path):
    points = [Point(0, 1), Point(1), Point(2), Point(2, 1), Point(3), Point(3, 1), Point(3, 1, 7)]
    for point in [*points, Point(3, 2)]:
        save_checkpoint(tmp_path, point, {"a": torch.ones(3)}, "run")
    assert checkpoint.stored_points(tmp_path) == [Point(3, 2), Point(3, 1, 7), Point(3), Point(2)]
    assert len(list(tmp_path.iterdir())) == 4


def test_a_state_that_torch_cannot_store_is_an_error_and_leaves_no_file(tmp_path):
    tensor = torch.ones(3)
    state = {"a": tensor, "b": tensor.view(torch.int32)}
    with pytest.raises(StateError, match=r"the state cannot be stored: .*different types"):
        save_checkpoint(tmp_path, Point(1), state, "run")
    assert not list(tmp_path.iterdir())
