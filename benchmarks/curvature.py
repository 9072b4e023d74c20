"""Is the curvature real? CoVON's ``hess`` against the exact per-example Fisher.

    python benchmarks/curvature.py --dataset-root DATA     run what is missing, then report
    python benchmarks/curvature.py --report

One task of MNIST (50,000 images, MLP 784-100-100-10), 10 epochs, for each estimator as a function
of ess, beta2, batch size and samples, one at a time. After epochs 1, 3 and 10 the average is
compared with the exact Fisher of 10,000 training images at the mean: rank correlation over the
entries and ratio of the means, by layer and over all, with ``optimizer.diagnostics()``. Results
go to ``benchmarks/results/permuted-mnist-hard/curvature.jsonl``, the table to
``docs/permuted-mnist.md``.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from importlib.metadata import version
from typing import Any

import torch
from avalanche.models import SimpleMLP
from comparison import ROOT, replace_part
from torch import Tensor, nn

from covon_avalanche import CoVON
from covon_avalanche.atomic_write import write_atomically
from covon_avalanche.posterior.fisher import squared_example_gradients, track_example_squares
from covon_avalanche.streams import PermutedMNIST

FILE = ROOT / "benchmarks/results/permuted-mnist-hard/curvature.jsonl"
PAGE = ROOT / "docs/permuted-mnist.md"
NAME = "benchmarks/curvature.py"
BASE: dict[str, Any] = {
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


def cases() -> Iterator[dict[str, Any]]:
    """The base and its variations, for each estimator."""
    for hess_approx in ("reparam", "gradsq", "per_example"):
        base = {**BASE, "hess_approx": hess_approx}
        yield base
        for key, values in VARIED.items():
            yield from ({**base, key: value} for value in values)


def rank_correlation(a: Tensor, b: Tensor) -> float:
    """Spearman's, over all entries."""
    ranks = torch.stack([x.flatten().argsort().argsort().double() for x in (a, b)])
    return torch.corrcoef(ranks)[0, 1].item()


def compare(hess: dict[str, Tensor], fisher: dict[str, Tensor]) -> dict[str, dict[str, float]]:
    """By layer (its weights) and over all parameters; entries that no image changes the loss
    by, those of dead units, do not count."""
    pairs = {n: (hess[n], fisher[n]) for n in fisher if n.endswith("weight")}
    pairs["all"] = tuple(torch.cat([d[n].flatten() for n in fisher]) for d in (hess, fisher))
    found = {}
    for name, (h, f) in pairs.items():
        reached = f > 0
        h, f = h[reached], f[reached]
        found[name] = {"correlation": rank_correlation(h, f), "ratio": (h.mean() / f.mean()).item()}
    return found


def measure(case: dict[str, Any], images: Tensor, targets: Tensor) -> dict[str, Any]:
    """Train one task and compare."""
    torch.manual_seed(0)
    model = SimpleMLP(num_classes=10, hidden_size=100, hidden_layers=2, drop_rate=0)
    size = case["batch_size"]
    optimizer = CoVON(
        model.named_parameters(),
        ess=case["ess"],
        lr=0.03,
        hess_init=0.03,
        betas=(0.9, case["beta2"]),
        weight_decay=20 / case["ess"],
        clip_radius=0.1,
        mc_samples=case["mc_samples"],
        hess_approx=case["hess_approx"],
        batch_size=size,
    )
    criterion = nn.CrossEntropyLoss()
    epochs = {}
    for epoch in range(1, EPOCHS + 1):
        tracked = track_example_squares(model) if case["hess_approx"] == "per_example" else None
        for rows in torch.randperm(len(images)).split(size):
            for _ in range(case["mc_samples"]):
                with optimizer.sampled_params():
                    optimizer.zero_grad()
                    criterion(model(images[rows]), targets[rows]).backward()
            optimizer.step()
        if tracked is not None:
            tracked.remove()
        if epoch in MEASURED:
            batches = zip(images[:10_000].split(500), targets[:10_000].split(500), strict=True)
            fisher = squared_example_gradients(model, list(batches))
            hess = {n: optimizer.state[p]["hess"] for n, p in model.named_parameters()}
            epochs[epoch] = {
                "layers": compare(hess, fisher),
                "diagnostics": optimizer.diagnostics()["all"]._asdict(),
            }
    return {"case": case, "epochs": epochs, "versions": {"torch": version("torch")}}


