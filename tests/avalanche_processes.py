"""What two processes train with Avalanche in ``plugins/test_distributed_training.py``."""

import os
from pathlib import Path

import torch
import torch.distributed as dist
from avalanche.distributed import DistributedHelper
from avalanche.training.plugins import EvaluationPlugin
from torch.optim import SGD, AdamW
from toy_optimizers import make_covon, make_vcl
from toys import make_naive, make_strategy, toy_benchmark, toy_model

from covon_avalanche import EVCLPlugin, MergePlugin, SIPlugin
from covon_avalanche.evaluation import DomainMetrics
from covon_avalanche.merging import FisherMerge, RegMean

IMAGES = 50  # odd halves: the evaluation of one process repeats an image


def generator():
    return torch.Generator().manual_seed(5)


def covon(model, **options):
    return make_strategy(
        "covon",
        model,
        optimizer=make_covon(
            model.named_parameters(), generator=generator(), hess_approx="gradsq", batch_size=None
        ),
        **options,
    )


KINDS = {
    "covon": covon,
    "covon with RegMean": lambda model, **options: covon(model, merge=RegMean(), **options),
    "vcl": lambda model, **options: make_strategy(
        "vcl",
        model,
        optimizer=make_vcl(model.named_parameters(), generator=generator()),
        **options,
    ),
    "evcl": lambda model, **options: make_naive(
        model,
        make_vcl(model.named_parameters(), generator=generator()),
        EVCLPlugin(strength=0.1),
        **options,
    ),
    "ada-reg": lambda model, **options: make_strategy("ada-reg", model, **options),
    "ewc-star": lambda model, **options: make_strategy("ewc-star", model, **options),
    "si": lambda model, **options: make_naive(
        model, SGD(model.parameters(), lr=0.05), SIPlugin(0.1), **options
    ),
    "merged": lambda model, **options: make_naive(
        model, AdamW(model.parameters(), lr=0.01), MergePlugin(FisherMerge()), **options
    ),
}


def train(kind: str, world: int = 1) -> dict:
    """Weights and metrics after three domains; a step is by the whole domain."""
    benchmark = toy_benchmark(n=IMAGES)
    model, metrics = DistributedHelper.wrap_model(toy_model()), DomainMetrics()
    strategy = KINDS[kind](
        model,
        train_mb_size=IMAGES // world,
        train_epochs=4,
        evaluator=EvaluationPlugin(metrics, loggers=[]),
    )
    for experience in benchmark.train_stream:
        strategy.train(experience)
        strategy.eval(benchmark.test_stream)
    weights = {n.removeprefix("module."): p.detach() for n, p in model.named_parameters()}
    found = {"rows": metrics.matrix.rows, "counts": metrics.matrix.counts, "weights": weights}
    found["classes"] = list(metrics.class_accuracy.values())
    return found | {"nll": [part.nll for part in metrics.calibration[-1]]}


def work(rank: int, folder: str, kind: str) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    torch.save(train(kind, 2), Path(folder) / str(rank))
    dist.destroy_process_group()
