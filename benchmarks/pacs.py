"""PACS with real images: the shipped recipe in two orders of the domains, three seeds each.

    python benchmarks/pacs.py --dataset-root DATA   run what is missing, then report
    python benchmarks/pacs.py --report              from stored results only

DATA has ``PACS/`` and ``weights/``, and gets a cache of decoded images. The settings are those of
``covon search benchmarks/pacs.toml``, searched in the first order on validation images. Results
go to ``benchmarks/results/pacs/ORDER.jsonl`` as they come (one result a line), tables into
``docs/pacs.md``, pictures to ``docs/pacs-ORDER.png`` and ``docs/pacs-ORDER-STRATEGY.png``.
"""

from __future__ import annotations

import argparse

from comparison import ROOT, origin, replace_part, run_missing, stored_results

from covon_avalanche.experiment.recipe import Recipe, load_recipe
from covon_avalanche.experiment.reporting import Section, brief, sections_of
from covon_avalanche.experiment.reporting.columns import columns_of
from covon_avalanche.experiment.reporting.tables import markdown_table

NAME = "benchmarks/pacs.py"
SEEDS = range(3)
MATRICES = ("finetune", "ewc-star", "covon")
CALIBRATION = ("NLL", "ECE", "sampled A_T %", "sampled NLL", "sampled ECE")


def orders() -> dict[str, Recipe]:
    """The recipe with its domains as they are, and in reverse."""
    recipe = load_recipe("pacs")
    domains = recipe.stream.model_dump()["domains"]
    backwards = recipe.stream.model_copy(update={"domains": domains[::-1]})
    title = f"PACS in reverse: {', '.join(domains[::-1])}"
    reverse = {"name": "pacs-reverse", "title": title, "stream": backwards}
    return {"forward": recipe, "reverse": recipe.model_copy(update=reverse)}


def calibration_table(section: Section) -> str:
    """How far probabilities can be trusted, by the mean weights and by posterior samples."""
    return markdown_table(section, [c for c in columns_of(section) if c.heading in CALIBRATION])


def write_report(order: str) -> None:
    """Tables and pictures of an order from stored results."""
    results = stored_results(ROOT / f"benchmarks/results/pacs/{order}.jsonl")
    (section,) = sections_of(results)
    brief.save_curves(section, ROOT / f"docs/pacs-{order}.png")
    for standing in section.standings:
        if standing.strategy in MATRICES:
            file = ROOT / f"docs/pacs-{order}-{standing.strategy}.png"
            brief.save_matrix(section, standing, file)
    page = ROOT / "docs/pacs.md"
    replace_part(page, f"{NAME}, {order}", f"{brief.brief_markdown(section)}\n{origin(results)}\n")
    replace_part(page, f"{NAME}, {order}, calibration", calibration_table(section))


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--report", action="store_true")
    parser.add_argument("--dataset-root", help="the folder that has PACS and weights")
    parser.add_argument("--jobs", type=int, help="runs at a time; one per core by default")
    arguments = parser.parse_args()
    for order, recipe in orders().items():
        if not arguments.report:
            file = ROOT / f"benchmarks/results/pacs/{order}.jsonl"
            run_missing(recipe, SEEDS, file, arguments.dataset_root, arguments.jobs)
        write_report(order)


if __name__ == "__main__":
    main()
