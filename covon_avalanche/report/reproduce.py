"""The commands that measure the same again, and what they were measured with."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from covon_avalanche.experiment.recipe import RecipeError, load_recipe, shipped_recipes
from covon_avalanche.experiment.recipe_text import toml_value
from covon_avalanche.experiment.result import Result
from covon_avalanche.experiment.run_folder import decisive, settings_of, settings_today
from covon_avalanche.report.leaves import common_leaves, leaves
from covon_avalanche.report.standing import Standing


def command(standing: Standing, among: Sequence[Standing] = ()) -> str:
    """The ``covon run`` of a row: of the recipe that comes with the package, with what was set
    otherwise; or else of a file.

    :param among: the rows of the report; the same strategy of the same file is told apart by
        what they set otherwise.
    """
    run = standing.runs[0]
    recipe, changes = run.recipe, _changes(run)
    if changes is None:
        recipe, changes = f"{run.recipe}.toml", _apart(run, [other.runs[0] for other in among])
    words = ["covon", "run", recipe, "--strategies", run.strategy]
    words += ["--seeds", ",".join(map(str, standing.seeds))]
    for change in changes:
        words += ["--set", change]
    return shlex.join(words)


def _changes(run: Result) -> list[str] | None:
    """``KEY=VALUE`` of what the run set otherwise than the shipped recipe of its name; ``None``
    where there is no such recipe, or these cannot make the run of it."""
    if run.recipe not in shipped_recipes():
        return None
    wanted = decisive(settings_today(run.settings))
    shipped = leaves(load_recipe(run.recipe).model_dump(mode="json", exclude_none=True))
    changes = _set(run, [shipped])
    try:
        again = load_recipe(run.recipe, changes)
    except RecipeError:
        return None
    made = run.strategy in again.strategies and decisive(settings_of(again, run.strategy)) == wanted
    return changes if made else None


def _apart(run: Result, others: Sequence[Result]) -> list[str]:
    """``KEY=VALUE`` of what the run set otherwise than others of the same strategy and file."""
    name = (run.recipe, run.strategy)
    return _set(run, [_keys(other) for other in others if (other.recipe, other.strategy) == name])


def _set(run: Result, others: Sequence[Mapping[str, Any]]) -> list[str]:
    return [
        f"{key}={toml_value(value)}"
        for key, value in _keys(run).items()
        if any(other.get(key) != value for other in others)
    ]


def _keys(run: Result) -> dict[str, Any]:
    """What decides the run, by the keys that it has in its recipe."""
    settings = decisive(settings_today(run.settings))
    return common_leaves(settings) | leaves({"strategies": {run.strategy: settings["strategy"]}})


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
