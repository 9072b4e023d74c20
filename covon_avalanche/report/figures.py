"""The figures of a report, as PDF, PNG and SVG."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Iterable
from functools import partial
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from covon_avalanche.atomic_write import write_atomically
from covon_avalanche.report.results import accuracy_matrix
from covon_avalanche.report.summary import Comparison

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FORMS = ("pdf", "png", "svg")  # the page shows the last
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
_MAX_NUMBERED = 10  # columns of a heat map with numbers


def rendered(figure: Figure, form: str) -> bytes:
    """The bytes of a file of one of the ``FORMS``; the same figure gives the same bytes."""
    if figure.get_layout_engine() is not None:  # once, not for each form
        figure.draw_without_rendering()
        figure.set_layout_engine(None)
    file = io.BytesIO()
    undated = {"svg": {"Date": None, "Creator": None}, "pdf": {"CreationDate": None}}
    metadata = undated.get(form)
    figure.savefig(file, format=form, facecolor="white", metadata=metadata)
    return file.getvalue()


def style() -> Any:
    """A context with the look of the figures, whatever the user's own defaults are."""
    import matplotlib.style

    return matplotlib.style.context(["default", Path(__file__).with_name("report.mplstyle")])


def save(comparison: Comparison, name: str, path: Path) -> None:
    """Write one of :func:`figures_of` as a PNG file, unless there are no data for it."""
    with style():
        for figure in figures_of(comparison, name).values():
            write_atomically(path, rendered(figure, "png"))


def figures_of(comparison: Comparison, *names: str) -> dict[str, Figure]:
    """Figures for which data exist, by name: all, or those named; ``matrix-LABEL`` is that of a
    strategy."""
    labels = comparison.summary.index
    drawings = _FIGURES | {f"matrix-{label}": partial(_matrix, label=label) for label in labels}
    found = {name: drawings[name](comparison) for name in names or drawings}
    return {name: figure for name, figure in found.items() if figure and figure.axes[0].has_data()}


def learning_rates(trials: pd.DataFrame) -> Figure | None:
    """A_T on validation images against the learning rate, a point per completed trial of
    :func:`~covon_avalanche.experiment.search.trials_in`."""
    known = trials.reindex(columns=["strategy", "lr", "accuracy"]).dropna()
    if known.empty:
        return None
    figure, axes = _new_figure(3.1)
    names = _short(known["strategy"])
    for i, (label, own) in enumerate(known.groupby("strategy")):
        look = {"color": _COLOURS[i % len(_COLOURS)], "marker": _MARKERS[i % len(_MARKERS)]}
        axes.plot(own["lr"], 100 * own["accuracy"], ls="", ms=4.5, **look, label=names[str(label)])
    axes.set(xscale="log", xlabel="learning rate", ylabel="A_T on validation images (%)")
    axes.grid()
    _add_legend(figure, axes)
    return figure


