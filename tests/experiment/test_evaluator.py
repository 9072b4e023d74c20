"""The evaluation plugin of runs gives what Avalanche's gives; TensorBoard and W&B."""

import io

import pytest
import torch
import wandb
from avalanche.evaluation.metrics import accuracy_metrics, loss_metrics
from avalanche.logging import TextLogger
from avalanche.training import Naive
from avalanche.training.plugins import EvaluationPlugin
from small_recipes import run_strategy
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
    assert logged.outcome() == plain.outcome()


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
        result = run_in_folder(
            RunFolder(tmp_path, recipe, "finetune", seed), RunOptions(wandb="project")
        )
        next(tmp_path.glob(f"finetune/seed-{seed}-*/result.json")).unlink()
    (first, _), (second, _), (again, values) = logged
    assert first != second == again
    accuracy = values["Top1_Acc_Epoch/train_phase/train_stream/Task000"]
    assert accuracy == pytest.approx(result.epochs[-1].accuracy)
    assert list(tmp_path.glob(f"finetune/seed-0-*/wandb/offline-run-*-{first}"))


def test_each_run_is_one_of_mlflow(recipe, tmp_path, monkeypatch):
    """Logged to local files; a run that is repeated in its folder keeps its identity there."""
    mlflow = pytest.importorskip("mlflow", reason="MLflow is not installed")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # newer versions prefer a database
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "mlruns").as_uri())
    monkeypatch.chdir(tmp_path)
    for seed in (0, 1, 1):
        result = run_in_folder(
            RunFolder(tmp_path, recipe, "finetune", seed), RunOptions(mlflow="mine")
        )
        next(tmp_path.glob(f"finetune/seed-{seed}-*/result.json")).unlink()
    logged = mlflow.search_runs(experiment_names=["mine"])
    assert sorted(logged["tags.mlflow.runName"]) == [
        f"{recipe.name}, finetune, seed {n}" for n in (0, 1)
    ]
    assert {*logged["status"]} == {"FINISHED"}
    last = logged[logged["tags.mlflow.runName"].str.endswith("1")].iloc[0]
    accuracy = last["metrics.Top1_Acc_Epoch/train_phase/train_stream/Task000"]
    assert accuracy == pytest.approx(result.epochs[-1].accuracy)
    assert last["params.strategy.kind"] == "finetune"


@pytest.mark.parametrize("uri", ["nowhere://x", "http://127.0.0.1:9"])
def test_a_tracking_server_that_does_not_exist_is_an_error_before_training(
    recipe, tmp_path, monkeypatch, uri
):
    pytest.importorskip("mlflow", reason="MLflow is not installed")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    slept = []
    monkeypatch.setattr("urllib3.util.retry.time.sleep", slept.append)
    folder = RunFolder(tmp_path, recipe, "finetune", 0)
    with pytest.raises(ValueError, match=f"MLflow cannot log: .*{uri}"):
        run_in_folder(folder, RunOptions(mlflow="mine"))
    assert not (folder.path / "data.json").exists()
    assert sum(slept) < 10


def test_a_run_of_mlflow_ends_if_its_settings_cannot_be_logged(recipe, tmp_path, monkeypatch):
    """Otherwise the next run of the process could not start one."""
    mlflow = pytest.importorskip("mlflow", reason="MLflow is not installed")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "mlruns").as_uri())

    def refuse(_):
        raise mlflow.MlflowException("too long")

    monkeypatch.setattr(mlflow, "log_params", refuse)
    with pytest.raises(ValueError, match="MLflow cannot log: too long"):
        run_in_folder(RunFolder(tmp_path, recipe, "finetune", 0), RunOptions(mlflow="mine"))
    assert mlflow.active_run() is None
    assert [*mlflow.search_runs(experiment_names=["mine"])["status"]] == ["FAILED"]
