"""The commands that measure the same again, and what they were measured with."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import Any

from covon_avalanche.experiment.recipe import load_recipe, shipped_recipes
from covon_avalanche.experiment.reporting.section import Section
from covon_avalanche.experiment.reporting.standing import Standing
from covon_avalanche.experiment.result import Result


def command(section: Section, standing: Standing) -> str:
    """The ``covon run`` of a row. A recipe that does not come with the package is a file."""
    shipped = section.recipe in shipped_recipes()
    words = ["covon", "run", section.recipe if shipped else f"{section.recipe}.toml"]
    words += ["--strategies", standing.strategy]
    words += ["--seeds", ",".join(map(str, standing.seeds))]
    epochs = standing.runs[0].settings.get("epochs")
    if shipped and epochs is not None and epochs != load_recipe(section.recipe).epochs:
        words += ["--epochs", str(epochs)]
    return shlex.join(words)


def versions(runs: Sequence[Result]) -> list[tuple[str, str]]:
    """Names and versions, with slashes where runs differ."""
    return _merged([run.versions for run in runs])


def machine(runs: Sequence[Result]) -> list[tuple[str, str]]:
    """What it ran on, with slashes where runs differ."""
    return _merged([run.machine for run in runs])


def _merged(each: Sequence[dict[str, Any]]) -> list[tuple[str, str]]:
    names = dict.fromkeys(name for one in each for name in one)
    return [
        (name, " / ".join(dict.fromkeys(str(one[name]) for one in each if name in one)))
        for name in names
    ]
