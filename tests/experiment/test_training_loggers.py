"""TensorBoard and Weights & Biases."""

import pytest
import wandb
from small_recipes import FEW, STRATEGIES, small_recipe

from covon_avalanche.experiment.run import run_in_folder, run_strategy
from covon_avalanche.experiment.run_options import RunOptions

RECIPE = small_recipe({"finetune": STRATEGIES["finetune"]}, epochs=1, train_mb_size=64, stream=FEW)
WANDB = RunOptions(wandb="project")


def test_tensorboard_files_are_below_the_run_and_change_nothing(tmp_path):
    plain = run_strategy(RECIPE, "finetune", 0)
    logged = run_in_folder(RECIPE, "finetune", 0, tmp_path, RunOptions(tensorboard=True))
    assert list(tmp_path.glob("finetune/seed-0-*/tensorboard/events.*"))
    assert logged.outcome() == plain.outcome()


def test_each_run_is_one_of_wandb(tmp_path, monkeypatch):
    """Logged offline; a run that is repeated in its folder keeps its identity there."""
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
    results = [run_in_folder(RECIPE, "finetune", seed, tmp_path, WANDB) for seed in (0, 1)]
    next(tmp_path.glob("finetune/seed-1-*/result.json")).unlink()
    run_in_folder(RECIPE, "finetune", 1, tmp_path, WANDB)
    wandb.finish()
    (first, values), (second, _), (again, _) = logged
    assert first != second == again
    assert values["Top1_Acc_Epoch/train_phase/train_stream/Task000"] == pytest.approx(
        results[0].epochs[-1].accuracy
    )
    assert list(tmp_path.glob(f"finetune/seed-0-*/wandb/offline-run-*-{first}"))
