"""The figures of a report, as SVG and PNG, with captions that say what they show."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

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
    unique_slugs,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

INK, GRID = "#1b1f24", "#d5dae1"
"""As in ``report.mplstyle``; the page replaces these and the colours by its own."""
COLOURS = ("#1d6fb8", "#e8650a", "#0b5d43", "#d0459b", "#4a1f7a", "#7a2f12")
"""Safe for colour-blind readers; ``DARK_COLOURS`` replace them on a dark page."""
DARK_COLOURS = ("#4c9df0", "#ff8c42", "#1fae7a", "#f7a8d8", "#9b6cf5", "#f2df7e")
_MARKERS = "osD^vPX*<>"
_DASHES: tuple[Any, ...] = ("-", (0, (5, 1.6)), (0, (1.2, 1.2)), (0, (6, 1.5, 1.2, 1.5)))
_CALIBRATION = {"nll": "NLL (nats)", "brier": "Brier score", "ece": "ECE"}
_MAX_NUMBERED = 10
"""Heat maps with more columns show no numbers."""


class Chart(NamedTuple):
    """A figure as the report shows it; ``name`` is that of its files."""

    name: str
    title: str
    caption: str
    figure: Figure

    @property
    def png(self) -> bytes:
        """The bytes of a PNG file."""
        file = io.BytesIO()
        self.figure.savefig(file, format="png", dpi=160, facecolor="white")
        return file.getvalue()

    @property
    def svg(self) -> str:
        """With the reader's fonts, and identifiers that no other figure has."""
        file = io.StringIO()
        nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        self.figure.savefig(file, format="svg", transparent=True, metadata=nothing)
        svg = re.sub(r'(id="|url\(#|href="#)', rf"\g<1>{self.name}-", file.getvalue())
        return re.sub(r"(font: [^;\"]*?px) [^;\"]*", r"\1 system-ui, sans-serif", svg)


def style() -> Any:
    """A context with the look of the figures, whatever the user's own defaults are."""
    import matplotlib.style

    return matplotlib.style.context(["default", Path(__file__).with_name("report.mplstyle")])


def save_curves(comparison: Comparison, path: Path) -> None:
    """Average accuracy over the domains learned, as a PNG file."""
    with style():
        write_atomically(path, accuracy_curves(comparison).png)


def save_matrix(comparison: Comparison, label: str, path: Path) -> None:
    """A strategy's accuracy matrix, mean over seeds, as a PNG file."""
    with style():
        write_atomically(path, matrix_chart(comparison, label).png)


def charts_of(comparison: Comparison) -> list[Chart]:
    """Those for which there are data."""
    found = [accuracy_curves(comparison), _forgetting(comparison)]
    if comparison.best or comparison.summary["average_accuracy_mean"].notna().any():
        found.append(_cost(comparison, "time", "train_seconds_mean", "training time, seconds"))
        found.append(_cost(comparison, "memory", "memory_ratio", "memory, in units of the weights"))
    found += [_calibration(comparison), _reliability(comparison), _training(comparison)]
    return [chart for chart in found if chart is not None]


def matrices_of(comparison: Comparison) -> list[Chart]:
    """The accuracy matrix of each strategy, in the order of the table."""
    labels = list(comparison.summary.index)
    charts = [matrix_chart(comparison, label) for label in labels]
    slugs = unique_slugs(labels)
    return [chart._replace(name=f"matrix-{s}") for chart, s in zip(charts, slugs, strict=True)]


def accuracy_curves(comparison: Comparison) -> Chart:
    """Average accuracy on the domains learned so far; bands are one standard deviation."""
    final = 100 * comparison.summary["average_accuracy_mean"].dropna()
    curves = {name: 100 * learning_curve(comparison.runs_of(name)) for name in final.index}
    drawn = {name: curve for name, curve in curves.items() if len(curve)}
    levels = {name: final[name] for name in final.index.difference(list(drawn))}
    lines = {name: curve["mean"] for name, curve in drawn.items()}
    figure, axes = _line_chart(comparison, lines, levels)
    for name, curve in drawn.items():
        low, high = curve["mean"] - curve["std"], curve["mean"] + curve["std"]
        colour = looks(comparison)[name]["color"]
        axes.fill_between(curve.index, low, high, color=colour, alpha=0.12, lw=0)
    count = len(comparison.domains)
    axes.set_xlim(1 - min(0.4, 0.03 * count), 1.03 * count)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set(xlabel="domains learned", ylabel="average accuracy (%)")
    parts = [_extremes(final[list(drawn)], "{:.1f} %", "highest", "lowest")] if drawn else []
    parts += [f"ceiling {name} with {level:.1f} %" for name, level in levels.items()]
    caption = f"After {count} domain{'s' if count > 1 else ''}: {'; '.join(parts)}."
    if not parts:
        caption = "No accuracies are known."
    return Chart("curves", "Average accuracy over domains learned", caption, figure)


