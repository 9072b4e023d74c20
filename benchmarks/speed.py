"""How fast: optimizer steps, Avalanche's data path, and what each method costs a task.

    python benchmarks/speed.py                      # all, about 15 minutes; writes the results
    python benchmarks/speed.py --short              # a minute, prints only
    python benchmarks/speed.py --only step --peer other.py:TheirOptimizer
    python benchmarks/speed.py --table              # docs/speed.md from the stored results

Everything that is compared runs interleaved in one process; figures are medians, and ratios
to the first row of each table. Results go to ``benchmarks/results/speed``.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import json
import math
import platform
import statistics
import time
import warnings
from collections.abc import Callable
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from covon_avalanche import CoVON

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "speed"
Row = dict[str, Any]


def timed(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def interleaved(cases: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Median seconds of each case; one round to warm up, then all in turn."""
    for work in cases.values():
        work()
    seconds: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(rounds):
        for name, work in cases.items():
            seconds[name].append(timed(work))
    return {name: statistics.median(values) for name, values in seconds.items()}


# Optimizer steps -------------------------------------------------------------------------


def vit_shapes(width: int, depth: int, classes: int = 345) -> list[tuple[int, ...]]:
    """Parameter shapes of a vision transformer with patches of 16 at 224 pixels."""
    w = width
    block = [(w,), (w,), (3 * w, w), (3 * w,), (w, w), (w,), (w,), (w,)]
    block += [(4 * w, w), (4 * w,), (w, 4 * w), (w,)]
    ends = [(1, 1, w), (1, 197, w), (w, 3, 16, 16), (w,), (w,), (w,), (classes, w), (classes,)]
    return ends + depth * block


def mlp_shapes(*widths: int) -> list[tuple[int, ...]]:
    return [shape for i, o in pairwise(widths) for shape in ((o, i), (o,))]


MODELS = {
    "MLP 64-100-32-10": mlp_shapes(64, 100, 32, 10),
    "MLP 784-100-100-10": mlp_shapes(784, 100, 100, 10),
    "ViT-Ti/16": vit_shapes(192, 12),
    "ViT-S/16": vit_shapes(384, 12),
    "ViT-B/16": vit_shapes(768, 12),
    "ViT-L/16": vit_shapes(1024, 24),
}


class Iteration:
    """A posterior optimizer's share of a training step: sample, restore, update."""

    def __init__(self, parameters: list[nn.Parameter], optimizer: Any, mc_samples: int = 1) -> None:
        self.parameters, self.optimizer, self.mc_samples = parameters, optimizer, mc_samples
        self.gradients = [p.grad for p in parameters]

    def __call__(self) -> None:
        for _ in range(self.mc_samples):
            with self.optimizer.sampled_params(train=True):
                for p, gradient in zip(self.parameters, self.gradients, strict=True):
                    # what a backward pass would leave; averages are written into a copy
                    p.grad = gradient if self.mc_samples == 1 else gradient.clone()
        self.optimizer.step()


def covon(
    parameters: list[nn.Parameter], implementation: str, task: int, mc: int = 1, **more: Any
) -> Iteration:
    more = {"hess_approx": "reparam", **more}
    optimizer = CoVON(parameters, ess=1e6, mc_samples=mc, implementation=implementation, **more)
    iteration = Iteration(parameters, optimizer, mc)
    for _ in range(task - 1):
        iteration()
        optimizer.consolidate()
    return iteration


