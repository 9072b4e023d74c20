"""The files of a report: an HTML page that needs no other file, tables and figures."""

from __future__ import annotations

import hashlib
from base64 import b64encode
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote
from zipfile import ZIP_DEFLATED, ZipFile

import pandas as pd
import tomli_w
from jinja2 import Environment, PackageLoader, StrictUndefined

from covon_avalanche.atomic_write import atomic_replace, write_atomically
from covon_avalanche.experiment.data_settings import published
from covon_avalanche.experiment.result import Result
from covon_avalanche.experiment.search import searches_in, trials_in
from covon_avalanche.report import figures, tables
from covon_avalanche.report.results import results_frame
from covon_avalanche.report.summary import MIN_SEEDS, NOTE, TEST, Comparison, comparisons
from covon_avalanche.safe_text import csv_text


def write_report(
    runs: pd.DataFrame,
    folder: Path,
    *,
    title: str | None = None,
    searches: Sequence[Path] = (),
    columns: Sequence[str] = (),
    missing: str = "",
) -> Path:
    """Write ``index.html``, ``table.md``, ``table.tex``, ``table.csv``, ``results.csv`` and
    ``figures/*.pdf``, ``*.svg`` and ``*.png``, replacing older ones atomically.

    The page needs no other file and no network. The same results give the same bytes.

    :param runs: of :func:`~covon_avalanche.load_results`, of one recipe or several.
    :param title: of the page; by default those of the recipes.
    :param searches: folders of ``covon search``, whose trials the page shows.
    :param columns: of ``table.md`` and ``table.tex``, by heading; by default all.
    :param missing: a sentence for page and tables on runs that are left out.
    :returns: the path of the page.
    :raises ValueError: if there are neither runs nor searches, or for an unknown column.
    :raises ResultError: if two results are of the same run.
    :raises RecipeError: if the files of a search are damaged.
    """
    return _write(_comparisons(runs, searches), folder, title, searches, columns, missing)[-1]


def write_archive(
    results: Sequence[Result],
    folder: Path,
    *,
    title: str | None = None,
    searches: Sequence[Path] = (),
    columns: Sequence[str] = (),
    missing: str = "",
) -> Path:
    """Write a report, and ``FOLDER.zip`` with the report in a folder, a recipe for each comparison,
    and ``results.jsonl``, which ``load_results`` and ``covon report`` read; none has an absolute
    path.

    :param results: figures of others in the folder are left out of the archive.
    :param title: of the page, see :func:`write_report` for this and the other arguments.
    :returns: the path of the archive.
    """
    file = folder.resolve().with_name(f"{folder.resolve().name}.zip")
    found = _comparisons(results_frame(results), searches)
    with atomic_replace(file) as part, ZipFile(part, "w", ZIP_DEFLATED) as archive:
        for path in _write(found, folder, title, searches, columns, missing):
            archive.write(path, path.relative_to(folder))
        for comparison in found:
            archive.writestr(f"{_file_name(comparison.name)}.toml", recipe(comparison))
        shared = [r.model_copy(update={"settings": published(r.settings)}) for r in results]
        archive.writestr("results.jsonl", "".join(f"{r.to_json()}\n" for r in shared))
    return file


def _comparisons(runs: pd.DataFrame, searches: Sequence[Path]) -> list[Comparison]:
    return [] if runs.empty and searches else comparisons(runs)


def _write(
    found: Sequence[Comparison],
    folder: Path,
    title: str | None,
    searches: Sequence[Path],
    columns: Sequence[str],
    missing: str,
) -> list[Path]:
    """The files of a report; the page comes last."""
    folder.mkdir(parents=True, exist_ok=True)  # before the figures, which take a while
    files: dict[Path, str | bytes] = {}
    images = {}
    searched: dict[str, list[pd.DataFrame]] = {}  # summary and trials by title

    def add(key: Any, name: str, figure: Any) -> None:
        for form in figures.FORMS:
            data = figures.rendered(figure, form)
            files[folder / "figures" / f"{_file_name(name)}.{form}"] = data
        images[key] = f"data:image/svg+xml;base64,{b64encode(data).decode()}"

    with figures.style():
        for comparison in found:
            prefix = f"{comparison.name}-" if len(found) > 1 else ""
            for name, figure in figures.figures_of(comparison).items():
                add((comparison.name, name), prefix + name, figure)
        for path in searches:
            trials = trials_in(path).map(published)
            name = f"search-{path.resolve().name}"
            name += f"-{len(searched) + 1}" * (name in searched)
            summary = pd.DataFrame([search.summary() for search in searches_in(path)])
            summary = summary.drop(columns="seconds").map(published)
            searched[name] = [summary, trials.map(tables.cell)]
            if (rates := figures.learning_rates(trials)) is not None:
                add(name, name, rates)
            files[folder / f"{_file_name(name)}.csv"] = csv_text(trials)
    if found:
        files[folder / "table.md"] = tables.markdown(found, columns, missing)
        files[folder / "table.tex"] = tables.latex(found, columns, missing)
        files[folder / "table.csv"] = tables.summary_csv(found)
        files[folder / "results.csv"] = tables.results_csv(found)
    loader = PackageLoader("covon_avalanche.report", ".")
    blocks: dict[str, Any] = {"trim_blocks": True, "lstrip_blocks": True}
    environment = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, **blocks)
    files[folder / "index.html"] = environment.get_template("page.html.j2").render(
        title=published(title) or "; ".join(dict.fromkeys([*(c.title for c in found), *searched])),
        comparisons=found,
        searched=searched,
        images=images,
        missing=missing,
        tables=tables,
        recipe=recipe,
        note=NOTE,
        test=TEST,
        min_seeds=MIN_SEEDS,
    )
    for path, content in files.items():
        write_atomically(path, content)
    return list(files)


def recipe(comparison: Comparison) -> str:
    """A recipe that repeats all runs of a comparison, as TOML."""
    common = {k: v for k, v in comparison.first["settings"].items() if k != "strategy"}
    seeds = sorted(set(comparison.runs["seed"].tolist()))
    settings = {**common, "seeds": seeds, "strategies": comparison.strategies()}
    return tomli_w.dumps(_without_null(settings))


def _without_null(value: Any) -> Any:
    """Settings without those that are not set, which TOML cannot store."""
    match value:
        case dict():
            return {key: _without_null(v) for key, v in value.items() if v is not None}
        case list():
            return [_without_null(v) for v in value if v is not None]
    return value


def _file_name(name: str) -> str:
    """A name with special characters escaped; the end of a long one is replaced by a hash."""
    escaped, digest = quote(name, safe=""), hashlib.sha256(name.encode()).hexdigest()
    return escaped if len(escaped) <= 128 else f"{escaped[:120]}-{digest[:7]}"
