"""Avalanche's own loggers, on request."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from avalanche.evaluation.metrics import accuracy_metrics, loss_metrics
from avalanche.logging import BaseLogger, TensorboardLogger, WandBLogger

from covon_avalanche.atomic_write import write_atomically


@contextmanager
def training_loggers(
    folder: Path, *, tensorboard: bool, wandb: str | None, name: str, settings: dict[str, Any]
) -> Iterator[tuple[list[BaseLogger], list[Any]]]:
    """Loggers of a run and the metrics that they show; W&B's run ends as this one does.

    :param folder: of the run; TensorBoard's files and W&B's go below.
    :param wandb: a project of W&B, in which a run that goes on is one run.
    :raises ValueError: if W&B is not installed.
    """
    metrics = [accuracy_metrics(epoch=True, experience=True), loss_metrics(epoch=True)]
    loggers: list[BaseLogger] = []
    with ExitStack() as at_end:
        if tensorboard:
            loggers.append(TensorboardLogger(folder / "tensorboard"))
        if wandb is not None:
            run = {"dir": str(folder), "id": _wandb_id(folder), "resume": "allow"}
            loggers.append(at_end.enter_context(_wandb_logger(wandb, name, settings, run)))
        yield loggers, metrics if loggers else []


@contextmanager
def _wandb_logger(
    project: str, name: str, settings: dict[str, Any], run: dict[str, Any]
) -> Iterator[BaseLogger]:
    try:
        import wandb
    except ImportError:
        raise ValueError("--wandb needs wandb: pip install wandb") from None
    logger = _Wandb(project_name=project, run_name=name, config=settings, params=run)
    try:
        yield logger
    except BaseException:
        wandb.finish(exit_code=1)
        raise
    wandb.finish()


class _Wandb(WandBLogger):
    """Avalanche's logger without its charts, which newer W&B no longer has."""

    def after_training_exp(self, strategy: Any, metric_values: Any, **kwargs: Any) -> None:
        self.exp_count = strategy.clock.train_exp_counter  # also of a run that goes on
        super().after_training_exp(strategy, metric_values, **kwargs)

    def log_single_metric(self, name: str, value: Any, x_plot: int) -> None:
        self.step = x_plot
        if isinstance(value, (int, float)):
            self.wandb.log({name: value}, step=x_plot)


def _wandb_id(folder: Path) -> str:
    """W&B's name of a run, the same each time the run goes on."""
    file = folder / "wandb-id.txt"
    if not file.exists():
        write_atomically(file, f"{secrets.token_hex(8)}\n")
    return file.read_text(encoding="utf-8").strip()