def peer(path: str, parameters: list[nn.Parameter]) -> Callable[[], object]:
    """An optimizer class from a file, called with ``(params, lr=..., ess=...)``."""
    file, name = path.rsplit(":", 1)
    spec = importlib.util.spec_from_file_location("peer", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    optimizer = getattr(module, name)(parameters, lr=0.01, ess=1e6)
    samples = hasattr(optimizer, "sampled_params")
    return Iteration(parameters, optimizer) if samples else optimizer.step


def step_cases(shapes: list[tuple[int, ...]], options: argparse.Namespace, large: bool) -> dict:
    """Each optimizer with weights of its own; the gradients are the same tensors. Of the large
    models only what fits into 24 GB."""
    torch.manual_seed(0)
    gradients = [1e-3 * torch.randn(shape) for shape in shapes]

    def weights() -> list[nn.Parameter]:
        parameters = [nn.Parameter(0.05 * torch.randn(shape)) for shape in shapes]
        for p, gradient in zip(parameters, gradients, strict=True):
            p.grad = gradient
        return parameters

    adamw = torch.optim.AdamW
    cases: dict[str, Callable[[], object]] = {"AdamW fused": adamw(weights(), fused=True).step}
    if not large:
        cases["AdamW foreach"] = adamw(weights(), foreach=True).step
        cases["AdamW for-loop"] = adamw(weights(), foreach=False).step
        cases["CoVON eager, task 2"] = covon(weights(), "eager", 2, 1)
        cases["CoVON compiled, task 1"] = covon(weights(), "compiled", 1, 1)
    cases["CoVON compiled, task 2"] = covon(weights(), "compiled", 2, 1)
    gradsq = covon(weights(), "compiled", 2, batch_size=256)
    cases["CoVON compiled, task 2, squared gradients"] = gradsq
    if not large:
        cases["CoVON compiled, task 2, 4 samples"] = covon(weights(), "compiled", 2, 4)
        if importlib.util.find_spec("ivon"):
            import ivon

            parameters = weights()
            optimizer = ivon.IVON(parameters, lr=0.01, ess=1e6)
            cases["ivon-opt"] = Iteration(parameters, optimizer)
        for path in options.peer:
            cases[path] = peer(path, weights())
    return cases


def measure_steps(options: argparse.Namespace) -> list[Row]:
    rows = []
    names = ["MLP 784-100-100-10"] if options.short else list(MODELS)
    for threads in (1,) if options.short else (1, 2):
        torch.set_num_threads(threads)
        for name in names:
            size = sum(math.prod(shape) for shape in MODELS[name])
            rounds = 200 if size < 1e6 else 7
            # the cases of one model are freed before those of the next are made
            medians = interleaved(step_cases(MODELS[name], options, large=size > 1e8), rounds)
            gc.collect()
            for case, seconds in medians.items():
                rows.append({"model": name, "parameters": size, "threads": threads, "case": case})
                rows[-1]["seconds"] = seconds
                print(rows[-1], flush=True)
    torch.set_num_threads(1)
    return rows


# The data path ---------------------------------------------------------------------------


def measure_data_path(options: argparse.Namespace) -> list[Row]:
    """An epoch over one experience of 60,000 random pictures in MNIST's format."""
    from avalanche.benchmarks import benchmark_from_datasets
    from avalanche.benchmarks.scenarios.task_aware import with_task_labels
    from avalanche.benchmarks.utils import _make_taskaware_classification_dataset
    from avalanche.training.plugins import EvaluationPlugin
    from avalanche.training.plugins.evaluation import default_evaluator
    from avalanche.training.supervised import Naive

    from covon_avalanche import CoVONStrategy, TensorBatches
    from covon_avalanche.streams.permuted import PermutedImages

    class FastNaive(TensorBatches, Naive):
        pass

    torch.manual_seed(0)
    n = 6_000 if options.short else 60_000
    pictures = torch.randint(256, (n, 28, 28), dtype=torch.uint8)
    targets = torch.randint(10, (n,))
    data = PermutedImages(pictures, targets, torch.randperm(784), 255, (0.13, 0.31))
    wrapped = _make_taskaware_classification_dataset(data, task_labels=0, targets=targets.tolist())
    experience = with_task_labels(benchmark_from_datasets(train=[wrapped])).train_stream[0]
    x, _ = data.tensor_batch(torch.arange(n))

    def network() -> nn.Module:
        layers = [nn.Flatten(), nn.Linear(784, 100), nn.ReLU(), nn.Linear(100, 100), nn.ReLU()]
        return nn.Sequential(*layers, nn.Linear(100, 10))

    model, loss = network(), nn.CrossEntropyLoss()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)

    def bare() -> None:
        for indices in torch.randperm(n).split(256):
            optimizer.zero_grad()
            loss(model(x.index_select(0, indices)), targets.index_select(0, indices)).backward()
            optimizer.step()

    def strategy(kind: Any, evaluator: Any, make: Any = None) -> Callable[[], object]:
        net = network()
        made = kind(
            model=net,
            optimizer=(make or (lambda p: torch.optim.AdamW(p, fused=True)))(net.parameters()),
            criterion=loss,
            train_mb_size=256,
            evaluator=evaluator,
        )
        return lambda: made.train(experience)

    silent = default_evaluator()
    silent.loggers = []
    nothing = EvaluationPlugin
    cases = {
        "bare loop over tensors": bare,
        "FastNaive": strategy(FastNaive, nothing()),
        "FastNaive, default metrics": strategy(FastNaive, silent),
        "Naive": strategy(Naive, nothing()),
        "CoVONStrategy": strategy(CoVONStrategy, nothing(), lambda p: CoVON(p, ess=60_000)),
    }
    medians = interleaved(cases, 3 if options.short else 7)
    return [{"examples": n, "case": case, "seconds": s} for case, s in medians.items()]


