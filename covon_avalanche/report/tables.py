"""Summary tables as Markdown, LaTeX, CSV and for the terminal, all exported by pandas."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

import pandas as pd
from rich.markup import escape
from rich.table import Table

from covon_avalanche.report.summary import TEST, Comparison

MISSING = "\N{EN DASH}"


class Metric(NamedTuple):
    """A column of the summary table.

    :param column: of :func:`strategy_summary`; ``*_mean`` is shown with its ``*_std``.
    :param meaning: one sentence for the legend.
    """

    heading: str
    column: str
    meaning: str

    def text(self, row: pd.Series) -> str:
        """The cell of a strategy, a row of the summary."""
        value, std = row[self.column], row.get(self.column.replace("_mean", "_std"))
        if self.column == "p_value" and row["best"]:
            return "best"
        if pd.isna(value):
            return "nan" if self.column == "average_accuracy_mean" else MISSING
        if self.column == "p_value":
            return "<0.001" if value < 0.001 else f"{value:.3f}"
        if self.column == "peak_memory":
            return f"{value / 2**20:.0f}"
        if not self.column.endswith("_mean") or self.column == "train_seconds_mean":
            return f"{value:.1f}" if value < 100 and self.column != "seeds" else f"{value:.0f}"
        digits, factor = (2, 100) if self.heading.endswith("%") else (3, 1)
        text = f"{factor * value:.{digits}f}"
        return text if pd.isna(std) else f"{text} ± {factor * std:.{digits}f}"


METRICS = (
    Metric("A_T %", "average_accuracy_mean", "accuracy after the last domain, mean over domains"),
    Metric("p", "p_value", "p-value of the difference to the best strategy"),
    Metric("by image %", "weighted_accuracy_mean", "A_T pooled over the images of all domains"),
    Metric("BWT %", "bwt_mean", "backward transfer: mean change of accuracy since it was learned"),
    Metric("forgetting %", "forgetting_mean", "minus the backward transfer; lower is better"),
    Metric("NLL", "nll_mean", "negative log-likelihood in nats; lower is better"),
    Metric("ECE", "ece_mean", "expected calibration error, in [0, 1]; lower is better"),
    Metric(
        "sampled A_T %",
        "sampled_average_accuracy_mean",
        "A_T of the mean prediction of posterior samples instead of the mean weights",
    ),
    Metric("sampled NLL", "sampled_nll_mean", "NLL of these predictions"),
    Metric("sampled ECE", "sampled_ece_mean", "ECE of these predictions"),
    Metric("seconds", "train_seconds_mean", "wall-clock training time of one run"),
    Metric(
        "memory",
        "memory_ratio",
        "weights, optimizer state, anchors and stored examples, in units of the weights",
    ),
    Metric("peak MiB", "peak_memory", "largest memory of a run"),
    Metric("seeds", "seeds", "number of runs"),
)
SHORT = ("A_T %", "BWT %", "seconds", "memory", "seeds")


def metrics_of(comparison: Comparison, headings: Sequence[str] = ()) -> list[Metric]:
    """The metrics that at least one strategy has.

    :param headings: of some of them only.
    """
    known = [metric for metric in METRICS if comparison.summary[metric.column].notna().any()]
    return [metric for metric in known if not headings or metric.heading in headings]


def summary_table(comparison: Comparison, headings: Sequence[str] = ()) -> pd.DataFrame:
    """The summary as text: mean ± standard deviation, by strategy, highest A_T first.

    :param headings: of the columns; all by default.
    """
    rows = [row for _, row in comparison.summary.iterrows()]
    metrics = metrics_of(comparison, headings)
    cells = {metric.heading: [metric.text(row) for row in rows] for metric in metrics}
    return pd.DataFrame({"strategy": [_name(row) for row in rows], **cells})


def markdown_table(
    comparison: Comparison, headings: Sequence[str] = (), extra: pd.DataFrame | None = None
) -> str:
    """The summary in Markdown, the best strategy in bold.

    :param headings: of the columns; all by default.
    :param extra: more columns of text, by label, which come after the first of these.
    """
    table = summary_table(comparison, headings).map(_markdown)
    for heading, cells in () if extra is None else extra.items():
        table.insert(2, heading, list(cells))
    best = list(comparison.summary["best"])
    for column in table.columns.intersection(["strategy", METRICS[0].heading]):
        table.loc[best, column] = "**" + table.loc[best, column] + "**"
    alignment = ["left", *["right"] * (len(table.columns) - 1)]
    return str(table.to_markdown(index=False, disable_numparse=True, colalign=alignment)) + "\n"


def markdown(found: Sequence[Comparison]) -> str:
    """One table for each comparison."""
    parts = []
    for comparison in found:
        if len(found) > 1:
            parts.append(f"## {_markdown(comparison.title)}\n")
        parts.append(markdown_table(comparison))
        if comparison.summary["p_value"].notna().any():
            parts.append(f"p: {TEST}.\n")
    return "\n".join(parts)


def latex(found: Sequence[Comparison]) -> str:
    """One ``tabular`` for each comparison, with the rules of booktabs."""
    parts = ["% needs \\usepackage{booktabs}\n"]
    for comparison in found:
        table = summary_table(comparison)
        best = list(comparison.summary["best"])
        style = table.style.hide(axis="index").format(_math, escape="latex")
        style = style.format_index(_heading, axis=1, escape="latex")
        style = style.map(lambda _: "textbf:--rwrap", subset=(best, ["strategy"]))
        style = style.map(lambda _: "boldmath:", subset=(best, [METRICS[0].heading]))
        alignment = "l" + "r" * (len(table.columns) - 1)
        title = " ".join(comparison.title.split())
        parts += [f"% {title}\n", style.to_latex(hrules=True, column_format=alignment)]
    return "".join(parts)


def summary_csv(found: Sequence[Comparison]) -> str:
    """:func:`strategy_summary` of all comparisons."""
    tables = [comparison.summary.rename_axis("strategy").reset_index() for comparison in found]
    return str(pd.concat(tables).convert_dtypes().to_csv(index=False))


def results_csv(found: Sequence[Comparison]) -> str:
    """One row per run, number of domains learned, and domain evaluated; both count from 1."""
    about = ["recipe", "stream", "evaluated", "label", "kind", "seed"]
    header = ["domains_learned", "domain", "domain_name", "images", "accuracy"]
    rows = [
        [*run[about], t, i, name, images, accuracy]
        for comparison in found
        for _, run in comparison.runs.iterrows()
        for t, row in enumerate(run["accuracy"], 1)
        for i, (name, images, accuracy) in enumerate(
            zip(comparison.tested_domains, run["counts"], row or [], strict=False), 1
        )
    ]
    table = pd.DataFrame(rows, columns=about + header).rename(columns={"label": "strategy"})
    return str(table.to_csv(index=False))


def terminal_table(comparison: Comparison) -> Table:
    """The most important columns for the terminal, the best strategy in bold."""
    cells = summary_table(comparison, SHORT)
    table = Table(title=escape(comparison.title), title_justify="left")
    for heading in cells:
        table.add_column(
            heading, justify="left" if heading == "strategy" else "right", no_wrap=True
        )
    for row, (_, about) in zip(cells.to_numpy(), comparison.summary.iterrows(), strict=True):
        style = "bold" if about["best"] else "dim" if about["ceiling"] else None
        table.add_row(*map(escape, row), style=style)
    return table


def marks(row: pd.Series) -> list[str]:
    """What one has to know about a strategy before comparing it."""
    return [mark for mark in ("ceiling", "replay") if row[mark]]


def _name(row: pd.Series) -> str:
    return " ".join([str(row.name), *(f"({mark})" for mark in marks(row))])


def _markdown(text: str) -> str:
    """On one line, with nothing that Markdown interprets."""
    return re.sub(r"([\\`*_{}\[\]#|~&$])", r"\\\1", " ".join(text.split())).replace("<", "&lt;")


def _math(text: str) -> str:
    """Escaped LaTeX text; numbers in math mode."""
    text = " ".join(text.split())
    number = re.fullmatch(r"[<-]?[\d.]+( ± [\d.]+)?", text)
    return f"${text}$".replace("±", r"\pm") if number else text


def _heading(text: str) -> str:
    return text.replace(r"A\_T", "$A_T$").replace(r"\%", r"(\%)")
