"""What two processes train with Avalanche in ``plugins/test_distributed_training.py``."""

import os
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from avalanche.distributed import DistributedHelper
from avalanche.training.plugins import EvaluationPlugin
from toy_optimizers import make_covon, make_vcl
from toys import Watch, adamw, make_naive, make_strategy, sgd, toy_benchmark, toy_model

from covon_avalanche import CoVONPlugin, EVCLPlugin, MergePlugin, TDVCLPlugin, plugins
from covon_avalanche.evaluation import DomainMetrics
from covon_avalanche.merging import FisherMerge, RegMean

IMAGES = 50  # odd halves: the evaluation of one process repeats an image


def covon(model):
    options = {"hess_approx": "gradsq", "batch_size": None}
    return make_covon(model.named_parameters(), seed=5, **options)


def vcl(model):
    return make_vcl(model.named_parameters(), seed=5)


def naive(optimizer, *own):
    """Makes fine-tuning with plugins."""
    return lambda model, **options: make_naive(
        model, optimizer(model), *(plugin() for plugin in own), **options
    )


def seeds():
    """Lets any number of processes choose the same stored examples."""

    def seed(strategy):
        torch.manual_seed(strategy.clock.train_iterations)

    return Watch(before_backward=seed, after_training_exp=seed)


def schedule():
    return plugins.SchedulePlugin([{"lr": 0.1}, {}, {"lr": 0.02, "epochs": 2}])


KINDS = {
    "covon": lambda model, **options: make_strategy(
        "covon", model, optimizer=covon(model), **options
    ),
    "covon with RegMean": naive(covon, lambda: CoVONPlugin(merge=RegMean())),
    "vcl": lambda model, **options: make_strategy("vcl", model, optimizer=vcl(model), **options),
    "td-vcl": naive(vcl, seeds, TDVCLPlugin),
    "evcl": naive(vcl, lambda: EVCLPlugin(strength=0.1)),
    "ada-reg": partial(make_strategy, "ada-reg"),
    "ewc-star": partial(make_strategy, "ewc-star"),
    "ewc": naive(sgd, lambda: plugins.EWCPlugin(1.0)),
    "lwf": naive(sgd, lambda: plugins.LwFPlugin(1.0)),
    "mas": naive(sgd, lambda: plugins.MASPlugin(0.01)),
    "rwalk": naive(sgd, lambda: plugins.RWalkPlugin(0.1, delta_t=2)),
    "si": naive(sgd, lambda: plugins.SIPlugin(0.1)),
    "avalanche-si": naive(sgd, lambda: plugins.AvalancheSIPlugin(0.1)),
    "scheduled": naive(sgd, schedule),
    "merged": naive(adamw, lambda: MergePlugin(FisherMerge())),
}


def train(kind: str, world: int = 1, device: str = "cpu") -> dict:
    """Weights and metrics after three domains; a step is by the whole domain."""
    torch.backends.cudnn.allow_tf32 = False  # its rounding depends on the batch
    metrics = DomainMetrics()
    options = {"train_epochs": 4, "evaluator": EvaluationPlugin(metrics, loggers=[])}
    model = DistributedHelper.wrap_model(toy_model().to(device))
    strategy = KINDS[kind](model, train_mb_size=IMAGES // world, device=device, **options)
    benchmark = toy_benchmark(n=IMAGES)
    for experience in benchmark.train_stream:
        torch.manual_seed(1)
        strategy.train(experience)
        strategy.eval(benchmark.test_stream)
    weights = {n.removeprefix("module."): p.detach().cpu() for n, p in model.named_parameters()}
    found = {"rows": metrics.matrix.rows, "counts": metrics.matrix.counts, "weights": weights}
    found["classes"] = list(metrics.class_accuracy.values())
    return found | {"nll": [part.nll for part in metrics.calibration[-1]]}


def work(rank: int, folder: str, device: str) -> None:
    """On the CPU with gloo, or on two GPUs with NCCL."""
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    backend = "gloo"
    if device == "cuda":  # as DistributedHelper.init_distributed does
        backend, DistributedHelper.use_cuda = "nccl", True
        torch.cuda.set_device(rank)
    dist.init_process_group(backend, init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    for kind in KINDS:
        torch.save(train(kind, 2, device), Path(folder) / f"{kind} {rank}")
    dist.destroy_process_group()
