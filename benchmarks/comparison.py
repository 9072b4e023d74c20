"""What the comparisons share: results stored as they come, and pages with generated parts."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pandas as pd

from covon_avalanche.atomic_write import write_atomically
from covon_avalanche.experiment.grid import Outcome, RunSpec, run_grid
from covon_avalanche.experiment.recipe import Recipe
from covon_avalanche.experiment.result import Result
from covon_avalanche.experiment.run_folder import decisive, settings_of, settings_today
from covon_avalanche.experiment.run_options import RunOptions
from covon_avalanche.experiment.worker_pool import default_processes
from covon_avalanche.report import Comparison, comparisons, load_results

ROOT = Path(__file__).parents[1]


def stored_results(file: Path) -> list[Result]:
    """What has been measured so far, one result a line."""
    if not file.exists():
        return []
    return [Result.model_validate_json(line) for line in file.read_text().splitlines()]


def run_missing(
    recipe: Recipe,
    seeds: Iterable[int],
    file: Path,
    dataset_root: str | None = None,
    processes: int | None = None,
) -> None:
    """Measure what is missing, seed by seed, storing each result as it comes.

    A stored result of other settings than the recipe's, names aside, is measured again. Runs that
    are interrupted go on from their folders in ``runs``.
    """
    wanted = {name: decisive(settings_of(recipe, name)) for name in recipe.strategies}
    have = {
        (r.strategy, r.seed): r
        for r in stored_results(file)
        if decisive(settings_today(r.settings)) == wanted.get(r.strategy)
    }
    jobs = [RunSpec(s, seed) for seed in seeds for s in wanted if (s, seed) not in have]
    order = {name: i for i, name in enumerate(wanted)}

    def store(event: Outcome) -> None:
        if event.error is not None:
            print(f"{event.spec}: {event.error}", flush=True)
        if event.result is None:
            return
        # What each epoch did stays in the run's folder: it is nine tenths of a result.
        have[event.spec.strategy, event.spec.seed] = event.result.model_copy(update={"epochs": []})
        keys = sorted(have, key=lambda k: (order[k[0]], k[1]))
        write_atomically(file, "".join(have[key].model_dump_json() + "\n" for key in keys))
        print(f"{event.spec}: {100 * event.result.average_accuracy:.2f} %", flush=True)

    run_grid(
        recipe,
        jobs,
        ROOT / "runs" / recipe.name,
        RunOptions(dataset_root=None if dataset_root is None else Path(dataset_root)),
        processes=processes or default_processes(recipe.device),
        on_end=store,
    )


def compared(file: Path) -> Comparison:
    """Stored results of one recipe."""
    (comparison,) = comparisons(load_results(file))
    return comparison


def origin(runs: pd.DataFrame) -> str:
    """How many seeds, which versions, what machine."""
    machines = runs["machine"].map(lambda m: f"{m['cores']} cores ({m['processor']})")
    names = runs.groupby(machines)["strategy"].unique()
    most, *others = names.map(len).sort_values(ascending=False, kind="stable").index
    rest = "".join(f"; {', '.join(names[machine])}: {machine}" for machine in others)
    versions = runs["versions"].iloc[0]
    return (
        f"Mean ± standard deviation over {runs['seed'].nunique()} seeds; torch "
        f"{versions['torch']}, avalanche-lib {versions['avalanche-lib']}, one thread a run, "
        f"{most}{rest}."
    )


def replace_part(page: Path, script: str, text: str) -> None:
    """Write what a script generates between its markers in a page."""
    start, end = f"<!-- results: {script} -->\n", "<!-- end of results -->\n"
    before, found, rest = page.read_text(encoding="utf-8").partition(start)
    _, closed, after = rest.partition(end)
    if not (found and closed):
        raise ValueError(f"{page} has no {start.strip()} ... {end.strip()}")
    write_atomically(page, f"{before}{start}\n{text}\n{end}{after}")
