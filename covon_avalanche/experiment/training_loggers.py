"""Avalanche's own loggers, on request."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from avalanche.evaluation.metrics import accuracy_metrics, loss_metrics
from avalanche.logging import BaseLogger, TensorboardLogger, WandBLogger


def training_loggers(
    folder: Path, *, tensorboard: bool, wandb: str | None, name: str, settings: dict[str, Any]
) -> tuple[list[BaseLogger], list[Any]]:
    """Loggers of a run and the metrics that they show.

    :param folder: of the run; TensorBoard's files go below.
    :param wandb: a project of W&B.
    :raises ValueError: if W&B is not installed.
    """
    loggers: list[BaseLogger] = []
    if tensorboard:
        loggers.append(TensorboardLogger(folder / "tensorboard"))
    if wandb is not None:
        try:
            import wandb as _  # noqa: F401
        except ImportError:
            raise ValueError("--wandb needs wandb: pip install wandb") from None
        parameters = {"dir": str(folder)}
        loggers.append(
            WandBLogger(project_name=wandb, run_name=name, config=settings, params=parameters)
        )
    if not loggers:
        return [], []
    metrics = [accuracy_metrics(epoch=True, experience=True), loss_metrics(epoch=True)]
    return loggers, metrics
