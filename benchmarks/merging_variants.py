"""RegMean's variants, and classifiers in closed form on a network that merging has changed.

    python benchmarks/merging_variants.py --dataset-root DATA   run what is missing, then report
    python benchmarks/merging_variants.py --report              from stored results only

On PACS as in ``benchmarks/merging.py``, with the settings searched there, one option is changed at
a time. Everything is evaluated on validation images of seeds that no report of test accuracies
uses. Besides the network's own classifier there is a ridge regression on standardised features of
all eight Fire modules, mean-pooled: with sums taken after each domain, as a learner without stored
examples can; with the sums of earlier domains corrected for the drift of the features, see
:func:`drift_map`; with features averaged over posterior samples; and with sums taken again at the
end from all training images, which no such learner can: the difference is what drifting features
cost. Each run is a line of ``variants.jsonl`` or, with ridge regressions, ``ridge.jsonl`` in
``benchmarks/results/merging``; the tables go to ``docs/merging.md``.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Mapping
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
from torch import Tensor, nn

from covon_avalanche.closed_form import ClosedFormModel, FeatureExtractor, RidgeClassifier
from covon_avalanche.evaluation import CalibrationSums
from covon_avalanche.experiment.build import build_benchmark, build_model
from covon_avalanche.experiment.search import with_settings
from covon_avalanche.optim import CoVON
from covon_avalanche.plugins.task_loader import dataset_loader
from covon_avalanche.report.tables import aligned

NAME = "benchmarks/merging_variants.py"
FILE, RIDGE_FILE = FOLDER / "variants.jsonl", FOLDER / "ridge.jsonl"
SEEDS = (1000, 1001)
VALIDATION = 0.2
SAMPLES = 8
FEATURE_SAMPLES = 4
BLOCKS = 8


class Variant(NamedTuple):
    """What differs from the cell of the factorial."""

    cell: str
    settings: Mapping[str, Any] = MappingProxyType({})
    epochs: int | None = None
    ridge: bool = False
    """Fit ridge regressions, too, in a run of their own."""
    domains: int | None = None
    """Train the network on that many domains only, as RanPAC does; the ridge learns all."""


VARIANTS = {
    "CoVON, no merge": Variant("covon-none", ridge=True),
    "CoVON, Eq. 8": Variant("covon-eq8"),
    "CoVON, RegMean": Variant("covon-regmean", ridge=True),
    "... every domain counts alike": Variant("covon-regmean", {"regmean_reduction": "mean"}),
    "... alpha = 0.9": Variant("covon-regmean", {"regmean_alpha": 0.9}),
    "... alpha = 0.5": Variant("covon-regmean", {"regmean_alpha": 0.5}),
    "... layer by layer": Variant("covon-regmean", {"regmean_layerwise": True}),
    "... moments of half of the images": Variant("covon-regmean", {"regmean_share": 0.5}),
    "... one pass": Variant("covon-regmean", {"regmean_passes": 1}),
    "... 10 epochs": Variant("covon-regmean", epochs=10),
    "... a tenth of the learning rate": Variant("covon-regmean", {"lr": 0.1}, ridge=True),
    "... trained on the first domain only": Variant("covon-regmean", ridge=True, domains=1),
    "... aligned classifier": Variant("covon-regmean", {"align_classifier": True}),
    "... anchor of strength 1e-5": Variant("covon-regmean", {"input_anchor": 1e-5}),
    "... anchor of strength 1e-4": Variant("covon-regmean", {"input_anchor": 1e-4}),
    "... anchor of strength 1e-3": Variant("covon-regmean", {"input_anchor": 1e-3}),
    "... anchor of strength 0.01": Variant("covon-regmean", {"input_anchor": 0.01}),
    "... K-FAC": Variant("covon-regmean", {"merge": "kfac"}),
    "... K-FAC, 10 epochs": Variant("covon-regmean", {"merge": "kfac"}, epochs=10),
    "AdamW, no merge": Variant("adamw-none"),
    "AdamW, no merge, anchor of strength 1e-4": Variant("adamw-none", {"input_anchor": 1e-4}),
    "AdamW, no merge, anchor of strength 1e-3": Variant("adamw-none", {"input_anchor": 1e-3}),
    "AdamW, no merge, anchor of strength 0.01": Variant("adamw-none", {"input_anchor": 0.01}),
    "AdamW, RegMean": Variant("adamw-regmean", ridge=True),
    "... 10 epochs of AdamW": Variant("adamw-regmean", epochs=10),
    "... a fifth of AdamW's learning rate": Variant("adamw-regmean", {"lr": 0.2}, ridge=True),
    "... AdamW on the first domain only": Variant("adamw-regmean", ridge=True, domains=1),
    "AdamW, K-FAC": Variant("adamw-regmean", {"merge": "kfac"}),
    "AdamW, RegMean, aligned classifier": Variant("adamw-regmean", {"align_classifier": True}),
    "AdamW, RegMean, anchor of strength 1e-4": Variant("adamw-regmean", {"input_anchor": 1e-4}),
    "AdamW, RegMean, anchor of strength 1e-3": Variant("adamw-regmean", {"input_anchor": 1e-3}),
    "AdamW, RegMean, anchor of strength 0.01": Variant("adamw-regmean", {"input_anchor": 0.01}),
}
"""By the name in the table; ``lr`` is relative to the cell's."""
RIDGES = {
    "ridge": "ridge",
    "ridge_corrected": "sums corrected for drift",
    "ridge_averaged": "features averaged over samples",
    "ridge_again": "sums taken again",
}
"""Titles of the columns."""
FROZEN = "pretrained network"