def _forgetting(comparison: Comparison) -> Chart | None:
    """By how much each domain's accuracy fell since it was learned, by strategy."""
    lost = {n: forgetting_by_domain(comparison.runs_of(n)) for n in comparison.summary.index}
    drops = 100 * pd.DataFrame({n: values for n, values in lost.items() if values is not None}).T
    if drops.empty:
        return None
    most = max(10.0, 10 * math.ceil(np.nanmax([*drops.abs().to_numpy().ravel(), 0]) / 10))
    names = comparison.domains[:-1]
    figure, axes = _new_figure((1.35 if _long(names) else 0.95) + 0.26 * max(4, len(drops)))
    _heat_map(axes, drops.to_numpy(), names, list(drops.index), (-most, most), "PuOr_r")
    axes.images[0].colorbar.set_label("points lost")
    axes.set_yticks(range(len(drops)), map(_short, drops.index))
    axes.set_xlabel("domain")
    caption = "No forgetting is known."
    if len(means := drops.mean(axis=1, skipna=False).dropna()):
        worst = drops.loc[means.idxmax()]
        where = f"(up to {worst.max():.1f} on domain {names[worst.argmax()]})"
        caption = f"Mean loss in points: {_extremes(means, '{:.1f}')} {where}."
    return Chart("forgetting", "Accuracy lost since a domain was learned", caption, figure)


def _cost(comparison: Comparison, name: str, column: str, unit: str) -> Chart:
    """A_T against a cost; bars are one standard deviation."""
    summary, costs = comparison.summary, comparison.summary[column]
    figure, axes = _new_figure(3.1, len(summary))
    for label, look in looks(comparison).items():
        row = summary.loc[label]
        mean, std = 100 * row["average_accuracy_mean"], 100 * row["average_accuracy_std"]
        error = None if math.isnan(std) else std
        point = {**look, "linestyle": "", "ms": 6.5, "label": _short(label)}
        axes.errorbar(row[column], mean, error, **point)
    if 0 < 12 * costs.min() < costs.max():
        _log_scale(axes, "x")
    else:
        axes.set_xlim(0, 1.08 * costs.max() or 1)
    axes.set(xlabel=unit, ylabel="accuracy after\nthe last domain (%)")
    axes.grid()
    _add_legend(figure, axes)
    caption = f"{unit.capitalize()}: {_extremes(costs, '{:.1f}')}"
    if comparison.best is not None:
        caption += f"; the best, {comparison.best}, with {costs[comparison.best]:.1f}"
    title = f"Accuracy against {unit.split(',')[0]}"
    return Chart(name, title, f"{caption}.", figure)


def _calibration(comparison: Comparison) -> Chart | None:
    """Bars of one standard deviation; lower is better."""
    columns = [f"{name}_mean" for name in _CALIBRATION]
    shown = comparison.summary.dropna(subset=columns, how="all")[::-1]
    if shown.empty:
        return None
    figure, all_axes = _new_figure(1.0 + 0.22 * max(3, len(shown)), columns=len(columns))
    look = looks(comparison)
    for axes, (name, label) in zip(all_axes, _CALIBRATION.items(), strict=True):
        mean = shown[f"{name}_mean"].replace(np.inf, np.nan)
        std = shown[f"{name}_std"].fillna(0)
        error = {"ecolor": INK, "elinewidth": 0.9}
        colours = [look[strategy]["color"] for strategy in shown.index]
        axes.barh(range(len(shown)), mean, xerr=std, height=0.66, color=colours, error_kw=error)
        axes.set(xlabel=label, xlim=(0, None))
        axes.locator_params(axis="x", nbins=3)
        axes.grid(axis="x")
        axes.tick_params(axis="y", length=0)
    all_axes[0].set_yticks(range(len(shown)), map(_short, shown.index))
    known = shown.loc[~shown["ceiling"], columns].replace(np.inf, np.nan)
    lowest = known.dropna(axis=1, how="all").agg(["idxmin", "min"]).items()
    parts = [f"{_CALIBRATION[c[:-5]].split()[0]} {name} with {x:.3f}" for c, (name, x) in lowest]
    caption = f"Lowest of the continual learners: {', '.join(parts) or 'none'}."
    return Chart(
        "calibration", "Calibration after the last domain (lower is better)", caption, figure
    )


