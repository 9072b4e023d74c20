"""Precision, workers, posterior samples, loggers, epochs: what a recipe or command may ask for."""

import gc
import itertools
import sys
import weakref

import pytest
import torch
import wandb
from miniature import pacs
from small_recipes import STRATEGIES, small_recipe

from covon_avalanche.experiment import machine, run
from covon_avalanche.experiment.build import build_benchmark, build_model
from covon_avalanche.experiment.recipe import Recipe
from covon_avalanche.experiment.resumable import Checkpoints
from covon_avalanche.experiment.run import run_in_folder, run_strategy
from covon_avalanche.streams.transforms import IMAGENET


def recipe_of(name="covon", **changes) -> Recipe:
    return small_recipe({name: STRATEGIES[name]}, **({"epochs": 2, "train_mb_size": 64} | changes))


def images(**changes) -> Recipe:
    """Four batches of randomly cropped images in each of two domains."""
    data = {
        "epochs": 2,
        "train_mb_size": 8,
        "stream": {"name": "PACS", "domains": ["sketch", "photo"], "image_size": 32},
        "model": {"backbone": "squeezenet", "weights": ""},
        **changes,
    }
    return small_recipe({"finetune": {"kind": "finetune", "lr": 1e-4}}, **data)


def test_memory_and_name_are_those_of_the_device(monkeypatch):
    def of_device(device):
        return int(device.removeprefix("cuda:"))

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    for name in ("get_device_name", "max_memory_allocated", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, of_device)
    machine.reset_peak_memory("cuda:7")
    assert machine.peak_memory("cuda:7") == 7
    assert machine.machine("cuda:7")["accelerator"] == 7
    assert "accelerator" not in machine.machine("cpu")


def test_a_run_does_not_find_the_models_of_those_before_it(monkeypatch):
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
            run_strategy(recipe_of(epochs=1), "covon", seed)
    finally:
        gc.enable()
    assert alive == [0, 0, 0]


def test_bfloat16_is_autocast_with_float32_weights():
    exact = run_strategy(recipe_of(), "covon", 0)
    rounded = run_strategy(recipe_of(precision="bfloat16"), "covon", 0)
    assert exact.outcome() != rounded.outcome()
    assert rounded.average_accuracy == pytest.approx(exact.average_accuracy, abs=0.1)
    assert rounded.epochs[0].loss == pytest.approx(exact.epochs[0].loss, rel=0.05)
    dtypes = set()

    def look(module, inputs, output):
        if isinstance(module, torch.nn.Linear):
            dtypes.add((output.dtype, module.weight.dtype))

    with torch.nn.modules.module.register_module_forward_hook(look):
        run_strategy(recipe_of(precision="bfloat16", epochs=1), "covon", 0)
    assert dtypes == {(torch.bfloat16, torch.float32)}


def test_posterior_samples_are_an_evaluation_beside_that_of_the_mean():
    plain = run_strategy(recipe_of(), "covon", 0)
    sampled = run_strategy(recipe_of(posterior_samples=8), "covon", 0)
    assert plain.sampled == {}
    assert sampled.sampled.keys() == {"average_accuracy", "nll", "brier", "ece"}
    assert sampled.sampled["nll"] != sampled.calibration["nll"]
    settled = ("accuracy", "calibration", "epochs", "diagnostics")
    assert all(plain.outcome()[key] == sampled.outcome()[key] for key in settled)
    assert run_strategy(recipe_of("ewc-star", posterior_samples=8), "ewc-star", 0).sampled == {}


def test_epochs_are_told_and_stored():
    told = []
    result = run_strategy(recipe_of(), "covon", 0, watch=lambda *event: told.append(event))
    assert [(e.experience, e.epoch) for e in result.epochs] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert [epoch for epoch, _ in told] == result.epochs
    assert {epochs for _, epochs in told} == {2}
    assert all(e.images == 1437 and e.seconds > 0 for e in result.epochs)
    assert result.epochs[0].loss > result.epochs[1].loss
    assert sum(e.seconds for e in result.epochs) <= sum(result.train_seconds)


