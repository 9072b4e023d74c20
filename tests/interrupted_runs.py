"""Runs that are stopped, as by a signal, and then finished."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from unittest import mock

import pytest

from covon_avalanche.experiment.recipe import Recipe
from covon_avalanche.experiment.result import Result
from covon_avalanche.experiment.resumable import Checkpointer
from covon_avalanche.experiment.run import run_in_folder
from covon_avalanche.experiment.run_options import RunOptions


class Killed(BaseException):
    """In place of a signal."""


def run_with_stops(
    recipe: Recipe, name: str, folder: Path, stops: Sequence[int], options: RunOptions
) -> Result:
    """The result of a run that is stopped once for each entry, after so many more checkpoints."""
    store = Checkpointer._store
    for limit in stops:
        left = iter(range(limit))

        def counted(self, left=left):
            stored = store(self)
            if next(left, None) is None:
                raise Killed
            return stored

        with mock.patch.object(Checkpointer, "_store", counted), pytest.raises(Killed):
            run_in_folder(recipe, name, 0, folder, options)
    return run_in_folder(recipe, name, 0, folder, options)