def _reliability(comparison: Comparison) -> Chart | None:
    """Accuracy against confidence; below the diagonal predictions are overconfident."""
    bins = {n: pooled_reliability(comparison.runs_of(n)) for n in comparison.summary.index}
    bins = {name: table for name, table in bins.items() if len(table)}
    if not bins:
        return None
    lines = {name: table.set_index("confidence")["accuracy"] for name, table in bins.items()}
    figure, axes = _line_chart(comparison, lines)
    axes.plot([0, 1], [0, 1], color=GRID, lw=1, zorder=0.5)
    axes.set(xlim=(0, 1), ylim=(0, 1), xlabel="confidence", ylabel="accuracy")
    axes.grid()
    label = comparison.best if comparison.best in bins else next(iter(bins))
    table = bins[str(label)]
    confidence, accuracy = 100 * np.average(
        table[["confidence", "accuracy"]], axis=0, weights=table["images"]
    )
    caption = (
        f"{label} has a mean confidence of {confidence:.1f} % and an accuracy of {accuracy:.1f} %; "
        "points below the diagonal are overconfident predictions."
    )
    return Chart("reliability", "Accuracy by confidence after the last domain", caption, figure)


def _training(comparison: Comparison) -> Chart | None:
    """Training loss by epoch, over all domains one after the other."""
    losses = {n: training_losses(comparison.runs_of(n)) for n in comparison.summary.index}
    losses = {name: values for name, values in losses.items() if len(values)}
    if not losses:
        return None
    figure, axes = _line_chart(comparison, losses)
    known = pd.concat(losses.values()).replace(np.inf, np.nan).dropna()
    if len(known) and 0 < 20 * known.min() < known.max():
        _log_scale(axes, "y")
    axes.set(xlabel="epochs, all domains one after the other", ylabel="training loss")
    last = pd.Series({name: values.iloc[-1] for name, values in losses.items()})
    caption = f"Training loss in the last epoch: {_extremes(last, '{:.3f}')}."
    return Chart("training", "Training loss", caption, figure)


def matrix_chart(comparison: Comparison, label: str) -> Chart:
    """Accuracy on each domain (across) after each domain learned (down); domains right of the
    step line were not learned yet."""
    cells = 100 * mean_matrix(comparison.runs_of(label))
    rows, columns = cells.shape
    names = comparison.tested_domains
    figure, axes = _new_figure(2.95 if _long(names) else 2.7, width=3.4)
    down = comparison.domains if _long(names) else [str(t + 1) for t in range(rows)]
    measured = [row for run in comparison.runs["accuracy"] for row in run if row is not None]
    low = min(90, 10 * math.floor(10 * np.nanmin([*np.ravel(measured), 1.0])))
    _heat_map(axes, cells, names, down, (low, 100), "viridis")
    axes.images[0].colorbar.set_label("accuracy (%)")
    if rows == columns and names == comparison.domains and not np.isnan(cells).any():
        steps = np.arange(rows)
        width = 1.4 if rows <= _MAX_NUMBERED else 0.6
        axes.step(steps + 0.5, steps - 0.5, where="pre", color="#ffffff", lw=width)
    axes.set(xlabel="tested on domain")
    axes.set(ylabel="after learning" if _long(names) else "domains learned")
    last = pd.Series(cells[-1], index=names)
    caption = f"After the last domain: {_extremes(last, '{:.1f} %', 'lowest domain', 'highest')}."
    return Chart("matrix", label, caption, figure)


