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
from collections.abc import Iterable
from statistics import mean, stdev

from comparison import ROOT, origin, replace_part, run_missing, stored_results

from covon_avalanche.atomic_write import write_atomically
from covon_avalanche.experiment.recipe import Recipe, load_recipe
from covon_avalanche.report import brief, sections_of
from covon_avalanche.report.columns import columns_of
from covon_avalanche.report.tables import markdown_table

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


def _row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def write_report(order: str) -> None:
    """What the page says of an order, from stored results: curves, tables and matrices."""
    results = stored_results(ROOT / f"benchmarks/results/pacs/{order}.jsonl")
    if not results:
        return
    (section,) = sections_of(results)
    brief.save_curves(section, ROOT / f"docs/pacs-{order}.png")
    shown = [s for s in section.standings if s.strategy in MATRICES]
    for standing in shown:
        file = ROOT / f"docs/pacs-{order}-{standing.strategy}.png"
        brief.save_matrix(section, standing, file)
    calibration = [c for c in columns_of(section) if c.heading in CALIBRATION]
    pictures = [f"![](pacs-{order}-{s.strategy}.png)" for s in shown]
    parts = [
        f"![Average accuracy over the domains learned](pacs-{order}.png)",
        brief.brief_markdown(section),
        origin(results),
        "Accuracy on each domain (across) after each domain learned (down), mean over seeds:",
        "\n".join([_row(s.strategy for s in shown), "|---" * len(shown) + "|", _row(pictures)]),
        "How far to trust the probabilities, with the mean weights and with 8 posterior samples:",
        markdown_table(section, calibration),
    ]
    text = "\n\n".join(part.strip() for part in parts)
    replace_part(ROOT / "docs/pacs.md", f"{NAME}, {order}", f"{text}\n")


def write_summary() -> None:
    """A_T in both orders, of the strategies and seeds that have run in both."""
    found: dict[str, dict[str, dict[int, float]]] = {}
    for order in ORDERS:
        for result in stored_results(ROOT / f"benchmarks/results/pacs/{order}.jsonl"):
            by_order = found.setdefault(result.strategy, {name: {} for name in ORDERS})
            by_order[order][result.seed] = 100 * result.average_accuracy
    rows = []
    for strategy, by_order in found.items():
        seeds = sorted(set.intersection(*(set(values) for values in by_order.values())))
        columns = [[values[seed] for seed in seeds] for values in by_order.values()]
        if seeds:
            rows.append((strategy, [*columns, [mean(pair) for pair in zip(*columns, strict=True)]]))
    rows.sort(key=lambda row: -mean(row[1][-1]))
    lines = [_row(["strategy", *ORDERS, "both", "seeds"]), "|---|" + "---:|" * (len(ORDERS) + 2)]
    for strategy, columns in rows:
        cells = [f"{mean(c):.2f}" + (f" ± {stdev(c):.2f}" if len(c) > 1 else "") for c in columns]
        lines.append(_row([strategy, *cells, str(len(columns[-1]))]))
    replace_part(ROOT / "docs/pacs.md", f"{NAME}, both", "\n".join(lines) + "\n")


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
