"""Batch norm's statistics after merges: of the newest domain only, or mixed over the domains.

    python benchmarks/batch_norm_merging.py --dataset-root DATA

A small convolutional network with batch norm learns PACS at 48 pixels from random weights (at most
100 images per class and domain, eight epochs a domain), and an MLP with batch norm permuted digits
(twenty epochs a domain), both with AdamW. After the last domain they are tested with the running
statistics of the newest domain, as re-estimated after the merge, and with those of all domains,
mixed by their numbers of images: the mean of the means, and the variance within and between
domains. The statistics of earlier domains are of the weights of their time. Rows go to
``benchmarks/results/batch-norm-merging.jsonl``; ``docs/merging.md`` has the table.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from avalanche.training.plugins import EvaluationPlugin
from batch_norm import network as mlp
from comparison import (
    RESULTS,
    ROOT,
    Case,
    FastNaive,
    arguments,
    mean_and_std,
    read_cases,
    replace_part,
    run_cases,
    tensors_of,
)
from torch import nn

from covon_avalanche import MergePlugin
from covon_avalanche.merging import EMA, MergeRule, RegMean
from covon_avalanche.report.tables import aligned
from covon_avalanche.streams import PACS, PermutedDigits, image_transforms

NAME = "benchmarks/batch_norm_merging.py"
FILE = RESULTS / "batch-norm-merging.jsonl"
RULES: dict[str, Callable[[], MergeRule] | None] = {
    "none": None,
    "EMA, 0.5": lambda: EMA(0.5),
    "RegMean": RegMean,
}
SEEDS = {"PACS": range(3), "permuted digits": range(5)}


def network() -> nn.Module:
    """Four convolutions with batch norm and stride 2."""
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise((3, 32, 64, 64, 128)):
        layers += [nn.Conv2d(inputs, outputs, 3, 2, 1), nn.BatchNorm2d(outputs), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 7))


def norms(model: nn.Module) -> list[Any]:
    """The layers with running statistics."""
    kinds = (nn.BatchNorm1d, nn.BatchNorm2d)
    return [module for module in model.modules() if isinstance(module, kinds)]


def pacs(root: Path, seed: int) -> Any:
    """The stream."""
    train, evaluate = image_transforms(48)
    return PACS(
        dataset_root=root / "PACS",
        train_transform=train,
        eval_transform=evaluate,
        train_limit=100,
        cache=root / "cache",
        cache_size=96,
        seed=seed,
    )


def mix_statistics(model: nn.Module, stored: list[list[tuple[Any, Any]]], sizes: list[int]) -> None:
    """Set the running statistics to those of all domains.

    :param stored: mean and variance by domain and layer.
    :param sizes: numbers of images by domain.
    """
    shares = torch.tensor(sizes) / sum(sizes)
    for i, norm in enumerate(norms(model)):
        means, variances = (torch.stack([domain[i][k] for domain in stored]) for k in (0, 1))
        mean = shares @ means
        norm.running_mean.copy_(mean)
        norm.running_var.copy_(shares @ (variances + (means - mean).square()))


def measure(case: Case, root: Path) -> Case:
    """A_T in percent with the statistics of the newest domain and of all."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    seed, images = case["seed"], case["stream"] == "PACS"
    benchmark = pacs(root, seed) if images else PermutedDigits(n_experiences=5, seed=seed)
    tests = [tensors_of(experience.dataset.eval()) for experience in benchmark.test_stream]
    torch.manual_seed(seed)
    model = network() if images else mlp(pixels=64)
    rule, lr = RULES[case["merge"]], 2e-3 if images else 1e-3
    strategy = FastNaive(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=1e-2),
        criterion=nn.CrossEntropyLoss(),
        train_mb_size=16 if images else 32,
        train_epochs=8 if images else 20,
        plugins=[] if rule is None else [MergePlugin(rule())],
        evaluator=EvaluationPlugin(),
    )
    stored: list[list[tuple[Any, Any]]] = []
    sizes = []
    for experience in benchmark.train_stream:
        strategy.train(experience)
        stored.append([(n.running_mean.clone(), n.running_var.clone()) for n in norms(model)])
        sizes.append(len(experience.dataset))
    found = {}
    for name in ("newest", "mixed"):
        if name == "mixed":
            mix_statistics(model, stored, sizes)
        found[name] = average_accuracy(model, tests)
    return found


@torch.no_grad()
def average_accuracy(model: nn.Module, tests: list[tuple[torch.Tensor, torch.Tensor]]) -> float:
    """A_T in percent, as domain mean."""
    model.eval()
    correct = [(model(x).argmax(1) == y).float().mean().item() for x, y in tests]
    return 100 * sum(correct) / len(correct)


def main() -> None:
    """Run and report."""
    given = arguments(__doc__)
    if not given.report:
        cases = [
            {"stream": stream, "merge": merge, "seed": seed}
            for stream, seeds in SEEDS.items()
            for seed in seeds
            for merge in RULES
        ]
        run_cases(cases, measure, FILE, given.dataset_root, processes=given.jobs)
    rows = pd.DataFrame(read_cases(FILE))
    table = rows.groupby(["stream", "merge"], sort=False)[["newest", "mixed"]].agg(mean_and_std)
    titles = {"newest": "newest domain", "mixed": "all domains"}
    replace_part(
        ROOT / "docs/merging.md", NAME, aligned(table.rename(columns=titles).reset_index(), left=2)
    )


if __name__ == "__main__":
    main()
