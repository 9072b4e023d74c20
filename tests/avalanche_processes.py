"""What two processes train with Avalanche in ``plugins/test_distributed_training.py``."""

import os
import random
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from avalanche.distributed import DistributedHelper
from avalanche.training import Naive
from avalanche.training.plugins import AGEMPlugin, EvaluationPlugin, GEMPlugin, ReplayPlugin
from avalanche.training.plugins import SupervisedPlugin as NoPlugin
from toy_optimizers import make_covon, make_vcl
from toy_vits import toy_image_benchmark, toy_vit
from toys import adamw, make_naive, make_strategy, sgd, toy_benchmark, toy_model

from covon_avalanche import CoVONPlugin, EVCLPlugin, MergePlugin, SIPlugin
from covon_avalanche.closed_form import (
    ClosedFormModel,
    FeatureExtractor,
    NearestClassMean,
    RidgeClassifier,
)
from covon_avalanche.data_loading import DataParallel
from covon_avalanche.evaluation import DomainMetrics
from covon_avalanche.merging import DUCT, FisherMerge, RegMean
from covon_avalanche.plugins import (
    AvalancheRWalkPlugin,
    AvalancheSIPlugin,
    ClassifierAlignmentPlugin,
    ClosedFormPlugin,
    DERPlugin,
    DUCTPlugin,
    EWCPlugin,
    ICaRLPlugin,
    LwFPlugin,
    MASPlugin,
    PromptPlugin,
    RWalkPlugin,
)
from covon_avalanche.prompting import L2P, CODAPrompt, SPrompts
from covon_avalanche.strategies import ERACEStrategy

IMAGES = 50  # odd halves: the evaluation of one process repeats an image


def covon(model):
    options = {"hess_approx": "gradsq", "batch_size": None}
    return make_covon(model.named_parameters(), seed=5, **options)


def vcl(model):
    return make_vcl(model.named_parameters(), seed=5)


def naive(optimizer, plugin):
    """Makes fine-tuning with a plugin."""
    return lambda model, **options: make_naive(model, optimizer(model), plugin(), **options)


KINDS = {
    "covon": lambda model, **options: make_strategy(
        "covon", model, optimizer=covon(model), **options
    ),
    "covon with RegMean": naive(covon, lambda: CoVONPlugin(merge=RegMean())),
    "vcl": lambda model, **options: make_strategy("vcl", model, optimizer=vcl(model), **options),
    "evcl": naive(vcl, lambda: EVCLPlugin(strength=0.1)),
    "ada-reg": partial(make_strategy, "ada-reg"),
    "ewc-star": partial(make_strategy, "ewc-star"),
    "ewc": naive(sgd, lambda: EWCPlugin(1.0)),
    "lwf": naive(sgd, lambda: LwFPlugin(1.0)),
    "mas": naive(sgd, lambda: MASPlugin(0.01)),
    "si": naive(sgd, lambda: SIPlugin(0.1)),
    "avalanche-si": naive(sgd, lambda: AvalancheSIPlugin(0.1)),
    "merged": naive(adamw, lambda: MergePlugin(FisherMerge())),
}


def closed_form(head):
    return ClosedFormModel(FeatureExtractor(toy_model()), head)


MIXED = {
    "ncm": (lambda: closed_form(NearestClassMean(10, 4)), ClosedFormPlugin),
    "ridge": (lambda: closed_form(RidgeClassifier(10, 4)), ClosedFormPlugin),
    "ranpac": (lambda: closed_form(RidgeClassifier(10, 4, projection=20)), ClosedFormPlugin),
    "alignment": (toy_model, lambda: ClassifierAlignmentPlugin(samples=8)),
    "duct": (lambda: DUCT(toy_model(), 4, 3), DUCTPlugin),
    "icarl": (toy_model, lambda: ICaRLPlugin(8)),
    "replay": (toy_model, lambda: ReplayPlugin(20)),
    "gem": (toy_model, lambda: GEMPlugin(15, 0.5)),
    "er-ace": (toy_model, NoPlugin),
    "der": (toy_model, lambda: DERPlugin(20, 7)),
    "agem": (toy_model, lambda: AGEMPlugin(15, 12)),
    "rwalk": (toy_model, lambda: RWalkPlugin(0.1, delta_t=2)),
    "mixed si": (toy_model, lambda: SIPlugin(0.1)),
    "avalanche-rwalk": (toy_model, lambda: AvalancheRWalkPlugin(delta_t=2)),
    "s-prompts": (lambda: SPrompts(toy_vit(), 3), PromptPlugin),
    "l2p": (lambda: L2P(toy_vit(), 3), PromptPlugin),
    "coda-p": (lambda: CODAPrompt(toy_vit(), 3, pool=9, layers=(0, 1)), PromptPlugin),
}
"""Their models cannot be wrapped once and for all: what is trained changes, or nothing is."""


class ParallelNaive(DataParallel, Naive):
    """Fine-tuning, whose batches are those of all processes."""


class ParallelERACE(DataParallel, ERACEStrategy):
    """ER-ACE, whose batches are those of all processes."""


def train(kind: str, world: int = 1, device: str = "cpu", parallel: bool = False) -> dict:
    """Weights and metrics after three domains; a step is by the whole domain.

    :param parallel: mix in ``DataParallel`` in one process, too.
    """
    torch.backends.cudnn.allow_tf32 = False  # its rounding depends on the batch
    metrics = DomainMetrics()
    options = {"train_epochs": 4, "evaluator": EvaluationPlugin(metrics, loggers=[])}
    options["device"] = device
    if kind in KINDS:
        model = DistributedHelper.wrap_model(toy_model().to(device))
        strategy = KINDS[kind](model, train_mb_size=IMAGES // world, **options)
    else:
        make, plugin = MIXED[kind]
        model = make().to(device)
        classes, options["train_mb_size"] = (Naive, ParallelNaive), IMAGES
        if kind == "er-ace":  # shares have other classes, and one has no image of the last batch
            classes, options["train_mb_size"] = (ERACEStrategy, ParallelERACE), 7
            options |= {"mem_size": 20, "batch_size_mem": 8}
        strategy = make_naive(
            model, sgd(model), plugin(), cls=classes[parallel or world > 1], **options
        )
    images = "prompt" in kind or kind in ("l2p", "coda-p")
    benchmark = toy_image_benchmark(n=IMAGES) if images else toy_benchmark(n=IMAGES)
    for experience in benchmark.train_stream:
        torch.manual_seed(1)
        random.seed(1)  # A-GEM chooses its memory with it
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
    for kind in (*KINDS, *MIXED):
        torch.save(train(kind, 2, device), Path(folder) / f"{kind} {rank}")
    dist.destroy_process_group()
