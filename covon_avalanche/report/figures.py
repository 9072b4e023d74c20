"""The figures of a report, as SVG and PNG."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from covon_avalanche.atomic_write import write_atomically
from covon_avalanche.report.summary import (
    Comparison,
    forgetting_by_domain,
    learning_curve,
    mean_matrix,
    pooled_reliability,
    training_losses,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

INK = "#1b1f24"  # of offline training and text, as in report.mplstyle
_COLOURS = (
    *("#1d6fb8", "#e8650a", "#0b5d43", "#d0459b", "#4a1f7a", "#7a2f12"),
    *("#00d200", "#0000ff", "#d2c300", "#ff00ff", "#5ad287", "#00d2e1"),
    *("#f0004b", "#c3a569", "#0069ff", "#967887", "#d2a5ff", "#4b7800"),
)
"""The first six are safe for colour-blind readers; the others are as far from them, from each other
and from black and white in CIELAB as these six are."""
_MARKERS = "osD^vPX*<>"
_DASHES: tuple[Any, ...] = ("-", (0, (5, 1.6)), (0, (1.2, 1.2)), (0, (6, 1.5, 1.2, 1.5)))
_CALIBRATION = {"nll": "NLL (nats)", "brier": "Brier score", "ece": "ECE"}
_COSTS = {
    "time": ("train_seconds_mean", "training time, seconds"),
    "memory": ("memory_ratio", "memory, in units of the weights"),
}
_MAX_NUMBERED = 10  # columns of a heat map with numbers


def rendered(figure: Figure, form: str) -> bytes:
    """The bytes of a ``svg`` or ``png`` file; the same figure gives the same bytes."""
    file = io.BytesIO()
    metadata = {"Date": None, "Creator": None} if form == "svg" else None
    figure.savefig(file, format=form, dpi=160, facecolor="white", metadata=metadata)
    return file.getvalue()


def style() -> Any:
    """A context with the look of the figures, whatever the user's own defaults are."""
    import matplotlib.style

    return matplotlib.style.context(["default", Path(__file__).with_name("report.mplstyle")])


def save(comparison: Comparison, name: str, path: Path) -> None:
    """Write one of :func:`figures_of` as a PNG file, unless there are no data for it."""
    with style():
        if (figure := _figure(comparison, name)) is not None:
            write_atomically(path, rendered(figure, "png"))


def figures_of(comparison: Comparison) -> dict[str, Figure]:
    """All figures for which data exist, by name; ``matrix-LABEL`` is that of a strategy."""
    names = [*_FIGURES, *(f"matrix-{label}" for label in comparison.summary.index)]
    found = {name: _figure(comparison, name) for name in names}
    return {name: figure for name, figure in found.items() if figure is not None}


def _figure(comparison: Comparison, name: str) -> Figure | None:
    kind, _, label = name.partition("-")
    return _matrix(comparison, label) if kind == "matrix" else _FIGURES[name](comparison)


def _curves(comparison: Comparison) -> Figure:
    curves = comparison.by_strategy(lambda runs: 100 * learning_curve(runs))
    lines = {label: curve["mean"] for label, curve in curves.items()}
    labels = {"xlabel": "domains learned", "ylabel": "average accuracy (%)"}
    figure = _line_chart(comparison, lines, **labels)
    for label, curve in curves.items():
        low, high = curve["mean"] - curve["std"], curve["mean"] + curve["std"]
        colour = line_styles(comparison)[label]["color"]
        figure.axes[0].fill_between(curve.index, low, high, color=colour, alpha=0.12, lw=0)
        if curve["std"].notna().any():
            figure.axes[0].set_xlabel("domains learned (band: ± one standard deviation)")
    figure.axes[0].locator_params(axis="x", integer=True)
    return figure


