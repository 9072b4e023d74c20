"""The ridge of RegMean on permuted digits with few images and wide layers.

    python benchmarks/regmean_ridge.py

An MLP with two hidden layers learns four pixel orders by AdamW, for 30 epochs each, and is merged
after each. Accuracies are those of 500 other images at the end. Results go to
``benchmarks/results/merging/regmean-ridge.jsonl``, the table to ``docs/merging.md``.
"""

from __future__ import annotations

from itertools import product

import pandas as pd
import torch
import torch.nn.functional as F
from comparison import (
    RESULTS,
    ROOT,
    Case,
    mean_and_std,
    origin,
    read_cases,
    replace_part,
    run_cases,
)
from sklearn.datasets import load_digits
from torch import nn

from covon_avalanche.merging import RegMean, linalg, merge_into
from covon_avalanche.report.tables import aligned

FILE = RESULTS / "merging/regmean-ridge.jsonl"
TASKS, EPOCHS = 4, 30


def measure(case: Case) -> Case:
    """A_T, and the largest growth of a layer's change by a merge."""
    torch.set_num_threads(1)
    torch.manual_seed(case["seed"])
    linalg.RIDGE = case["ridge"]
    pixels, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(pixels / 16, dtype=torch.float32), torch.tensor(labels)
    test, train = torch.randperm(len(x)).tensor_split([500])
    orders = [torch.randperm(64) for _ in range(TASKS)]
    width = case["width"]
    model = nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU())
    model.append(nn.Linear(width, 10))
    rule, optimizer = RegMean(), torch.optim.AdamW(model.parameters(), lr=1e-3)
    growth = 0.0
    for order in orders:
        chosen = train[torch.randperm(len(train))[: case["images"]]]
        images = x[chosen][:, order]
        batches = list(zip(images.split(32), y[chosen].split(32), strict=True))
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        for _ in range(EPOCHS):
            for images, targets in batches:
                optimizer.zero_grad()
                F.cross_entropy(model(images), targets).backward()
                optimizer.step()
        new = {name: p.detach().clone() for name, p in model.named_parameters()}
        merge_into(model, optimizer, rule, before, lambda batches=batches: batches)
        for name, p in model.named_parameters():
            change = (p.detach() - before[name]).norm() / (new[name] - before[name]).norm()
            growth = max(growth, float(change))
    hits = [(model(x[test][:, order]).argmax(1) == y[test]).float().mean() for order in orders]
    return {"average_accuracy": float(sum(hits)) / TASKS, "growth": growth}


def main() -> None:
    """Measure what is missing, and write the table."""
    ridges, sizes = (1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1), product((50, 300), (100, 1000))
    cases = [
        {"images": images, "width": width, "ridge": ridge, "seed": seed}
        for (images, width), ridge, seed in product(sizes, ridges, range(3))
    ]
    run_cases(cases, measure, FILE, processes=1)
    rows = pd.DataFrame(read_cases(FILE)).assign(strategy="regmean")
    rows["average_accuracy"] *= 100
    cells = rows.groupby(["images", "width", "ridge"])["average_accuracy"].agg(
        lambda scores: mean_and_std(scores, 1)
    )
    table = cells.unstack("ridge").reset_index().astype(str)
    table.columns = [c if isinstance(c, str) else f"{c:g}" for c in table.columns]
    part = f"{aligned(table, left=2)}\n\n{origin(rows)}"
    replace_part(ROOT / "docs/merging.md", "benchmarks/regmean_ridge.py", part)


if __name__ == "__main__":
    main()
