"""The tables of a report in Markdown, LaTeX and CSV."""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Callable, Iterable, Sequence

from covon_avalanche.report.columns import (
    ACCURACY,
    NOTHING,
    Column,
    columns_of,
    marks,
)
from covon_avalanche.report.section import Section
from covon_avalanche.report.standing import Spread, Standing
from covon_avalanche.report.statistics import TEST

_LATEX = {
    "\\": r"\textbackslash{}",
    **{c: f"\\{c}" for c in "&%$#_{}"},
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    '"': r"\textquotedbl{}",
    "±": r"$\pm$",
    NOTHING: "--",
}
_MARKDOWN = re.compile(r"([\\`*_{}\[\]<>#|~&$])")
_NUMBER = re.compile(r"-?\d+(\.\d+)?( ± \d+(\.\d+)?)?")
_UNDEFINED = (math.nan, math.nan)
_MEASURES = ("average_accuracy", "weighted_accuracy", "bwt", "forgetting", "nll", "brier", "ece")


def markdown(sections: Sequence[Section]) -> str:
    """One table per section, the best strategy in bold."""
    parts = []
    for section in sections:
        if len(sections) > 1:
            parts.append(f"## {escape_markdown(section.title)}\n")
        parts.append(markdown_table(section, columns_of(section)))
        if section.p_values:
            parts.append(f"p: {TEST}.\n")
    return "\n".join(parts)


def markdown_table(section: Section, columns: Sequence[Column]) -> str:
    """The strategies of a section with some of their measures."""
    heads = ["strategy", *(column.heading for column in columns)]
    lines = [f"| {' | '.join(heads)} |", "|---|" + "---:|" * len(columns)]
    for standing in section.standings:
        cells = [_name(standing, escape_markdown)]
        cells += [column.text(section, standing) for column in columns]
        if standing is section.best:
            bold = [0] + [i for i, column in enumerate(columns, 1) if column is ACCURACY]
            cells = [f"**{cell}**" if i in bold else cell for i, cell in enumerate(cells)]
        lines.append(f"| {' | '.join(cells)} |".replace("<0.001", "&lt;0.001"))
    return "\n".join(lines) + "\n"


def latex(sections: Sequence[Section]) -> str:
    """One ``tabular`` per section, with the rules of booktabs."""
    parts = ["% needs \\usepackage{booktabs}"]
    for section in sections:
        columns = columns_of(section)
        parts += [
            f"% {' '.join(section.title.split())}",
            f"\\begin{{tabular}}{{l{'r' * len(columns)}}}",
            "\\toprule",
            " & ".join(["strategy", *(column.latex for column in columns)]) + r" \\",
            "\\midrule",
        ]
        for standing in section.standings:
            cells = [_name(standing, escape_latex)]
            for column in columns:
                bold = standing is section.best and column is ACCURACY
                cells.append(_latex_cell(column.text(section, standing), bold))
            if standing is section.best:
                cells[0] = f"\\textbf{{{cells[0]}}}"
            parts.append(" & ".join(cells) + r" \\")
        parts += ["\\bottomrule", "\\end{tabular}"]
    return "\n".join(parts) + "\n"


def summary_csv(sections: Sequence[Section]) -> str:
    """One row per strategy: means and standard deviations over seeds, accuracies in [0, 1];
    what is not defined is empty."""
    spreads = [f"{name}_{part}" for name in (*_MEASURES, "seconds") for part in ("mean", "std")]
    header = ["recipe", "stream", "evaluated", "strategy", "kind", "ceiling", "replay", "best"]
    header += ["seeds", *spreads, "parameters_worth", "peak_memory_bytes", "p_value"]
    rows = []
    for section in sections:
        for standing in section.standings:
            row: list[object] = [section.recipe, section.stream, section.evaluated]
            row += [standing.strategy, standing.kind, int(standing.ceiling), int(standing.replay)]
            row += [int(standing is section.best), len(standing.runs)]
            for value in _spreads(standing):
                row += ["" if math.isnan(number) else number for number in value or _UNDEFINED]
            peak = standing.peak_memory
            row += [standing.parameters_worth, "" if peak is None else peak]
            row.append(section.p_values.get(standing.strategy, ""))
            rows.append(row)
    return _csv(header, rows)


def results_csv(sections: Sequence[Section]) -> str:
    """One row per run, number of domains learned, and domain tested on; both count from 1."""
    header = ["recipe", "stream", "evaluated", "strategy", "kind", "seed", "domains_learned"]
    header += ["domain", "domain_name", "images", "accuracy"]
    rows = []
    for section in sections:
        for standing in section.in_order:
            for run in standing.runs:
                for t, row in enumerate(run.accuracy):
                    for i, accuracy in enumerate(row or []):
                        cell: list[object] = [section.recipe, section.stream, section.evaluated]
                        cell += [standing.strategy, standing.kind, run.seed, t + 1, i + 1]
                        rows.append([*cell, section.tested[i], run.counts[i], accuracy])
    return _csv(header, rows)


def escape_markdown(text: str) -> str:
    """On one line, nothing in it read as markup."""
    return _MARKDOWN.sub(r"\\\1", " ".join(text.split()))


def escape_latex(text: str) -> str:
    """On one line, nothing in it read as a command."""
    return "".join(_LATEX.get(c, c) for c in " ".join(text.split()))


def _name(standing: Standing, escape: Callable[[str], str]) -> str:
    return escape(" ".join([standing.strategy, *(f"({mark})" for mark in marks(standing))]))


def _latex_cell(text: str, bold: bool) -> str:
    if text.startswith("<"):
        return f"${text}$"
    if not _NUMBER.fullmatch(text):
        return escape_latex(text)
    inner = text.replace("±", r"\pm")
    return f"$\\mathbf{{{inner}}}$" if bold else f"${inner}$"


def _spreads(standing: Standing) -> list[Spread | None]:
    return [
        standing.accuracy,
        standing.weighted_accuracy,
        standing.bwt,
        standing.forgetting,
        *(standing.calibration(name) for name in ("nll", "brier", "ece")),
        standing.seconds,
    ]


def _csv(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(header)
    writer.writerows(rows)
    return text.getvalue()
