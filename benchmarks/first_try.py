"""CoVON without a search: a preset at a learning rate of AdamW's, against searched regularisers.

    python benchmarks/first_try.py --dataset-root DATA [STREAM ...]   run what is missing, report
    python benchmarks/first_try.py --report                           from stored results only

CoVON with a preset, and fine-tuning, at the same learning rate: the one that the search of joint
training found, with which AdamW learns well, and the one that fine-tuning's found, with which it
forgets little. Streams (``pacs``, ``pacs-vit``, ``permuted-mnist-hard``) and protocols are those of
the recipes whose searched regularisers are shown beside. Results go to
``benchmarks/results/first-try``, tables to ``docs/presets.md``.
"""

from __future__ import annotations

import os
import re
from itertools import product
from typing import Any

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
)

from covon_avalanche.experiment.recipe import Recipe, load_recipe, validate
from covon_avalanche.report.tables import aligned

NAME = "benchmarks/first_try.py"
PAGE = ROOT / "docs/presets.md"
STREAMS = {
    "pacs": ("forward", "reverse", "third", "fourth"),
    "pacs-vit": ("forward", "reverse"),
    "permuted-mnist-hard": ("results",),
}
"""The orders of their domains, which are also the names of the searched methods' results."""
UNTUNED = ("third", "fourth")
SEEDS = 5
BESIDE = (
    "finetune",
    *(f"avalanche-{name}" for name in ("lwf", "ewc", "si")),
    "lwf",
    "ewc",
    "si",
    "mas",
    "rwalk",
    "ewc-star",
    "ada-reg",
    "evcl",
    "covon",
    "covon-gradsq",
)
"""Searched methods, whose results are stored."""
KNOB = {"pacs": 0.05116, "pacs-vit": 0.2288}
"""``gamma`` by a search in the first order (``pacs.toml``, ``pacs_vit_knob.toml``, strategy
``covon-preset``; 6 trials). On permuted MNIST-Hard (``permuted_mnist_knob.toml``) it is the
preset's."""
_TITLES = {
    "covon": "CoVON",
    "covon-clip-2": "CoVON, `clip_radius` 2",
    "finetune": "AdamW",
    "covon-knob": "CoVON, `gamma` searched",
    "covon-regmean": "CoVON + RegMean",
    "finetune-regmean": "AdamW + RegMean",
    "covon-slca": "CoVON + retrained classifier",
    "covon-half": "CoVON, bfloat16 prior",
    "covon-scratch": "CoVON, default preset",
}


def recipe_of(stream: str, order: str) -> Recipe:
    """Fine-tuning and CoVON's preset at each learning rate; with pretrained weights, the preset at
    joint training's also with RegMean, as fine-tuning, with a retrained classifier, and with a
    ``clip_radius`` of 2, its default before; with SqueezeNet and on permuted images also with a
    prior in bfloat16; on these also the default preset."""
    own = f"{stream}-{order}".replace("-", "_")
    is_shipped = stream == "permuted-mnist-hard"
    recipe = load_recipe(stream if is_shipped else str(ROOT / f"benchmarks/{own}.toml"))
    data = recipe.model_dump()
    finetune = data["strategies"]["finetune"]
    preset = "perceptron" if is_shipped else "finetune"
    strategies: dict[str, Any] = {}
    for lr in (data["strategies"]["joint"]["lr"], finetune["lr"]):
        strategies[f"covon-{lr:.1e}"] = {"kind": "covon", "preset": preset, "lr": lr}
        strategies[f"finetune-{lr:.1e}"] = {**finetune, "lr": lr}
    lr = data["strategies"]["joint"]["lr"]
    covon = {"kind": "covon", "preset": preset, "lr": lr}
    if is_shipped:
        strategies[f"covon-scratch-{lr:.1e}"] = {**covon, "preset": "scratch"}
    else:
        strategies[f"covon-regmean-{lr:.1e}"] = {**covon, "merge": "regmean"}
        if stream in KNOB:
            strategies[f"covon-knob-{lr:.1e}"] = {**covon, "gamma": KNOB[stream]}
        strategies[f"finetune-regmean-{lr:.1e}"] = {**finetune, "lr": lr, "merge": "regmean"}
        strategies[f"covon-slca-{lr:.1e}"] = {**covon, "align_classifier": True}
        for rate in (lr, finetune["lr"]):
            strategies[f"covon-clip-2-{rate:.1e}"] = {**covon, "lr": rate, "clip_radius": 2.0}
    if stream != "pacs-vit":
        strategies[f"covon-half-{lr:.1e}"] = {**covon, "bfloat16_prior": True}
    name = stream if is_shipped else f"first-try-{stream}-{order}"
    new = {"name": name, "strategies": strategies, "search": {}, "searched": []}
    return validate({**data, **new}, name)


