"""The evaluation plugin of runs gives what Avalanche's gives; TensorBoard and W&B."""

import io

import pytest
import torch
import wandb
from avalanche.evaluation.metrics import accuracy_metrics, loss_metrics
from avalanche.logging import TextLogger
from avalanche.training import Naive
from avalanche.training.plugins import EvaluationPlugin
from small_recipes import reproducible, run_strategy
from toys import QUIET, toy_benchmark, toy_model

from covon_avalanche.evaluation import DomainMetrics
from covon_avalanche.experiment.evaluator import Evaluator
from covon_avalanche.experiment.run import run_in_folder
from covon_avalanche.experiment.run_folder import RunFolder
from covon_avalanche.experiment.run_options import RunOptions

METRICS = dict(minibatch=True, epoch=True, experience=True, stream=True)


def trained(evaluator: EvaluationPlugin) -> dict:
    """The metrics of two domains."""
    torch.manual_seed(0)
    model, benchmark = toy_model(), toy_benchmark(2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options = {**QUIET, "criterion": torch.nn.CrossEntropyLoss(), "evaluator": evaluator}
    strategy = Naive(model=model, optimizer=optimizer, **options)
    for experience in benchmark.train_stream:
        strategy.train(experience)
        strategy.eval(benchmark.test_stream)
    return {k: str(v) for k, v in evaluator.get_all_metrics().items() if "Time" not in k}


def test_all_values_are_those_of_avalanches_plugin():
    found = []
    for kind, logs in ((EvaluationPlugin, True), (Evaluator, True), (Evaluator, False)):
        metrics = [accuracy_metrics(**METRICS), loss_metrics(**METRICS), DomainMetrics()]
        text = io.StringIO()
        evaluator = kind(*metrics, loggers=[TextLogger(text)] if logs else [])
        found.append((trained(evaluator), text.getvalue()))
    (values, text), logged, (unlogged, nothing) = found
    assert logged == (values, text)
    assert (unlogged, nothing) == (values, "")
    assert len(values) > 10
    assert text


def test_callbacks_that_no_metric_has_are_skipped(monkeypatch):
    done = set()
    whole = EvaluationPlugin._update_metrics_and_loggers

    def noted(self, strategy, callback):
        done.add(callback)
        return whole(self, strategy, callback)

    monkeypatch.setattr(EvaluationPlugin, "_update_metrics_and_loggers", noted)
    trained(Evaluator(DomainMetrics(), loggers=[]))
    assert "after_eval_iteration" in done
    assert not done & {"before_forward", "after_training_iteration"}


def test_tensorboard_files_are_below_the_run_and_change_nothing(recipe, tmp_path):
    plain = run_strategy(recipe, "finetune", 0)
    logged = run_in_folder(RunFolder(tmp_path, recipe, "finetune", 0), RunOptions(tensorboard=True))
    assert list(tmp_path.glob("finetune/seed-0-*/tensorboard/events.*"))
    assert reproducible(logged) == reproducible(plain)


def test_each_run_is_one_of_wandb(recipe, tmp_path, monkeypatch):
    """Logged offline; a run that is repeated in its folder keeps its identity there."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    logged, init = [], wandb.init

    def spied_init(**settings):
        run = init(**settings)
        logged.append((run.id, values := {}))
        monkeypatch.setattr(wandb, "log", lambda new, step: values.update(new))
        return run

    monkeypatch.setattr(wandb, "init", spied_init)
    for seed in (0, 1, 1):
        folder = RunFolder(tmp_path, recipe, "finetune", seed)
        result = run_in_folder(folder, RunOptions(wandb="project"))
        next(tmp_path.glob(f"finetune/seed-{seed}-*/result.json")).unlink()
    (first, _), (second, _), (again, values) = logged
    assert first != second == again
    accuracy = values["Top1_Acc_Epoch/train_phase/train_stream/Task000"]
    assert accuracy == pytest.approx(result.epochs[-1].accuracy)
    assert list(tmp_path.glob(f"finetune/seed-0-*/wandb/offline-run-*-{first}"))
