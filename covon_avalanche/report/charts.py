"""Charts with axes: accuracy over domains, its price, calibration, training."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from covon_avalanche.report.canvas import (
    FAINT,
    INK,
    WIDTH,
    add_legend,
    legend_columns,
    looks,
    new_figure,
    short,
)
from covon_avalanche.report.label_places import is_far, place_labels
from covon_avalanche.report.section import Section
from covon_avalanche.report.standing import Standing

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CALIBRATION = {"nll": "NLL (nats)", "brier": "Brier score", "ece": "ECE"}


def accuracy_curves(section: Section) -> Figure:
    """Average accuracy on the domains learned so far; bands are one standard deviation."""
    from matplotlib.ticker import MaxNLocator

    look = looks(section.standings)
    figure = new_figure(3.3 + _legend_height(section))
    axes = figure.subplots()
    handles, steps = [], len(section.domains)
    for standing in section.standings:
        mine = look[standing.strategy]
        curve = standing.curve
        if not curve:
            level = 100 * standing.accuracy[0]
            handles.append(axes.axhline(level, color=mine.colour, ls=mine.dashes, lw=1.2))
            continue
        x = list(range(1, len(curve) + 1))
        y = [100 * mean for mean, _ in curve]
        spread = [0.0 if math.isnan(std) else 100 * std for _, std in curve]
        handles += axes.plot(
            x,
            y,
            color=mine.colour,
            linestyle=mine.dashes,
            marker=mine.marker,
            markersize=4.5,
            markevery=max(1, len(x) // 10),
            linewidth=2.4 if standing is section.best else 1.3,
        )
        low = [a - b for a, b in zip(y, spread, strict=True)]
        high = [a + b for a, b in zip(y, spread, strict=True)]
        axes.fill_between(x, low, high, color=mine.colour, alpha=0.12, linewidth=0)
    axes.set_xlim(1 - min(0.4, 0.03 * steps), steps + 0.03 * steps)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("domains learned")
    axes.set_ylabel("average accuracy (%)")
    axes.grid(axis="y")
    add_legend(figure, handles, [s.strategy for s in section.standings])
    return figure


def accuracy_against(section: Section, price: Callable[[Standing], float], label: str) -> Figure:
    """A_T against what it costs, every strategy named at its point."""
    look = looks(section.standings)
    known = [s for s in section.in_order if not math.isnan(s.accuracy[0])]
    figure = new_figure(3.4)
    axes = figure.subplots()
    x, y = [price(s) for s in known], [100 * s.accuracy[0] for s in known]
    for standing, across, up in zip(known, x, y, strict=True):
        mine = look[standing.strategy]
        std = standing.accuracy[1]
        if not math.isnan(std):
            axes.errorbar(across, up, yerr=100 * std, color=mine.colour, linewidth=1)
        axes.plot(across, up, marker=mine.marker, color=mine.colour, markersize=6.5)
    axes.set_xlabel(label)
    axes.set_ylabel("accuracy after the last domain (%)")
    axes.grid()
    axes.margins(x=0.12, y=0.12)
    _scale(axes, x)
    _name_points(figure, axes, list(zip(x, y, strict=True)), [s.strategy for s in known])
    return figure


def calibration_bars(section: Section) -> Figure:
    """Log loss, Brier score and calibration error after the last domain; lower is better."""
    shown = [s for s in section.standings[::-1] if any(s.calibration(name) for name in CALIBRATION)]
    look = looks(section.standings)
    figure = new_figure(1.0 + 0.22 * max(3, len(shown)))
    all_axes = figure.subplots(1, len(CALIBRATION), sharey=True)
    for axes, (name, label) in zip(all_axes, CALIBRATION.items(), strict=True):
        for place, standing in enumerate(shown):
            value = standing.calibration(name)
            if value is None or not math.isfinite(value[0]):
                continue
            std = None if math.isnan(value[1]) else value[1]
            axes.barh(
                place,
                value[0],
                xerr=std,
                height=0.66,
                color=look[standing.strategy].colour,
                error_kw={"ecolor": INK, "elinewidth": 0.9},
            )
        axes.set_xlim(left=0)
        axes.set_xlabel(label)
        axes.locator_params(axis="x", nbins=3)
        axes.grid(axis="x")
        axes.tick_params(axis="y", length=0)
    all_axes[0].set_yticks(range(len(shown)), [short(s.strategy) for s in shown])
    for text in all_axes[0].get_yticklabels():
        text.set_parse_math(False)
    return figure


def reliability_diagram(section: Section) -> Figure:
    """Accuracy against confidence: below the diagonal predictions are too sure."""
    shown = [s for s in section.standings if s.reliability]
    look = looks(section.standings)
    figure = new_figure(3.0 + _legend_height(section))
    axes = figure.subplots()
    axes.plot([0, 1], [0, 1], color=FAINT, linewidth=1)
    handles = []
    for standing in shown:
        mine = look[standing.strategy]
        handles += axes.plot(
            [b.confidence for b in standing.reliability],
            [b.accuracy for b in standing.reliability],
            color=mine.colour,
            linestyle=mine.dashes,
            marker=mine.marker,
            markersize=3.5,
            linewidth=2.0 if standing is section.best else 1.2,
        )
    axes.set_xlim(0, 1)
    axes.set_ylim(0, 1)
    axes.set_xlabel("confidence")
    axes.set_ylabel("accuracy")
    axes.grid()
    add_legend(figure, handles, [s.strategy for s in shown])
    return figure


def training_curves(section: Section) -> Figure:
    """Training loss by epoch, over all domains one after the other."""
    shown = [s for s in section.standings if s.losses]
    look = looks(section.standings)
    figure = new_figure(3.0 + _legend_height(section))
    axes = figure.subplots()
    handles = []
    for standing in shown:
        mine = look[standing.strategy]
        x = range(1, len(standing.losses) + 1)
        handles += axes.plot(
            x, standing.losses, color=mine.colour, linestyle=mine.dashes, linewidth=1.3
        )
    losses = [loss for s in shown for loss in s.losses if math.isfinite(loss)]
    if losses and min(losses) > 0 and max(losses) > 20 * min(losses):
        axes.set_yscale("log")
        _plain_log(axes.yaxis)
    axes.set_xlabel("epochs, all domains one after the other")
    axes.set_ylabel("training loss")
    axes.grid(axis="y")
    add_legend(figure, handles, [s.strategy for s in shown])
    return figure


def _legend_height(section: Section) -> float:
    """Inches, so that the axes stay as high with many strategies as with few."""
    columns = legend_columns([s.strategy for s in section.in_order])
    return 0.19 * math.ceil(len(section.in_order) / columns)


def _scale(axes: Any, values: Sequence[float]) -> None:
    """From zero; logarithmic where the values are of different magnitude."""
    if values and min(values) > 0 and max(values) > 12 * min(values):
        axes.set_xscale("log")
        _plain_log(axes.xaxis)
    else:
        axes.set_xlim(left=0)


def _plain_log(axis: Any) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


def _name_points(
    figure: Figure, axes: Any, points: Sequence[tuple[float, float]], names: Sequence[str]
) -> None:
    figure.draw_without_rendering()
    pixels = [tuple(p) for p in axes.transData.transform(points)] if points else []
    unit = figure.dpi / 72
    texts, sizes = [], []
    for name in names:
        text = axes.text(0, 0, short(name), fontsize=9, ha="center", va="center")
        text.set_parse_math(False)
        text.set_in_layout(False)
        extent = text.get_window_extent()
        texts.append(text)
        sizes.append((extent.width, extent.height))
    frame = axes.get_window_extent()
    # Names may stand a little over the axes at the right, where the page has a margin.
    inside = (frame.x0, frame.y0, min(frame.x1 + 4 * unit, WIDTH * figure.dpi), frame.y1)
    centres = place_labels(pixels, sizes, inside, radius=4 * unit)
    back = axes.transData.inverted()
    for text, pixel, centre, size in zip(texts, pixels, centres, sizes, strict=True):
        text.set_position(back.transform(centre))
        if is_far(pixel, centre, size[1]):
            edge = centre[1] + (size[1] / 2 if pixel[1] > centre[1] else -size[1] / 2)
            ends = back.transform([pixel, (centre[0], edge)])
            (line,) = axes.plot(*zip(*ends, strict=True), color=FAINT, linewidth=0.9, zorder=0.5)
            line.set_in_layout(False)
