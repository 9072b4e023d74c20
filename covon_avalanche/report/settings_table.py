"""In what the strategies of a section differ, and what they have in common."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from covon_avalanche.experiment.run_folder import settings_today
from covon_avalanche.report.columns import NOTHING
from covon_avalanche.report.leaves import common_leaves, leaves
from covon_avalanche.report.section import Section

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
    """From the resolved recipes of the runs."""
    cells: dict[str, dict[str, str]] = {}
    for standing in section.in_order:
        settings = settings_today(standing.runs[0].settings)
        whole = {key: value for key, value in settings.items() if key not in _ABOUT}
        flat = {**common_leaves(whole), **leaves(settings["strategy"])}
        cells[standing.strategy] = {key: _text(value) for key, value in flat.items() if value != []}
    keys = list(dict.fromkeys(key for mine in cells.values() for key in mine))
    same = {key: len({mine.get(key, NOTHING) for mine in cells.values()}) == 1 for key in keys}
    differing = sorted((key for key in keys if not same[key]), key=lambda key: key != "kind")
    return SettingsTable(
        keys=differing,
        rows=[
            (s.strategy, [cells[s.strategy].get(key, NOTHING) for key in differing])
            for s in section.standings
        ],
        common=[(key, next(iter(cells.values()))[key]) for key in keys if same[key]],
    )


def _text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, str):
        return value or '""'
    if isinstance(value, list) and all(isinstance(v, str) for v in value):
        return ", ".join(value)
    return json.dumps(value, default=str)
