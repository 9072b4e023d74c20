"""What batch norm's running statistics are worth after a merge: permuted digits and MNIST.

    python benchmarks/batch_norm.py --dataset-root DATA

An MLP with two hidden layers of 100 units, with batch norm, learns five permutations with the
package's defaults, ``ess`` the number of images: of the digits 20 epochs each, ten seeds, of MNIST
three epochs, three seeds. Once the plugin estimates the statistics anew after each merge, as it
does; once they stay as training has left them. Rows go to ``benchmarks/results/batch-norm.json`` as
they come; what is there is not run again. DATA has ``MNIST/raw``.
"""

from __future__ import annotations

import argparse
import json
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import product
from statistics import mean, stdev
from typing import Any
from unittest import mock

import torch
from avalanche.training.plugins import EvaluationPlugin
from avalanche.training.supervised import Naive
from comparison import ROOT
from torch import nn

from covon_avalanche import CoVON, CoVONPlugin, TensorBatches
from covon_avalanche.atomic_write import write_atomically
from covon_avalanche.evaluation import DomainMetrics
from covon_avalanche.experiment.machine import machine, versions
from covon_avalanche.merging import rule
from covon_avalanche.streams import PermutedDigits, PermutedMNIST

FILE = ROOT / "benchmarks/results/batch-norm.json"
METHODS: dict[str, dict[str, Any]] = {"covon": {}, "covon, gamma 0.5": {"gamma": 0.5}}


@dataclass(frozen=True)
class Setting:
    """A stream, and how it is learned."""

    stream: Callable[..., Any]
    pixels: int
    epochs: int
    mb_size: int
    seeds: int


SETTINGS = {
    "permuted digits": Setting(PermutedDigits, 64, 20, 32, 10),
    "permuted MNIST": Setting(PermutedMNIST, 784, 3, 128, 3),
}


def network(pixels: int) -> nn.Module:
    """With batch norm after both hidden layers."""
    layers: list[nn.Module] = [nn.Flatten()]
    for inputs in (pixels, 100):
        layers += [nn.Linear(inputs, 100), nn.BatchNorm1d(100), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(100, 10))


def average_accuracy(setting: Setting, method: str, seed: int, options: dict[str, Any]) -> float:
    """A_T on the test images."""
    benchmark = setting.stream(n_experiences=5, seed=seed, **options)
    torch.manual_seed(seed)
    model, metrics = network(setting.pixels), DomainMetrics()
    ess = len(benchmark.train_stream[0].dataset)
    strategy = FastNaive(
        model=model,
        optimizer=CoVON(model.named_parameters(), ess=ess, **METHODS[method]),
        criterion=nn.CrossEntropyLoss(),
        plugins=[CoVONPlugin()],
        train_mb_size=setting.mb_size,
        train_epochs=setting.epochs,
        eval_mb_size=256,
        evaluator=EvaluationPlugin(metrics, loggers=[]),
    )
    for experience in benchmark.train_stream:
        strategy.train(experience)
        strategy.eval(benchmark.test_stream)
    return metrics.matrix.average_accuracy()


class FastNaive(TensorBatches, Naive):
    """Fetches its batches from tensors."""


def main() -> None:
    """Measure what is missing."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dataset-root", help="has MNIST/raw")
    root = parser.parse_args().dataset_root
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    rows = json.loads(FILE.read_text())["rows"] if FILE.exists() else []
    for (stream, setting), method, anew in product(SETTINGS.items(), METHODS, (True, False)):
        row = {"stream": stream, "method": method, "statistics anew": anew}
        if any(row.items() <= known.items() for known in rows):
            continue
        options = {"dataset_root": root} if "MNIST" in stream else {}
        kept = mock.patch.object(rule, "trained_batch_norms", return_value=[])
        with nullcontext() if anew else kept:
            values = [
                100 * average_accuracy(setting, method, seed, options)
                for seed in range(setting.seeds)
            ]
        rows.append({**row, "a_t": values})
        print(row, f"{mean(values):.2f} ± {stdev(values):.2f}", flush=True)
        found = {"rows": rows, "machine": machine(), "versions": versions()}
        write_atomically(FILE, json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
