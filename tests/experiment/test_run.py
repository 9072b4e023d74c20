"""Single runs: learning, reproducibility, and what a recipe may ask for."""

import gc
import json
import weakref

import numpy as np
import pytest
import torch
from avalanche.training.supervised import Naive
from small_recipes import CLOSED_FORM, FEW, STRATEGIES, run_strategy, short_recipe, small_recipe
from toy_optimizers import DEVICES
from toys import columns

from covon_avalanche.experiment import run
from covon_avalanche.experiment.build import build_benchmark, build_model
from covon_avalanche.experiment.registry import KINDS
from covon_avalanche.experiment.registry.prompting import Prompting
from covon_avalanche.experiment.run import run_in_folder
from covon_avalanche.experiment.run_folder import RunFolder


def test_there_is_a_small_recipe_of_every_kind():
    on_images = {kind for kind, own in KINDS.items() if issubclass(own, Prompting)}
    assert {settings["kind"] for settings in STRATEGIES.values()} == KINDS.keys() - on_images


@pytest.mark.parametrize("name", ["finetune", "joint", "ncm"])
def test_a_folder_is_told_the_accuracy_after_each_domain_and_may_end_the_run(name, tmp_path):
    class Watched(RunFolder):
        evaluated_on = "valid"

        def on_domain(self, domains, accuracy):
            seen.append((domains, accuracy))
            if may_end:
                raise StopAsyncIteration

        def gives_up(self, error):
            return "pruned" if isinstance(error, StopAsyncIteration) else None

    seen, may_end = [], False
    stream = {"name": "PermutedDigits", "n_experiences": 2, "validation_size": 300}
    recipe = short_recipe(name, stream=stream, epochs=1, train_mb_size=32)
    result = run_in_folder(Watched(tmp_path / "whole", recipe, name, 0))
    assert result.counts == [300, 300]
    curve = [(t, mean) for t, mean in enumerate(result.matrix.curve(), 1) if mean is not None]
    assert seen == curve
    assert [domains for domains, _ in seen] == ([2] if name == "joint" else [1, 2])
    may_end, ended = True, Watched(tmp_path / "ended", recipe, name, 0)
    with pytest.raises(StopAsyncIteration):
        run_in_folder(ended)
    assert (ended.status().given_up, ended.state()[0]) == ("pruned", "pruned")
    assert len(seen) == len(curve) + 1


IMAGE = 64 * 4 + 2 * 8
"""Bytes of an example: 64 floats and two integers."""
# Beside the examples, weights 1; AdamW's moments 2; SGD's momentum 1; GEM's and A-GEM's reference
# gradient 1; VCL's 8 and two posteriors of 2.
STORED = {
    "replay": (3, IMAGE),
    "der": (3, IMAGE + 10 * 4),  # ten logits, too
    "er-ace": (3, IMAGE),
    "gem": (3, IMAGE),
    "agem": (2, IMAGE),
    # the old model 1, and a mean of 32 features for each of ten classes
    "icarl": (3 + 1 + 320 / 2410, IMAGE),
    "td-vcl": (9 + 4, IMAGE),
}
BUFFER_SIZES = ("mem_size", "patterns_per_exp", "replay_examples")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", STRATEGIES)
def test_every_strategy_learns_and_its_result_is_complete(name, device):
    stream = FEW | {"validation_size": 718}
    recipe = short_recipe(name, stream=stream, epochs=1, train_mb_size=32, device=device)
    result = run_strategy(recipe, name, 0)
    joint = name == "joint"
    assert max(result.accuracy[-1]) > 0.25  # chance is 0.1
    assert [row is not None for row in result.accuracy] == [not joint, True]
    trained = [] if name in CLOSED_FORM else [719 * (1 + joint)]
    assert [epoch.images for epoch in result.epochs[:1]] == trained
    assert len(result.accuracy) == 2
    assert (result.bwt is None) == joint
    assert result.counts == [360, 360]
    assert all(seconds > 0 for seconds in result.train_seconds)
    if name in STORED:
        others, each = STORED[name]
        settings = recipe.strategies[name].model_dump()
        examples = next(settings[key] for key in BUFFER_SIZES if key in settings)
        stored = examples * each / (4 * result.parameters)
        assert result.memory_ratio == pytest.approx(others + stored, abs=1e-3)
    mean = np.mean([*result.class_accuracy.values()])
    assert mean == pytest.approx(result.weighted_accuracy, abs=0.05)
    assert result.calibration.keys() == {"nll", "brier", "ece"}
    assert all(0 <= d["hess_at_start"] <= 1 for d in result.diagnostics)
    assert len(result.diagnostics) == 2 * (recipe.strategies[name].kind == "covon")


def test_results_are_plain_json_with_everything_that_determines_them(tmp_path):
    recipe = short_recipe("covon")
    result = run_in_folder(RunFolder(tmp_path, recipe, "covon", 1))
    folder = RunFolder(tmp_path, recipe, "covon", 1)
    assert folder.result() == result
    data = json.loads(folder.result_file.read_text())
    assert data["schema_version"] == 2
    assert data["settings"]["strategy"]["kind"] == "covon"
    assert data["peak_memory"] > 50e6
    assert {"torch", "avalanche-lib", "covon_avalanche", "python"} <= data["versions"].keys()
    assert data["machine"]["threads"] == 1
    assert {p.name for p in folder.path.iterdir() if p.is_file()} == {
        *(".lock", "data.json", "log.txt", "result.json", "run.json")
    }
    assert not list(folder.path.rglob("*.pt"))


