"""Permuted MNIST-Hard: the shipped recipe with five seeds, beside the paper's Figure 2.

    python benchmarks/permuted_mnist.py --dataset-root DATA   run what is missing, then report
    python benchmarks/permuted_mnist.py --report              from stored results only

Results go to ``benchmarks/results/permuted-mnist-hard/results.jsonl`` as they come (one result a
line), tables into ``docs/permuted-mnist.md`` between its markers, pictures to
``docs/permuted-mnist.png`` and ``docs/permuted-mnist-matrices.png``.
"""

from __future__ import annotations

import argparse

from comparison import ROOT, origin, replace_part, run_missing, stored_results

from covon_avalanche.experiment.recipe import load_recipe
from covon_avalanche.experiment.report import Summary, plot_curves, plot_matrices, summarise

NAME = "benchmarks/permuted_mnist.py"
STORED = ROOT / "benchmarks/results/permuted-mnist-hard/results.jsonl"
FIGURE = (
    "finetune",
    "ewc-star",
    "ada-reg",
    "vcl",
    "td-vcl-lambda",
    "covon-nom",
    "covon",
    "covon-gradsq",
    "joint",
)
ABLATION = {
    "ivon": "fast, without a prior",
    "ivon-prior": "fast, the last task as prior",
    "ema": "fast and slow, means averaged without precision",
    "covon-nom": "fast and slow, Eq. 8, gamma = 1",
    "covon": "fast and slow, Eq. 8, gamma < 1",
    "covon-gradsq": "the same with squared gradients as curvature",
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
REPLAY = ("td-vcl-n", "td-vcl-lambda")


def percent(value: tuple[float, float] | None) -> str:
    """Mean and, for several seeds, standard deviation."""
    if value is None:
        return "-"
    mean, std = value
    return f"{mean:.2f} ± {std:.2f}" if std == std else f"{mean:.2f}"


def table(rows: list[list[str]], columns: list[str]) -> str:
    """Markdown; the first column is text."""
    lines = [f"| {' | '.join(columns)} |", "|---|" + "---:|" * (len(columns) - 1)]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)]) + "\n"


def main_table(summaries: list[Summary]) -> str:
    """All strategies, the best without replay in bold."""
    by_name = {s.strategy: s for s in summaries}
    low, high = (by_name[name].accuracy[0] for name in ("finetune", "joint"))
    alone = [s for s in summaries if not s.ceiling and s.strategy not in REPLAY]
    winner = max(alone, key=lambda s: s.accuracy[0])
    rows = []
    for s in summaries:
        name = s.strategy + " (replay)" * (s.strategy in REPLAY) + " (ceiling)" * s.ceiling
        accuracy = percent(s.accuracy)
        if s is winner:
            name, accuracy = f"**{name}**", f"**{accuracy}**"
        closed = 100 * (s.accuracy[0] - low) / (high - low)
        rows.append(
            [
                name,
                accuracy,
                PAPER.get(s.strategy, "-"),
                f"{closed:.0f}",
                percent(s.bwt),
                f"{s.seconds:.0f}",
                f"{s.parameters_worth:.0f}",
                str(s.seeds),
            ]
        )
    columns = ["strategy", "A_T %", "paper", "gap closed %", "BWT %", "seconds", "memory", "seeds"]
    return table(rows, columns)


def ablation_table(summaries: list[Summary]) -> str:
    """The paper's Figure 2b."""
    by_name = {s.strategy: s for s in summaries}
    rows = [
        [text, name, percent(by_name[name].accuracy), PAPER.get(name, "-")]
        for name, text in ABLATION.items()
        if name in by_name
    ]
    return table(rows, ["update", "strategy", "A_T %", "paper"])


def write_report() -> None:
    """Tables and pictures from stored results."""
    results = stored_results(STORED)
    summaries = summarise(results)
    title = load_recipe("permuted-mnist-hard").title
    plot_curves(
        [s for s in summaries if s.strategy in FIGURE], title, ROOT / "docs/permuted-mnist.png"
    )
    shown = ("finetune", "ewc-star", "covon", "covon-gradsq")
    plot_matrices(
        {name: [r for r in results if r.strategy == name] for name in shown},
        ROOT / "docs/permuted-mnist-matrices.png",
    )
    whole = f"{main_table(summaries)}\n{origin(results)}\n"
    page = ROOT / "docs/permuted-mnist.md"
    replace_part(page, NAME, whole)
    replace_part(page, f"{NAME}, Figure 2b", ablation_table(summaries))


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--report", action="store_true")
    parser.add_argument("--dataset-root", help="the folder that has MNIST/raw")
    parser.add_argument("--seeds", type=int, default=5, help="how many")
    arguments = parser.parse_args()
    if not arguments.report:
        recipe = load_recipe("permuted-mnist-hard")
        run_missing(recipe, range(arguments.seeds), STORED, arguments.dataset_root)
    write_report()


if __name__ == "__main__":
    main()
