"""PACS with a pretrained vision transformer: all methods, in two orders of the domains.

    python benchmarks/pacs_vit.py --dataset-root DATA   run what is missing, then report
    python benchmarks/pacs_vit.py --report              from stored results only

DATA has ``PACS/`` and ``weights/``, and gets a cache of decoded images. The recipe is
``benchmarks/results/pacs-vit/best.toml``, searched from the shipped recipe ``pacs-vit`` in the
first order on validation images. Results go to ``benchmarks/results/pacs-vit/ORDER.jsonl``, tables
and figures to ``docs/pretrained.md``.
"""

from __future__ import annotations

import os

import pacs
from comparison import (
    RESULTS,
    ROOT,
    across_orders,
    arguments,
    compared,
    in_order,
    origin,
    replace_part,
    run_recipe,
    searches_table,
)

from covon_avalanche.experiment.recipe import Recipe, load_recipe
from covon_avalanche.report import figures
from covon_avalanche.report.tables import FULL, markdown_table

NAME = "benchmarks/pacs_vit.py"
PAGE = ROOT / "docs/pretrained.md"
FOLDER = RESULTS / "pacs-vit"
ORDERS = {name: pacs.ORDERS[name] for name in pacs.TUNED}
BEST = ("regmean-slca", "covon-slca", "covon-regmean-slca", "ranpac")
"""The best four sequential methods over both orders with three seeds: these have five."""
STORED = {order: FOLDER / f"{order}.jsonl" for order in ORDERS}


def orders() -> dict[str, Recipe]:
    """The searched recipe in each order."""
    recipe = load_recipe(str(FOLDER / "best.toml"))
    found = {}
    for order, domains in ORDERS.items():
        title = f"{recipe.title.partition(':')[0]}: {', '.join(domains)}"
        found[order] = in_order(recipe, domains, name=f"pacs-vit-{order}", title=title)
    return found


def write_report() -> None:
    """A_T in both orders; tables and figures of each."""
    found = {order: compared(file) for order, file in STORED.items() if file.exists()}
    parts = ["A_T as domain mean, in percent:", across_orders(STORED)]
    for order, comparison in found.items():
        figure = f"pretrained-{order}"
        figures.save(comparison, "curves", ROOT / f"docs/{figure}.png")
        parts += [
            f"### {', '.join(ORDERS[order])}",
            markdown_table(comparison, FULL).strip(),
            origin(comparison.runs),
            f"![Average accuracy over the domains learned]({figure}.png)",
        ]
        for cost in ("time", "memory"):
            figures.save(comparison, cost, ROOT / f"docs/{figure}-{cost}.png")
            parts.append(f"![Accuracy against {cost}]({figure}-{cost}.png)")
    replace_part(PAGE, NAME, "\n\n".join(parts))
    recipe = load_recipe(str(FOLDER / "best.toml"))
    replace_part(PAGE, f"{NAME}, search", searches_table(recipe))


def main() -> None:
    """Run and report."""
    given = arguments(__doc__)
    os.environ.setdefault("TIMM_FUSED_ATTN", "0")  # trains in two thirds of the time on a CPU
    if not given.report:
        for seeds in (1, 3, 5):  # one of each first
            for order, recipe in orders().items():
                names = BEST if seeds == 5 else None
                file = STORED[order]
                run_recipe(recipe, range(seeds), file, given.dataset_root, given.jobs, names)
    write_report()


if __name__ == "__main__":
    main()
