"""How good is the Hessian estimate? CoVON's ``hess`` against the exact per-example Fisher.

    python benchmarks/curvature.py --dataset-root DATA     run what is missing, then report
    python benchmarks/curvature.py --report                from stored results only

One task of MNIST (50,000 images, MLP 784-100-100-10), 10 epochs, for each estimate as a function
of ess, beta2, batch size and samples, one at a time. After epochs 1, 3 and 10 the average is
compared with the exact Fisher of 10,000 training images at the mean: rank correlation over the
entries and ratio of the means, by layer and over all, with ``optimizer.diagnostics()``. Results
go to ``benchmarks/results/permuted-mnist-hard/curvature.jsonl``, the tables to
``docs/permuted-mnist.md``. The stored cases of ``"per_example"`` (exact squares of per-example
gradients at the sample) are of version 0.1, which had it as a third estimate.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from avalanche.models import SimpleMLP
from comparison import (
    RESULTS,
    ROOT,
    Case,
    arguments,
    read_cases,
    replace_part,
    run_cases,
    tensors_of,
)
from scipy.stats import spearmanr
from torch import Tensor, nn

from covon_avalanche import CoVON
from covon_avalanche.posterior.fisher import squared_example_gradients
from covon_avalanche.report.tables import aligned
from covon_avalanche.streams import PermutedMNIST

FILE = RESULTS / "permuted-mnist-hard/curvature.jsonl"
PAGE = ROOT / "docs/permuted-mnist.md"
NAME = "benchmarks/curvature.py"
BASE: Case = {
    "hess_approx": "reparam",
    "ess": 1e5,
    "beta2": 0.998,
    "batch_size": 256,
    "mc_samples": 1,
}
VARIED: dict[str, list[float]] = {
    "ess": [1e4, 1e6, 1e8, 1e10],
    "beta2": [0.99, 0.9999, 0.99999],
    "batch_size": [64, 1024],
    "mc_samples": [4],
}
EPOCHS, MEASURED = 10, (1, 3, 10)


def cases() -> Iterator[Case]:
    """The base and its variations, for each estimate."""
    for hess_approx in ("reparam", "gradsq"):
        base = {**BASE, "hess_approx": hess_approx}
        yield {"case": base}
        for key, values in VARIED.items():
            yield from ({"case": {**base, key: value}} for value in values)


def compare(hess: dict[str, Tensor], fisher: dict[str, Tensor]) -> dict[str, dict[str, float]]:
    """By layer (its weights) and over all parameters, without the entries that change no image's
    loss (those of dead units)."""
    pairs = {n: (hess[n], fisher[n]) for n in fisher if n.endswith("weight")}
    pairs["all"] = tuple(torch.cat([d[n].flatten() for n in fisher]) for d in (hess, fisher))
    found = {}
    for name, (h, f) in pairs.items():
        h, f = h[f > 0], f[f > 0]
        correlation = float(spearmanr(h, f).statistic)
        found[name] = {"correlation": correlation, "ratio": (h.mean() / f.mean()).item()}
    return found


def measure(case: Case, root: Path, epochs: int = EPOCHS) -> Case:
    """Train one task and compare."""
    own = case["case"]
    data = PermutedMNIST(1, validation_size=10_000, dataset_root=root).train_stream[0].dataset
    images, targets = tensors_of(data)
    torch.manual_seed(0)
    model = SimpleMLP(num_classes=10, hidden_size=100, hidden_layers=2, drop_rate=0)
    optimizer = CoVON(
        model.named_parameters(),
        lr=0.03,
        hess_init=0.03,
        betas=(0.9, own["beta2"]),
        weight_decay=20 / own["ess"],
        clip_radius=0.1,
        **{key: own[key] for key in ("ess", "mc_samples", "hess_approx", "batch_size")},
    )
    found: dict[str, Any] = {}
    for epoch in range(1, epochs + 1):
        for rows in torch.randperm(len(images)).split(own["batch_size"]):
            for _ in range(own["mc_samples"]):
                with optimizer.sampled_params():
                    optimizer.zero_grad()
                    nn.functional.cross_entropy(model(images[rows]), targets[rows]).backward()
            optimizer.step()
        if epoch in MEASURED:
            batches = zip(images[:10_000].split(500), targets[:10_000].split(500), strict=True)
            fisher = squared_example_gradients(model, list(batches))
            hess = {n: optimizer.state[p]["hess"] for n, p in model.named_parameters()}
            diagnostics = optimizer.diagnostics()["all"]._asdict()
            found[str(epoch)] = {"layers": compare(hess, fisher), "diagnostics": diagnostics}
    return {"epochs": found}


def by_layer(stored: list[Case]) -> pd.DataFrame:
    """Layers and epochs of the base, for each estimate."""
    rows = []
    for record in stored:
        if {**record["case"], "hess_approx": BASE["hess_approx"]} != BASE:
            continue
        epochs = [record["epochs"][str(epoch)]["layers"] for epoch in MEASURED]
        for layer in epochs[0]:
            row = {"estimator": record["case"]["hess_approx"], "layer": layer}
            for what, form in (("correlation", "{:.2f}"), ("ratio", "{:.2g}")):
                for epoch, layers in zip(MEASURED, epochs, strict=True):
                    row[f"{what}, epoch {epoch}"] = form.format(layers[layer][what])
            rows.append(row)
    return pd.DataFrame(rows)


def after_last_epoch(stored: list[Case]) -> pd.DataFrame:
    """All cases after the last epoch."""
    rows = []
    for record in stored:
        case, last = record["case"], record["epochs"][str(EPOCHS)]
        changed = [f"{k} = {v:g}" for k, v in case.items() if k in VARIED and v != BASE[k]]
        *layers, over_all = last["layers"].values()
        diagnostics = last["diagnostics"]
        rows.append(
            {
                "estimator": case["hess_approx"],
                "what differs": ", ".join(changed) or "-",
                "correlation": f"{over_all['correlation']:.2f}",
                "first layer": f"{layers[0]['correlation']:.2f}",
                "last layer": f"{layers[-1]['correlation']:.2f}",
                "ratio of means": f"{over_all['ratio']:.2g}",
                "signal to noise": f"{diagnostics['hess_signal_to_noise']:.2g}",
                "at hess_init": f"{100 * diagnostics['hess_at_start']:.0f} %",
                "noise / weights": f"{diagnostics['noise_to_weights']:.2g}",
            }
        )
    return pd.DataFrame(rows)


def write_report() -> None:
    """Both tables."""
    stored = read_cases(FILE)
    base = ", ".join(f"{k} = {v:g}" for k, v in BASE.items() if k in VARIED)
    text = aligned(after_last_epoch(stored), left=2)
    replace_part(PAGE, NAME, f"{text}\n\nThe first line of each estimator: {base}.")
    replace_part(PAGE, f"{NAME}, by layer", aligned(by_layer(stored), left=2))


def main() -> None:
    """Measure and report."""
    given = arguments(__doc__)
    if not given.report:
        run_cases(cases(), measure, FILE, given.dataset_root, processes=given.jobs)
    write_report()


if __name__ == "__main__":
    main()