def ridge_on(network: nn.Module, x: Tensor, num_classes: int, seed: int) -> ClosedFormModel:
    """An untrained ridge regression on a copy of the network."""
    features = FeatureExtractor(copy.deepcopy(network), BLOCKS)
    width = features(x).shape[1]
    head = RidgeClassifier(width, num_classes, standardize=True, ridge_from="all", seed=seed)
    return ClosedFormModel(features, head)


def learn(ridge: ClosedFormModel, network: nn.Module, batches: Any) -> None:
    """Add a domain, with features of the network as it is now."""
    ridge.features.network.load_state_dict(network.state_dict())
    ridge.learn(batches)


def drift_map(old: Tensor, new: Tensor) -> Tensor:
    """The linear map ``W = I + D`` from old to new features of the same images, with the least
    ``|old D - (new - old)|² + ridge |D|²``; every fifth image chooses the ridge.

    :param old: of shape (images, width), with a constant 1 at the end, as ``new``.
    """
    old, change = old.double(), (new - old).double()
    held_out = torch.arange(len(old)) % 5 == 4
    kernel = old @ old.T
    scale = kernel.diagonal().mean()

    def dual(rows: Tensor, ridge: float) -> Tensor:
        regularised = kernel[rows][:, rows].clone()
        regularised.diagonal().add_(ridge * scale)
        return torch.linalg.solve(regularised, change[rows])

    def error(ridge: float) -> float:
        found = kernel[held_out][:, ~held_out] @ dual(~held_out, ridge)
        return float((found - change[held_out]).square().sum())

    best = min((10.0**k for k in range(-6, 3)), key=error)
    eye = torch.eye(old.shape[1], dtype=old.dtype)
    return eye + old.T @ dual(torch.ones_like(held_out), best)


@torch.no_grad()
def follow(ridge: ClosedFormModel, network: nn.Module, batches: list[Any]) -> None:
    """Correct the sums of earlier domains, then add one.

    The sums ``HᵀH`` and ``HᵀY`` become those of ``H W``, with the map of the new domain's images.
    """
    head = ridge.head
    assert isinstance(head, RidgeClassifier)
    if int(ridge.domains):
        old = torch.cat([ridge.features(x) for x, *_ in batches])
        ridge.features.network.load_state_dict(network.state_dict())
        new = torch.cat([ridge.features(x) for x, *_ in batches])
        w = drift_map(*(torch.cat([f, torch.ones(len(f), 1)], 1) for f in (old, new)))
        head.gram.copy_(w.T @ head.gram @ w)
        head.targets.copy_(w.T @ head.targets)
    learn(ridge, network, batches)


