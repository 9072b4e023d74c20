"""Runs that are stopped, as by a signal, and then finished."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from covon_avalanche.experiment.recipe import Recipe
from covon_avalanche.experiment.result import Result
from covon_avalanche.experiment.resumable import Checkpointer
from covon_avalanche.experiment.run import run_in_folder
from covon_avalanche.experiment.run_folder import RunFolder
from covon_avalanche.experiment.run_options import RunOptions


class Killed(BaseException):
    """In place of a signal."""


def run_until_killed(checkpoints: int, folder: RunFolder) -> bool:
    """A run with a checkpoint after each batch, epoch and domain, killed after one more than
    ``checkpoints``; whether it was."""
    store, left = Checkpointer._store, iter(range(checkpoints))

    def counted(self: Checkpointer) -> bool:
        stored = store(self)
        if next(left, None) is None:
            raise Killed
        return stored

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Checkpointer, "_store", counted)
        try:
            run_in_folder(folder, RunOptions(checkpoint_seconds=0))
        except Killed:
            return True
    return False


def run_with_stops(
    recipe: Recipe, name: str, folder: Path, stops: Sequence[int], dataset_root: Path | None = None
) -> Result:
    """The result of a run that is stopped once for each entry, after so many more checkpoints."""
    run = RunFolder(folder, recipe, name, 0, dataset_root)
    for checkpoints in stops:
        run_until_killed(checkpoints, run)
    return run_in_folder(run)