def looks(comparison: Comparison) -> dict[str, dict[str, Any]]:
    """Colour, marker and line style of each strategy, as matplotlib's arguments.

    They follow the order of the names, so that a strategy looks the same whatever its rank.
    Ceilings have the colour of the text.
    """
    found: dict[str, dict[str, Any]] = {}
    for ceiling, group in comparison.summary.sort_index().groupby("ceiling"):
        for i, label in enumerate(group.index):
            colour = INK if ceiling else COLOURS[i % len(COLOURS)]
            marker = "p8"[i % 2] if ceiling else _MARKERS[i % len(_MARKERS)]
            dashes = _DASHES[1 + i % 2 if ceiling else i // len(COLOURS) % len(_DASHES)]
            found[label] = {"color": colour, "marker": marker, "linestyle": dashes}
    return {label: found[label] for label in comparison.summary.index}


def _line_chart(
    comparison: Comparison, lines: Mapping[str, pd.Series], levels: Mapping[str, float] = {}
) -> tuple[Figure, Any]:
    """A line per strategy, thicker for the best.

    :param levels: of strategies with one number, which are horizontal lines.
    """
    figure, axes = _new_figure(3.1, len(lines) + len(levels))
    for label, look in looks(comparison).items():
        line = {**look, "label": _short(label), "lw": 2.4 if label == comparison.best else 1.3}
        if label in levels:
            axes.axhline(levels[label], **{**line, "marker": ""})
        elif label in lines:
            every = max(1, len(lines[label]) // 10)
            axes.plot(lines[label], **line, ms=4.5, markevery=every)
    axes.grid(axis="y")
    _add_legend(figure, axes)
    return figure, axes


def _heat_map(
    axes: Any,
    cells: np.ndarray,
    across: Sequence[str],
    down: Sequence[str],
    limits: tuple[float, float],
    colours: str,
) -> None:
    """Cells with a colour bar, numbers where there is room, and names at the edges."""
    image = axes.imshow(cells, cmap=colours, clim=limits, interpolation="none", aspect="auto")
    slim = 8 * axes.figure.get_figheight()
    bar = axes.figure.colorbar(image, ax=axes, pad=0.02, fraction=0.05, aspect=slim)
    bar.outline.set_linewidth(0)
    for axis, names in ((axes.xaxis, across), (axes.yaxis, down)):
        every = 1 if _long(across) or len(names) <= 10 else math.ceil(len(names) / 8)
        axis.set_ticks(range(0, len(names), every), map(_short, names[::every]))
    if _long(across):
        for text in axes.get_xticklabels():
            text.set(rotation=45 if len(across) <= 10 else 90, rotation_mode="anchor")
            text.set(ha="right", va="center")
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    for (t, i), cell in np.ndenumerate(cells):
        if len(across) <= _MAX_NUMBERED and not np.isnan(cell):
            dark = np.dot(image.to_rgba(cell)[:3], (0.3, 0.6, 0.1)) < 0.5
            colour = "#ffffff" if dark else "#000000"
            axes.text(i, t, f"{round(cell)}", ha="center", va="center", fontsize=8, color=colour)


def _new_figure(
    height: float, names: int = 0, width: float = 4.2, columns: int = 1
) -> tuple[Figure, Any]:
    """A figure and its axes.

    :param height: inches, without the legend.
    :param names: in the legend.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height + 0.19 * math.ceil(names / 2)))
    return figure, figure.subplots(1, columns, sharey=True)


def _add_legend(figure: Figure, axes: Any) -> None:
    handles, names = axes.get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=2)


def _log_scale(axes: Any, name: str) -> None:
    """With plain numbers at 1, 2, 5, 10 and so on."""
    from matplotlib.ticker import LogLocator, NullFormatter

    axes.set(**{f"{name}scale": "log"})
    axis = getattr(axes, f"{name}axis")
    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axis.set_major_formatter("{x:g}")
    axis.set_minor_formatter(NullFormatter())


def _long(names: Sequence[str]) -> bool:
    return max(map(len, names)) > 3


def _short(name: str, length: int = 16) -> str:
    """A name in a figure: on one line, without its middle if it is long, never as a formula."""
    name = " ".join(name.split())
    if len(name) > length:
        name = f"{name[: length // 2]}…{name[length // 2 + 1 - length :]}"
    return name.replace("$", r"\$")


def _extremes(values: pd.Series, form: str, first: str = "lowest", last: str = "highest") -> str:
    """``lowest A with 1.0, highest B with 2.0``; of one value, only that."""
    values = values.dropna()
    if values.empty:
        return "not known"
    if len(values) > 1 and values.nunique() == 1:
        return f"{form.format(values.iloc[0])} for all"
    names = [values.idxmin(), values.idxmax()]
    if first == "highest":
        names.reverse()
    texts = [f"{name} with {form.format(values[name])}" for name in names]
    return f"{first} {texts[0]}, {last} {texts[1]}" if len(values) > 1 else texts[0]
