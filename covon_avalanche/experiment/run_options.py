"""Options of a run that do not affect its result. Nothing here imports torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RunOptions:
    """Options that the command line passes to every run."""

    checkpoint_seconds: float = 300.0
    """Time between two checkpoints inside a domain."""
    tensorboard: bool = False
    """Log for TensorBoard in the run's folder."""
    bundle: bool = False
    """Save the trained model in the run's folder, for prediction; not of runs that are finished."""
    wandb: str | None = None
    """Log to this project of Weights & Biases."""
