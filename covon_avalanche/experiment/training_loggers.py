"""Avalanche's loggers for TensorBoard and Weights & Biases, on request."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from avalanche.evaluation.metrics import accuracy_metrics, loss_metrics
from avalanche.logging import BaseLogger, TensorboardLogger, WandBLogger

from covon_avalanche.atomic_write import write_atomically
from covon_avalanche.experiment.run_options import RunOptions


@contextmanager
def training_loggers(
    folder: Path, options: RunOptions, title: str, settings: dict[str, Any]
) -> Iterator[tuple[list[BaseLogger], list[Any]]]:
    """The loggers that the options ask for, and the metrics that they log.

    :param folder: of the run; TensorBoard's files and W&B's go below.
    :param title: of the run in W&B, where a resumed run is one run.
    """
    loggers: list[BaseLogger] = []
    with ExitStack() as at_end:
        if options.tensorboard:
            loggers.append(TensorboardLogger(folder / "tensorboard"))
        if options.wandb is not None:
            logger = _wandb_logger(options.wandb, folder, title, settings)
            loggers.append(at_end.enter_context(logger))
        metrics = [accuracy_metrics(epoch=True, experience=True), loss_metrics(epoch=True)]
        yield loggers, metrics if loggers else []


@contextmanager
def _wandb_logger(
    project: str, folder: Path, title: str, settings: dict[str, Any]
) -> Iterator[BaseLogger]:
    import wandb

    id_file = folder / "wandb-id.txt"
    if not id_file.exists():
        write_atomically(id_file, f"{secrets.token_hex(8)}\n")
    run_id = id_file.read_text(encoding="utf-8").strip()
    params = {"dir": str(folder), "id": run_id, "resume": "allow"}
    logger = _Wandb(project_name=project, run_name=title, config=settings, params=params)
    try:
        yield logger
    except BaseException:
        wandb.finish(exit_code=1)
        raise
    wandb.finish()


class _Wandb(WandBLogger):
    """Avalanche's logger without its charts, which newer W&B no longer has."""

    def after_training_exp(self, strategy: Any, metric_values: Any, **kwargs: Any) -> None:
        self.exp_count = strategy.clock.train_exp_counter  # also of a resumed run
        super().after_training_exp(strategy, metric_values, **kwargs)

    def log_single_metric(self, name: str, value: Any, x_plot: int) -> None:
        self.step = x_plot
        if isinstance(value, (int, float)):
            self.wandb.log({name: value}, step=x_plot)
