"""PACS with real images: the searched recipe and closed forms, in four orders of the domains.

    python benchmarks/pacs.py --dataset-root DATA               run what is missing, then report
    python benchmarks/pacs.py --dataset-root DATA closed-form   only these, which takes an hour
    python benchmarks/pacs.py --report                          from stored results only
    python benchmarks/pacs.py --write-recipe                    as the shipped recipe ``pacs``

DATA has ``PACS/`` and ``weights/``, and gets a cache of decoded images. The recipe is
``benchmarks/results/pacs/best.toml``, searched from ``benchmarks/pacs.toml`` in the first order on
validation images. Two more orders, which no trained method was tuned in, have the closed
forms. Results go to ``benchmarks/results/pacs/ORDER.jsonl``, tables and figures to
``docs/pacs.md``.
"""

from __future__ import annotations

from typing import Any

import pandas as pd
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
    ship_recipe,
)

from covon_avalanche.experiment.recipe import Recipe, load_recipe
from covon_avalanche.report import figures
from covon_avalanche.report.tables import FULL, aligned, markdown_table

NAME = "benchmarks/pacs.py"
PAGE = ROOT / "docs/pacs.md"
SEARCHED = RESULTS / "pacs/best.toml"
ORDERS = {
    "forward": ("photo", "art_painting", "cartoon", "sketch"),
    "reverse": ("sketch", "cartoon", "art_painting", "photo"),
    "third": ("cartoon", "sketch", "photo", "art_painting"),
    "fourth": ("art_painting", "photo", "sketch", "cartoon"),
}
STORED = {order: RESULTS / f"pacs/{order}.jsonl" for order in ORDERS}
CLOSED_FORM = ("ncm", "ridge", "ranpac", "layup", "layup-max", "layup-flip")
FIVE_SEEDS = ("layup-flip",)
"""Closed forms with more than three seeds."""
TUNED = ("forward", "reverse")
UNTUNED = ("finetune", "avalanche-lwf", "covon", "covon-inputs", "joint")  # in the last two orders
MATRICES = ("avalanche-lwf", "covon", "covon-inputs")
CALIBRATION = ("NLL", "ECE", "sampled A_T %", "sampled NLL", "sampled ECE")


def orders() -> dict[str, Recipe]:
    """The recipe in each order: the searched strategies and the closed forms."""
    recipe = load_recipe(str(SEARCHED))
    start = load_recipe(str(ROOT / "benchmarks/pacs.toml"))
    closed = {name: start.strategies[name] for name in CLOSED_FORM}
    found = {}
    for order, domains in ORDERS.items():
        trained = recipe.strategies if order in TUNED else UNTUNED
        update: dict[str, Any] = {
            "strategies": closed | {name: recipe.strategies[name] for name in trained}
        }
        if order != "forward":
            update |= {"name": f"pacs-{order}", "title": f"PACS: {', '.join(domains)}"}
        found[order] = in_order(recipe, domains, **update)
    return found


def write_report(order: str) -> None:
    """Curves, tables and matrices of an order."""
    comparison = compared(STORED[order])
    figures.save(comparison, "curves", ROOT / f"docs/pacs-{order}.png")
    shown = [strategy for strategy in comparison.summary.index if strategy in MATRICES]
    for strategy in shown:
        figures.save(comparison, f"matrix-{strategy}", ROOT / f"docs/pacs-{order}-{strategy}.png")
    matrices = pd.DataFrame({name: [f"![](pacs-{order}-{name}.png)"] for name in shown})
    parts = [
        f"![Average accuracy over the domains learned](pacs-{order}.png)",
        markdown_table(comparison, FULL).strip(),
        origin(comparison.runs),
    ]
    if order in TUNED:
        parts += [
            "Accuracy on each domain (across) after each domain learned (down), mean over seeds:",
            aligned(matrices, left=len(shown)),
            "Calibration, with the mean weights and with 8 posterior samples:",
            markdown_table(comparison, CALIBRATION),
        ]
    replace_part(PAGE, f"{NAME}, {order}", "\n\n".join(parts))
    replace_part(PAGE, f"{NAME}, search", searches_table(load_recipe(str(SEARCHED))))


def main() -> None:
    """Run and report."""
    given = arguments(__doc__, "closed-form", "trained")
    if given.write_recipe:
        start = (ROOT / "benchmarks/pacs.toml").read_text(encoding="utf-8")
        closed = start[start.index("# Closed forms") : start.index("[search.")]
        ship_recipe(
            SEARCHED.parent,
            "pacs",
            closed,
            weights='weights = "default"',
            precision='precision = "auto"',
        )
        return
    for part in () if given.report else given.parts or ("closed-form", "trained"):
        for most in (1, 3, 5):  # one seed of everything first
            for order, recipe in orders().items():
                names = [n for n in recipe.strategies if (n in CLOSED_FORM) == (part != "trained")]
                if most == 5 and (order not in TUNED or part == "closed-form"):
                    names = [n for n in names if n in FIVE_SEEDS]
                file = STORED[order]
                run_recipe(recipe, range(most), file, given.dataset_root, given.jobs, names)
    for order, file in STORED.items():
        if file.exists():
            write_report(order)
    replace_part(PAGE, f"{NAME}, both", across_orders(STORED))


if __name__ == "__main__":
    main()
