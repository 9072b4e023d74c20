"""What re-estimating batch norm's running statistics after a merge gains, on digits and MNIST.

    python benchmarks/batch_norm.py --dataset-root DATA

An MLP with two hidden layers of 100 units, with batch norm, learns five permutations with the
package's defaults and ``ess`` the number of images: of the digits for 20 epochs each, ten seeds; of
MNIST for three epochs, three seeds. Every run is made twice: with statistics that are re-estimated
after each merge (``"statistics anew"``), as the plugin does, and with those that training has left.
Rows go to ``benchmarks/results/batch-norm.jsonl``; ``docs/digits.md`` quotes them.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pandas as pd
import torch
from avalanche.training.plugins import EvaluationPlugin
from comparison import RESULTS, Case, arguments, mean_and_std, read_cases, run_cases
from torch import nn

from covon_avalanche import CoVON, CoVONStrategy
from covon_avalanche.evaluation import DomainMetrics
from covon_avalanche.merging import rule
from covon_avalanche.report.tables import aligned
from covon_avalanche.streams import PermutedDigits, PermutedMNIST

FILE = RESULTS / "batch-norm.jsonl"
METHODS: dict[str, dict[str, Any]] = {"covon": {}, "covon, gamma 0.5": {"gamma": 0.5}}
KEY = ("stream", "method", "statistics anew")


class Setting(NamedTuple):
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


def average_accuracy(setting: Setting, method: str, seed: int, root: Path | None) -> float:
    """A_T on the test images."""
    options = {} if root is None else {"dataset_root": root}
    benchmark = setting.stream(n_experiences=5, seed=seed, **options)
    torch.manual_seed(seed)
    model, metrics = network(setting.pixels), DomainMetrics()
    ess = len(benchmark.train_stream[0].dataset)
    strategy = CoVONStrategy(
        model=model,
        optimizer=CoVON(model.named_parameters(), ess=ess, **METHODS[method]),
        criterion=nn.CrossEntropyLoss(),
        train_mb_size=setting.mb_size,
        train_epochs=setting.epochs,
        eval_mb_size=256,
        evaluator=EvaluationPlugin(metrics, loggers=[]),
    )
    for experience in benchmark.train_stream:
        strategy.train(experience)
        strategy.eval(benchmark.test_stream)
    return metrics.matrix.average_accuracy()


def measure(case: Case, root: Path) -> Case:
    """A_T in percent, by seed."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    setting = SETTINGS[case["stream"]]
    given = root if "MNIST" in case["stream"] else None
    update = rule.update_batch_norm if case["statistics anew"] else lambda *_: None
    with mock.patch.object(rule, "update_batch_norm", update):
        seeds = range(setting.seeds)
        values = [average_accuracy(setting, case["method"], seed, given) for seed in seeds]
    return {"a_t": [100 * value for value in values]}


def main() -> None:
    """Run and print."""
    given = arguments(__doc__)
    if not given.report:
        cases = [dict(zip(KEY, c, strict=True)) for c in product(SETTINGS, METHODS, (True, False))]
        run_cases(cases, measure, FILE, given.dataset_root, processes=given.jobs)
    table = pd.DataFrame(read_cases(FILE))[[*KEY, "a_t"]]
    print(aligned(table.assign(a_t=[mean_and_std(pd.Series(v)) for v in table["a_t"]]), left=3))


if __name__ == "__main__":
    main()