# What a method costs a task --------------------------------------------------------------


class _Clock:
    """Seconds of each training iteration, and of what follows the last epoch."""

    def __init__(self) -> None:
        self.iterations: list[float] = []
        self.ends: list[float] = []


def _clocks() -> tuple[Any, Any, _Clock]:
    """A plugin that starts the clock and one that stops it, to stand first and last."""
    from avalanche.core import SupervisedPlugin

    clock = _Clock()

    class Start(SupervisedPlugin):
        def before_training_iteration(self, strategy: Any, **kwargs: Any) -> None:
            clock.iterations.append(-time.perf_counter())

        def after_training_epoch(self, strategy: Any, **kwargs: Any) -> None:
            self.end = time.perf_counter()

    class Stop(SupervisedPlugin):
        def after_training_iteration(self, strategy: Any, **kwargs: Any) -> None:
            clock.iterations[-1] += time.perf_counter()

        def after_training_exp(self, strategy: Any, **kwargs: Any) -> None:
            clock.ends.append(time.perf_counter() - start.end)

    start = Start()
    return start, Stop(), clock


METHODS = ("finetune", "EWC (Avalanche)", "EWC*", "Ada-Reg", "VCL", "CoVON")


def make_method(name: str, model: nn.Module, epochs: int, batch: int, plugins: list) -> Any:
    from avalanche.training.plugins import EvaluationPlugin, EWCPlugin
    from avalanche.training.supervised import Naive

    from covon_avalanche import (
        AdaRegStrategy,
        BayesByBackprop,
        CoVONStrategy,
        EWCStarStrategy,
        TensorBatches,
        VCLStrategy,
    )

    class FastNaive(TensorBatches, Naive):
        pass

    def adamw() -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    kinds: dict[str, tuple[Any, Callable[[], Any], list]] = {
        "finetune": (FastNaive, adamw, []),
        "EWC (Avalanche)": (FastNaive, adamw, [EWCPlugin(ewc_lambda=1.0)]),
        "EWC*": (EWCStarStrategy, adamw, []),
        "Ada-Reg": (AdaRegStrategy, adamw, []),
        "VCL": (VCLStrategy, lambda: BayesByBackprop(model.parameters(), ess=1e4), []),
        "CoVON": (CoVONStrategy, lambda: CoVON(model.parameters(), ess=1e4), []),
    }
    kind, optimizer, more = kinds[name]
    start, *rest = plugins
    return kind(
        model=model,
        optimizer=optimizer(),
        criterion=nn.CrossEntropyLoss(),
        train_mb_size=batch,
        train_epochs=epochs,
        plugins=[start, *more, *rest],
        evaluator=EvaluationPlugin(),
    )


def run_tasks(
    name: str, model: nn.Module, tasks: list[tuple[Tensor, Tensor]], epochs: int, batch: int
) -> Row:
    """Train through tasks; times of iterations and of the tasks' ends, memory."""
    from avalanche.benchmarks import benchmark_from_datasets
    from avalanche.benchmarks.scenarios.task_aware import with_task_labels
    from avalanche.benchmarks.utils import _make_taskaware_tensor_classification_dataset

    from covon_avalanche.evaluation.memory import MemoryFootprint

    data = [_make_taskaware_tensor_classification_dataset(x, y, task_labels=0) for x, y in tasks]
    stream = with_task_labels(benchmark_from_datasets(train=data)).train_stream
    start, stop, clock = _clocks()
    per_task, worth = [], []
    kept = MemoryFootprint()
    strategy = make_method(name, model, epochs, batch, [start, kept, stop])
    for experience in stream:
        first = len(clock.iterations)
        strategy.train(experience)
        per_task.append(statistics.median(clock.iterations[first + 1 :]))
        worth.append(kept.ratio)
    return {"case": name, "batch_seconds": per_task, "end_seconds": clock.ends, "memory": worth}


