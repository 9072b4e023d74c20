"""What ``speed.py`` times. It runs this file in one process per version of the package.

Only names that old versions of the package have, too, are used. Requests are read from standard
input, one JSON object a line: ``{"part": "step", "threads": 1, ...}`` builds the cases of a part
and answers with their names, ``{"case": "AdamW fused", "repeats": 3}`` times one of them and
answers with seconds per repetition.
"""

from __future__ import annotations

import gc
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.util import find_spec
from itertools import pairwise
from typing import Any

import torch
from torch import nn

import covon_avalanche
from covon_avalanche import CoVON

Cases = dict[str, Callable[[], object]]
ENTRIES = "one tensor of 20 M"
MERGED = {
    "SqueezeNet 1.1, 112 px": ("squeezenet", 112, 32),
    "ViT-S/14, 84 px": ("timm/vit_small_patch14_dinov2", 84, 16),
}
"""Backbone, image size and training batch."""


# Optimizers --------------------------------------------------------------------------------


def _vit_shapes(width: int, depth: int = 12, classes: int = 345) -> list[tuple[int, ...]]:
    """Parameter shapes of a vision transformer with patches of 16 at 224 pixels."""
    w = width
    block = [(w,), (w,), (3 * w, w), (3 * w,), (w, w), (w,), (w,), (w,)]
    block += [(4 * w, w), (4 * w,), (w, 4 * w), (w,)]
    ends = [(1, 1, w), (1, 197, w), (w, 3, 16, 16), (w,), (w,), (w,), (classes, w), (classes,)]
    return ends + depth * block


SHAPES: dict[str, list[tuple[int, ...]]] = {
    "MLP 784-100-100-10": [s for i, o in pairwise((784, 100, 100, 10)) for s in ((o, i), (o,))],
    "ViT-S/16": _vit_shapes(384),
    "ViT-B/16": _vit_shapes(768),
    ENTRIES: [(20_000_000,)],
}


def parameters_in(model: str) -> int:
    """How many entries a model has."""
    return sum(math.prod(shape) for shape in SHAPES[model])


def _covon(implementation: str, hess_approx: str) -> Callable[[list[nn.Parameter]], CoVON]:
    def make(params: list[nn.Parameter]) -> CoVON:
        own: Any = {"implementation": implementation, "hess_approx": hess_approx}
        return CoVON(params, ess=1e6, batch_size=256, **own)

    return make


def _ivon(params: list[nn.Parameter]) -> Any:
    from ivon import IVON

    return IVON(params, lr=0.01, ess=1e6)


OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], Any]] = {
    "AdamW fused": lambda params: torch.optim.AdamW(params, fused=True),
    "AdamW foreach": lambda params: torch.optim.AdamW(params, foreach=True),
    "CoVON compiled, gradsq": _covon("compiled", "gradsq"),
    "CoVON compiled, reparam": _covon("compiled", "reparam"),
    "CoVON foreach, gradsq": _covon("foreach", "gradsq"),
    "CoVON foreach, reparam": _covon("foreach", "reparam"),
    "ivon-opt": _ivon,
}


def _in_second_task(optimizer: Any, iteration: Callable[[], object]) -> Callable[[], object]:
    """An iteration after the first consolidation, from which on there is a prior."""
    iteration()
    if isinstance(optimizer, CoVON):
        optimizer.consolidate()
    return iteration


# Cases -------------------------------------------------------------------------------------


def step(model: str, optimizers: list[str]) -> Cases:
    """Optimizer steps without forward and backward pass. Each optimizer has weights of its own;
    the gradients are the same tensors."""
    torch.manual_seed(0)
    gradients = [1e-3 * torch.randn(shape) for shape in SHAPES[model]]

    def case(name: str) -> Callable[[], object]:
        params = [nn.Parameter(0.05 * torch.randn(shape)) for shape in SHAPES[model]]
        optimizer = OPTIMIZERS[name](params)
        samples = hasattr(optimizer, "sampled_params")

        def backward() -> None:
            for p, gradient in zip(params, gradients, strict=True):
                p.grad = gradient

        def iteration() -> None:
            if samples:
                with optimizer.sampled_params(train=True):
                    backward()
            optimizer.step()

        if not samples:
            backward()
        return _in_second_task(optimizer, iteration)

    return {name: case(name) for name in optimizers if name != "ivon-opt" or find_spec("ivon")}


def noise(model: str, optimizers: list[str]) -> Cases:
    """A posterior sample's noise, against whole steps."""
    from covon_avalanche.optim.samples import fill_normal_

    out = torch.empty(parameters_in(model))
    return {**step(model, optimizers), "noise": lambda: fill_normal_(out, 1, 0)}


def train(model: str, optimizers: list[str]) -> Cases:
    """Training steps: forward, backward, update."""

    def case(name: str) -> Callable[[], object]:
        torch.manual_seed(0)
        if model == "MLP, batch 256":
            network, x = _mlp(), torch.randn(256, 784)
        else:
            import timm

            size, batch = 112, 8
            network = timm.create_model("vit_small_patch16_224", img_size=size, num_classes=10)
            x = torch.randn(batch, 3, size, size)
        y = torch.randint(10, (len(x),))
        optimizer = OPTIMIZERS[name](list(network.parameters()))

        def backward() -> None:
            optimizer.zero_grad()
            nn.functional.cross_entropy(network(x), y).backward()

        def iteration() -> None:
            if isinstance(optimizer, CoVON):
                with optimizer.sampled_params():
                    backward()
            else:
                backward()
            optimizer.step()

        return _in_second_task(optimizer, iteration)

    return {name: case(name) for name in optimizers}


