"""PACS with real images: the searched recipe in two orders of the domains, five seeds each.

    python benchmarks/pacs.py --dataset-root DATA   run what is missing, then report
    python benchmarks/pacs.py --report              from stored results only
    python benchmarks/pacs.py --write-recipe        as the shipped recipe ``pacs``

DATA has ``PACS/`` and ``weights/``, and gets a cache of decoded images. The recipe is
``benchmarks/results/pacs/best.toml``, searched from ``benchmarks/pacs.toml`` in the first order on
validation images. Results go to ``benchmarks/results/pacs/ORDER.jsonl``, tables and figures to
``docs/pacs.md``.
"""

from __future__ import annotations

import pandas as pd
from comparison import (
    RESULTS,
    ROOT,
    arguments,
    compared,
    mean_and_std,
    origin,
    replace_part,
    run_recipe,
    ship_recipe,
)

from covon_avalanche.experiment.recipe import Recipe, load_recipe
from covon_avalanche.report import load_results
from covon_avalanche.report.figures import save_curves, save_matrix
from covon_avalanche.report.tables import SHORT, aligned, markdown_table

NAME = "benchmarks/pacs.py"
PAGE = ROOT / "docs/pacs.md"
SEARCHED = RESULTS / "pacs/best.toml"
STORED = {order: RESULTS / f"pacs/{order}.jsonl" for order in ("forward", "reverse")}
MATRICES = ("lwf", "covon", "covon-inputs")
CALIBRATION = ("NLL", "ECE", "sampled A_T %", "sampled NLL", "sampled ECE")


def orders() -> dict[str, Recipe]:
    """The recipe with its order of domains, and with the reverse."""
    recipe = load_recipe(str(SEARCHED))
    domains = recipe.stream.model_dump()["domains"]
    backwards = recipe.stream.model_copy(update={"domains": domains[::-1]})
    title = f"PACS in reverse: {', '.join(domains[::-1])}"
    reverse = {"name": "pacs-reverse", "title": title, "stream": backwards}
    return {"forward": recipe, "reverse": recipe.model_copy(update=reverse)}


def write_report(order: str) -> None:
    """Curves, tables and matrices of an order."""
    comparison = compared(STORED[order])
    save_curves(comparison, ROOT / f"docs/pacs-{order}.png")
    shown = [strategy for strategy in comparison.summary.index if strategy in MATRICES]
    for strategy in shown:
        save_matrix(comparison, strategy, ROOT / f"docs/pacs-{order}-{strategy}.png")
    matrices = pd.DataFrame({name: [f"![](pacs-{order}-{name}.png)"] for name in shown})
    parts = [
        f"![Average accuracy over the domains learned](pacs-{order}.png)",
        markdown_table(comparison, SHORT).strip(),
        origin(comparison.runs),
        "Accuracy on each domain (across) after each domain learned (down), mean over seeds:",
        aligned(matrices, left=len(shown)),
        "Calibration, with the mean weights and with 8 posterior samples:",
        markdown_table(comparison, CALIBRATION),
    ]
    replace_part(PAGE, f"{NAME}, {order}", "\n\n".join(parts))


def write_summary() -> None:
    """A_T in both orders, of the strategies and seeds that have run in both."""
    runs = pd.concat({order: load_results(file) for order, file in STORED.items()}, names=["order"])
    scores = 100 * runs.pivot_table("average_accuracy", ["strategy", "seed"], "order").dropna()
    scores["both"] = scores.mean(axis=1)
    groups = scores.groupby("strategy")
    table = groups.agg(mean_and_std).assign(seeds=groups.size().astype(str))
    ranked = groups["both"].mean().sort_values(ascending=False).index
    replace_part(PAGE, f"{NAME}, both", aligned(table.loc[ranked].reset_index()))


def main() -> None:
    """Run and report."""
    given = arguments(__doc__)
    if given.write_recipe:
        ship_recipe(SEARCHED.parent, "pacs", weights='"default"')
        return
    for order, recipe in orders().items():
        if not given.report:
            run_recipe(recipe, range(5), STORED[order], given.dataset_root, given.jobs)
        write_report(order)
    write_summary()


if __name__ == "__main__":
    main()
