"""The commands that repeat the runs of a report."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from covon_avalanche.experiment.recipe import RecipeError, load_recipe, shipped_recipes
from covon_avalanche.experiment.run_folder import result_settings, settings_of
from covon_avalanche.report.results import flatten


def command(runs: pd.DataFrame, others: Sequence[pd.Series] = ()) -> str:
    """The ``covon run`` that repeats the runs of a strategy.

    It names the shipped recipe with the settings that were changed, or else a file.

    :param others: first runs of the other strategies of the report; settings in which those of
        the same strategy and file differ are named.
    """
    run = runs.iloc[0]
    recipe, changes = run["recipe"], _changes(run)
    if changes is None:
        recipe = f"{run['recipe']}.toml"
        same = [
            o for o in others if (o["recipe"], o["strategy"]) == (run["recipe"], run["strategy"])
        ]
        changes = _differing(run, [_recipe_keys(other) for other in same])
    seeds = ",".join(map(str, runs["seed"]))
    words = ["covon", "run", recipe, "--strategies", run["strategy"], "--seeds", seeds]
    return shlex.join(words + [word for change in changes for word in ("--set", change)])


def _changes(run: pd.Series) -> list[str] | None:
    """``KEY=VALUE`` for each setting that differs from the shipped recipe of that name; ``None``
    if there is none, or these do not lead to the run's settings."""
    if run["recipe"] not in shipped_recipes():
        return None
    shipped = load_recipe(run["recipe"]).model_dump(mode="json", exclude_none=True)
    changes = _differing(run, [flatten(shipped)])
    try:
        recipe = load_recipe(run["recipe"], changes)
    except RecipeError:
        return None
    if run["strategy"] not in recipe.strategies:
        return None
    again = result_settings(settings_of(recipe, run["strategy"]))
    return changes if again == result_settings(run["settings"]) else None


def _differing(run: pd.Series, others: Sequence[Mapping[str, Any]]) -> list[str]:
    return [
        f"{key}={_toml_value(value)}"
        for key, value in _recipe_keys(run).items()
        if any(other.get(key) != value for other in others)
    ]


def _recipe_keys(run: pd.Series) -> dict[str, Any]:
    """The settings that decide the run, by their keys in the recipe."""
    settings = result_settings(run["settings"])
    own = {"strategies": {run["strategy"]: settings.pop("strategy")}}
    return flatten(settings) | flatten(own)


def _toml_value(value: Any) -> str:
    """A number, text, list or table on one line."""
    if isinstance(value, dict):
        pairs = (f"{json.dumps(key)} = {_toml_value(v)}" for key, v in value.items())
        return f"{{ {', '.join(pairs)} }}"
    if isinstance(value, list):
        return f"[{', '.join(map(_toml_value, value))}]"
    return json.dumps(value, ensure_ascii=False)
