"""What each method costs, task by task: time per batch, time at the end of a task, memory.

    python benchmarks/method_costs.py growth    # ten tasks of an MLP, 2 minutes
    python benchmarks/method_costs.py vit       # two tasks of ViT-B/16 at 224 pixels, 10 minutes

Results go to ``benchmarks/results/speed/growth.json`` and ``vit.json``, the tables to
``docs/speed.md``.
"""

from __future__ import annotations

import argparse
import statistics
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from avalanche.benchmarks import benchmark_from_datasets
from avalanche.benchmarks.scenarios.task_aware import with_task_labels
from avalanche.benchmarks.utils import _make_taskaware_tensor_classification_dataset
from avalanche.core import SupervisedPlugin
from avalanche.training.plugins import EvaluationPlugin, EWCPlugin
from comparison import RESULTS, FastNaive, write_measurement
from speed_table import write_tables
from torch import Tensor, nn

from covon_avalanche import (
    AdaRegStrategy,
    BayesByBackprop,
    CoVON,
    CoVONStrategy,
    EWCStarStrategy,
    VCLStrategy,
)
from covon_avalanche.evaluation.memory import MemoryFootprint

Row = dict[str, Any]
Params = Any


def _adamw(params: Params) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-4, fused=True)


METHODS: dict[str, tuple[Any, Callable[[Params], Any]]] = {
    "finetune": (FastNaive, _adamw),
    "EWC (Avalanche)": (FastNaive, _adamw),
    "EWC*": (EWCStarStrategy, _adamw),
    "Ada-Reg": (AdaRegStrategy, _adamw),
    "VCL": (VCLStrategy, lambda params: BayesByBackprop(params, ess=1e4)),
    "CoVON": (CoVONStrategy, lambda params: CoVON(params, ess=1e4)),
}


class Clock(SupervisedPlugin):
    """Times iterations, and what follows the last epoch; the first plugin of a strategy.

    Its ``stop`` is the last one.
    """

    def __init__(self) -> None:
        super().__init__()
        self.stop = Stop(self)
        self.iterations: list[float] = []
        self.ends: list[float] = []

    def before_training_iteration(self, strategy: Any, **kwargs: Any) -> None:
        """Start."""
        self.since = time.perf_counter()

    def after_training_epoch(self, strategy: Any, **kwargs: Any) -> None:
        """Start; the last epoch's is the one that counts."""
        self.since = time.perf_counter()


class Stop(SupervisedPlugin):
    """Stops a clock after all plugins between."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.clock = clock

    def after_training_iteration(self, strategy: Any, **kwargs: Any) -> None:
        """Note an iteration."""
        self.clock.iterations.append(time.perf_counter() - self.clock.since)

    def after_training_exp(self, strategy: Any, **kwargs: Any) -> None:
        """Note the end of a task."""
        self.clock.ends.append(time.perf_counter() - self.clock.since)


def run_tasks(
    name: str, model: nn.Module, tasks: list[tuple[Tensor, Tensor]], epochs: int, mb_size: int
) -> Row:
    """Train through the tasks."""
    kind, make_optimizer = METHODS[name]
    data = [_make_taskaware_tensor_classification_dataset(x, y, task_labels=0) for x, y in tasks]
    clock, memory = Clock(), MemoryFootprint()
    own = [EWCPlugin(ewc_lambda=1.0)] if name == "EWC (Avalanche)" else []
    strategy = kind(
        model=model,
        optimizer=make_optimizer(model.parameters()),
        criterion=nn.CrossEntropyLoss(),
        train_mb_size=mb_size,
        train_epochs=epochs,
        plugins=[clock, *own, memory, clock.stop],
        evaluator=EvaluationPlugin(),
    )
    row: Row = {"case": name, "batch": mb_size, "batch_seconds": [], "memory": []}
    for experience in with_task_labels(benchmark_from_datasets(train=data)).train_stream:
        first = len(clock.iterations)
        strategy.train(experience)
        row["batch_seconds"].append(statistics.median(clock.iterations[first + 1 :]))
        row["memory"].append(memory.ratio)
    print(row, flush=True)
    return {**row, "end_seconds": clock.ends}


def growth(tasks: int = 10, examples: int = 4_000) -> list[Row]:
    """What grows with the number of tasks: MLP 784-100-100-10, one thread."""
    torch.manual_seed(0)
    data = [(torch.randn(examples, 784), torch.randint(10, (examples,))) for _ in range(tasks)]
    rows = []
    for name in METHODS:
        torch.manual_seed(0)
        layers = [nn.Linear(784, 100), nn.ReLU(), nn.Linear(100, 100), nn.ReLU()]
        rows.append(run_tasks(name, nn.Sequential(*layers, nn.Linear(100, 10)), data, 4, 256))
    return rows


def vit() -> list[Row]:
    """The paper's cost table: ViT-B/16 at 224 pixels, two tasks of four batches, two threads."""
    from torchvision.models import vit_b_16

    torch.set_num_threads(2)
    torch.manual_seed(0)
    data = [(torch.randn(32, 3, 224, 224), torch.randint(345, (32,))) for _ in range(2)]
    rows = []
    for name in ("finetune", "EWC (Avalanche)", "EWC*", "Ada-Reg", "CoVON"):
        rows.append(run_tasks(name, vit_b_16(num_classes=345), data, 1, 8))
    return rows


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("part", choices=["growth", "vit"])
    part = parser.parse_args().part
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    rows = growth() if part == "growth" else vit()
    write_measurement(RESULTS / f"speed/{part}.json", rows, script="benchmarks/method_costs.py")
    write_tables()


if __name__ == "__main__":
    main()
