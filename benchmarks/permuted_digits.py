"""The README's comparison: the shipped recipe with ten seeds.

    python benchmarks/permuted_digits.py             run what is missing, then write all below
    python benchmarks/permuted_digits.py --report    write table and picture from stored results

Results go to ``benchmarks/results/permuted-digits/results.jsonl`` (one result a line), the
table into ``README.md`` between its markers, the picture to ``docs/permuted-digits.png``.
"""

from __future__ import annotations

import argparse

from comparison import ROOT, compared, origin, replace_part, run_missing

from covon_avalanche.experiment.recipe import load_recipe
from covon_avalanche.report.figures import save_curves
from covon_avalanche.report.tables import SHORT, markdown_table

STORED = ROOT / "benchmarks/results/permuted-digits/results.jsonl"


def write_report() -> None:
    """Table and picture."""
    comparison = compared(STORED)
    save_curves(comparison, ROOT / "docs/permuted-digits.png")
    table = f"{markdown_table(comparison, SHORT)}\n{origin(comparison.runs)}\n"
    replace_part(ROOT / "README.md", "benchmarks/permuted_digits.py", table)


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--report", action="store_true")
    if not parser.parse_args().report:
        run_missing(load_recipe("permuted-digits"), range(10), STORED)
    write_report()


if __name__ == "__main__":
    main()
