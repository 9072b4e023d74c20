"""The short form of a report: a table for the terminal, one in Markdown, one picture."""

from __future__ import annotations

from pathlib import Path

from rich.markup import escape
from rich.table import Table

from covon_avalanche.atomic_write import write_atomically
from covon_avalanche.report import charts, findings, heat_maps
from covon_avalanche.report.canvas import picture, style
from covon_avalanche.report.columns import brief_columns, marks
from covon_avalanche.report.section import Section
from covon_avalanche.report.standing import Standing
from covon_avalanche.report.tables import markdown_table


def rich_table(section: Section) -> Table:
    """The strategies with the most important measures, the best in bold."""
    columns = brief_columns(section)
    table = Table(title=escape(section.title), title_justify="left")
    table.add_column("strategy", no_wrap=True)
    for column in columns:
        table.add_column(column.heading, justify="right", no_wrap=True)
    for standing in section.standings:
        style = "bold" if standing is section.best else "dim" if standing.ceiling else None
        name = " ".join([standing.strategy, *(f"({mark})" for mark in marks(standing))])
        table.add_row(name, *(column.text(section, standing) for column in columns), style=style)
    return table


def brief_markdown(section: Section) -> str:
    """The same in Markdown."""
    return markdown_table(section, brief_columns(section))


def save_curves(section: Section, path: Path) -> None:
    """Average accuracy over the domains learned, as a PNG file."""
    with style():
        drawn = picture(charts.accuracy_curves(section), "curves", "", findings.curves(section))
    write_atomically(path, drawn.png)


def save_matrix(section: Section, standing: Standing, path: Path) -> None:
    """A strategy's accuracy matrix, mean over seeds, as a PNG file."""
    with style():
        drawn = picture(heat_maps.matrix_map(section, standing), "matrix", "", "")
    write_atomically(path, drawn.png)
