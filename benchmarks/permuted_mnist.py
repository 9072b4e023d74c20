"""Permuted MNIST-Hard: the shipped recipe with five seeds, beside the paper's Figure 2.

    python benchmarks/permuted_mnist.py --dataset-root DATA   run what is missing, then report
    python benchmarks/permuted_mnist.py --report              from stored results only

Results go to ``benchmarks/results/permuted-mnist-hard/results.jsonl`` as they come (one result a
line), tables into ``docs/permuted-mnist.md`` between its markers, pictures to
``docs/permuted-mnist.png`` and ``docs/permuted-mnist-STRATEGY.png``.
"""

from __future__ import annotations

import argparse

from comparison import ROOT, origin, replace_part, run_missing, stored_results

from covon_avalanche.experiment.recipe import load_recipe
from covon_avalanche.report import Section, brief, sections_of
from covon_avalanche.report.columns import ACCURACY, Column, brief_columns
from covon_avalanche.report.standing import Standing
from covon_avalanche.report.tables import markdown_table

NAME = "benchmarks/permuted_mnist.py"
STORED = ROOT / "benchmarks/results/permuted-mnist-hard/results.jsonl"
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


def main_table(section: Section) -> str:
    """All strategies, the best in bold, with the paper's number and how much of the way from
    fine-tuning to joint training it goes."""
    accuracy = {s.strategy: s.accuracy[0] for s in section.standings}
    low, high = accuracy["finetune"], accuracy["joint"]

    def closed(_: Section, standing: Standing) -> str:
        return f"{100 * (standing.accuracy[0] - low) / (high - low):.0f}"

    def paper(_: Section, standing: Standing) -> str:
        return PAPER.get(standing.strategy, "-")

    first, *rest = brief_columns(section)
    more = [
        Column("paper", "paper", "the paper's A_T", paper, lambda *_: None),
        Column("gap closed %", "", "of fine-tuning to joint training", closed, lambda *_: None),
    ]
    return markdown_table(section, [first, *more, *rest])


def ablation_table(section: Section) -> str:
    """The paper's Figure 2b."""
    by_name = {s.strategy: s for s in section.standings}
    lines = ["| update | strategy | A_T % | paper |", "|---|---|---:|---:|"]
    for name, text in ABLATION.items():
        if name in by_name:
            accuracy = ACCURACY.text(section, by_name[name])
            lines.append(f"| {text} | {name} | {accuracy} | {PAPER.get(name, '-')} |")
    return "\n".join(lines) + "\n"


def write_report() -> None:
    """Tables and pictures from stored results."""
    results = stored_results(STORED)
    (section,) = sections_of(results)
    brief.save_curves(section, ROOT / "docs/permuted-mnist.png")
    for standing in section.standings:
        if standing.strategy in MATRICES:
            file = ROOT / f"docs/permuted-mnist-{standing.strategy}.png"
            brief.save_matrix(section, standing, file)
    page = ROOT / "docs/permuted-mnist.md"
    table = f"{main_table(section)}\n{origin(results)}\n"
    replace_part(page, NAME, table)
    replace_part(page, f"{NAME}, Figure 2b", ablation_table(section))
    replace_part(ROOT / "README.md", NAME, table)


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--report", action="store_true")
    parser.add_argument("--dataset-root", help="the folder that has MNIST/raw")
    parser.add_argument("--seeds", type=int, default=5, help="how many")
    parser.add_argument("--jobs", type=int, help="runs at a time; one per core by default")
    arguments = parser.parse_args()
    if not arguments.report:
        recipe = load_recipe("permuted-mnist-hard")
        seeds = range(arguments.seeds)
        run_missing(recipe, seeds, STORED, arguments.dataset_root, arguments.jobs)
    write_report()


if __name__ == "__main__":
    main()
