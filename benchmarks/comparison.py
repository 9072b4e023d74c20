"""Run what is missing of a comparison, store results as they come, and write tables into pages.

Results are lines of a ``.jsonl`` file, one per run or case; :func:`write_measurement` stores
timings, which are always measured together, as one ``.json`` file.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import as_completed
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from covon_avalanche.atomic_write import write_atomically
from covon_avalanche.experiment.machine import machine, versions
from covon_avalanche.experiment.worker_pool import WorkerPool, default_processes
from covon_avalanche.report import Comparison, comparisons, load_results
from covon_avalanche.report.figures import rendered, style

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks/results"
Case = dict[str, Any]


def arguments(doc: str, *positional: str) -> argparse.Namespace:
    """The command line of a script whose results are stored.

    :param positional: names of the parts that it can run, all by default; they need the data.
    """
    parser = argparse.ArgumentParser(description=doc.splitlines()[0])
    if positional:
        parser.add_argument("parts", nargs="*", choices=[[], *positional], metavar="PART")
    parser.add_argument("--report", action="store_true", help="from stored results only")
    parser.add_argument("--dataset-root", type=Path, help="with MNIST, PACS, weights; or corpora")
    parser.add_argument("--jobs", type=int, help="parallel runs; one per core by default")
    given = parser.parse_args()
    if positional and not (given.report or given.dataset_root):
        parser.error("--dataset-root is missing")
    return given


# Running -----------------------------------------------------------------------------------


def read_cases(file: Path) -> list[Case]:
    """The stored lines, as dictionaries."""
    if not file.exists():
        return []
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def run_cases(
    cases: Iterable[Case],
    measure: Callable[..., Case],
    file: Path,
    *arguments: Any,
    key: Sequence[str] = (),
    processes: int | None = None,
) -> None:
    """Measure the cases that are missing, and store each when it is there.

    :param measure: called in another process with the case and ``arguments``; what it returns is
        stored with the case, the versions and the machine.
    :param key: which entries of a case tell whether it is stored; all by default.
    """
    rows, cases = read_cases(file), list(cases)
    key = key or list(cases[0])
    known = [[row[name] for name in key] for row in rows]
    missing = [case for case in cases if [case[name] for name in key] not in known]
    with WorkerPool(processes or default_processes("cpu")) as pool:
        futures = {pool.submit(_measure, measure, case, *arguments): case for case in missing}
        for future in as_completed(futures):
            rows.append(futures[future] | future.result())
            write_atomically(file, "".join(json.dumps(row) + "\n" for row in rows))
            print({name: rows[-1][name] for name in key}, flush=True)


def _measure(measure: Callable[..., Case], case: Case, *arguments: Any) -> Case:
    return {**measure(case, *arguments), "versions": versions(), "machine": machine()}


def write_measurement(file: Path, rows: Any, **about: Any) -> None:
    """Store rows that were measured together, with versions, machine and what else is given."""
    found = {**about, "versions": versions(), "machine": machine(), "rows": rows}
    file.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(file, json.dumps(found, indent=1) + "\n")
    print(f"stored in {file}")


def provenance(stored: Mapping[str, Any], condition: str = "") -> str:
    """Machine, condition, load and versions of a measurement, in one line.

    :param stored: by :func:`write_measurement`.
    """
    versions = {**stored["versions"], "numba": stored["numba"]}
    load = f"load average at the start {stored['load_average'][0]:.1f}"
    parts = [
        stored["machine"]["processor"],
        ", ".join(filter(None, [condition, load])),
        *(f"{name} {versions[name]}" for name in ("torch", "numba", "avalanche-lib")),
    ]
    return f"<sub>{'; '.join(filter(None, parts))}</sub>"


# Tables and figures ------------------------------------------------------------------------


def compared(file: Path, *strategies: str) -> Comparison:
    """The stored results of a recipe: of all strategies, or of those named."""
    runs = load_results(file)
    (comparison,) = comparisons(runs[runs["strategy"].isin(strategies)] if strategies else runs)
    return comparison


def machine_name(machine: Mapping[str, Any]) -> str:
    """Cores and processor, and the accelerator, if it was used."""
    accelerator = f"{machine['accelerator']}, " if "accelerator" in machine else ""
    return f"{accelerator}{machine['cores']} cores ({machine['processor']})"


def origin(runs: pd.DataFrame) -> str:
    """The number of seeds, the versions and the machines."""
    machines = runs["machine"].map(machine_name)
    names = runs.groupby(machines)["strategy"].unique()
    most, *others = names.map(len).sort_values(ascending=False, kind="stable").index
    rest = "".join(f"; {', '.join(names[machine])}: {machine}" for machine in others)
    versions = [
        f"{package} " + " or ".join(sorted({found[package] for found in runs["versions"]}))
        for package in ("torch", "avalanche-lib")
    ]
    seeds = runs["seed"].nunique()
    spread = f"Mean ± standard deviation over the seeds of each row, at most {seeds}"
    if seeds == 1:
        spread = "One seed per row"
    return f"{spread}; {', '.join(versions)}, one thread per run, {most}{rest}."


def mean_and_std(values: pd.Series, digits: int = 2) -> str:
    """``mean ± standard deviation``, or the value itself if it is the only one."""
    mean = f"{values.mean():.{digits}f}"
    return mean if len(values) == 1 else f"{mean} ± {values.std():.{digits}f}"


@contextmanager
def new_figure(path: Path, width: float, height: float) -> Iterator[Figure]:
    """A figure in the style of the reports, sizes in inches; written as PNG at the end."""
    with style():
        figure = Figure(figsize=(width, height), dpi=160, layout="constrained")
        yield figure
        write_atomically(path, rendered(figure, "png"))


def replace_part(page: Path, script: str, text: str) -> None:
    """Write what a script generates between its markers in a page."""
    start, end = f"<!-- results: {script} -->\n", "<!-- end of results -->\n"
    before, found, rest = page.read_text(encoding="utf-8").partition(start)
    _, closed, after = rest.partition(end)
    if not (found and closed):
        raise ValueError(f"{page} has no {start.strip()} ... {end.strip()}")
    write_atomically(page, f"{before}{start}\n{text.strip()}\n\n{end}{after}")
