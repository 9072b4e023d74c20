"""Permuted digits: the shipped recipe with ten seeds.

    python benchmarks/permuted_digits.py             run what is missing, then report
    python benchmarks/permuted_digits.py --report    from stored results only

Results go to ``benchmarks/results/permuted-digits/results.jsonl``, the table to
``docs/digits.md``, the figure to ``docs/permuted-digits.png``.
"""

from __future__ import annotations

from comparison import (
    RESULTS,
    ROOT,
    arguments,
    compared,
    origin,
    replace_part,
    run_recipe,
    ship_recipe,
)

from covon_avalanche.experiment.recipe import load_recipe
from covon_avalanche.report import figures
from covon_avalanche.report.tables import SHORT, markdown_table

STORED = RESULTS / "permuted-digits/results.jsonl"


def write_report() -> None:
    """Table and figure."""
    comparison = compared(STORED)
    figures.save(comparison, "curves", ROOT / "docs/permuted-digits.png")
    table = f"{markdown_table(comparison, SHORT)}\n{origin(comparison.runs)}"
    replace_part(ROOT / "docs/digits.md", "benchmarks/permuted_digits.py", table)


def main() -> None:
    """Run and report."""
    given = arguments(__doc__)
    if given.write_recipe:
        ship_recipe(STORED.parent, "permuted-digits")
        return
    if not given.report:
        run_recipe(load_recipe("permuted-digits"), range(10), STORED, processes=given.jobs)
    write_report()


if __name__ == "__main__":
    main()