class AveragedFeatures(nn.Module):
    """The mean of the features of several networks, samples of a posterior."""

    def __init__(self, extractors: list[FeatureExtractor]) -> None:
        super().__init__()
        self.extractors = nn.ModuleList(extractors)
        self.network = self.extractors

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([extractor(x) for extractor in self.extractors]).mean(0)


def average(ridge: ClosedFormModel, model: nn.Module, optimizer: CoVON) -> None:
    """Let the features be means over samples of the posterior."""
    drawn = []
    for _ in range(FEATURE_SAMPLES):
        with optimizer.sampled_params(train=False):
            drawn.append(FeatureExtractor(copy.deepcopy(model), BLOCKS))
    ridge.features = AveragedFeatures(drawn)  # type: ignore[assignment]


@torch.no_grad()
def calibrated_nll(model: nn.Module, domains: list[Any]) -> float:
    """NLL of every second image at the temperature with the lowest NLL of the others, a mean over
    domains."""
    model.eval()
    parts = [
        (
            torch.cat([model(x) for x, *_ in batches]).double(),
            torch.cat([y for _, y, *_ in batches]),
        )
        for batches in domains
    ]

    def nll(temperature: float, start: int) -> float:
        losses = [
            nn.functional.cross_entropy(scores[start::2] / temperature, y[start::2])
            for scores, y in parts
        ]
        return float(torch.stack(losses).mean())

    best = min((10.0 ** (k / 10) for k in range(-25, 11)), key=lambda value: nll(value, 0))
    return nll(best, 1)


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


def measure(case: Case, root: Path, with_ridge: bool) -> Case:
    """Train on the stream, then evaluate the network, or ridge regressions on its features."""
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    seed, name = case["seed"], case["variant"]
    frozen = name == FROZEN
    variant = Variant("covon-regmean", ridge=True) if frozen else VARIANTS[name]
    recipe = recipe_of(case["order"])
    changed = dict(variant.settings)
    if "lr" in changed:
        changed["lr"] *= recipe.strategies[variant.cell].lr
    recipe = with_settings(recipe, variant.cell, changed)
    stream = recipe.stream.model_copy(update={"validation_size": VALIDATION})
    epochs = variant.epochs or recipe.epochs
    recipe = recipe.model_copy(update={"stream": stream, "epochs": epochs})
    data = build_benchmark(recipe, seed=seed, dataset_root=root)
    torch.manual_seed(seed)
    model = build_model(recipe.model, data, root)
    strategy = strategy_of(recipe.strategies[variant.cell], recipe, model)

    def batches(experience: Any) -> Any:
        return dataset_loader(experience.dataset.eval(), strategy, 256)

    domains = [list(batches(experience)) for experience in data.valid_stream]
    example = domains[0][0][0][:2]
    ridges = {}
    moves = not frozen and variant.domains is None
    if with_ridge:
        kinds = ["ridge", "ridge_again"] + ["ridge_corrected"] * moves
        kinds += ["ridge_averaged"] * (moves and isinstance(strategy.optimizer, CoVON))
        ridges = {kind: ridge_on(model, example, data.n_classes, seed) for kind in kinds}
    for number, experience in enumerate(data.train_stream):
        if not frozen and (variant.domains is None or number < variant.domains):
            strategy.train(experience)
        if ridges:
            learn(ridges["ridge"], model, batches(experience))
        if "ridge_corrected" in ridges:
            follow(ridges["ridge_corrected"], model, list(batches(experience)))
        if "ridge_averaged" in ridges:
            average(ridges["ridge_averaged"], model, strategy.optimizer)
            ridges["ridge_averaged"].learn(batches(experience))
    found: Case = {}
    if not with_ridge:
        found["mean"] = quality(model, domains)
        if isinstance(strategy.optimizer, CoVON) and not variant.settings.get("align_classifier"):
            found["samples"] = quality(model, domains, strategy.optimizer)
    for experience in data.train_stream if ridges and not frozen else ():
        learn(ridges["ridge_again"], model, batches(experience))
    if frozen and ridges:
        ridges["ridge_again"] = ridges["ridge"]
    for kind, ridge in ridges.items():
        found[kind] = quality(ridge, domains)["accuracy"]
        found[f"{kind}_nll"] = calibrated_nll(ridge, domains)
    return found


