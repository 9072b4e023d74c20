"""Tables and plots of results, aggregated over seeds."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import JustifyMethod
from rich.table import Table

from covon_avalanche.evaluation import mean_and_std
from covon_avalanche.experiment.result import Result
from covon_avalanche.experiment.strategy_settings import CEILINGS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_COLOURS = (
    *("#0b6e4f", "#7a4fbf", "#c2571a", "#1f6fb4"),
    *("#b0892b", "#a33b5e", "#6b7280", "#4d7c0f"),
)
COLUMNS = ("strategy", "A_T %", "BWT %", "seconds", "memory", "seeds")


@dataclass(frozen=True)
class Summary:
    """One strategy over its seeds; accuracies in percent, mean and standard deviation."""

    strategy: str
    ceiling: bool
    accuracy: tuple[float, float]
    bwt: tuple[float, float] | None
    seconds: float
    parameters_worth: float
    curve: list[tuple[float, float]]
    seeds: int

    def cells(self) -> tuple[str, ...]:
        """The row of a table, in the order of ``COLUMNS``."""
        name = f"{self.strategy} (ceiling)" if self.ceiling else self.strategy
        return (
            name,
            _plus_minus(self.accuracy),
            "-" if self.bwt is None else _plus_minus(self.bwt),
            f"{self.seconds:.1f}",
            f"{self.parameters_worth:.0f}",
            str(self.seeds),
        )


def summarise(results: Sequence[Result]) -> list[Summary]:
    """One summary per strategy, in order of first appearance."""
    summaries = []
    for strategy in dict.fromkeys(result.strategy for result in results):
        runs = [result for result in results if result.strategy == strategy]
        ceiling = runs[0].settings["strategy"]["kind"] in CEILINGS
        bwts = [100 * run.bwt for run in runs if run.bwt is not None]
        whole = all(None not in run.accuracy for run in runs)
        curves = [run.matrix.curve() for run in runs] if whole else []
        points = [[100 * a for a in point if a is not None] for point in zip(*curves, strict=True)]
        summaries.append(
            Summary(
                strategy=strategy,
                ceiling=ceiling,
                accuracy=mean_and_std([100 * run.average_accuracy for run in runs]),
                bwt=mean_and_std(bwts) if bwts else None,
                seconds=sum(sum(run.train_seconds) for run in runs) / len(runs),
                parameters_worth=max(run.parameters_worth for run in runs),
                curve=[mean_and_std(point) for point in points],
                seeds=len(runs),
            )
        )
    return summaries


def best(summaries: Sequence[Summary]) -> str | None:
    """The strategy with the highest mean accuracy, the ceiling aside."""
    learners = [summary for summary in summaries if not summary.ceiling]
    return max(learners, key=lambda s: s.accuracy[0]).strategy if learners else None


def rich_table(summaries: Sequence[Summary], title: str) -> Table:
    """The table for a terminal, best strategy in bold."""
    table = Table(title=title, title_justify="left")
    for column in COLUMNS:
        justify: JustifyMethod = "left" if column == "strategy" else "right"
        table.add_column(column, justify=justify, no_wrap=True)
    winner = best(summaries)
    for summary in summaries:
        style = "bold" if summary.strategy == winner else "dim" if summary.ceiling else None
        table.add_row(*summary.cells(), style=style)
    return table


def markdown_table(summaries: Sequence[Summary]) -> str:
    """The same table in Markdown."""
    lines = [f"| {' | '.join(COLUMNS)} |", "|---|" + "---:|" * (len(COLUMNS) - 1)]
    winner = best(summaries)
    for summary in summaries:
        cells = list(summary.cells())
        if summary.strategy == winner:
            cells[:2] = [f"**{cell}**" for cell in cells[:2]]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def plot_curves(summaries: Sequence[Summary], title: str, path: Path) -> None:
    """Mean accuracy over the domains seen so far, after each domain, as PNG or SVG.

    Bands are one standard deviation over seeds; the ceiling is a dashed line.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.ticker import MaxNLocator

    figure, axes = plt.subplots(figsize=(7.2, 4.4), layout="constrained")
    colours = iter(_COLOURS)
    ends: list[tuple[float, str, str]] = []
    order = sorted(summaries, key=lambda s: -s.accuracy[0])
    steps = max((len(s.curve) for s in summaries), default=1)
    for summary in order:
        if summary.ceiling:
            axes.axhline(summary.accuracy[0], color="#444444", linestyle="--", linewidth=1)
            ends.append((summary.accuracy[0], f"{summary.strategy} (ceiling)", "#444444"))
            continue
        colour = next(colours, "#6b7280")
        x = list(range(1, len(summary.curve) + 1))
        y = [mean for mean, _ in summary.curve]
        spread = [0.0 if math.isnan(std) else std for _, std in summary.curve]
        wide = summary.strategy == best(summaries)
        axes.plot(x, y, color=colour, marker="o", markersize=4, linewidth=2.6 if wide else 1.5)
        low = [a - b for a, b in zip(y, spread, strict=True)]
        high = [a + b for a, b in zip(y, spread, strict=True)]
        axes.fill_between(x, low, high, color=colour, alpha=0.13, linewidth=0)
        ends.append((y[-1], summary.strategy, colour))
    axes.set_xlim(0.9, steps + 0.1)
    axes.margins(y=0.05)
    bottom, top = axes.get_ylim()
    _label_ends(axes, ends, steps + 0.15, gap=(top - bottom) * 0.055)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("domains learned")
    axes.set_ylabel("accuracy on all of them (%)")
    axes.set_title(title, fontsize=10, loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#e5e7eb", linewidth=0.8)
    _save(figure, path)


def plot_matrices(results: Mapping[str, Sequence[Result]], path: Path) -> None:
    """Accuracy on each domain (across) after each domain learned (down), as heat maps side by
    side: the mean over a strategy's results, in percent."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    width = 0.6 + 2.9 * len(results)
    figure, all_axes = plt.subplots(
        1, len(results), figsize=(width, 3.1), layout="constrained", sharey=True, squeeze=False
    )
    image = None
    for axes, (name, runs) in zip(all_axes[0], results.items(), strict=True):
        rows = [[row for row in run.accuracy if row is not None] for run in runs]
        mean = [
            [100 * sum(cells) / len(cells) for cells in zip(*same, strict=True)]
            for same in zip(*rows, strict=True)
        ]
        seen = [
            [a if i <= t else math.nan for i, a in enumerate(row)] for t, row in enumerate(mean)
        ]
        image = axes.imshow(seen, cmap="viridis", vmin=50, vmax=100)
        axes.set_title(name, fontsize=10)
        axes.set_xlabel("domain")
    all_axes[0][0].set_ylabel("domains learned")
    if image is not None:
        figure.colorbar(image, ax=list(all_axes[0]), label="accuracy (%)", shrink=0.85)
    _save(figure, path)


def _save(figure: Figure, path: Path) -> None:
    from matplotlib import pyplot as plt

    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.part")
    figure.savefig(part, format=path.suffix[1:], dpi=160)
    part.replace(path)
    plt.close(figure)


def _label_ends(axes: object, ends: list[tuple[float, str, str]], x: float, gap: float) -> None:
    """Names at the right end of the curves, moved apart where they would overlap."""
    ends = sorted(ends)
    heights = [height for height, *_ in ends]
    for i in range(1, len(heights)):
        heights[i] = max(heights[i], heights[i - 1] + gap)
    shift = (sum(heights) - sum(height for height, *_ in ends)) / max(1, len(ends))
    for height, (_, name, colour) in zip(heights, ends, strict=True):
        axes.text(  # type: ignore[attr-defined]
            x, height - shift, name, color=colour, fontsize=9, va="center", clip_on=False
        )


def _plus_minus(value: tuple[float, float]) -> str:
    mean, std = value
    return f"{mean:.2f}" if math.isnan(std) else f"{mean:.2f} ± {std:.2f}"
