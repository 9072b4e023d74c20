"""From results to the files of a report."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from covon_avalanche.atomic_write import write_atomically
from covon_avalanche.experiment.result import Result
from covon_avalanche.report import tables
from covon_avalanche.report.page import Illustrated, render
from covon_avalanche.report.pictures import matrices_of, pictures_of
from covon_avalanche.report.section import sections_of


def write_report(results: Sequence[Result], folder: Path, *, title: str | None = None) -> Path:
    """Write ``index.html``, ``table.md``, ``table.tex``, ``table.csv``, ``results.csv`` and
    ``figures/*.svg`` and ``*.png``; older ones are replaced, each at once.

    The page needs no other file and no network. The same results give the same bytes.

    :param results: of one recipe or several; each run once.
    :param title: of the page; the recipes' own by default.
    :returns: the path of the page.
    :raises ValueError: if there are no results.
    :raises ResultError: if two are of the same run.
    """
    folder = Path(folder)
    sections = sections_of(results)
    if title is None:
        title = "; ".join(dict.fromkeys(section.title for section in sections))
    parts = []
    for section in sections:
        prefix = f"{section.slug}-" if len(sections) > 1 else ""
        parts.append(
            Illustrated(section, pictures_of(section, prefix), matrices_of(section, prefix))
        )
    for part in parts:
        for picture in [*part.pictures, *part.matrices]:
            write_atomically(folder / "figures" / f"{picture.name}.svg", picture.svg)
            write_atomically(folder / "figures" / f"{picture.name}.png", picture.png)
    write_atomically(folder / "table.md", tables.markdown(sections))
    write_atomically(folder / "table.tex", tables.latex(sections))
    write_atomically(folder / "table.csv", tables.summary_csv(sections))
    write_atomically(folder / "results.csv", tables.results_csv(sections))
    page = folder / "index.html"
    write_atomically(page, render(parts, title))
    return page