def measure_vit(options: argparse.Namespace) -> list[Row]:
    """The paper's cost table: ViT-B/16 at 224 pixels, two tasks, on two threads."""
    from torchvision.models import vit_b_16

    torch.set_num_threads(2)
    batch, batches = 8, 4
    torch.manual_seed(0)
    tasks = [
        (torch.randn(batch * batches, 3, 224, 224), torch.randint(345, (batch * batches,)))
        for _ in range(2)
    ]
    rows = []
    for name in ("finetune", "EWC (Avalanche)", "EWC*", "Ada-Reg", "CoVON"):
        rows.append(run_tasks(name, vit_b_16(num_classes=345), tasks, 1, batch))
        rows[-1]["batch"] = batch
        print(rows[-1], flush=True)
    torch.set_num_threads(1)
    return rows


def measure_growth(options: argparse.Namespace) -> list[Row]:
    """Ten tasks with a small network: what grows with their number."""
    torch.manual_seed(0)
    n = 4_000
    tasks = [(torch.randn(n, 784), torch.randint(10, (n,))) for _ in range(10)]
    rows = []
    for name in METHODS:
        torch.manual_seed(0)
        layers = [nn.Linear(784, 100), nn.ReLU(), nn.Linear(100, 100), nn.ReLU()]
        model = nn.Sequential(*layers, nn.Linear(100, 10))
        rows.append(run_tasks(name, model, tasks, 4, 256))
        print(rows[-1], flush=True)
    return rows


def measure_fisher(options: argparse.Namespace) -> list[Row]:
    """The exact per-example Fisher against one training epoch on the same batches."""
    from torchvision.models import squeezenet1_1

    from covon_avalanche.posterior.fisher import squared_batch_gradients, squared_example_gradients

    torch.manual_seed(0)
    layers = [nn.Linear(784, 100), nn.ReLU(), nn.Linear(100, 100), nn.ReLU()]
    mlp = nn.Sequential(*layers, nn.Linear(100, 10))
    cases: dict[str, tuple[nn.Module, tuple[int, ...], int, int]] = {
        "MLP 784-100-100-10": (mlp, (784,), 20_000, 256)
    }
    if not options.short:
        cases["SqueezeNet 1.1, 96 pixels"] = (squeezenet1_1(num_classes=7), (3, 96, 96), 256, 32)
    rows = []
    for name, (model, shape, n, batch) in cases.items():
        x, y = torch.randn(n, *shape), torch.randint(7, (n,))
        batches = [(x[i : i + batch], y[i : i + batch]) for i in range(0, n, batch)]
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)

        def epoch(model=model, batches=batches, optimizer=optimizer) -> None:
            for inputs, labels in batches:
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(inputs), labels).backward()
                optimizer.step()

        work = {
            "training epoch": epoch,
            "exact Fisher": lambda m=model, b=batches: squared_example_gradients(m, b),
            "batch Fisher": lambda m=model, b=batches: squared_batch_gradients(m, b),
        }
        for case, seconds in interleaved(work, 3 if options.short else 5).items():
            rows.append({"model": name, "case": case, "seconds": seconds})
            print(rows[-1], flush=True)
    return rows


# Results ---------------------------------------------------------------------------------

SECTIONS = {
    "step": measure_steps,
    "data": measure_data_path,
    "fisher": measure_fisher,
    "growth": measure_growth,
    "vit": measure_vit,
}
SHORT = ("step", "data", "fisher")


def machine() -> Row:
    processor = platform.processor()
    info = Path("/proc/cpuinfo")
    if info.is_file():
        lines = info.read_text(encoding="utf-8").splitlines()
        names = (ln.split(":")[1].strip() for ln in lines if ln.startswith("model name"))
        processor = next(names, processor)
    packages = ("torch", "numba", "numpy", "avalanche-lib")
    return {
        "processor": processor,
        "platform": platform.platform(),
        "python": platform.python_version(),
        "versions": {p: version(p) for p in packages},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--short", action="store_true", help="small cases; nothing is written")
    parser.add_argument("--only", choices=SECTIONS, nargs="*", default=None)
    parser.add_argument("--peer", action="append", default=[], metavar="FILE.py:CLASS")
    parser.add_argument("--table", action="store_true", help="write docs/speed.md and stop")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    if not options.table:
        for name in options.only or (SHORT if options.short else SECTIONS):
            rows = SECTIONS[name](options)
            if options.short:
                print(json.dumps({name: rows}, indent=1))
                continue
            RESULTS.mkdir(parents=True, exist_ok=True)
            text = json.dumps({"machine": machine(), "rows": rows}, indent=1)
            (RESULTS / f"{name}.json").write_text(text + "\n", encoding="utf-8")
    if not options.short:
        from speed_table import write_table

        write_table(RESULTS, ROOT / "docs" / "speed.md")


if __name__ == "__main__":
    main()