def test_validation_images_are_always_held_out_and_test_images_not_looked_at():
    stream = {**FEW, "permute_first": True}
    part = short_recipe("finetune", stream=stream)
    whole = short_recipe("finetune", stream={**stream, "validation_size": 0})
    assert run_strategy(whole, "finetune", 0).epochs[0].images == 1437
    result = run_strategy(part, "finetune", 0)
    assert result.epochs[0].images == 200
    assert result.counts == [360, 360]
    result = run_strategy(part, "finetune", 0, stream="valid")
    assert (result.stream, result.counts) == ("valid", [1237, 1237])
    with pytest.raises(ValueError, match=r"no validation images: stream\.validation_size is 0"):
        run_strategy(whole, "finetune", 0, stream="valid")


def test_a_run_does_not_keep_the_models_of_those_before_it(monkeypatch):
    models, alive = [], []

    def spied(*arguments):
        alive.append(sum(model() is not None for model in models))
        model = build_model(*arguments)
        models.append(weakref.ref(model))
        return model

    monkeypatch.setattr(run, "build_model", spied)
    gc.disable()  # as if it did not come by chance
    try:
        for seed in range(3):
            run_strategy(short_recipe("covon", epochs=1), "covon", seed)
    finally:
        gc.enable()
    assert alive == [0, 0, 0]


def test_the_first_epoch_by_hand():
    """One batch an epoch: loss and accuracy of the initial network."""
    recipe = short_recipe("finetune", train_mb_size=200)
    result = run_strategy(recipe, "finetune", 0)
    assert [(e.experience, e.epoch) for e in result.epochs] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert all(e.images == 200 and e.seconds > 0 for e in result.epochs)
    assert sum(e.seconds for e in result.epochs) <= sum(result.train_seconds)
    benchmark = build_benchmark(recipe, seed=0)
    torch.manual_seed(0)
    model = build_model(recipe.model, benchmark)
    x, y = columns(benchmark.train_stream[0])
    output = model(x)
    loss = torch.nn.functional.cross_entropy(output, y)
    assert result.epochs[0].loss == pytest.approx(loss.item(), rel=1e-5)
    assert result.epochs[0].accuracy == pytest.approx((output.argmax(1) == y).double().mean())


def test_a_last_step_that_diverges_is_no_result():
    stream = FEW | {"n_experiences": 1}
    own = {"finetune": dict(kind="finetune", lr=1e30)}
    recipe = small_recipe(own, epochs=1, train_mb_size=200, stream=stream)
    with pytest.raises(FloatingPointError, match="predictions after domain 1 are NaN"):
        run_strategy(recipe, "finetune", 0)


class OwnLoop(Naive):
    """Trains without the callbacks of batches."""

    def training_epoch(self, **kwargs):
        for x, y, _ in self.dataloader:
            self.optimizer.zero_grad()
            self._criterion(self.model(x), y).backward()
            self.optimizer.step()


def test_no_loss_is_made_up_where_a_strategy_does_not_tell_its_batches():
    own = {**STRATEGIES["custom"], "implementation": f"{__name__}:OwnLoop"}
    result = run_strategy(small_recipe({"own": own}, stream=FEW, epochs=2), "own", 0)
    assert result.epochs == []
    assert result.average_accuracy > 0.2
    assert all(seconds > 0 for seconds in result.train_seconds)


class TrainsNothing(Naive):
    def train(self, *args, **kwargs):
        return {}


class TrainsTwice(Naive):
    def train(self, *args, **kwargs):
        super().train(*args, **kwargs)
        return super().train(*args, **kwargs)


class EvaluatesEachDomain(Naive):
    def eval(self, stream, **kwargs):
        return {k: v for each in stream for k, v in super(Naive, self).eval(each, **kwargs).items()}


@pytest.mark.parametrize("cls", [TrainsNothing, TrainsTwice, EvaluatesEachDomain])
def test_a_strategy_without_one_row_of_accuracies_for_each_domain_is_refused(cls):
    own = {**STRATEGIES["custom"], "implementation": f"{__name__}:{cls.__name__}"}
    recipe = small_recipe({"own": own}, stream=FEW, epochs=1)
    rows = 2 if cls is TrainsTwice else 0
    with pytest.raises(ValueError, match=f"own must train on each .* 1 there are {rows} rows of"):
        run_strategy(recipe, "own", 0)


def test_a_device_that_this_machine_lacks_is_an_error_before_the_data_are_read(monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    monkeypatch.setattr(run, "build_benchmark", None)
    with pytest.raises(ValueError, match='device = "cuda": this machine has 0 cuda devices'):
        run_strategy(short_recipe("covon", device="cuda"), "covon", 0)


def test_the_status_of_a_run_has_its_batches_and_the_accuracy_so_far(tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(run, "_WRITE_EVERY", -1.0)
    monkeypatch.setattr(RunFolder, "write_status", lambda folder, status: seen.append(status))
    run_in_folder(RunFolder(tmp_path, short_recipe("finetune"), "finetune", 0))
    assert len(seen) == 4 * (4 + 1) + 2  # 2 epochs of 4 batches in 2 domains of 200 images
    assert (seen[0].text, seen[0].share) == ("domain 1/2, epoch 1/2, batch 1/4", 1 / 16)
    assert seen[4].text.startswith("domain 1/2, epoch 1/2, loss ")
    assert seen[13].text.startswith("domain 2/2, epoch 1/2, batch 3/4, loss ")
    assert (seen[13].share, seen[-1].share) == (11 / 16, 1.0)
    assert [status.share for status in seen] == sorted(status.share for status in seen)
    assert seen[0].accuracy is None
    assert seen[-1].accuracy > 0.25
