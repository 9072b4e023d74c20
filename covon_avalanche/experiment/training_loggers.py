"""Avalanche's own loggers, on request."""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Any

from avalanche.evaluation.metrics import accuracy_metrics, loss_metrics
from avalanche.logging import BaseLogger, TensorboardLogger, WandBLogger

from covon_avalanche.atomic import write_atomically


def training_loggers(
    folder: Path, *, tensorboard: bool, wandb: str | None, name: str, settings: dict[str, Any]
) -> tuple[list[BaseLogger], list[Any]]:
    """Loggers of a run and the metrics that they show.

    :param folder: of the run; TensorBoard's files and W&B's go below.
    :param wandb: a project of W&B, in which a run that goes on is one run.
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
        run = {"dir": str(folder), "id": _wandb_id(folder), "resume": "allow", "reinit": True}
        loggers.append(_Wandb(project_name=wandb, run_name=name, config=settings, params=run))
    if not loggers:
        return [], []
    metrics = [accuracy_metrics(epoch=True, experience=True), loss_metrics(epoch=True)]
    return loggers, metrics


class _Wandb(WandBLogger):
    """Avalanche's logger without its charts, which newer W&B no longer has."""

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
