"""Avalanche's evaluation plugin for runs, with loggers for TensorBoard and W&B."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from avalanche.evaluation import PluginMetric
from avalanche.logging import BaseLogger, TensorboardLogger
from avalanche.training.plugins import EvaluationPlugin

from covon_avalanche.atomic_write import write_atomically
from covon_avalanche.experiment.data_settings import published
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
    loggers: list[BaseLogger] = []
    with ExitStack() as stack:
        if options.tensorboard:
            # Names of event files have that of the host in them, which has no place in shared runs.
            nowhere = SimpleNamespace(gethostname=lambda: "localhost")
            with patch("tensorboard.summary.writer.event_file_writer.socket", nowhere):
                loggers.append(TensorboardLogger(folder.path / "tensorboard"))
        if options.wandb is not None:
            import wandb

            id_file = folder.path / "wandb-id.txt"
            if not id_file.exists():
                write_atomically(id_file, f"{secrets.token_hex(8)}\n")
            wandb.init(
                project=options.wandb,
                name=f"{folder.recipe.name}, {folder.title}",
                config=published(folder.settings),
                dir=str(folder.path),
                id=id_file.read_text(encoding="utf-8").strip(),  # a resumed run is one run
                resume="allow",
            )
            stack.push(lambda error, *_: wandb.finish(exit_code=int(error is not None)))
            loggers.append(_WandB())
        yield loggers


class _WandB(BaseLogger):
    """Logs metrics that are numbers to W&B; Avalanche's logger needs an older version of it."""

    def log_single_metric(self, name: str, value: Any, x_plot: int) -> None:
        import wandb

        if isinstance(value, (int, float)):
            wandb.log({name: value}, step=x_plot)
