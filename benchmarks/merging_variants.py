"""RegMean's variants.

    python benchmarks/merging_variants.py --dataset-root DATA   run what is missing, then report
    python benchmarks/merging_variants.py --report              from stored results only

On PACS as in ``benchmarks/merging.py``, with the settings searched there, one option is changed at
a time. Everything is evaluated on validation images of seeds that no report of test accuracies
uses. Each run is a line of ``benchmarks/results/merging/variants.jsonl``; the tables go to
``docs/merging.md``.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from itertools import product
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch
from comparison import (
    Case,
    arguments,
    machine_name,
    mean_and_std,
    read_cases,
    replace_part,
    run_cases,
    strategy_of,
)
from merging import FOLDER, PAGE, recipe_of
from pacs import TUNED
from torch import nn

from covon_avalanche.evaluation import CalibrationSums
from covon_avalanche.experiment.build import build_benchmark, build_model
from covon_avalanche.experiment.search import with_settings
from covon_avalanche.optim import CoVON
from covon_avalanche.plugins.task_loader import dataset_loader
from covon_avalanche.report.tables import aligned

NAME = "benchmarks/merging_variants.py"
FILE = FOLDER / "variants.jsonl"
SEEDS = (1000, 1001)
VALIDATION = 0.2
SAMPLES = 8


class Variant(NamedTuple):
    """What differs from the cell of the factorial."""

    cell: str
    settings: Mapping[str, Any] = MappingProxyType({})
    epochs: int | None = None


VARIANTS = {
    "CoVON, no merge": Variant("covon-none"),
    "CoVON, Eq. 8": Variant("covon-eq8"),
    "CoVON, RegMean": Variant("covon-regmean"),
    "... moments of half of the images": Variant("covon-regmean", {"merge.share": 0.5}),
    "... 10 epochs": Variant("covon-regmean", epochs=10),
    "... a tenth of the learning rate": Variant("covon-regmean", {"lr": 0.1}),
    "... aligned classifier": Variant("covon-regmean", {"align_classifier": True}),
    "... K-FAC": Variant("covon-regmean", {"merge": "kfac"}),
    "... K-FAC, 10 epochs": Variant("covon-regmean", {"merge": "kfac"}, epochs=10),
    "AdamW, no merge": Variant("adamw-none"),
    "AdamW, RegMean": Variant("adamw-regmean"),
    "... 10 epochs of AdamW": Variant("adamw-regmean", epochs=10),
    "... a fifth of AdamW's learning rate": Variant("adamw-regmean", {"lr": 0.2}),
    "AdamW, K-FAC": Variant("adamw-regmean", {"merge": "kfac"}),
    "AdamW, RegMean, aligned classifier": Variant("adamw-regmean", {"align_classifier": True}),
}
"""By the name in the table; ``lr`` is relative to the cell's."""


@torch.no_grad()
def quality(model: nn.Module, domains: list[Any], optimizer: CoVON | None = None) -> dict[str, Any]:
    """Accuracy by domain, NLL and ECE as means over domains.

    :param optimizer: predict with samples of its posterior; with the weights as they are without.
    """
    model.eval()
    parts = []
    for batches in domains:
        sums = CalibrationSums()
        for x, y, *_ in batches:
            drawn = []
            for _ in range(SAMPLES if optimizer else 1):
                sampled = optimizer.sampled_params(train=False) if optimizer else nullcontext()
                with sampled, torch.autocast("cpu", torch.bfloat16):
                    drawn.append(model(x).double().log_softmax(1))
            sums.add(torch.stack(drawn).logsumexp(0), y)
        parts.append(sums)
    return {
        "accuracy": [part.accuracy for part in parts],
        "nll": float(np.mean([part.result().nll for part in parts])),
        "ece": float(np.mean([part.result().ece for part in parts])),
    }


