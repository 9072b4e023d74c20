"""The evaluation plugin of runs gives what Avalanche's gives; TensorBoard and W&B."""

import io

import pytest
import torch
import wandb
from avalanche.evaluation.metrics import accuracy_metrics, forgetting_metrics, loss_metrics
from avalanche.logging import TextLogger
from avalanche.training import Naive
from avalanche.training.plugins import EvaluationPlugin
from small_recipes import FEW, STRATEGIES, small_recipe
from toys import QUIET, toy_benchmark, toy_model

from covon_avalanche.evaluation import DomainMetrics
from covon_avalanche.experiment.evaluator import Evaluator
from covon_avalanche.experiment.run import run_in_folder, run_strategy
from covon_avalanche.experiment.run_options import RunOptions

RECIPE = small_recipe({"finetune": STRATEGIES["finetune"]}, epochs=1, train_mb_size=64, stream=FEW)
WANDB = RunOptions(wandb="project")


def naive(evaluator: EvaluationPlugin) -> Naive:
    model = toy_model()
    return Naive(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        criterion=torch.nn.CrossEntropyLoss(),
        **{**QUIET, "evaluator": evaluator},
    )


def values(kind, loggers) -> dict:
    torch.manual_seed(0)
    levels = {"minibatch": True, "epoch": True, "experience": True, "stream": True}
    evaluator = kind(
        accuracy_metrics(**levels),
        loss_metrics(**levels),
        forgetting_metrics(experience=True, stream=True),
        DomainMetrics(),
        loggers=loggers,
    )
    strategy = naive(evaluator)
    benchmark = toy_benchmark(2)
    for experience in benchmark.train_stream:
        strategy.train(experience)
        strategy.eval(benchmark.test_stream)
    return {k: v for k, v in evaluator.get_all_metrics().items() if "Time" not in k}


@pytest.mark.parametrize("logged", [False, True])
def test_all_values_are_those_of_avalanches_plugin(logged):
    texts = [io.StringIO(), io.StringIO()]
    loggers = [[TextLogger(text)] if logged else [] for text in texts]
    found = [
        values(kind, own) for kind, own in zip((Evaluator, EvaluationPlugin), loggers, strict=True)
    ]
    assert found[0].keys() == found[1].keys()
    assert len(found[0]) > 10
    assert all(str(found[0][key]) == str(found[1][key]) for key in found[0])
    assert texts[0].getvalue() == texts[1].getvalue()
    assert bool(texts[0].getvalue()) == logged


def test_callbacks_that_no_metric_has_are_skipped(monkeypatch):
    done = []
    whole = EvaluationPlugin._update_metrics_and_loggers

    def noted(self, strategy, callback):
        done.append(callback)
        return whole(self, strategy, callback)

    monkeypatch.setattr(EvaluationPlugin, "_update_metrics_and_loggers", noted)
    evaluator = Evaluator(DomainMetrics(), loggers=[])
    strategy = naive(evaluator)
    benchmark = toy_benchmark(1)
    strategy.train(benchmark.train_stream[0])
    assert not [callback for callback in done if callback.endswith("iteration")]
    strategy.eval(benchmark.test_stream)
    assert "after_eval_iteration" in done
    assert "before_forward" not in done


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
