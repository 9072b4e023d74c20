"""The commands that measure the same again, and what they were measured with."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import Any

from covon_avalanche.experiment.recipe import RecipeError, load_recipe, shipped_recipes
from covon_avalanche.experiment.recipe_text import toml_value
from covon_avalanche.experiment.reporting.leaves import leaves
from covon_avalanche.experiment.reporting.standing import Standing
from covon_avalanche.experiment.result import Result
from covon_avalanche.experiment.run_folder import decisive, settings_of, settings_today


def command(standing: Standing) -> str:
    """The ``covon run`` of a row: of the recipe that comes with the package, with what was set
    otherwise; or else of a file."""
    run = standing.runs[0]
    changes = _changes(run)
    words = ["covon", "run", f"{run.recipe}.toml" if changes is None else run.recipe]
    words += ["--strategies", run.strategy]
    words += ["--seeds", ",".join(map(str, standing.seeds))]
    for change in changes or []:
        words += ["--set", change]
    return shlex.join(words)


def _changes(run: Result) -> list[str] | None:
    """``KEY=VALUE`` of what the run set otherwise than the shipped recipe of its name; ``None``
    where there is no such recipe, or these cannot make the run of it."""
    if run.recipe not in shipped_recipes():
        return None
    wanted = decisive(settings_today(run.settings))
    whole = {key: value for key, value in wanted.items() if key != "strategy"}
    shipped = leaves(load_recipe(run.recipe).model_dump(mode="json", exclude_none=True))
    mine = leaves({**whole, "strategies": {run.strategy: wanted["strategy"]}})
    changes = [
        f"{key}={toml_value(value)}" for key, value in mine.items() if shipped.get(key) != value
    ]
    try:
        again = load_recipe(run.recipe, changes)
    except RecipeError:
        return None
    made = run.strategy in again.strategies and decisive(settings_of(again, run.strategy)) == wanted
    return changes if made else None


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
