"""How the figures look, and how they become SVG and PNG."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from covon_avalanche.report.standing import Standing

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.figure import Figure

INK = "#1b1f24"
"""Text, axes and ceilings: ``currentColor`` in the page."""
FAINT = "#d5dae1"
"""Grid lines."""
COLOURS = ("#1d6fb8", "#e8650a", "#0b5d43", "#d0459b", "#4a1f7a", "#7a2f12")
"""Apart for colour-blind eyes, too; on a dark page their brighter sisters."""
DARK_COLOURS = ("#4c9df0", "#ff8c42", "#1fae7a", "#f7a8d8", "#9b6cf5", "#f2df7e")
WIDTH = 4.2
"""Inches of a figure: what a phone shows at about the size of its text."""

_MARKERS = "osD^vPX*<>"
_DASHES: tuple[object, ...] = ("-", (0, (5, 1.6)), (0, (1.2, 1.2)), (0, (6, 1.5, 1.2, 1.5)))
_STYLE = {
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 10,
    "axes.labelsize": 10,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "axes.linewidth": 0.7,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.color": FAINT,
    "grid.linewidth": 0.7,
    "legend.frameon": False,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "xtick.labelsize": 9.5,
    "ytick.labelsize": 9.5,
    "figure.constrained_layout.use": True,
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "covon_avalanche",
}


@dataclass(frozen=True)
class Look:
    """Colour, marker and dashes of a strategy; no two share all three."""

    colour: str
    marker: str
    dashes: object


@dataclass(frozen=True)
class Picture:
    """A figure as the report shows it.

    :param name: of its files, unique in a report.
    :param finding: what it shows, in words.
    """

    name: str
    title: str
    finding: str
    svg: str
    png: bytes


def looks(standings: Sequence[Standing]) -> dict[str, Look]:
    """Of each strategy by name, whoever is the best, so that sections with the same strategies
    have the same; ceilings are drawn in the colour of the text."""
    found: dict[str, Look] = {}
    learners = ceilings = 0
    for standing in sorted(standings, key=lambda standing: standing.strategy):
        if standing.ceiling:
            dashes = ((0, (4, 2)), (0, (1.2, 1.6)))[ceilings % 2]
            found[standing.strategy] = Look(INK, "p8"[ceilings % 2], dashes)
            ceilings += 1
        else:
            found[standing.strategy] = Look(
                COLOURS[learners % len(COLOURS)],
                _MARKERS[learners % len(_MARKERS)],
                _DASHES[learners // len(COLOURS) % len(_DASHES)],
            )
            learners += 1
    return found


@contextmanager
def style() -> Iterator[None]:
    """The look of the figures, whatever the user's own defaults are; they are put back."""
    import matplotlib.style

    with matplotlib.style.context(["default", _STYLE]):
        yield


def new_figure(height: float, width: float = WIDTH) -> Figure:
    """An empty figure, in inches, that no window manager knows of."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height))
    FigureCanvasAgg(figure)
    return figure


def short(name: str, most: int = 16) -> str:
    """A name as figures show it: on one line, what is too long without its middle: what tells
    names apart is often at the end."""
    name = " ".join(name.split())
    return name if len(name) <= most else f"{name[: most // 2]}…{name[most // 2 + 1 - most :]}"


def add_legend(figure: Figure, handles: Sequence[Artist], names: Sequence[str]) -> None:
    """Below the axes, in as many columns as fit."""
    names = [short(name) for name in names]
    columns = min(len(names), legend_columns(names))
    legend = figure.legend(
        handles,
        ["x"] * len(names),  # a real name might begin with "_", which hides it
        loc="outside lower center",
        ncols=columns,
        fontsize=9,
        handlelength=2.4,
        columnspacing=1.2,
    )
    for text, name in zip(legend.get_texts(), names, strict=True):
        text.set_parse_math(False)
        text.set_text(name)


def legend_columns(names: Sequence[str]) -> int:
    """How many names of a legend fit beside each other."""
    return max(1, int(48 / (max(len(short(name)) for name in names) + 6)))


def picture(figure: Figure, name: str, title: str, finding: str) -> Picture:
    """Render a figure; the same figure gives the same bytes."""
    png, svg = io.BytesIO(), io.StringIO()
    figure.savefig(png, format="png", dpi=160, facecolor="white")
    nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    figure.savefig(svg, format="svg", transparent=True, metadata=nothing)
    return Picture(name, title, finding, _tidy(svg.getvalue(), name), png.getvalue())


def _tidy(svg: str, name: str) -> str:
    """Without the machine's fonts, and with identifiers that no other figure has."""
    svg = re.sub(r'(id="|url\(#|href="#)', rf"\g<1>{name}-", svg)
    svg = re.sub(r"(font: [^;\"]*?px) [^;\"]*", r"\1 system-ui, sans-serif", svg)
    return "\n".join(line.rstrip() for line in svg.splitlines()) + "\n"
