"""Calibration with posterior samples, and detection of images of a class never trained on.

    python benchmarks/uncertainty.py --dataset-root DATA   run what is missing, then report
    python benchmarks/uncertainty.py --report              from stored results only

Models learn PACS without elephants and permuted MNIST-Hard without nines, with the settings of the
searches. Predictions are by the mean of the posterior, by 16 samples of it, and by 16 samples at
the temperature with the lowest log loss on validation images. Out-of-distribution detection is the
area under the ROC curve (AUROC) of the entropy, or the mutual information, of test images of the
known classes against all images of the unseen class. Rows go to
``benchmarks/results/uncertainty.jsonl``, the table to ``docs/uncertainty.md``.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from comparison import (
    RESULTS,
    ROOT,
    Case,
    arguments,
    machine_name,
    read_cases,
    replace_part,
    run_cases,
    tensors_of,
)
from sklearn.metrics import roc_auc_score
from torch import Tensor

from covon_avalanche import load_bundle
from covon_avalanche.evaluation import CalibrationSums
from covon_avalanche.experiment.build import build_benchmark
from covon_avalanche.experiment.bundle import Bundle
from covon_avalanche.experiment.recipe import Recipe, load_recipe
from covon_avalanche.experiment.run import run_in_folder
from covon_avalanche.experiment.run_folder import RunFolder
from covon_avalanche.experiment.run_options import RunOptions
from covon_avalanche.report.tables import aligned
from covon_avalanche.streams.pacs import CLASSES

NAME = "benchmarks/uncertainty.py"
PAGE = ROOT / "docs/uncertainty.md"
FILE = RESULTS / "uncertainty.jsonl"
SAMPLES = 16
UNSEEN_PACS, UNSEEN_MNIST = "elephant", 9
STRATEGIES = {
    "PACS": ("finetune", "covon-inputs"),
    "permuted MNIST-Hard": ("finetune", "vcl", "covon", "covon-gradsq"),
}
SEEDS = range(3)


def pacs_without_a_class(root: Path, folder: Path) -> tuple[Recipe, list[Path]]:
    """A recipe for links to the images of the known classes, and the images of the unseen one."""
    shipped = load_recipe(str(RESULTS / "pacs/best.toml"))
    unseen: list[Path] = []
    for domain in shipped.stream.domains:  # type: ignore[union-attr]
        for name in CLASSES:
            images = root / "PACS" / domain / name
            if name == UNSEEN_PACS:
                unseen += sorted(images.iterdir())
            else:
                (folder / domain).mkdir(parents=True, exist_ok=True)
                (folder / domain / name).symlink_to(images.resolve())
    own = {"domains", "image_size", "validation_size"}
    stream = shipped.stream.model_dump(include=own)
    stream |= {"name": "DomainFolders", "folder": str(folder)}
    data = shipped.model_dump() | {"stream": stream}
    return Recipe.model_validate(data), unseen


def mnist_without_a_class(root: Path, folder: Path) -> Recipe:
    """The shipped recipe; ``folder`` becomes a data folder whose MNIST lacks the unseen class."""
    raw = folder / "MNIST/raw"
    raw.mkdir(parents=True)
    for part in ("train", "t10k"):
        images = (root / f"MNIST/raw/{part}-images-idx3-ubyte").read_bytes()
        labels = (root / f"MNIST/raw/{part}-labels-idx1-ubyte").read_bytes()
        y = np.frombuffer(labels, np.uint8, offset=8)
        x = np.frombuffer(images, np.uint8, offset=16).reshape(len(y), -1)
        known = y != UNSEEN_MNIST
        count = int(known.sum()).to_bytes(4, "big")
        images, labels = images[:4] + count + images[8:16], labels[:4] + count
        (raw / f"{part}-images-idx3-ubyte").write_bytes(images + x[known].tobytes())
        (raw / f"{part}-labels-idx1-ubyte").write_bytes(labels + y[known].tobytes())
    return load_recipe("permuted-mnist-hard")


def measure(case: Case, root: Path) -> Case:
    """Train without the class, then predict known and unseen images in each way."""
    torch.set_num_threads(1)
    seed, name = case["seed"], case["strategy"]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "data"
        if case["stream"] == "PACS":
            recipe, files = pacs_without_a_class(root, folder)
            data = root
        else:
            recipe, data = mnist_without_a_class(root, folder), folder
        recipe = recipe.model_copy(
            update={"posterior_samples": SAMPLES, "posterior_temperature": "validation"}
        )
        options = RunOptions(data, bundle=True)
        result = run_in_folder(RunFolder(Path(temporary) / "runs", recipe, name, seed), options)
        (path,) = (Path(temporary) / "runs").glob("*/*/bundle")
        bundle = load_bundle(path)
        benchmark = build_benchmark(recipe, seed=seed, dataset_root=data)
        known = [tensors_of(e.dataset) for e in benchmark.test_stream]
        if case["stream"] == "PACS":
            from covon_avalanche.streams.image_files import decode

            unseen = torch.stack([bundle.transform(decode(file)) for file in files])
        else:
            whole = build_benchmark(recipe, seed=seed, dataset_root=root)
            parts = [tensors_of(e.dataset) for e in whole.test_stream]
            unseen = torch.cat([x[y == UNSEEN_MNIST] for x, y in parts])
    found: Case = {"average_accuracy": result.average_accuracy}
    ways: dict[str, dict[str, Any]] = {"mean": {}}
    if bundle.posterior is not None:
        found["eval_temperature"] = bundle.info.eval_temperature
        ways["samples"] = {"samples": SAMPLES, "temperature": 1.0}
        ways["temperature"] = {"samples": SAMPLES}
    for way, how in ways.items():
        found[way] = quality(bundle, known, unseen, how)
    return found


def quality(
    bundle: Bundle, known: list[tuple[Tensor, Tensor]], unseen: Tensor, how: dict[str, Any]
) -> dict[str, float]:
    """Accuracy and calibration as means over domains, and the two AUROCs."""

    def predict(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        parts = [bundle.predict(part, **how) for part in x.split(512)]
        p, entropy, information = map(torch.cat, zip(*parts, strict=True))
        return p, entropy, information

    rows, scores = [], []
    for x, y in known:
        p, *uncertainty = predict(x)
        sums = CalibrationSums()
        sums.add(p.clamp(min=1e-12).log(), y)
        rows.append([sums.accuracy, sums.result().nll, sums.result().ece])
        scores.append(torch.stack(uncertainty))
    accuracy, nll, ece = np.mean(rows, axis=0)
    outside = torch.stack(predict(unseen)[1:])
    inside = torch.cat(scores, 1)
    label = np.r_[np.zeros(inside.shape[1]), np.ones(outside.shape[1])]
    both = torch.cat([inside, outside], 1).numpy()
    found = {"accuracy": accuracy, "nll": nll, "ece": ece}
    found["auroc_entropy"] = roc_auc_score(label, both[0])
    if how:
        found["auroc_information"] = roc_auc_score(label, both[1])
    return {key: float(value) for key, value in found.items()}


COLUMNS: dict[str, tuple[str, Callable[[float], str]]] = {
    "accuracy": ("A_T %", lambda v: f"{100 * v:.2f}"),
    "nll": ("NLL", "{:.3f}".format),
    "ece": ("ECE", "{:.3f}".format),
    "auroc_entropy": ("AUROC of entropy", "{:.3f}".format),
    "auroc_information": ("AUROC of mutual information", "{:.3f}".format),
}


def write_report() -> None:
    """One table: means over seeds."""
    cases = sorted(read_cases(FILE), key=lambda case: case["stream"])
    ways = {"mean": "mean weights", "samples": f"{SAMPLES} samples"}
    ways["temperature"] = f"{SAMPLES} samples, T = "
    table = pd.DataFrame(
        {"eval_temperature": np.nan, **case, **case[way], "way": way}
        for case in cases
        for way in ways
        if way in case
    )
    lines = []
    for (stream, strategy, way), part in table.groupby(["stream", "strategy", "way"], sort=False):
        line = {"stream": stream, "strategy": strategy, "prediction by": ways[way]}
        if way == "temperature":
            temperatures = map("{:.3g}".format, sorted(part["eval_temperature"].dropna().unique()))
            line["prediction by"] += ", ".join(temperatures) or "chosen"
        for key, (title, form) in COLUMNS.items():
            value = part[key].mean()
            line[title] = "" if np.isnan(value) else form(value)
        lines.append(line | {"seeds": len(part)})
    origins = dict.fromkeys(
        f"torch {case['versions']['torch']} on {machine_name(case['machine'])}" for case in cases
    )
    origin = f"Means over the seeds; {' and '.join(origins)}."
    replace_part(PAGE, NAME, f"{aligned(pd.DataFrame(lines))}\n\n{origin}")


def main() -> None:
    """Run and report."""
    given = arguments(__doc__)
    if not given.report:
        cases = [
            {"stream": stream, "strategy": name, "seed": seed}
            for seed in SEEDS
            for stream, names in STRATEGIES.items()
            for name in names
        ]
        run_cases(cases, measure, FILE, given.dataset_root, processes=given.jobs)
    write_report()


if __name__ == "__main__":
    main()