def test_the_first_epoch_by_hand():
    """One batch an epoch: loss and accuracy of the initial network."""
    recipe = recipe_of("finetune", train_mb_size=1437, epochs=1)
    result = run_strategy(recipe, "finetune", 0)
    benchmark = build_benchmark(recipe, seed=0)
    torch.manual_seed(0)
    model = build_model(recipe.model, benchmark)
    dataset = benchmark.train_stream[0].dataset
    rows = [dataset[i] for i in range(len(dataset))]
    x, y = torch.stack([row[0] for row in rows]), torch.tensor([row[1] for row in rows])
    output = model(x)
    assert result.epochs[0].loss == pytest.approx(
        torch.nn.functional.cross_entropy(output, y).item(), rel=1e-5
    )
    assert result.epochs[0].accuracy == pytest.approx((output.argmax(1) == y).double().mean())


def test_tensorboard_files_are_below_the_run(tmp_path):
    plain = run_strategy(recipe_of(epochs=1), "covon", 0)
    logged = run_in_folder(recipe_of(epochs=1), "covon", 0, tmp_path, tensorboard=True)
    assert list(tmp_path.glob("covon/seed-0-*/tensorboard/events.*"))
    assert logged.outcome() == plain.outcome()


def test_wandb_is_asked_for_where_it_is_missing(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ValueError, match="--wandb needs wandb"):
        run_in_folder(recipe_of(), "covon", 0, tmp_path, wandb="mine")


def test_each_run_is_one_of_wandb(tmp_path, monkeypatch):
    """Logged offline; a run that is done again in its folder keeps its name there."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    logged = []
    init = wandb.init

    def spied_init(**settings):
        run = init(**settings)
        logged.append((run.id, values := {}))
        monkeypatch.setattr(wandb, "log", lambda new, step: values.update(new))
        return run

    monkeypatch.setattr(wandb, "init", spied_init)
    recipe = recipe_of("finetune", epochs=1)
    results = [run_in_folder(recipe, "finetune", seed, tmp_path, wandb="p") for seed in (0, 1)]
    next(tmp_path.glob("finetune/seed-1-*/result.json")).unlink()
    run_in_folder(recipe, "finetune", 1, tmp_path, wandb="p")
    wandb.finish()
    (first, values), (second, _), (again, _) = logged
    assert first != second == again
    assert values["Top1_Acc_Epoch/train_phase/train_stream/Task000"] == pytest.approx(
        results[0].epochs[-1].accuracy
    )
    assert list(tmp_path.glob(f"finetune/seed-0-*/wandb/offline-run-*-{first}"))


@pytest.mark.parametrize("workers", [0, 1])
def test_a_stopped_run_on_augmented_images_goes_on_as_if_it_had_not(workers, tmp_path, monkeypatch):
    pacs(tmp_path / "PACS")
    recipe = images(workers=workers)
    whole = run_strategy(recipe, "finetune", 0, dataset_root=tmp_path)
    store, count = Checkpoints._store, itertools.count(1)

    class Killed(BaseException):
        pass

    def counted(self):
        stored = store(self)
        if next(count) in (3, 9):  # inside an epoch, twice
            raise Killed
        return stored

    monkeypatch.setattr(Checkpoints, "_store", counted)
    options = dict(dataset_root=tmp_path, seconds=0, share=1)
    for _ in range(2):
        with pytest.raises(Killed):
            run_in_folder(recipe, "finetune", 0, tmp_path / "runs", **options)
    result = run_in_folder(recipe, "finetune", 0, tmp_path / "runs", **options)
    assert result.continued == 2
    assert result.outcome() == whole.outcome()


def test_cached_images_lie_below_the_data(tmp_path):
    pacs(tmp_path / "PACS")
    stream = {"name": "PACS", "domains": ["photo"], "image_size": 32, "cache_size": 36}
    cached = images(stream=stream, epochs=1)
    result = run_strategy(cached, "finetune", 0, dataset_root=tmp_path)
    assert list((tmp_path / "cache").iterdir())
    assert result.counts == [14]


def test_images_are_normalised_as_the_backbone_expects(tmp_path):
    pytest.importorskip("timm")
    pacs(tmp_path / "PACS")
    pixels = {}
    for name in ("squeezenet", "vit-b16-in1k"):
        recipe = images(model={"backbone": name, "weights": ""})
        benchmark = build_benchmark(recipe, seed=0, dataset_root=tmp_path)
        pixels[name] = benchmark.test_stream[0].dataset[0][0]
    mean, std = (torch.tensor(v)[:, None, None] for v in IMAGENET)
    bare = pixels["squeezenet"] * std + mean
    torch.testing.assert_close(pixels["vit-b16-in1k"], (bare - 0.5) / 0.5)
