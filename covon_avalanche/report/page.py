"""The files of a report: an HTML page that needs no other file, tables and figures."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from covon_avalanche.atomic_write import write_atomically
from covon_avalanche.report import figures, reproduce, tables
from covon_avalanche.report.results import flatten
from covon_avalanche.report.summary import MIN_SEEDS, TEST, Comparison, comparisons, setting_text


def write_report(runs: pd.DataFrame, folder: Path, *, title: str | None = None) -> Path:
    """Write ``index.html``, ``table.md``, ``table.tex``, ``table.csv``, ``results.csv`` and
    ``figures/*.svg`` and ``*.png``, replacing older ones atomically.

    The page needs no other file and no network. The same results give the same bytes.

    :param runs: of :func:`~covon_avalanche.load_results`, of one recipe or several.
    :param title: of the page; by default those of the recipes.
    :returns: the path of the page.
    :raises ValueError: if there are no runs.
    :raises ResultError: if two results are of the same run.
    """
    found = comparisons(runs)
    parts = []
    for comparison in found:
        prefix = f"{comparison.slug}-" if len(found) > 1 else ""
        with figures.style():
            charts, matrices = (
                [chart._replace(name=prefix + chart.name) for chart in make(comparison)]
                for make in (figures.charts_of, figures.matrices_of)
            )
            for chart in charts + matrices:
                write_atomically(folder / "figures" / f"{chart.name}.svg", chart.svg)
                write_atomically(folder / "figures" / f"{chart.name}.png", chart.png)
        parts.append((comparison, charts, matrices))
    for name, export in (
        ("table.md", tables.markdown),
        ("table.tex", tables.latex),
        ("table.csv", tables.summary_csv),
        ("results.csv", tables.results_csv),
    ):
        write_atomically(folder / name, export(found))
    title = title or "; ".join(dict.fromkeys(comparison.title for comparison in found))
    with figures.style():
        write_atomically(folder / "index.html", _render(parts, title))
    return folder / "index.html"


def headline(comparison: Comparison) -> str:
    """The result of the comparison in words."""
    summary, accuracy = comparison.summary, tables.METRICS[0].text
    learners = summary[~summary["ceiling"]]
    ranked = learners.dropna(subset="average_accuracy_mean")
    if ranked.empty:
        return "No continual learner has an accuracy: there is no best strategy."
    best = ranked.iloc[0]
    only = len(learners) == 1
    role = "reaches" if only else "has the highest accuracy of the continual learners:"
    seeds = f"{best['seeds']} seed{'s' if best['seeds'] > 1 else ''}"
    text = f"{best.name} {role} {accuracy(best)} % (A_T, mean over domains, {seeds})"
    ceilings = summary[summary["ceiling"]]["average_accuracy_mean"].dropna()
    if len(ceilings):
        gap = 100 * (ceilings.iloc[0] - best["average_accuracy_mean"])
        side = "below" if gap >= 0 else "above"
        text += f", {abs(gap):.2f} points {side} the ceiling {ceilings.index[0]}"
    text += "."
    if not comparison.same_seeds:
        text += " The strategies were run with different seeds."
    if best["replay"] and not ranked["replay"].all():
        other = ranked[~ranked["replay"]].iloc[0]
        text += f" It uses replay; the best without is {other.name} with {accuracy(other)} %."
    p = summary["p_value"].dropna()
    similar = ", ".join(p.index[p >= 0.05])
    if similar:
        text += f" Not significantly different from it (p ≥ 0.05): {similar}."
    elif len(p):
        text += " Its difference to every other that could be tested is significant (p < 0.05)."
    return text


def _render(parts: Sequence[tuple[Comparison, Any, Any]], title: str) -> str:
    """The page, with everything from results escaped."""
    environment = Environment(
        loader=PackageLoader("covon_avalanche.report", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["inline_svg"] = _inline_svg
    environment.filters["merged"] = _merged
    first_runs = [c.runs_of(label).iloc[0] for c, _, _ in parts for label in c.summary.index]
    return environment.get_template("page.html.j2").render(
        title=title,
        parts=parts,
        colours=list(zip(figures.COLOURS, figures.DARK_COLOURS, strict=True)),
        metrics_of=tables.metrics_of,
        marks=tables.marks,
        headline=headline,
        settings_tables=settings_tables,
        command=lambda runs: reproduce.command(runs, first_runs),
        test=TEST,
        min_seeds=MIN_SEEDS,
    )


def settings_tables(comparison: Comparison) -> tuple[pd.DataFrame, dict[str, str]]:
    """Settings in which strategies differ, by strategy and name; and those common to all."""
    cells = {}
    for label in comparison.summary.index:
        settings = comparison.runs_of(label)["settings"].iloc[0]
        common = {k: v for k, v in settings.items() if k not in ("name", "title", "strategy")}
        flat = flatten(common) | flatten(settings["strategy"])
        cells[label] = {key: _cell(value) for key, value in flat.items() if value != []}
    table = pd.DataFrame.from_dict(cells, orient="index").fillna(tables.MISSING)
    same = table.nunique() == 1
    differing = table.loc[:, ~same]
    order = sorted(differing.columns, key=lambda key: key != "kind")
    return differing[order], table.loc[:, same].iloc[0].to_dict()


def _cell(value: Any) -> str:
    if isinstance(value, list) and all(isinstance(part, str) for part in value):
        return ", ".join(value)
    return f"{value:g}" if isinstance(value, float) else setting_text(value)


def _merged(each: Iterable[dict[str, Any]]) -> str:
    """``name value, name value``, with slashes where runs differ."""
    found: dict[str, dict[str, None]] = {}
    for one in each:
        for name, value in one.items():
            found.setdefault(name, {})[str(value)] = None
    return ", ".join(f"{name} {' / '.join(values)}" for name, values in found.items())


def _inline_svg(chart: figures.Chart, title: str) -> Markup:
    """The ``<svg>`` element with the page's colours, named for screen readers."""
    svg = chart.svg
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>|<!--.*?-->|<style.*?</style>", "", svg, flags=re.DOTALL)
    opening, body = svg.split(">", 1)
    box = re.search(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', opening)
    assert box is not None  # matplotlib writes it
    body = body.replace(figures.INK, "currentColor").replace(figures.GRID, "var(--faint)")
    for i, colour in enumerate(figures.COLOURS):
        body = body.replace(colour, f"var(--c{i})")
    head = (
        f'<svg {box.group(0)} width="{box.group(1)}" height="{box.group(2)}" role="img" '
        f'aria-label="{escape(f"{title}. {chart.caption}")}">\n<title>{escape(title)}</title>'
    )
    return Markup(head + body)
