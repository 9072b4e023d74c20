"""Ridge regressions on the features of networks that merging has changed.

    python benchmarks/merging_ridge.py --dataset-root DATA   run what is missing, then report
    python benchmarks/merging_ridge.py --report              from stored results only

On PACS and on validation images as in ``benchmarks/merging_variants.py``. The features are
standardised and come from all eight Fire modules, mean-pooled. The sums are taken after each
domain, as a learner without stored examples can; the same with the sums of earlier domains
corrected for the drift of the features, see :func:`drift_map`; with features averaged over
posterior samples; and with sums taken again at the end from all training images, which no such
learner can: the difference is what drifting features cost. Each run is a line of
``benchmarks/results/merging/ridge.jsonl``; the tables go to ``docs/merging.md``.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from comparison import Case, arguments, mean_and_std, read_cases, replace_part, run_cases
from merging import FOLDER, PAGE
from merging_variants import SEEDS, Variant, batches_of, by_order, origin, prepare, quality
from pacs import TUNED
from torch import Tensor, nn

from covon_avalanche.closed_form import ClosedFormModel, FeatureExtractor, RidgeClassifier
from covon_avalanche.optim import CoVON

NAME = "benchmarks/merging_ridge.py"
FILE = FOLDER / "ridge.jsonl"
FEATURE_SAMPLES = 4
BLOCKS = 8
TRAINED = {
    "pretrained network": (Variant("covon-regmean"), 0),
    "CoVON, no merge": (Variant("covon-none"), 4),
    "CoVON, RegMean": (Variant("covon-regmean"), 4),
    "... a tenth of the learning rate": (Variant("covon-regmean", {"lr": 0.1}), 4),
    "... trained on the first domain only": (Variant("covon-regmean"), 1),
    "AdamW, RegMean": (Variant("adamw-regmean"), 4),
    "... a fifth of AdamW's learning rate": (Variant("adamw-regmean", {"lr": 0.2}), 4),
    "... AdamW on the first domain only": (Variant("adamw-regmean"), 1),
}
"""By the name in the table: how the network is trained, and on how many domains. The ridge
regressions learn all four."""
RIDGES = {
    "ridge": "ridge",
    "ridge_corrected": "corrected",
    "ridge_averaged": "averaged",
    "ridge_again": "taken again",
}
"""Titles of the columns."""


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


def measure(case: Case, root: Path) -> Case:
    """Train on the stream, and evaluate ridge regressions on the network's features."""
    variant, trained_domains = TRAINED[case["variant"]]
    data, model, strategy = prepare(variant, case, root)
    domains = [list(batches_of(experience, strategy)) for experience in data.valid_stream]
    moves = trained_domains > 1
    kinds = ["ridge"] + ["ridge_again", "ridge_corrected"] * moves
    kinds += ["ridge_averaged"] * (moves and isinstance(strategy.optimizer, CoVON))
    x = domains[0][0][0][:2]
    ridges = {kind: ridge_on(model, x, data.n_classes, case["seed"]) for kind in kinds}
    for number, experience in enumerate(data.train_stream):
        if number < trained_domains:
            strategy.train(experience)
        batches = list(batches_of(experience, strategy))
        learn(ridges["ridge"], model, batches)
        if "ridge_corrected" in ridges:
            follow(ridges["ridge_corrected"], model, batches)
        if "ridge_averaged" in ridges:
            average(ridges["ridge_averaged"], model, strategy.optimizer)
            ridges["ridge_averaged"].learn(batches)
    if moves:
        for experience in data.train_stream:
            learn(ridges["ridge_again"], model, batches_of(experience, strategy))
    else:  # the features are the same
        ridges["ridge_again"] = ridges["ridge"]
    found: Case = {}
    for kind, ridge in ridges.items():
        found[kind] = quality(ridge, domains)["accuracy"]
        found[f"{kind}_nll"] = calibrated_nll(ridge, domains)
    return found


def write_report() -> None:
    """A table of A_T, and one of the NLL."""
    cases = read_cases(FILE)
    if not cases:
        print("there are no results yet")
        return
    runs = pd.json_normalize(cases)
    for key in RIDGES:
        runs[key] = 100 * runs[key].map(np.mean, na_action="ignore")
    of_nll = {f"{key}_nll": title for key, title in RIDGES.items()}
    parts = [
        "A_T on validation images, in percent:",
        by_order(runs, RIDGES, TRAINED, mean_and_std),
        "NLL of every second image, at the temperature with the lowest NLL of the others:",
        by_order(runs, of_nll, TRAINED, lambda values: f"{values.mean():.3f}"),
        origin(cases),
    ]
    replace_part(PAGE, NAME, "\n\n".join(parts))


def main() -> None:
    """Run and report."""
    given = arguments(__doc__)
    if not given.report:
        cases = [
            {"order": order, "variant": name, "seed": seed}
            for seed in SEEDS
            for name in TRAINED
            for order in TUNED
        ]
        run_cases(cases, measure, FILE, given.dataset_root, processes=given.jobs)
    write_report()


if __name__ == "__main__":
    main()
