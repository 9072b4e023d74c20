"""In what the strategies of a section differ, and what they have in common."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from covon_avalanche.experiment.reporting.columns import NOTHING
from covon_avalanche.experiment.reporting.section import Section

_ABOUT = ("name", "title", "strategies", "seeds")
"""Parts of a recipe that do not decide what a single run does."""


@dataclass(frozen=True)
class SettingsTable:
    """Settings by dotted name.

    :param keys: in which at least two strategies differ.
    :param rows: strategy and its values of these, in order.
    :param common: what is the same for all.
    """

    keys: list[str]
    rows: list[tuple[str, list[str]]]
    common: list[tuple[str, str]]


def settings_table(section: Section) -> SettingsTable:
    """From the resolved recipes of the runs. Where the runs of one strategy differ among
    themselves, its cell has all values, with slashes."""
    found: dict[str, dict[str, list[str]]] = {}
    for standing in section.in_order:
        mine = found.setdefault(standing.strategy, {})
        for run in standing.runs:
            whole = {k: v for k, v in run.settings.items() if k not in (*_ABOUT, "strategy")}
            own = flatten(run.settings["strategy"])
            for key, value in {**flatten(whole), **own}.items():
                values = mine.setdefault(key, [])
                if value not in values:
                    values.append(value)
    cells = {
        name: {key: " / ".join(values) for key, values in mine.items()}
        for name, mine in found.items()
    }
    keys = list(dict.fromkeys(key for mine in cells.values() for key in mine))
    same = {
        key: len({mine.get(key, NOTHING) for mine in cells.values()}) == 1 and len(cells) > 0
        for key in keys
    }
    differing = sorted((key for key in keys if not same[key]), key=lambda key: key != "kind")
    return SettingsTable(
        keys=differing,
        rows=[
            (s.strategy, [cells[s.strategy].get(key, NOTHING) for key in differing])
            for s in section.standings
        ],
        common=[(key, next(iter(cells.values()))[key]) for key in keys if same[key]],
    )


def flatten(settings: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Values as text by dotted name; lists stay whole, and what is not set is left out."""
    flat: dict[str, str] = {}
    for key, value in settings.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{key}.")
        elif isinstance(value, float):
            flat[f"{prefix}{key}"] = f"{value:g}"
        elif isinstance(value, str):
            flat[f"{prefix}{key}"] = value
        elif isinstance(value, list) and value and all(isinstance(v, str) for v in value):
            flat[f"{prefix}{key}"] = ", ".join(value)
        elif value is not None and value != []:
            flat[f"{prefix}{key}"] = json.dumps(value, default=str)
    return flat
