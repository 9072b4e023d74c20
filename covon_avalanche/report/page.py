"""The page: one HTML file that needs nothing else."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from jinja2 import Environment, PackageLoader, StrictUndefined

from covon_avalanche.report import findings, reproduce
from covon_avalanche.report.canvas import COLOURS, DARK_COLOURS, Picture
from covon_avalanche.report.columns import columns_of, marks
from covon_avalanche.report.inline_svg import inline_svg
from covon_avalanche.report.section import Section
from covon_avalanche.report.settings_table import settings_table
from covon_avalanche.report.statistics import LEAST_SEEDS, TEST


@dataclass(frozen=True)
class Illustrated:
    """A section with its figures."""

    section: Section
    pictures: list[Picture]
    matrices: list[Picture]


def render(parts: Sequence[Illustrated], title: str) -> str:
    """The whole page; everything from results is escaped."""
    environment = Environment(
        loader=PackageLoader("covon_avalanche.report", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    rows = [standing for part in parts for standing in part.section.in_order]
    environment.filters["sortable"] = _sortable
    return environment.get_template("page.html.j2").render(
        title=title,
        parts=parts,
        colours=list(zip(COLOURS, DARK_COLOURS, strict=True)),
        columns_of=columns_of,
        marks=marks,
        headline=findings.headline,
        inline_svg=inline_svg,
        settings_table=settings_table,
        command=partial(reproduce.command, among=rows),
        versions=reproduce.versions,
        machine=reproduce.machine,
        test=TEST,
        least_seeds=LEAST_SEEDS,
    )


def _sortable(value: float | None) -> str:
    """A number that scripts read; empty where there is none."""
    return "" if value is None or math.isnan(value) else repr(float(value))
