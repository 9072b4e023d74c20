"""CoVON without a search: a preset at a learning rate of AdamW's, against fine-tuning.

    python benchmarks/first_try.py --dataset-root DATA [pacs] [pacs-vit]   run missing ones, report
    python benchmarks/first_try.py --report                                from stored results only

Fine-tuning, and CoVON with ``preset = "finetune"`` at the same learning rate: the one that a search
of fine-tuning found, and larger ones. Streams and protocols are those of ``pacs.py`` and
``pacs_vit.py``; their searched regularisers are shown beside. Results go to
``benchmarks/results/first-try``, tables to ``docs/how-to/choose-settings.md``.
"""

from __future__ import annotations

import argparse
import os
from typing import Any

import pacs
import pacs_vit
import pandas as pd
from comparison import (
    RESULTS,
    ROOT,
    arguments,
    compared,
    in_order,
    mean_and_std,
    origin,
    replace_part,
    run_recipe,
)

from covon_avalanche.experiment.recipe import Recipe, load_recipe, validate
from covon_avalanche.report.tables import aligned

NAME = "benchmarks/first_try.py"
PAGE = ROOT / "docs/how-to/choose-settings.md"
SEARCHED = {"pacs": pacs.SEARCHED, "pacs-vit": pacs_vit.FOLDER / "best.toml"}
LARGER = {"pacs": 1.2e-4, "pacs-vit": 2.5e-5}
"""Learning rates with which AdamW learns each domain better than with the searched one, which
forgets least."""
SEEDS = 5
BESIDE = ("finetune", "lwf", "ewc", "ewc-star", "si", "ada-reg", "covon")
"""Searched methods, whose results are stored by the other scripts."""


def recipes(stream: str) -> dict[str, Recipe]:
    """In each order of the domains: fine-tuning and CoVON's preset at each learning rate."""
    searched = load_recipe(str(SEARCHED[stream]))
    data = searched.model_dump()
    finetune = data["strategies"]["finetune"]
    strategies: dict[str, Any] = {}
    for lr in (finetune["lr"], LARGER[stream]):
        strategies[f"covon-{lr:.1e}"] = {"kind": "covon", "preset": "finetune", "lr": lr}
        strategies[f"finetune-{lr:.1e}"] = {**finetune, "lr": lr}
    recipe = validate({**data, "strategies": strategies, "search": {}, "searched": []}, stream)
    orders = pacs.ORDERS if stream == "pacs" else pacs_vit.ORDERS
    return {
        order: in_order(recipe, domains, name=f"first-try-{stream}-{order}")
        for order, domains in orders.items()
    }


def table(stream: str) -> str:
    """A_T and BWT in each order, mean ± standard deviation over the seeds."""
    columns: dict[str, dict[str, str]] = {}
    means: dict[str, dict[str, float]] = {}
    runs = []
    for order in recipes(stream):
        files = [RESULTS / f"first-try/{stream}-{order}.jsonl", RESULTS / f"{stream}/{order}.jsonl"]
        for file in files:
            if not file.exists():
                continue
            found = compared(file).runs
            own = file is files[0]
            runs += [found] if own else []
            for name, group in found.groupby("strategy"):
                if own or name in BESIDE:
                    row = str(name) if own else f"{name}, searched"
                    scores = 100 * group["A_T"]
                    bwt = 100 * group["BWT"].mean()
                    columns.setdefault(row, {})[order] = f"{mean_and_std(scores, 1)} ({bwt:.1f})"
                    means.setdefault(row, {})[order] = float(scores.mean())
    rows = pd.DataFrame(columns).T.fillna("–")  # noqa: RUF001
    rows.insert(0, "method", rows.index)
    return aligned(rows) + "\n\n" + (origin(pd.concat(runs)) if runs else "")


def write_report() -> None:
    """The tables of both streams."""
    for stream in SEARCHED:
        if not any(RESULTS.glob(f"first-try/{stream}-*.jsonl")):
            continue
        if f"{NAME}, {stream}" in PAGE.read_text(encoding="utf-8"):
            replace_part(PAGE, f"{NAME}, {stream}", table(stream))
        else:
            print(table(stream))  # until the page has a section for it


def run(stream: str, seeds: int, part: slice, given: argparse.Namespace) -> None:
    """Run what is missing, in all orders.

    :param part: of the strategies: the first two have the searched learning rate.
    """
    for order, recipe in recipes(stream).items():
        file = RESULTS / f"first-try/{stream}-{order}.jsonl"
        file.parent.mkdir(exist_ok=True)
        names = list(recipe.strategies)[part]
        if part.start is None and order in pacs.TUNED:
            del names[1]  # fine-tuning as searched has its results in the stream's own
        run_recipe(recipe, range(seeds), file, given.dataset_root, given.jobs, names)


def main() -> None:
    """Run and report."""
    given = arguments(__doc__, *SEARCHED)
    os.environ.setdefault("TIMM_FUSED_ATTN", "0")
    for stream in () if given.report else given.parts or SEARCHED:
        for most in range(1, SEEDS + 1):  # one of each first
            run(stream, most, slice(2), given)
        for most in range(1, SEEDS + 1):
            run(stream, most, slice(2, 4), given)
    write_report()


if __name__ == "__main__":
    main()