def _mlp() -> nn.Sequential:
    layers = [nn.Linear(784, 100), nn.ReLU(), nn.Linear(100, 100), nn.ReLU(), nn.Linear(100, 10)]
    return nn.Sequential(nn.Flatten(), *layers)


def epoch(examples: int) -> Cases:
    """An epoch of one experience with random images of MNIST's size, at batch size 256."""
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
    images = torch.randint(256, (examples, 28, 28), dtype=torch.uint8)
    y = torch.randint(10, (examples,))
    data = PermutedImages(images, y, torch.randperm(784), 255, (0.13, 0.31))
    x, _ = data.tensor_batch(torch.arange(examples))
    wrapped = _make_taskaware_classification_dataset(data, task_labels=0, targets=y.tolist())
    experience = with_task_labels(benchmark_from_datasets(train=[wrapped])).train_stream[0]

    def loop() -> Callable[[], object]:
        model = _mlp()
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)

        def run() -> None:
            for rows in torch.randperm(examples).split(256):
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(x[rows]), y[rows]).backward()
                optimizer.step()

        return run

    def strategy(kind: Any, make: Callable[..., Any], evaluator: Any) -> Callable[[], object]:
        model = _mlp()
        built = kind(
            model=model,
            optimizer=make(model.parameters()),
            criterion=nn.CrossEntropyLoss(),
            train_mb_size=256,
            evaluator=evaluator,
        )
        return lambda: built.train(experience)

    adamw = OPTIMIZERS["AdamW fused"]
    metrics = default_evaluator()
    metrics.loggers = []
    return {
        "loop over tensors": loop(),
        "TensorBatches, Naive": strategy(FastNaive, adamw, EvaluationPlugin()),
        "TensorBatches, Naive, default metrics": strategy(FastNaive, adamw, metrics),
        "Naive": strategy(Naive, adamw, EvaluationPlugin()),
        "CoVONStrategy": strategy(
            CoVONStrategy, lambda params: CoVON(params, ess=examples), EvaluationPlugin()
        ),
    }


def merge(model: str, examples: int) -> Cases:
    """A training epoch, and merging with RegMean after a later task, as in the PACS recipes."""
    from covon_avalanche.backbones import create_backbone
    from covon_avalanche.merging import RegMean, merge_into

    name, size, batch = MERGED[model.rpartition(", ")[0]]
    autocast = torch.autocast("cpu", torch.bfloat16, enabled=model.endswith("bfloat16"))
    torch.manual_seed(0)
    network = create_backbone(name, 7, image_size=size).to(memory_format=torch.channels_last)
    x = torch.randn(examples, 3, size, size).contiguous(memory_format=torch.channels_last)
    y = torch.randint(7, (examples,))
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-6, fused=True)

    def training_epoch() -> None:
        for images, labels in zip(x.split(batch), y.split(batch), strict=True):
            optimizer.zero_grad()
            with autocast:
                output = network(images)
            nn.functional.cross_entropy(output.float(), labels).backward()
            optimizer.step()

    def merging(rule: RegMean) -> Callable[[], object]:
        before = {name: p.detach().clone() for name, p in network.named_parameters()}

        def work() -> None:
            with autocast:
                batches = list(zip(x.split(64), y.split(64), strict=True))
                merge_into(network, optimizer, rule, before, lambda: batches)

        return work

    return {
        "training epoch": training_epoch,
        "RegMean": merging(RegMean()),
        "RegMean, half of the images": merging(RegMean(share=0.5)),
    }


def run(arguments: list[str]) -> Cases:
    """``covon run permuted-digits``, from start to end of the process."""

    def command() -> None:
        with tempfile.TemporaryDirectory() as folder:
            covon = [sys.executable, "-W", "ignore", "-m", "covon_avalanche", "run"]
            subprocess.run(
                [*covon, "permuted-digits", "--jobs", "1", "--out", folder, *arguments],
                stdout=subprocess.DEVNULL,
                check=True,
            )

    return {"covon run permuted-digits": command}


PARTS: dict[str, Callable[..., Cases]] = {
    "step": step,
    "noise": noise,
    "train": train,
    "epoch": epoch,
    "merge": merge,
    "run": run,
}


def main() -> None:
    """Answer requests until standard input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever libraries print
    cases: Cases = {}

    def answer(value: Any) -> None:
        print(json.dumps(value), file=answers, flush=True)

    capability = torch.backends.cpu.get_cpu_capability()
    answer({"package": covon_avalanche.__file__, "cpu_capability": capability})
    for line in sys.stdin:
        request = json.loads(line)
        if "part" in request:
            torch.set_num_threads(request.pop("threads"))
            cases.clear()
            gc.collect()
            cases |= PARTS[request.pop("part")](**request)
            answer(list(cases))
        else:
            work = cases[request["case"]]
            start = time.perf_counter()
            for _ in range(request["repeats"]):
                work()
            answer((time.perf_counter() - start) / request["repeats"])


if __name__ == "__main__":
    main()