def _forgetting(comparison: Comparison) -> Figure | None:
    drops = 100 * pd.DataFrame(comparison.by_strategy(forgetting_by_domain)).T.dropna(how="all")
    if drops.empty:
        return None
    figure, axes = _new_figure(1.2 + 0.26 * max(4, len(drops)))
    drops = drops.set_axis(comparison.domains[:-1], axis=1)
    most = np.nanmax([*drops.abs().to_numpy().ravel(), 10])
    _heat_map(axes, drops, (-most, most), cmap="PuOr_r", label="points lost")
    figure.axes[1].set_ylim(min(0, drops.min(axis=None)), max(1, drops.max(axis=None)))
    axes.set(xlabel="domain")
    return figure


def _cost(comparison: Comparison, name: str) -> Figure | None:
    column, unit = _COSTS[name]
    summary = comparison.summary.dropna(subset="average_accuracy_mean")
    if summary.empty:
        return None
    figure, axes = _new_figure(3.1)
    for label, row in summary.iterrows():
        point = {**line_styles(comparison)[label], "linestyle": "", "ms": 6.5}
        mean, std = 100 * row[["average_accuracy_mean", "average_accuracy_std"]]
        axes.errorbar(row[column], mean, std, **point, label=_short(label))
    axes.set(xlim=(0, None), xlabel=unit, ylabel="accuracy after\nthe last domain (%)")
    axes.grid()
    _add_legend(figure, axes)
    return figure


def _calibration(comparison: Comparison) -> Figure | None:
    columns = [f"{name}_mean" for name in _CALIBRATION]
    shown = comparison.summary.dropna(subset=columns, how="all")[::-1]
    if shown.empty:
        return None
    figure, all_axes = _new_figure(1.0 + 0.22 * max(3, len(shown)), columns=len(columns))
    colours = [line_styles(comparison)[label]["color"] for label in shown.index]
    for axes, (name, label) in zip(all_axes, _CALIBRATION.items(), strict=True):
        mean = shown[f"{name}_mean"].replace(np.inf, np.nan)
        axes.barh(range(len(shown)), mean, xerr=shown[f"{name}_std"], color=colours)
        axes.set(xlabel=label, xlim=(0, None))
        axes.locator_params(axis="x", nbins=3)
        axes.grid(axis="x")
    all_axes[0].set_yticks(range(len(shown)), map(_short, shown.index))
    return figure


def _reliability(comparison: Comparison) -> Figure | None:
    bins = comparison.by_strategy(pooled_reliability)
    if all(accuracy.empty for accuracy in bins.values()):
        return None
    limits = {"xlim": (0, 1), "ylim": (0, 1)}
    figure = _line_chart(comparison, bins, xlabel="confidence", ylabel="accuracy", **limits)
    figure.axes[0].axline((0, 0), slope=1, color="#d5dae1", lw=1, zorder=0.5)
    return figure


def _training(comparison: Comparison) -> Figure | None:
    losses = comparison.by_strategy(training_losses)
    if all(loss.empty for loss in losses.values()):
        return None
    xlabel = "epochs, all domains one after the other"
    return _line_chart(comparison, losses, xlabel=xlabel, ylabel="training loss", yscale="log")


def _matrix(comparison: Comparison, label: str) -> Figure:
    """Accuracy on each domain (across) after each domain learned (down); domains right of the
    step line were not learned yet."""
    learned, tested = comparison.domains, comparison.tested_domains
    runs = comparison.runs_of(label)
    cells = pd.DataFrame(100 * mean_matrix(runs), learned, tested)
    cells = cells[[row is not None for row in runs["accuracy"].iloc[0]]]  # joint: the last one
    measured = [row for run in comparison.runs["accuracy"] for row in run if row is not None]
    low = min(90, 10 * math.floor(10 * np.nanmin([*np.ravel(measured), 1.0])))
    ylabel, height = ("after learning domain", 2.8) if len(cells) > 1 else ("after", 1.5)
    figure, axes = _new_figure(height, width=3.4)
    _heat_map(axes, cells, (low, 100), cmap="viridis", label="accuracy (%)")
    if learned == tested and cells.notna().all(axis=None):
        steps = np.arange(len(cells))
        axes.step(steps + 0.5, steps - 0.5, where="pre", color="#ffffff", lw=1)
    axes.set(xlabel="tested on domain", ylabel=ylabel)
    return figure