def _curves(comparison: Comparison) -> Figure:
    def curves(runs: pd.DataFrame) -> pd.DataFrame:
        """Average accuracy by seed and domain; joint training is a horizontal line."""
        rows = pd.DataFrame([accuracy_matrix(run).curve() for _, run in runs.iterrows()])
        return rows.astype(float).rename(columns=lambda t: t + 1).bfill(axis=1)

    figure, axes = _new_figure(3.1)
    axes.set(xlabel="domains learned", ylabel="average accuracy (%)")
    names = _short(comparison.summary.index)
    for label, rows in comparison.by_strategy(curves).items():
        mean, std = 100 * rows.mean(skipna=False), 100 * rows.std(skipna=False)
        look, every = line_styles(comparison)[label], max(1, len(mean) // 10)
        axes.plot(mean, **look, label=names[label], ms=4.5, markevery=every)
        band = {"y1": mean - std, "y2": mean + std}
        axes.fill_between(mean.index, **band, color=look["color"], alpha=0.12, lw=0)
        if std.notna().any():
            axes.set_xlabel("domains learned (band: ± one standard deviation)")
    axes.locator_params(axis="x", integer=True)
    axes.grid(axis="y")
    _add_legend(figure, axes)
    return figure


def _forgetting(comparison: Comparison) -> Figure | None:
    """Accuracy when a domain was learned minus accuracy at the end, of all domains but the last."""
    known = comparison.summary["bwt_mean"].dropna().index
    if known.empty:
        return None
    matrices = [_mean_matrix(comparison.runs_of(label)) for label in known]
    lost = [100 * (np.diagonal(matrix) - matrix[-1])[:-1] for matrix in matrices]
    drops = pd.DataFrame(lost, known, comparison.domains[:-1])
    figure, axes = _new_figure(1.2 + 0.26 * max(4, len(drops)))
    most = np.nanmax([*drops.abs().to_numpy().ravel(), 10])
    _heat_map(axes, drops, (-most, most), cmap="PuOr_r", label="points lost")
    figure.axes[1].set_ylim(min(0, drops.min(axis=None)), max(1, drops.max(axis=None)))
    axes.set(xlabel="domain")
    return figure


def _cost(comparison: Comparison, column: str, unit: str) -> Figure:
    summary = comparison.summary.dropna(subset="average_accuracy_mean")
    names = _short(summary.index)
    figure, axes = _new_figure(3.1)
    for label, row in summary.iterrows():
        point = {**line_styles(comparison)[label], "linestyle": "", "ms": 6.5}
        mean, std = 100 * row[["average_accuracy_mean", "average_accuracy_std"]]
        axes.errorbar(row[column], mean, std, **point, label=names[label])
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
        axes.locator_params(axis="x", nbins=2)
        axes.grid(axis="x")
    names = _short(shown.index).values()
    all_axes[0].set_yticks(range(len(shown)), names)
    _make_room(figure, names)
    return figure


def _mean_matrix(runs: pd.DataFrame) -> np.ndarray:
    """Accuracy matrix, mean over seeds; NaN in rows that were not measured."""
    unknown = [math.nan] * len(runs["counts"].iloc[0])
    return np.mean([[row or unknown for row in rows] for rows in runs["accuracy"]], axis=0)


def _matrix(comparison: Comparison, label: str) -> Figure:
    """Accuracy on each domain (across) after each (down); those right of the line come later."""
    learned, tested = comparison.domains, comparison.tested_domains
    runs = comparison.runs_of(label)
    cells = pd.DataFrame(100 * _mean_matrix(runs), learned, tested)
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
    "time": partial(_cost, column="train_seconds_mean", unit="training time, seconds"),
    "memory": partial(_cost, column="memory_ratio", unit="memory, in units of the weights"),
    "calibration": _calibration,
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


def _heat_map(
    axes: Any, cells: pd.DataFrame, limits: tuple[float, float], cmap: str, label: str
) -> None:
    """Cells, with numbers where there is room, names at the edges and a labelled colour bar."""
    image = axes.imshow(cells, cmap=cmap, clim=limits, interpolation="none", aspect="auto")
    axes.figure.colorbar(image, ax=axes, pad=0.02, label=label)
    for axis, names in ((axes.xaxis, cells.columns), (axes.yaxis, cells.index)):
        every = 1 if max(map(len, names)) > 3 else math.ceil(len(names) / _MAX_NUMBERED)
        axis.set_ticks(range(0, len(names), every), _short(names[::every]).values())
    axes.tick_params(axis="x", length=0, rotation=90 if max(map(len, cells.columns)) > 3 else 0)
    axes.tick_params(axis="y", length=0)
    _make_room(axes.figure, _short(cells.index).values(), _short(cells.columns).values())
    axes.spines[:].set_visible(False)
    for (t, i), cell in np.ndenumerate(cells):
        if len(cells.columns) <= _MAX_NUMBERED and not np.isnan(cell):
            dark = np.dot(image.to_rgba(cell)[:3], (0.3, 0.6, 0.1)) < 0.5
            style = {"color": "#ffffff" if dark else "#000000", "fontsize": 8}
            axes.text(i, t, f"{round(cell)}", ha="center", va="center", **style)


def _new_figure(height: float, width: float = 4.2, columns: int = 1) -> tuple[Figure, Any]:
    """A figure and its axes; sizes in inches, without the legend."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=160, layout="constrained")
    return figure, figure.subplots(1, columns, sharey=True)


def _make_room(figure: Figure, down: Iterable[str], across: Iterable[str] = ("",)) -> None:
    """Enlarge a figure for long names at its left edge and upright ones below it."""
    width, height = figure.get_size_inches()
    width += 0.08 * max(0, max(map(len, down)) - 16)
    figure.set_size_inches(width, height + 0.08 * max(0, max(map(len, across)) - 4))


def _add_legend(figure: Figure, axes: Any) -> None:
    """Below the axes, in two columns, or in one if names are long."""
    handles, names = axes.get_legend_handles_labels()
    columns = 1 if max(map(len, names), default=0) > 18 else 2
    figure.set_figheight(figure.get_figheight() + 0.19 * math.ceil(len(names) / columns))
    figure.legend(handles, names, loc="outside lower center", ncols=columns)


def _short(names: Iterable[str]) -> dict[str, str]:
    """What stands for each name in a figure: at most 16 characters, without those in the middle, or
    as many more as tell it from the others; never a formula."""

    def cut(name: str, n: int) -> str:
        return name if len(name) <= 2 * n else f"{name[:n]}…{name[1 - n :]}"

    def distinct(name: str) -> str:
        lengths = (n for n in count(8) if [cut(o, n) for o in whole].count(cut(name, n)) == 1)
        return name if len(name) <= 16 else cut(name, next(lengths))

    whole = [*map(str, dict.fromkeys(names))]
    return {name: distinct(name).replace("$", r"\$") for name in whole}