def title(name: str) -> str:
    """Such as ``CoVON + RegMean, lr 2.1e-04`` for ``covon-regmean-2.1e-04``."""
    kind, lr = re.split(r"-(?=\d\.)", name, maxsplit=1)
    return f"{_TITLES[kind]}, lr {lr}"


def table(stream: str) -> str:
    """A_T and BWT in each order, mean ± standard deviation over the seeds."""
    columns: dict[str, dict[str, str]] = {}
    means: dict[str, list[float]] = {}
    runs = []
    for order in STREAMS[stream]:
        files = [RESULTS / f"first-try/{stream}-{order}.jsonl", RESULTS / stream / f"{order}.jsonl"]
        for file in files:
            if not file.exists():
                continue
            found = compared(file).runs
            own = file is files[0]
            runs.append(found if own else found[found["strategy"].isin(BESIDE)])
            for name, group in found.groupby("strategy"):
                if own or name in BESIDE:
                    row = title(str(name)) if own else f"{name}, searched"
                    scores = 100 * group["average_accuracy"]
                    bwt = 100 * group["bwt"].mean()
                    columns.setdefault(row, {})[order] = f"{mean_and_std(scores, 1)} ({bwt:.1f})"
                    means.setdefault(row, []).append(float(scores.mean()))
    rows = pd.DataFrame(columns).T
    complete = rows.notna().all(axis=1)
    average = pd.Series({row: sum(found) / len(found) for row, found in means.items()})
    rows["all orders"] = average.where(complete).map("{:.1f}".format)
    rows = rows.loc[average.sort_values(ascending=False).index]
    if len(orders := STREAMS[stream]) == 1:
        rows = rows.drop(columns="all orders").rename(columns=dict.fromkeys(orders, "A_T % (BWT)"))
    rows = rows.replace({"nan": "–"}).fillna("–")  # noqa: RUF001
    rows.insert(0, "method", rows.index)
    return f"{aligned(rows)}\n\n{origin(pd.concat(runs))}"


def write_report() -> None:
    """The tables of all streams."""
    for stream in STREAMS:
        if any(RESULTS.glob(f"first-try/{stream}-*.jsonl")):
            replace_part(PAGE, f"{NAME}, {stream}", table(stream))


def main() -> None:
    """Run and report."""
    given = arguments(__doc__, *STREAMS)
    os.environ.setdefault("TIMM_FUSED_ATTN", "0")
    for stream in () if given.report else given.parts or STREAMS:
        for seeds, number in product(range(1, SEEDS + 1), range(11)):
            for order in STREAMS[stream]:
                recipe = recipe_of(stream, order)
                if number >= len(recipe.strategies):
                    continue
                name = list(recipe.strategies)[number]
                if number == 3 and order not in UNTUNED:
                    continue  # fine-tuning as searched has its results in the stream's own
                file = RESULTS / f"first-try/{stream}-{order}.jsonl"
                file.parent.mkdir(exist_ok=True)
                run_recipe(recipe, range(seeds), file, given.dataset_root, given.jobs, [name])
    write_report()


if __name__ == "__main__":
    main()
