"""The README's comparison: the shipped recipe with ten seeds.

    python benchmarks/permuted_digits.py             run what is missing, then write all below
    python benchmarks/permuted_digits.py --report    write table and picture from stored results

Results go to ``benchmarks/results/permuted-digits/results.jsonl`` (one result a line), the
table into ``README.md`` between its markers, the picture to ``docs/permuted-digits.png``.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path

from covon_avalanche.experiment.grid import Event, Job, run_grid
from covon_avalanche.experiment.recipe import load_recipe
from covon_avalanche.experiment.report import markdown_table, plot_curves, summarise
from covon_avalanche.experiment.result import Result, write_atomically

ROOT = Path(__file__).parents[1]
STORED = ROOT / "benchmarks/results/permuted-digits/results.jsonl"
SEEDS = range(10)
START, END = "<!-- results: benchmarks/permuted_digits.py -->\n", "<!-- end of results -->\n"


def stored_results() -> list[Result]:
    """What has been measured so far."""
    if not STORED.exists():
        return []
    return [Result.model_validate_json(line) for line in STORED.read_text().splitlines()]


def run_missing() -> None:
    """Measure, storing each result as it comes."""
    recipe = load_recipe("permuted-digits")
    have = {(r.strategy, r.seed): r for r in stored_results()}
    jobs = [Job(s, seed) for seed in SEEDS for s in recipe.strategies if (s, seed) not in have]

    def store(event: Event) -> None:
        if event.result is None:
            return
        have[event.job.strategy, event.job.seed] = event.result
        order = {name: i for i, name in enumerate(recipe.strategies)}
        lines = [
            have[key].model_dump_json() for key in sorted(have, key=lambda k: (order[k[0]], k[1]))
        ]
        write_atomically(STORED, "\n".join(lines) + "\n")
        print(f"{len(have)}/{len(SEEDS) * len(recipe.strategies)} {event.job}", flush=True)

    with tempfile.TemporaryDirectory() as folder:
        run_grid(recipe, jobs, Path(folder), processes=os.cpu_count() or 1, notify=store)


def write_report() -> None:
    """Table and picture."""
    results = stored_results()
    summaries = summarise(results)
    plot_curves(summaries, load_recipe("permuted-digits").title, ROOT / "docs/permuted-digits.png")
    readme = ROOT / "README.md"
    before, _, rest = readme.read_text(encoding="utf-8").partition(START)
    _, _, after = rest.partition(END)
    machine, versions = results[0].machine, results[0].versions
    origin = (
        f"Mean ± standard deviation over {len(SEEDS)} seeds; torch {versions['torch']}, "
        f"avalanche-lib {versions['avalanche-lib']}, {machine['cores']} cores "
        f"({machine['processor']}), one thread a run.\n"
    )
    table = f"\n{markdown_table(summaries)}\n{origin}\n"
    write_atomically(readme, before + START + table + END + after)


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--report", action="store_true")
    if not parser.parse_args().report:
        run_missing()
    write_report()


if __name__ == "__main__":
    main()
