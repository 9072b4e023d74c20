"""Time per step of CoVON against AdamW, in each training loop.

    python benchmarks/loop_overhead.py            # 10 minutes on two cores; writes docs/loops.md
    python benchmarks/loop_overhead.py --short    # a tiny network; prints, stores nothing
    python benchmarks/loop_overhead.py --report   # docs/loops.md from the stored result

The network is a vision transformer with 11 million parameters; a step is by 8 images of 96
pixels, in one micro-batch. Every loop trains with both optimizers in turns, in one process, and
each keeps its network: a slow phase of the machine affects both. A step is the time from one
forward pass to the next, so that all that the loop does between them counts; what it does
before the first step and after the last (CoVON's merge) does not. A figure is the median over the
rounds of each round's median, a ratio the median of the rounds' ratios.
"""

from __future__ import annotations

import argparse
import itertools
import json
import logging
import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from importlib.metadata import version
from typing import Any

import pandas as pd
import torch
from avalanche.benchmarks import benchmark_from_datasets
from avalanche.benchmarks.utils import as_classification_dataset
from avalanche.training.plugins import EvaluationPlugin
from avalanche.training.supervised import Naive
from comparison import RESULTS, ROOT, provenance, replace_part, write_measurement
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from torch.utils.data import DataLoader, TensorDataset

from covon_avalanche import CoVON, CoVONPlugin
from covon_avalanche.report.tables import aligned

FILE = RESULTS / "speed" / "loops.json"
CLASSES = 100
Loop = Callable[[nn.Module, Optimizer, TensorDataset, int], None]


class Transformer(nn.Module):
    """A vision transformer with patches of 16 pixels, without a class token."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 16, stride=16)
        layer = nn.TransformerEncoderLayer(
            width, width // 64, 4 * width, dropout=0.0, batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.patches(x).flatten(2).transpose(1, 2)
        return self.head(self.blocks(tokens).mean(1))


# Loops: an epoch each, with the optimizer's task ended after it ------------------------------


def sampled(optimizer: Optimizer) -> AbstractContextManager[Any]:
    """CoVON's weights are a posterior sample inside."""
    return optimizer.sampled_params() if isinstance(optimizer, CoVON) else nullcontext()


def plain(model: nn.Module, optimizer: Optimizer, data: TensorDataset, mb_size: int) -> None:
    model.train()
    for x, y in DataLoader(data, mb_size, shuffle=True):
        optimizer.zero_grad()
        with sampled(optimizer):
            nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    if isinstance(optimizer, CoVON):
        optimizer.consolidate()


def avalanche(model: nn.Module, optimizer: Optimizer, data: TensorDataset, mb_size: int) -> None:
    data.targets = data.tensors[1]
    experience = benchmark_from_datasets(train=[as_classification_dataset(data)]).train_stream[0]
    strategy = Naive(
        model=model,
        optimizer=optimizer,
        train_mb_size=mb_size,
        plugins=[CoVONPlugin()] if isinstance(optimizer, CoVON) else [],
        evaluator=EvaluationPlugin(loggers=[]),
    )
    strategy.train(experience)


def lightning(model: nn.Module, optimizer: Optimizer, data: TensorDataset, mb_size: int) -> None:
    import lightning.pytorch as pl

    from covon_avalanche.integrations.lightning import PosteriorCallback

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = model

        def training_step(self, batch: Any, index: int) -> Tensor:
            return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

        def configure_optimizers(self) -> Optimizer:
            return optimizer

    trainer = pl.Trainer(
        max_epochs=1,
        callbacks=[PosteriorCallback()] if isinstance(optimizer, CoVON) else [],
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Module(), DataLoader(data, mb_size, shuffle=True))