_FIGURES: dict[str, Callable[[Comparison], Figure | None]] = {
    "curves": _curves,
    "forgetting": _forgetting,
    **{name: partial(_cost, name=name) for name in _COSTS},
    "calibration": _calibration,
    "reliability": _reliability,
    "training": _training,
}


def line_styles(comparison: Comparison) -> dict[str, dict[str, Any]]:
    """Colour, marker and line style of each strategy, as matplotlib's arguments.

    They follow the order of the names, so that a strategy looks the same whatever its rank.
    Offline training has the colour of the text, and the best strategy has the thickest line.
    """
    found = {}
    for i, label in enumerate(sorted(comparison.summary.index)):
        offline = comparison.summary.loc[label, "offline"]
        found[label] = {
            "color": INK if offline else _COLOURS[i % len(_COLOURS)],
            "linestyle": "--" if offline else _DASHES[i // len(_COLOURS) % len(_DASHES)],
            "marker": _MARKERS[i % len(_MARKERS)],
            "lw": 2.4 if label == comparison.best else 1.3,
        }
    return found


def _line_chart(comparison: Comparison, lines: Mapping[str, pd.Series], **about: Any) -> Figure:
    """A line per strategy that has one; ``about`` are properties of the axes."""
    figure, axes = _new_figure(3.1)
    for label, line in lines.items():
        if len(line):
            every = max(1, len(line) // 10)
            look = line_styles(comparison)[label]
            axes.plot(line, **look, label=_short(label), ms=4.5, markevery=every)
    axes.set(**about)
    axes.grid(axis="y")
    _add_legend(figure, axes)
    return figure


def _heat_map(
    axes: Any, cells: pd.DataFrame, limits: tuple[float, float], cmap: str, label: str
) -> None:
    """Cells, with numbers where there is room, names at the edges and a labelled colour bar."""
    image = axes.imshow(cells, cmap=cmap, clim=limits, interpolation="none", aspect="auto")
    axes.figure.colorbar(image, ax=axes, pad=0.02, label=label)
    long = max(map(len, cells.columns)) > 3
    for axis, names in ((axes.xaxis, cells.columns), (axes.yaxis, cells.index)):
        every = 1 if max(map(len, names)) > 3 else math.ceil(len(names) / _MAX_NUMBERED)
        axis.set_ticks(range(0, len(names), every), map(_short, names[::every]))
    axes.tick_params(axis="x", length=0, rotation=90 if long else 0)
    axes.tick_params(axis="y", length=0)
    axes.spines[:].set_visible(False)
    for (t, i), cell in np.ndenumerate(cells):
        if len(cells.columns) <= _MAX_NUMBERED and not np.isnan(cell):
            dark = np.dot(image.to_rgba(cell)[:3], (0.3, 0.6, 0.1)) < 0.5
            style = {"color": "#ffffff" if dark else "#000000", "fontsize": 8}
            axes.text(i, t, f"{cell:.0f}", ha="center", va="center", **style)


def _new_figure(height: float, width: float = 4.2, columns: int = 1) -> tuple[Figure, Any]:
    """A figure and its axes; sizes in inches, without the legend."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height))
    return figure, figure.subplots(1, columns, sharey=True)


def _add_legend(figure: Figure, axes: Any) -> None:
    """Below the axes, in two columns."""
    handles, names = axes.get_legend_handles_labels()
    figure.set_figheight(figure.get_figheight() + 0.19 * math.ceil(len(names) / 2))
    figure.legend(handles, names, loc="outside lower center", ncols=2)


def _short(name: str, length: int = 16) -> str:
    """A name in a figure: on one line, without its middle if it is long, never as a formula."""
    name = " ".join(name.split())
    if len(name) > length:
        name = f"{name[: length // 2]}…{name[length // 2 + 1 - length :]}"
    return name.replace("$", r"\$")
