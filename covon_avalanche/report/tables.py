"""Summary tables as Markdown, LaTeX, CSV and for the terminal, all exported by pandas."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from covon_avalanche.did_you_mean import did_you_mean
from covon_avalanche.experiment.registry.base import flat
from covon_avalanche.report.summary import NOTE, TEST, Comparison
from covon_avalanche.safe_text import csv_text

MISSING = "\N{EN DASH}"


class Metric(NamedTuple):
    """A column of the summary table."""

    heading: str
    column: str  # of strategy_summary
    digits: int  # after the decimal point; from two on, the spread is shown, too
    meaning: str  # one sentence for the legend

    def text(self, row: pd.Series) -> str:
        """The cell of a strategy, a row of the summary."""
        value, name = row[self.column], self.column.removesuffix("_mean")
        spread = row.get(f"{name}_std", row.get(f"{name}_ci95"))
        if pd.isna(value):
            return MISSING
        if self.column == "p_value" and value < 0.001:
            return "<0.001"
        factor = {"%": 100, "MiB": 2**-20}.get(self.heading.rpartition(" ")[2], 1)
        text = f"{round(factor * value, self.digits) + 0.0:.{self.digits}f}"  # not -0.0
        known = self.digits > 1 and not pd.isna(spread)
        return f"{text} ± {factor * spread:.{self.digits}f}" if known else text


METRICS = (
    Metric("A_T %", "average_accuracy_mean", 2, "domain mean: mean over domains after the last"),
    Metric(
        "difference %", "difference", 2, "A_T minus the best strategy's, ± 95 % confidence interval"
    ),
    Metric("p", "p_value", 3, "p-value of this difference"),
    Metric("A_T pooled %", "weighted_accuracy_mean", 2, "accuracy over the images of all domains"),
    Metric("mean A_t %", "incremental_accuracy_mean", 2, "mean over time of A_t (domain mean)"),
    Metric("BWT %", "bwt_mean", 2, "backward transfer: mean change since a domain was learned"),
    Metric(
        "max forgetting %",
        "max_forgetting_mean",
        2,
        "best earlier accuracy minus the last one, mean over past domains; lower is better",
    ),
    Metric("plasticity %", "plasticity_mean", 2, "mean accuracy right after learning a domain"),
    Metric(
        "forward transfer %",
        "forward_transfer_mean",
        2,
        "mean accuracy on domains that are not learned yet",
    ),
    Metric("NLL", "nll_mean", 3, "negative log-likelihood in nats; lower is better"),
    Metric("ECE", "ece_mean", 3, "expected calibration error, in [0, 1]; lower is better"),
    Metric("sampled A_T %", "sampled_average_accuracy_mean", 2, "A_T with posterior samples"),
    Metric("sampled NLL", "sampled_nll_mean", 3, "NLL of the samples' mean prediction"),
    Metric("sampled ECE", "sampled_ece_mean", 3, "ECE of the samples' mean prediction"),
    Metric("seconds", "train_seconds_mean", 1, "wall-clock training time of one run"),
    Metric("memory", "memory_ratio", 1, "all tensors kept between steps, in units of the weights"),
    Metric(
        "time growth",
        "time_growth_mean",
        1,
        "training time of the last domain relative to the second",
    ),
    Metric("memory growth", "memory_growth_mean", 1, "the same of all tensors kept between steps"),
    Metric("peak MiB", "peak_memory", 0, "largest memory of a run"),
    Metric("seeds", "seeds", 0, "number of runs"),
)
MARKS = ("offline", "replay", "untuned")
SHORT = ("A_T %", "BWT %", "seconds", "memory", "seeds")
FULL = ("A_T %", "A_T pooled %", "mean A_t %", "BWT %", "max forgetting %", *SHORT[2:])
"""Columns that ``covon run`` prints."""


def check_headings(headings: Sequence[str]) -> None:
    """:raises ValueError: for a heading that no metric has."""
    known = [metric.heading.removesuffix(" %") for metric in METRICS]
    for heading in headings:
        if heading.removesuffix(" %") not in known:
            similar = did_you_mean(heading, known)
            raise ValueError(
                f"no column is named {heading!r}; known are {', '.join(known)}{similar}"
            )


def metrics_of(comparison: Comparison, headings: Sequence[str] = ()) -> list[Metric]:
    """The metrics that at least one strategy has, or those of them with some headings, with or
    without " %", in the order of these; without the pooled A_T beside an equal A_T.

    :raises ValueError: as :func:`check_headings`.
    """
    check_headings(headings)
    summary = comparison.summary
    means, pooled = (summary[f"{name}_accuracy_mean"] for name in ("average", "weighted"))
    known = [m for m in METRICS if summary[m.column].notna().any()]
    by_name = {metric.heading.removesuffix(" %"): metric for metric in known}
    wanted = [heading.removesuffix(" %") for heading in headings or by_name]
    if "A_T" in wanted and np.allclose(means, pooled, equal_nan=True):
        by_name.pop("A_T pooled", None)
    return [by_name[name] for name in wanted if name in by_name]


def summary_table(comparison: Comparison, headings: Sequence[str] = ()) -> pd.DataFrame:
    """Text by strategy, highest A_T first, of all or some metrics: mean ± standard deviation, of
    the difference ± 95 % confidence interval."""
    rows = [row for _, row in comparison.summary.iterrows()]
    names = [" ".join([row.name, *(f"({mark})" for mark in MARKS if row[mark])]) for row in rows]
    metrics = metrics_of(comparison, headings)
    cells = {metric.heading: [metric.text(row) for row in rows] for metric in metrics}
    return pd.DataFrame({"strategy": names, **cells})


def markdown_table(
    comparison: Comparison, headings: Sequence[str] = (), extra: pd.DataFrame | None = None
) -> str:
    """:func:`summary_table` in Markdown, the best strategy in bold.

    :param extra: more columns of text, by label, which come after the first of these.
    """
    table = summary_table(comparison, headings).map(_markdown)
    for heading, cells in () if extra is None else extra.items():
        table.insert(2, heading, list(cells))
    best = _best_cells(comparison, table)
    table.loc[best] = "**" + table.loc[best] + "**"
    return aligned(table) + "\n"


def aligned(table: pd.DataFrame, left: int = 1, form: str = "pipe") -> str:
    """A table of text without its index, in Markdown or another format of tabulate; all but the
    first ``left`` columns are aligned to the right."""
    sides = ["left"] * left + ["right"] * (len(table.columns) - left)
    return str(table.to_markdown(index=False, tablefmt=form, disable_numparse=True, colalign=sides))


def markdown(found: Sequence[Comparison], headings: Sequence[str] = (), missing: str = "") -> str:
    """One table for each comparison, of all or some metrics, and what is ``missing``."""
    parts = []
    for comparison in found:
        if len(found) > 1:
            parts.append(f"## {_markdown(comparison.title)}\n")
        parts.append(markdown_table(comparison, headings))
        parts += [f"{_markdown(note)}\n" for note in _notes(comparison, headings)]
    return "\n".join([*parts, *[f"{_markdown(missing)}\n"] * bool(missing)])


def _notes(comparison: Comparison, headings: Sequence[str]) -> list[str]:
    """Sentences below a table."""
    tested = any(m.column in ("difference", "p_value") for m in metrics_of(comparison, headings))
    return [NOTE, *comparison.remarks, *([f"difference: {TEST}."] if tested else [])]


def latex(found: Sequence[Comparison], headings: Sequence[str] = (), missing: str = "") -> str:
    """One ``tabular`` for each comparison, with the rules of booktabs, of all or some metrics, and
    what is ``missing`` as a comment."""
    parts = ["% needs \\usepackage{booktabs}\n", *[f"% {missing}\n"] * bool(missing)]
    for comparison in found:
        table = summary_table(comparison, headings)
        style = table.style.hide(axis="index").format(escape="latex")
        style = style.format_index(axis=1, escape="latex")
        style = style.map(lambda _: "textbf:--rwrap", subset=_best_cells(comparison, table))
        alignment = "l" + "r" * (len(table.columns) - 1)
        notes = [f"% {note}\n" for note in _notes(comparison, headings)]
        body = style.to_latex(hrules=True, column_format=alignment)
        parts += [f"% {comparison.title}\n", *notes, body]
    text = "".join(parts).replace(r"A\_T", "$A_T$").replace(r"A\_t", "$A_t$").replace("±", r"$\pm$")
    return re.sub(r"& ([<-])(?=\d)", r"& $\1$", text)


def summary_csv(found: Sequence[Comparison]) -> str:
    """:func:`strategy_summary` of all comparisons, ``recipe`` being their name."""
    named = [comparison.summary.assign(recipe=comparison.name) for comparison in found]
    tables = [summary.rename_axis("strategy").reset_index() for summary in named]
    return csv_text(pd.concat(tables).convert_dtypes())


def results_csv(found: Sequence[Comparison]) -> str:
    """One row per run, number of domains learned, and domain evaluated; both count from 1."""
    about = ["stream", "evaluated", "label", "kind", "seed"]
    header = ["recipe", *about, "domains_learned", "domain", "domain_name", "images", "accuracy"]
    rows: list[list[Any]] = []
    for comparison in found:
        names = comparison.tested_domains
        for run in comparison.runs.to_dict("records"):
            own = [comparison.name, *(run[key] for key in about)]
            rows += [
                [*own, t, i, *cell]
                for t, row in enumerate(run["accuracy"], 1)
                for i, cell in enumerate(zip(names, run["counts"], row or [], strict=False), 1)
            ]
    table = pd.DataFrame(rows, columns=header).rename(columns={"label": "strategy"})
    return csv_text(table)


def cell(value: Any) -> str:
    """A value as text; a dash if it is unknown."""
    if value is None or value is pd.NA or value != value:
        return MISSING
    return f"{value:g}" if isinstance(value, float) else str(value)


def settings_table(comparison: Comparison) -> pd.DataFrame:
    """Settings in which the strategies differ, as text, by strategy and name."""
    settings = {label: flat(own) for label, own in comparison.strategies().items()}
    table = pd.DataFrame.from_dict(settings, orient="index", dtype=object)
    texts = table.map(cell)
    return texts.loc[:, texts.nunique() > 1]


def class_table(comparison: Comparison) -> pd.DataFrame:
    """Accuracy in percent by class and strategy after the last domain, mean over seeds."""
    columns = comparison.by_strategy(lambda runs: pd.DataFrame([*runs["class_accuracy"]]).mean())
    return 100 * pd.DataFrame(columns).dropna(axis=1, how="all")


def merged(dictionaries: pd.Series) -> str:
    """``name value, name value``, with slashes where runs differ."""
    table = pd.DataFrame(dictionaries.tolist(), dtype=object)
    texts = {name: values.dropna().map(str).unique() for name, values in table.items()}
    return ", ".join(f"{name} {' / '.join(values)}" for name, values in texts.items())


def _markdown(text: str) -> str:
    """Escape Markdown."""
    return re.sub(r"([\\`*_{}\[\]#|~&$])", r"\\\1", text).replace("<", "&lt;")


def _best_cells(comparison: Comparison, table: pd.DataFrame) -> tuple[list[bool], pd.Index]:
    """Name and A_T of the best strategy; there is no A_T where every run has diverged."""
    columns = table.columns.intersection(["strategy", METRICS[0].heading])
    return [*comparison.summary["best"]], columns