def stored() -> list[dict[str, Any]]:
    """What has been measured so far."""
    if not FILE.exists():
        return []
    return [json.loads(line) for line in FILE.read_text().splitlines()]


def run_missing(root: str) -> None:
    """Measure what is missing, storing each case as it comes."""
    torch.set_num_threads(1)
    data = PermutedMNIST(1, validation_size=10_000, dataset_root=root).train_stream[0].dataset
    columns = [data[i] for i in range(len(data))]
    images = torch.stack([row[0] for row in columns])
    targets = torch.tensor([int(row[1]) for row in columns])
    records = stored()
    for case in cases():
        if all(record["case"] != case for record in records):
            records.append(measure(case, images, targets))
            write_atomically(FILE, "".join(json.dumps(r) + "\n" for r in records))
            print(case, records[-1]["epochs"][EPOCHS]["layers"]["all"], flush=True)


def by_layer() -> str:
    """What each layer and epoch of the first cases shows."""
    columns = [f"{what}, epoch {epoch}" for what in ("correlation", "ratio") for epoch in MEASURED]
    lines = [f"| estimator | layer | {' | '.join(columns)} |", "|---|---|" + "---:|" * len(columns)]
    for record in stored():
        if {**record["case"], "hess_approx": BASE["hess_approx"]} != BASE:
            continue
        epochs = [record["epochs"][str(epoch)]["layers"] for epoch in MEASURED]
        for layer in epochs[0]:
            cells = [f"{layers[layer]['correlation']:.2f}" for layers in epochs]
            cells += [f"{layers[layer]['ratio']:.2g}" for layers in epochs]
            lines.append(f"| {record['case']['hess_approx']} | {layer} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def write_report() -> None:
    """The table of all cases after the last epoch, and that of the layers."""
    columns = (
        *("estimator", "what differs", "correlation", "first layer", "last layer"),
        *("ratio of means", "signal to noise", "at hess_init", "noise / weights"),
    )
    lines = [f"| {' | '.join(columns)} |", "|---|---|" + "---:|" * 7]
    for record in stored():
        case, last = record["case"], record["epochs"][str(EPOCHS)]
        changed = [f"{k} = {v:g}" for k, v in case.items() if k in VARIED and v != BASE[k]]
        layers, diagnostics = last["layers"], last["diagnostics"]
        names = [name for name in layers if name != "all"]
        cells = [
            case["hess_approx"],
            ", ".join(changed) or "-",
            f"{layers['all']['correlation']:.2f}",
            f"{layers[names[0]]['correlation']:.2f}",
            f"{layers[names[-1]]['correlation']:.2f}",
            f"{layers['all']['ratio']:.2g}",
            f"{diagnostics['hess_signal_to_noise']:.2g}",
            f"{100 * diagnostics['hess_at_start']:.0f} %",
            f"{diagnostics['noise_to_weights']:.2g}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    base = ", ".join(f"{k} = {v:g}" for k, v in BASE.items() if k in VARIED)
    text = "\n".join(lines) + f"\n\nThe first line of each estimator: {base}.\n"
    replace_part(PAGE, NAME, text)
    replace_part(PAGE, f"{NAME}, by layer", by_layer())


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dataset-root", help="the folder that has MNIST/raw")
    parser.add_argument("--report", action="store_true")
    arguments = parser.parse_args()
    if not arguments.report:
        run_missing(arguments.dataset_root)
    write_report()


if __name__ == "__main__":
    main()
