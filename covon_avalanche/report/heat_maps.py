"""Accuracies and losses of accuracy by domain, as heat maps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from covon_avalanche.report.canvas import FAINT, INK, WIDTH, new_figure, short
from covon_avalanche.report.section import Section
from covon_avalanche.report.standing import Standing

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_MOST_NUMBERS = 10
"""Columns up to which cells show their numbers."""


def lowest_shown(section: Section) -> float:
    """Where the colours of all matrices of a section begin: a multiple of ten percent below 100."""
    cells = [cell for s in section.in_order for row in s.matrix for cell in row]
    known = [cell for cell in cells if not math.isnan(cell)]
    return min(90, 10 * math.floor(10 * min(known))) if known else 0


def matrix_map(section: Section, standing: Standing) -> Figure:
    """Accuracy on each domain (across) after each domain learned (down).

    Right of the step line the domains were not learned yet.
    """
    cells = [[100 * cell for cell in row] for row in standing.matrix]
    rows, columns = len(cells), len(cells[0])
    names = section.tested
    long = max(map(len, names)) > 3
    figure = new_figure(width=3.4, height=2.95 if long else 2.7)
    axes = figure.subplots()
    low = lowest_shown(section)
    image = axes.imshow(
        cells, cmap="viridis", vmin=low, vmax=100, interpolation="none", aspect="auto"
    )
    _frame(axes, names, section.domains if long else [str(t + 1) for t in range(rows)])
    _numbers(axes, cells, low, 100.0, dark_below=0.55)
    complete = not any(math.isnan(cell) for row in cells for cell in row)
    if complete and rows == columns and names == section.domains:
        steps = [(t + 0.5, t + side) for t in range(rows - 1) for side in (-0.5, 0.5)]
        x = [a for a, _ in steps] + ([rows - 0.5] if rows > 1 else [])
        y = [b for _, b in steps] + ([rows - 1.5] if rows > 1 else [])
        axes.plot(x, y, color="#ffffff", linewidth=1.4 if rows <= _MOST_NUMBERS else 0.6)
    axes.set_xlabel("tested on domain")
    axes.set_ylabel("domains learned" if not long else "after learning")
    _colour_bar(figure, image, axes, "accuracy (%)")
    return figure


def forgetting_map(section: Section) -> Figure:
    """By how much each domain's accuracy fell since it was learned, by strategy."""
    shown = [s for s in section.standings if s.forgetting_by_domain is not None]
    cells = [[100 * drop for drop in s.forgetting_by_domain or []] for s in shown]
    known = [abs(cell) for row in cells for cell in row if not math.isnan(cell)]
    most = max(10.0, 10 * math.ceil(max(known, default=0) / 10))
    names = section.domains[:-1]
    long = max(map(len, names)) > 3
    figure = new_figure(width=WIDTH, height=(1.35 if long else 0.95) + 0.26 * max(4, len(shown)))
    axes = figure.subplots()
    image = axes.imshow(
        cells, cmap="PuOr_r", vmin=-most, vmax=most, interpolation="none", aspect="auto"
    )
    _frame(axes, names, [short(s.strategy) for s in shown], every_row=True)
    _numbers(axes, cells, -most, most, dark_below=None)
    axes.set_xlabel("domain")
    _colour_bar(figure, image, axes, "points lost")
    return figure


def _frame(axes: Any, across: Sequence[str], down: Sequence[str], every_row: bool = False) -> None:
    """Names at the edges, as many as there is room for."""
    long = max(map(len, across)) > 3
    for axis, names, every in ((axes.xaxis, across, long), (axes.yaxis, down, every_row)):
        step = 1 if every or len(names) <= 10 else math.ceil(len(names) / 8)
        places = list(range(0, len(names), step))
        axis.set_ticks(places, [short(names[i]) for i in places])
        for text in axis.get_ticklabels():
            text.set_parse_math(False)
    if long:
        for text in axes.get_xticklabels():
            text.set(rotation=45 if len(across) <= 10 else 90, rotation_mode="anchor")
            text.set(ha="right", va="top" if len(across) <= 10 else "center")
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)


def _numbers(
    axes: Any, cells: Sequence[Sequence[float]], low: float, high: float, dark_below: float | None
) -> None:
    """Numbers in the cells, white on dark colours; for a diverging map, on both ends."""
    if len(cells[0]) > _MOST_NUMBERS:
        return
    for t, row in enumerate(cells):
        for i, cell in enumerate(row):
            if math.isnan(cell):
                continue
            where = (cell - low) / (high - low)
            dark = abs(where - 0.5) > 0.3 if dark_below is None else where < dark_below
            axes.text(
                i,
                t,
                f"{cell:.0f}".replace("-0", "0") if abs(cell) < 0.5 else f"{cell:.0f}",
                ha="center",
                va="center",
                fontsize=8.5 if len(row) <= 6 else 7.5,
                color="#ffffff" if dark else "#000000",
            )


def _colour_bar(figure: Figure, image: Any, axes: Any, label: str) -> None:
    slim = 8 * figure.get_figheight()
    bar = figure.colorbar(image, ax=axes, pad=0.02, fraction=0.05, aspect=slim)
    bar.set_label(label)
    bar.ax.spines[:].set_visible(False)
    bar.ax.tick_params(length=2, color=FAINT, labelcolor=INK)