def write_report() -> None:
    """A table of A_T by variant and order, and one of the calibration."""
    cases, ridge_cases = read_cases(FILE), read_cases(RIDGE_FILE)
    if not cases or not ridge_cases:
        print("there are no results yet")
        return
    runs, ridge_runs = pd.json_normalize(cases), pd.json_normalize(ridge_cases)
    runs["mean.accuracy"] = 100 * runs["mean.accuracy"].map(np.mean)
    for key in RIDGES:
        ridge_runs[key] = 100 * ridge_runs[key].map(np.mean, na_action="ignore")
    accuracy = by_order(runs, {"mean.accuracy": "own classifier"}, mean_and_std)
    ridge = by_order(ridge_runs, RIDGES, mean_and_std)
    titles = {f"{key}_nll": title for key, title in RIDGES.items()}
    ridge_nll = by_order(ridge_runs, titles, lambda values: f"{values.mean():.3f}")
    titles = {
        f"{weights}.{measure}": f"{weights} {measure.upper()}"
        for measure in ("nll", "ece")
        for weights in ("mean", "samples")
    }
    sampled = runs.dropna(subset=["samples.nll"])
    calibration = by_order(sampled, titles, lambda values: f"{values.mean():.3f}")
    parts = [
        "A_T on validation images, in percent:",
        accuracy,
        f"Calibration on the same images, by the mean weights and by {SAMPLES} samples:",
        calibration,
        origin(cases),
        "A_T of ridge regressions on the features of the networks, in runs of their own:",
        ridge,
        "Their NLL on every second image, at the temperature with the lowest NLL of the others:",
        ridge_nll,
        origin(ridge_cases),
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


def by_order(runs: pd.DataFrame, titles: dict[str, str], form: Callable[[pd.Series], str]) -> str:
    """A table with a row per variant and, for each measure, a column per order.

    :param titles: of the measures, which are columns of ``runs``.
    :param form: the text of a cell, from the values of its seeds.
    """
    columns = {}
    for (key, title), order in product(titles.items(), TUNED):
        known = runs[runs["order"] == order].dropna(subset=[key])
        columns[f"{title}, {order}"] = known.groupby("variant")[key].agg(form)
    table = pd.DataFrame(columns)  # of the variants with one of the measures
    table = table.reindex([name for name in (FROZEN, *VARIANTS) if name in table.index])
    return aligned(table.fillna("").rename_axis("training and merge").reset_index())


def main() -> None:
    """Run and report."""
    given = arguments(__doc__)
    if not given.report:
        for file, with_ridge in ((FILE, False), (RIDGE_FILE, True)):
            wanted = [n for n, own in VARIANTS.items() if own.ridge or not with_ridge]
            wanted = [n for n in wanted if with_ridge or VARIANTS[n].domains is None]
            cases = [
                {"order": order, "variant": name, "seed": seed}
                for seed in SEEDS
                for name in [FROZEN] * with_ridge + wanted
                for order in TUNED
            ]
            run_cases(cases, measure, file, given.dataset_root, with_ridge, processes=given.jobs)
    write_report()


if __name__ == "__main__":
    main()