def hugging_face(model: nn.Module, optimizer: Optimizer, data: TensorDataset, mb_size: int) -> None:
    from torch.optim.lr_scheduler import LambdaLR
    from transformers import PrinterCallback, Trainer, TrainingArguments

    from covon_avalanche.integrations.huggingface import PosteriorCallback

    class WithLoss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = model

        def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
            logits = self.net(x)
            return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}

    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            num_train_epochs=1,
            per_device_train_batch_size=mb_size,
            save_strategy="no",
            logging_strategy="no",
            report_to=[],
            disable_tqdm=True,
            use_cpu=True,
        )
        trainer = Trainer(
            WithLoss(),
            arguments,
            train_dataset=[{"x": x, "labels": y} for x, y in data],
            optimizers=(optimizer, LambdaLR(optimizer, lambda step: 1.0)),
            callbacks=[PosteriorCallback()] if isinstance(optimizer, CoVON) else [],
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()


def accelerate(model: nn.Module, optimizer: Optimizer, data: TensorDataset, mb_size: int) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    loader = DataLoader(data, mb_size, shuffle=True)
    prepared, wrapped, loader = accelerator.prepare(model, optimizer, loader)
    prepared.train()
    for x, y in loader:
        wrapped.zero_grad()
        with sampled(optimizer):
            accelerator.backward(nn.functional.cross_entropy(prepared(x), y))
        wrapped.step()
    if isinstance(optimizer, CoVON):
        optimizer.consolidate()


LOOPS: dict[str, Loop] = {
    "plain PyTorch": plain,
    "Avalanche": avalanche,
    "Lightning": lightning,
    "Hugging Face's `Trainer`": hugging_face,
    "Accelerate": accelerate,
}
PACKAGES = ("avalanche-lib", "lightning", "transformers", "accelerate", "numba")


# Timing --------------------------------------------------------------------------------------


class Case:
    """A network in training by one optimizer in one loop."""

    def __init__(self, loop: Loop, covon: bool, short: bool) -> None:
        torch.manual_seed(0)
        self.loop, self.steps, self.mb_size = loop, 5 if short else 10, 2 if short else 8
        model = Transformer(64, 2) if short else Transformer(384, 6)
        n = self.steps * self.mb_size
        self.data = TensorDataset(torch.randn(n, 3, 96, 96), torch.randint(CLASSES, (n,)))
        self.model, self._begins = model, list[float]()
        model.register_forward_pre_hook(lambda *_: self._begins.append(time.perf_counter()))
        self.optimizer: Optimizer = (
            CoVON(model.named_parameters(), lr=1e-3, ess=50_000, batch_size=self.mb_size)
            if covon
            else AdamW(model.parameters(), lr=1e-4, fused=True)
        )

    def seconds(self) -> float:
        """Time of a step: the median over an epoch, without the first, which may allocate."""
        self._begins.clear()
        self.loop(self.model, self.optimizer, self.data, self.mb_size)
        between = [b - a for a, b in itertools.pairwise(self._begins)]
        if len(self._begins) != self.steps:
            raise RuntimeError(f"{self.steps} steps are one forward pass each: {self._begins}")
        return statistics.median(between[1:])


def measure(short: bool, rounds: int) -> list[dict[str, Any]]:
    """A row per loop, all loops in turns."""
    cases = {(name, covon): Case(LOOPS[name], covon, short) for name in LOOPS for covon in (0, 1)}
    timed: dict[str, list[tuple[float, float]]] = {name: [] for name in LOOPS}
    for number in range(rounds + 1):
        for name, found in timed.items():
            order = (0, 1) if number % 2 else (1, 0)
            pair = {covon: cases[name, covon].seconds() for covon in order}
            if number > 0:  # the first compiles, and begins before the first merge
                found.append((pair[0], pair[1]))
    return [
        {
            "loop": name,
            "adamw_seconds": round(statistics.median(a for a, _ in found), 6),
            "covon_seconds": round(statistics.median(c for _, c in found), 6),
            "ratio": round(statistics.median(c / a for a, c in found), 4),
            "rounds": rounds,
        }
        for name, found in timed.items()
    ]


def table(rows: list[dict[str, Any]]) -> str:
    """Milliseconds and ratio by loop."""
    frame = pd.DataFrame(rows)
    columns = {"loop": frame["loop"]}
    for name in ("AdamW", "CoVON"):
        seconds = frame[f"{name.lower()}_seconds"]
        columns[f"{name}, ms per step"] = (1000 * seconds).map("{:.1f}".format)
    columns["CoVON / AdamW"] = frame["ratio"].map("{:.3f}".format)
    return aligned(pd.DataFrame(columns))


def main() -> None:
    """Measure, store, write the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--short", action="store_true", help="a tiny network; stores nothing")
    parser.add_argument("--report", action="store_true", help="from the stored result only")
    parser.add_argument("--rounds", type=int, help="default 9, with --short 2")
    options = parser.parse_args()
    if not options.report:
        load = os.getloadavg()
        torch.set_num_threads(1)
        warnings.simplefilter("ignore")
        logging.disable(logging.WARNING)
        rows = measure(options.short, options.rounds or (2 if options.short else 9))
        if options.short:
            print(table(rows))
            return
        packages = {name: version(name) for name in PACKAGES}
        write_measurement(
            FILE, rows, script="benchmarks/loop_overhead.py", packages=packages, load_average=load
        )
    stored = json.loads(FILE.read_text(encoding="utf-8"))
    text = f"{table(stored['rows'])}\n\n{provenance(stored, 'one thread')}"
    replace_part(ROOT / "docs/loops.md", "benchmarks/loop_overhead.py", text)


if __name__ == "__main__":
    main()
