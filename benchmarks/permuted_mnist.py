"""Permuted MNIST-Hard: the shipped recipe with five seeds, beside the paper's Figure 2.

    python benchmarks/permuted_mnist.py --dataset-root DATA   run what is missing, then report
    python benchmarks/permuted_mnist.py --report              from stored results only

Results go to ``benchmarks/results/permuted-mnist-hard/results.jsonl``, tables to
``docs/permuted-mnist.md``, figures to ``docs/permuted-mnist.png`` and
``docs/permuted-mnist-STRATEGY.png``.
"""

from __future__ import annotations

import pandas as pd
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
from covon_avalanche.report import Comparison, figures
from covon_avalanche.report.tables import METRICS, SHORT, aligned, markdown_table

NAME = "benchmarks/permuted_mnist.py"
STORED = RESULTS / "permuted-mnist-hard/results.jsonl"
MATRICES = ("finetune", "ewc-star", "covon", "covon-gradsq")
ABLATION = {
    "ivon": "fast, without a prior",
    "ivon-prior": "fast, the last task as prior",
    "ema": "fast and slow, means averaged without precision",
    "covon-nom": "fast and slow, Eq. 8, gamma = 1",
    "covon": "fast and slow, Eq. 8, gamma < 1",
    "covon-gradsq": "squared gradients as curvature, gamma 1 for the mean, 2 for the precision",
}
PAPER = {
    "ivon": "40.23 ± 2.98",
    "ivon-prior": "77.03 ± 1.03",
    "ema": "89.56 ± 0.25",
    "covon-nom": "90.32 ± 0.27",
    "covon": "92.12 ± 0.35",
    "td-vcl-n": "about 90",
    "td-vcl-lambda": "about 90",
}


def paper(strategies: pd.Index) -> list[str]:
    """The paper's A_T."""
    return [PAPER.get(name, "-") for name in strategies]


def main_table(comparison: Comparison) -> str:
    """All strategies, with the paper's A_T and the share of the gap between fine-tuning and joint
    training that each closes."""
    accuracy = comparison.summary["average_accuracy_mean"]
    low, high = accuracy["finetune"], accuracy["joint"]
    gap = 100 * (accuracy - low) / (high - low)
    extra = {"gap closed %": gap.map("{:.0f}".format), "paper": paper(accuracy.index)}
    return markdown_table(comparison, SHORT, pd.DataFrame(extra, index=accuracy.index))


def ablation_table(comparison: Comparison) -> str:
    """The paper's Figure 2b."""
    summary = comparison.summary.reindex(ABLATION).dropna(how="all")
    columns = {
        "update": summary.index.map(ABLATION),
        "strategy": summary.index,
        "A_T %": [METRICS[0].text(row) for _, row in summary.iterrows()],
        "paper": paper(summary.index),
    }
    return aligned(pd.DataFrame(columns), left=2)


def write_report() -> None:
    """Tables and figures."""
    comparison = compared(STORED)
    figures.save(comparison, "curves", ROOT / "docs/permuted-mnist.png")
    for strategy in comparison.summary.index.intersection(MATRICES):
        figures.save(comparison, f"matrix-{strategy}", ROOT / f"docs/permuted-mnist-{strategy}.png")
    page = ROOT / "docs/permuted-mnist.md"
    table = f"{main_table(comparison)}\n{origin(comparison.runs)}"
    replace_part(page, NAME, table)
    replace_part(page, f"{NAME}, Figure 2b", ablation_table(comparison))


def main() -> None:
    """Run and report."""
    given = arguments(__doc__)
    recipe = load_recipe("permuted-mnist-hard")
    if given.write_recipe:
        ship_recipe(STORED.parent, recipe.name)
        return
    if not given.report:
        run_recipe(recipe, recipe.seeds, STORED, given.dataset_root, given.jobs)
    write_report()


if __name__ == "__main__":
    main()
