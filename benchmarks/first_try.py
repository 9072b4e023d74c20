"""CoVON without a search: a preset at a learning rate of AdamW's, against searched regularisers.

    python benchmarks/first_try.py --dataset-root DATA [STREAM ...]   run what is missing, report
    python benchmarks/first_try.py --report                           from stored results only

CoVON with a preset, and fine-tuning, at the same learning rate: the one that the search of joint
training found, with which AdamW learns well, and the one that fine-tuning's found, with which it
forgets little. Streams (``pacs``, ``pacs-vit``, ``permuted-mnist-hard``) and
protocols are those of the scripts ``pacs.py``, ``pacs_vit.py`` and ``permuted_mnist.py``, whose
searched regularisers are shown beside. Results go to ``benchmarks/results/first-try``, tables to
``docs/presets.md``.
"""

from __future__ import annotations

import os
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import pacs
import pacs_vit
import pandas as pd
import permuted_mnist
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
PAGE = ROOT / "docs/presets.md"


class Stream(NamedTuple):
    """A benchmark with searched methods."""

    recipe: str
    preset: str
    orders: dict[str, tuple[str, ...]]
    """Domains by the name of an order; empty for the recipe's own."""
    stored: dict[str, Path]
    """Results of the searched methods."""


STREAMS = {
    "pacs": Stream(str(pacs.SEARCHED), "finetune", pacs.ORDERS, pacs.STORED),
    "pacs-vit": Stream(
        str(pacs_vit.FOLDER / "best.toml"), "finetune", pacs_vit.ORDERS, pacs_vit.STORED
    ),
    "permuted-mnist-hard": Stream(
        "permuted-mnist-hard", "small", {"results": ()}, {"results": permuted_mnist.STORED}
    ),
}
UNTUNED = pacs.ORDERS.keys() - set(pacs.TUNED)
SEEDS = 5
BESIDE = (
    "finetune",
    *(f"avalanche-{name}" for name in ("lwf", "ewc", "si")),
    "ewc-star",
    "ada-reg",
    "covon",
)
"""Searched methods, whose results are stored by the other scripts."""
_OPTIMIZERS = {"covon": "CoVON", "finetune": "AdamW"}


def recipes(name: str) -> dict[str, Recipe]:
    """In each order of the domains: fine-tuning and CoVON's preset at each learning rate."""
    stream = STREAMS[name]
    data = load_recipe(stream.recipe).model_dump()
    finetune = data["strategies"]["finetune"]
    strategies: dict[str, Any] = {}
    for lr in (data["strategies"]["joint"]["lr"], finetune["lr"]):
        strategies[f"covon-{lr:.1e}"] = {"kind": "covon", "preset": stream.preset, "lr": lr}
        strategies[f"finetune-{lr:.1e}"] = {**finetune, "lr": lr}
    recipe = validate({**data, "strategies": strategies, "search": {}, "searched": []}, name)
    return {
        order: in_order(recipe, domains, name=f"first-try-{name}-{order}") if domains else recipe
        for order, domains in stream.orders.items()
    }


def table(stream: str) -> str:
    """A_T and BWT in each order, mean ± standard deviation over the seeds."""
    columns: dict[str, dict[str, str]] = {}
    means: dict[str, list[float]] = {}
    runs = []
    for order in recipes(stream):
        files = [RESULTS / f"first-try/{stream}-{order}.jsonl", STREAMS[stream].stored[order]]
        for file in files:
            if not file.exists():
                continue
            found = compared(file).runs
            own = file is files[0]
            runs.append(found if own else found[found["strategy"].isin(BESIDE)])
            for name, group in found.groupby("strategy"):
                if own or name in BESIDE:
                    kind, _, lr = str(name).partition("-")
                    row = f"{_OPTIMIZERS[kind]}, lr {lr}" if own else f"{name}, searched"
                    scores = 100 * group["average_accuracy"]
                    bwt = 100 * group["bwt"].mean()
                    columns.setdefault(row, {})[order] = f"{mean_and_std(scores, 1)} ({bwt:.1f})"
                    means.setdefault(row, []).append(float(scores.mean()))
    rows = pd.DataFrame(columns).T
    complete = rows.notna().all(axis=1)
    average = pd.Series({row: sum(found) / len(found) for row, found in means.items()})
    rows["all orders"] = average.where(complete).map("{:.1f}".format)
    rows = rows.loc[average.sort_values(ascending=False).index]
    if len(orders := recipes(stream)) == 1:
        rows = rows.drop(columns="all orders").rename(columns=dict.fromkeys(orders, "A_T % (BWT)"))
    rows = rows.replace({"nan": "–"}).fillna("–")  # noqa: RUF001
    rows.insert(0, "method", rows.index)
    return f"{aligned(rows)}\n\n{origin(pd.concat(runs))}"


def write_report() -> None:
    """The tables of both streams."""
    for stream in STREAMS:
        if any(RESULTS.glob(f"first-try/{stream}-*.jsonl")):
            replace_part(PAGE, f"{NAME}, {stream}", table(stream))


def main() -> None:
    """Run and report."""
    given = arguments(__doc__, *STREAMS)
    os.environ.setdefault("TIMM_FUSED_ATTN", "0")
    for stream in () if given.report else given.parts or STREAMS:
        for seeds, number in product(range(1, SEEDS + 1), range(4)):
            for order, recipe in recipes(stream).items():
                name = list(recipe.strategies)[number]
                if number == 3 and order not in UNTUNED:
                    continue  # fine-tuning as searched has its results in the stream's own
                file = RESULTS / f"first-try/{stream}-{order}.jsonl"
                file.parent.mkdir(exist_ok=True)
                run_recipe(recipe, range(seeds), file, given.dataset_root, given.jobs, [name])
    write_report()


if __name__ == "__main__":
    main()
