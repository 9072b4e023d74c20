"""The files of a report: an HTML page that needs no other file, tables and figures."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote
from zipfile import ZIP_DEFLATED, ZipFile

import pandas as pd
import tomli_w
from jinja2 import Environment, PackageLoader, StrictUndefined

from covon_avalanche.atomic_write import atomic_replace, write_atomically
from covon_avalanche.experiment.result import Result
from covon_avalanche.report import figures, tables
from covon_avalanche.report.results import flatten, results_frame
from covon_avalanche.report.summary import MIN_SEEDS, TEST, Comparison, comparisons

if TYPE_CHECKING:
    from matplotlib.figure import Figure


_FILES = ("index.html", "table.md", "table.tex", "table.csv", "results.csv")
_SUFFIXES = (".png", ".svg")


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
        with figures.style():
            images = {
                name: _saved(figure, folder / "figures" / _stem(name, comparison, found))
                for name, figure in figures.figures_of(comparison).items()
            }
        parts.append((comparison, images))
    write_atomically(folder / "table.md", tables.markdown(found))
    write_atomically(folder / "table.tex", tables.latex(found))
    write_atomically(folder / "table.csv", tables.summary_csv(found))
    write_atomically(folder / "results.csv", tables.results_csv(found))
    title = title or "; ".join(dict.fromkeys(comparison.title for comparison in found))
    write_atomically(folder / "index.html", _render(parts, title))
    return folder / "index.html"


def write_archive(results: Sequence[Result], folder: Path) -> Path:
    """Write ``FOLDER.zip`` with the report in a folder, a recipe for each comparison, and
    ``results.jsonl``, which ``load_results`` and ``covon report`` read.

    :param results: those of the report; figures of others in its folder are left out.
    :returns: the path of the archive.
    """
    file = folder.resolve().with_name(f"{folder.resolve().name}.zip")
    found = comparisons(results_frame(results))
    images = sorted(
        folder / "figures" / f"{_stem(name, comparison, found)}{suffix}"
        for comparison in found
        for name in figures.figures_of(comparison)
        for suffix in _SUFFIXES
    )
    with atomic_replace(file) as part, ZipFile(part, "w", ZIP_DEFLATED) as archive:
        for path in [*(folder / name for name in _FILES), *images]:
            archive.write(path, path.relative_to(folder))
        for comparison in found:
            archive.writestr(f"{quote(comparison.name, safe='')}.toml", recipe(comparison))
        lines = [f"{result.model_dump_json()}\n" for result in results]
        archive.writestr("results.jsonl", "".join(lines))
    return file


def _stem(name: str, comparison: Comparison, found: Sequence[Comparison]) -> str:
    """The file name of a figure, without its suffix."""
    prefix = f"{comparison.name}-" if len(found) > 1 else ""
    return quote(prefix + name, safe="")


def _saved(figure: Figure, file: Path) -> str:
    """Write a figure as SVG and PNG; returns the SVG as a data URI."""
    for suffix in _SUFFIXES:
        data = figures.rendered(figure, suffix[1:])
        write_atomically(file.with_name(file.name + suffix), data)
    return f"data:image/svg+xml;base64,{base64.b64encode(data).decode()}"


def headline(comparison: Comparison) -> str:
    """The result of the comparison in words."""
    summary, accuracy = comparison.summary, tables.METRICS[0].text
    ranked = summary[summary["average_accuracy_mean"].notna()]
    learners, offline = ranked[~ranked["offline"]], ranked[ranked["offline"]]
    if learners.empty:
        return "No continual learner has an accuracy: there is no best strategy."
    best = learners.iloc[0]
    text = f"{best.name} has the highest accuracy of the continual learners: {accuracy(best)} %."
    if best["replay"] and not learners["replay"].all():
        other = learners[~learners["replay"]].iloc[0]
        text += f" It uses replay; the best without replay, {other.name}, has {accuracy(other)} %."
    for _, row in offline.iterrows():
        text += f" Offline training, {row.name}, reaches {accuracy(row)} %."
    similar = ", ".join(summary.index[summary["p_value"] >= 0.05])
    if similar:
        text += f" Not significantly different from the best (p ≥ 0.05): {similar}."
    return text


def settings_table(comparison: Comparison) -> pd.DataFrame:
    """Settings in which the strategies differ, as text, by strategy and name."""
    settings = {label: flatten(own) for label, own in _strategies(comparison).items()}
    table = pd.DataFrame.from_dict(settings, orient="index", dtype=object)
    texts = table.map(lambda value: f"{value:g}" if isinstance(value, float) else str(value))
    texts = texts.where(table.notna(), tables.MISSING)
    return texts.loc[:, texts.nunique() > 1]


def class_table(comparison: Comparison) -> pd.DataFrame:
    """Accuracy in percent by class and strategy after the last domain, mean over seeds."""
    columns = comparison.by_strategy(lambda runs: pd.DataFrame([*runs["class_accuracy"]]).mean())
    return 100 * pd.DataFrame(columns).dropna(axis=1, how="all")


def recipe(comparison: Comparison) -> str:
    """A recipe that repeats all runs of a comparison, as TOML."""
    common = {k: v for k, v in comparison.first["settings"].items() if k != "strategy"}
    seeds = sorted(set(comparison.runs["seed"].tolist()))
    return tomli_w.dumps({**common, "seeds": seeds, "strategies": _strategies(comparison)})


def _strategies(comparison: Comparison) -> dict[str, dict[str, Any]]:
    """The settings of each strategy, in the order of the table."""
    return comparison.by_strategy(lambda runs: runs["settings"].iloc[0]["strategy"])


def _merged(dictionaries: pd.Series) -> str:
    """``name value, name value``, with slashes where runs differ."""
    table = pd.DataFrame(dictionaries.tolist(), dtype=object)
    texts = {name: map(str, values.dropna().unique()) for name, values in table.items()}
    return ", ".join(f"{name} {' / '.join(values)}" for name, values in texts.items())


def _render(parts: Sequence[tuple[Comparison, dict[str, str]]], title: str) -> str:
    """The page, with everything from results escaped."""
    environment = Environment(
        loader=PackageLoader("covon_avalanche.report", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("page.html.j2").render(
        title=title,
        parts=parts,
        tables=tables,
        headline=headline,
        settings_table=settings_table,
        class_table=class_table,
        recipe=recipe,
        merged=_merged,
        test=TEST,
        min_seeds=MIN_SEEDS,
    )