def prepare(variant: Variant, case: Case, root: Path) -> tuple[Any, nn.Module, Any]:
    """The stream, the model and the Avalanche strategy of a case."""
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    recipe = recipe_of(case["order"])
    changed = dict(variant.settings)
    if "lr" in changed:
        changed["lr"] *= recipe.strategies[variant.cell].lr
    recipe = with_settings(recipe, variant.cell, changed)
    stream = recipe.stream.model_copy(update={"validation_size": VALIDATION})
    epochs = variant.epochs or recipe.epochs
    recipe = recipe.model_copy(update={"stream": stream, "epochs": epochs})
    data = build_benchmark(recipe, seed=case["seed"], dataset_root=root)
    torch.manual_seed(case["seed"])
    model = build_model(recipe.model, data, root)
    return data, model, strategy_of(recipe.strategies[variant.cell], recipe, model)


def batches_of(experience: Any, strategy: Any) -> Any:
    """The data of a domain, with the evaluation transform."""
    return dataset_loader(experience.dataset.eval(), strategy, 256)


def measure(case: Case, root: Path) -> Case:
    """Train on the stream, then evaluate."""
    variant = VARIANTS[case["variant"]]
    data, model, strategy = prepare(variant, case, root)
    for experience in data.train_stream:
        strategy.train(experience)
    domains = [list(batches_of(experience, strategy)) for experience in data.valid_stream]
    found = {"mean": quality(model, domains)}
    if isinstance(strategy.optimizer, CoVON) and not variant.settings.get("align_classifier"):
        found["samples"] = quality(model, domains, strategy.optimizer)
    return found


def write_report() -> None:
    """A table of A_T by variant and order, and one of the calibration."""
    cases = read_cases(FILE)
    if not cases:
        print("there are no results yet")
        return
    runs = pd.json_normalize(cases)
    runs["mean.accuracy"] = 100 * runs["mean.accuracy"].map(np.mean)
    titles = {
        f"{weights}.{measure}": f"{weights} {measure.upper()}"
        for measure in ("nll", "ece")
        for weights in ("mean", "samples")
    }
    sampled = runs.dropna(subset=["samples.nll"])
    parts = [
        "A_T on validation images, in percent:",
        by_order(runs, {"mean.accuracy": "A_T"}, VARIANTS, mean_and_std),
        f"Calibration on the same images, by the mean weights and by {SAMPLES} samples:",
        by_order(sampled, titles, VARIANTS, lambda values: f"{values.mean():.3f}"),
        origin(cases),
    ]
    replace_part(PAGE, NAME, "\n\n".join(parts))


def origin(cases: list[Case]) -> str:
    """How many seeds, and where."""
    seeds = pd.DataFrame(cases).groupby(["variant", "order"]).size()
    number = " to ".join(map(str, sorted({seeds.min(), seeds.max()})))
    over = "One seed" if number == "1" else f"Mean ± standard deviation over {number} seeds"
    where = dict.fromkeys(
        f"torch {case['versions']['torch']} on {machine_name(case['machine'])}" for case in cases
    )
    return f"{over}; one thread per run, {' and '.join(where)}."


def by_order(
    runs: pd.DataFrame,
    titles: Mapping[str, str],
    variants: Iterable[str],
    form: Callable[[pd.Series], str],
) -> str:
    """A table with a row per variant and, for each measure, a column per order.

    :param titles: of the measures, which are columns of ``runs``.
    :param variants: in the order of the rows; those without any of the measures are left out.
    :param form: the text of a cell, from the values of its seeds.
    """
    columns = {}
    for (key, title), order in product(titles.items(), TUNED):
        known = runs[runs["order"] == order].dropna(subset=[key])
        columns[f"{title}, {order}"] = known.groupby("variant")[key].agg(form)
    table = pd.DataFrame(columns)
    table = table.reindex([name for name in variants if name in table.index])
    return aligned(table.fillna("").rename_axis("training and merge").reset_index())


def main() -> None:
    """Run and report."""
    given = arguments(__doc__)
    if not given.report:
        cases = [
            {"order": order, "variant": name, "seed": seed}
            for seed in SEEDS
            for name in VARIANTS
            for order in TUNED
        ]
        run_cases(cases, measure, FILE, given.dataset_root, processes=given.jobs)
    write_report()


if __name__ == "__main__":
    main()
