"""Avalanche's evaluation plugin for runs, with loggers for TensorBoard, W&B and MLflow."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from avalanche.evaluation import PluginMetric
from avalanche.logging import BaseLogger, TensorboardLogger
from avalanche.training.plugins import EvaluationPlugin

from covon_avalanche.atomic_write import write_atomically
from covon_avalanche.experiment.data_settings import published
from covon_avalanche.experiment.registry.base import flat
from covon_avalanche.experiment.run_folder import RunFolder
from covon_avalanche.experiment.run_options import RunOptions


class Evaluator(EvaluationPlugin):
    """Without loggers, skips callbacks that no metric implements.

    Avalanche's plugin copies the experience in each of its eight callbacks per iteration, even if
    no metric implements the callback: 5 % of a training step of a small network, in a
    measurement that is not stored.
    """

    def _update_metrics_and_loggers(self, strategy: Any, callback: str) -> Any:
        base = getattr(PluginMetric, callback, None)
        methods = (getattr(metric, callback, base) for metric in self.metrics)
        if self.loggers or any(getattr(m, "__func__", m) is not base for m in methods):
            return super()._update_metrics_and_loggers(strategy, callback)
        return None


@contextmanager
def training_loggers(folder: RunFolder, options: RunOptions) -> Iterator[list[BaseLogger]]:
    """The loggers that the options ask for; TensorBoard's files and W&B's go below the folder."""
    title, settings = f"{folder.recipe.name}, {folder.title}", published(folder.settings)
    loggers: list[BaseLogger] = []
    with ExitStack() as stack:
        if options.tensorboard:
            # Names of event files have that of the host in them, which has no place in shared runs.
            nowhere = SimpleNamespace(gethostname=lambda: "localhost")
            with patch("tensorboard.summary.writer.event_file_writer.socket", nowhere):
                loggers.append(TensorboardLogger(folder.path / "tensorboard"))
        for start, project in ((_wandb, options.wandb), (_mlflow, options.mlflow)):
            if project is not None:
                log = start(stack, project, folder.path, title, settings)
                loggers.append(_Numbers(log))
        yield loggers


class _Numbers(BaseLogger):
    """Logs metrics that are numbers.

    :param log: called with a name, a value and a step.
    """

    def __init__(self, log: Callable[[str, float, int], object]) -> None:
        super().__init__()
        self.log = log

    def log_single_metric(self, name: str, value: Any, x_plot: int) -> None:
        if isinstance(value, (int, float)):
            self.log(name, value, x_plot)


def _mlflow(
    stack: ExitStack, experiment: str, folder: Path, title: str, settings: dict[str, Any]
) -> Callable[[str, float, int], object]:
    """A run of MLflow, where ``MLFLOW_TRACKING_URI`` says; a resumed run is one run."""
    import mlflow

    id_file = folder / "mlflow-id.txt"
    known = id_file.read_text(encoding="utf-8") if id_file.exists() else None
    retries = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2", **os.environ}  # the default: 4 minutes
    try:
        with patch.dict(os.environ, retries):
            mlflow.set_experiment(experiment)
            run = stack.enter_context(mlflow.start_run(run_id=known, run_name=title))
        if known is None:
            write_atomically(id_file, run.info.run_id)
            mlflow.log_params(flat(settings))
    except mlflow.MlflowException as error:
        raise ValueError(f"MLflow cannot log: {error}") from error
    return mlflow.log_metric


def _wandb(
    stack: ExitStack, project: str, folder: Path, title: str, settings: dict[str, Any]
) -> Callable[[str, float, int], object]:
    """A run of W&B; a resumed run is one run."""
    import wandb

    id_file = folder / "wandb-id.txt"
    if not id_file.exists():
        write_atomically(id_file, f"{secrets.token_hex(8)}\n")
    about: Any = {"id": id_file.read_text(encoding="utf-8").strip(), "resume": "allow"}
    try:
        wandb.init(project=project, name=title, config=settings, dir=str(folder), **about)
    except wandb.Error as error:
        raise ValueError(f"W&B cannot log: {error}") from error
    stack.push(lambda error, *_: wandb.finish(exit_code=int(error is not None)))
    return lambda name, value, step: wandb.log({name: value}, step=step)
