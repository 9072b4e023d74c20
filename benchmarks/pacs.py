"""PACS with real images: the searched recipe in two orders of the domains, five seeds each.

    python benchmarks/pacs.py --dataset-root DATA   run what is missing, then report
    python benchmarks/pacs.py --report              from stored results only
    python benchmarks/pacs.py --write-recipe        as the shipped recipe ``pacs``

DATA has ``PACS/`` and ``weights/``, and gets a cache of decoded images. The recipe is
``benchmarks/results/pacs/best.toml``, searched from ``benchmarks/pacs.toml`` in the first order on
validation images. Results go to ``benchmarks/results/pacs/ORDER.jsonl`` as they come (one result a
line), tables into ``docs/pacs.md``, pictures beside it.
"""

from __future__ import annotations

import argparse

import pandas as pd
from comparison import ROOT, compared, origin, replace_part, run_missing

from covon_avalanche.atomic_write import write_atomically
from covon_avalanche.experiment.recipe import Recipe, load_recipe
from covon_avalanche.report import load_results
from covon_avalanche.report.figures import save_curves, save_matrix
from covon_avalanche.report.tables import SHORT, markdown_table

NAME = "benchmarks/pacs.py"
SEARCHED = ROOT / "benchmarks/results/pacs/best.toml"
SEEDS = range(5)
ORDERS = ("forward", "reverse")
MATRICES = ("lwf", "covon", "covon-inputs")
CALIBRATION = ("NLL", "ECE", "sampled A_T %", "sampled NLL", "sampled ECE")


def orders() -> dict[str, Recipe]:
    """The recipe with its domains as they are, and in reverse."""
    recipe = load_recipe(str(SEARCHED))
    domains = recipe.stream.model_dump()["domains"]
    backwards = recipe.stream.model_copy(update={"domains": domains[::-1]})
    title = f"PACS in reverse: {', '.join(domains[::-1])}"
    reverse = {"name": "pacs-reverse", "title": title, "stream": backwards}
    return dict(zip(ORDERS, (recipe, recipe.model_copy(update=reverse)), strict=True))


def write_report(order: str) -> None:
    """What the page says of an order, from stored results: curves, tables and matrices."""
    file = ROOT / f"benchmarks/results/pacs/{order}.jsonl"
    if not file.exists():
        return
    comparison = compared(file)
    save_curves(comparison, ROOT / f"docs/pacs-{order}.png")
    shown = [strategy for strategy in comparison.summary.index if strategy in MATRICES]
    for strategy in shown:
        save_matrix(comparison, strategy, ROOT / f"docs/pacs-{order}-{strategy}.png")
    pictures = pd.DataFrame([[f"![](pacs-{order}-{name}.png)" for name in shown]], columns=shown)
    parts = [
        f"![Average accuracy over the domains learned](pacs-{order}.png)",
        markdown_table(comparison, SHORT),
        origin(comparison.runs),
        "Accuracy on each domain (across) after each domain learned (down), mean over seeds:",
        pictures.to_markdown(index=False),
        "How far to trust the probabilities, with the mean weights and with 8 posterior samples:",
        markdown_table(comparison, CALIBRATION),
    ]
    text = "\n\n".join(part.strip() for part in parts)
    replace_part(ROOT / "docs/pacs.md", f"{NAME}, {order}", f"{text}\n")


def write_summary() -> None:
    """A_T in both orders, of the strategies and seeds that have run in both."""
    files = {order: ROOT / f"benchmarks/results/pacs/{order}.jsonl" for order in ORDERS}
    runs = pd.concat({o: load_results(f) for o, f in files.items() if f.exists()}, names=["order"])
    scores = 100 * runs.pivot_table("average_accuracy", ["strategy", "seed"], "order").dropna()
    scores["both"] = scores.mean(axis=1)
    groups = scores.groupby("strategy")
    mean = groups.mean().sort_values("both", ascending=False)
    std = groups.std().loc[mean.index]
    table = mean.apply(lambda c: c.map("{:.2f}".format) + std[c.name].map(" ± {:.2f}".format))
    table = table.replace(" ± nan", "", regex=True).assign(seeds=groups.size().astype(str))
    alignment = ["left", *["right"] * len(table.columns)]
    text = table.to_markdown(disable_numparse=True, colalign=alignment)
    replace_part(ROOT / "docs/pacs.md", f"{NAME}, both", f"{text}\n")


def write_recipe() -> None:
    """The searched recipe, with torchvision's own weights."""
    lines = [
        "# Written by benchmarks/pacs.py; do not edit. The settings are the best of a search, by",
        "# A_T on validation images; all trials are in benchmarks/results/pacs.",
    ]
    for line in SEARCHED.read_text(encoding="utf-8").splitlines():
        lines.append('weights = "default"' if line.startswith("weights = ") else line)
    file = ROOT / "covon_avalanche/experiment/recipes/pacs.toml"
    write_atomically(file, "\n".join(lines) + "\n")


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--report", action="store_true")
    parser.add_argument("--write-recipe", action="store_true")
    parser.add_argument("--dataset-root", help="the folder that has PACS and weights")
    parser.add_argument("--jobs", type=int, help="runs at a time; one per core by default")
    arguments = parser.parse_args()
    if arguments.write_recipe:
        write_recipe()
        return
    for order, recipe in orders().items():
        if not arguments.report:
            file = ROOT / f"benchmarks/results/pacs/{order}.jsonl"
            run_missing(recipe, SEEDS, file, arguments.dataset_root, arguments.jobs)
        write_report(order)
    write_summary()


if __name__ == "__main__":
    main()
