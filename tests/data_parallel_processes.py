"""What two processes run in ``experiment/test_data_parallel.py``; they import it by name."""

import os
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from small_recipes import FEW, OFTEN, STRATEGIES, small_recipe

from covon_avalanche.experiment.recipe import Recipe
from covon_avalanche.experiment.run import join_run, run_in_folder
from covon_avalanche.experiment.run_options import RunOptions

KINDS = {
    **{name: STRATEGIES[name] for name in ("covon", "covon-gradsq", "finetune", "vcl", "evcl")},
    **{name: STRATEGIES[name] for name in ("ewc-star", "ada-reg", "si", "ewc", "lwf", "mas")},
    **{name: STRATEGIES[name] for name in ("upgd", "slca", "ncm", "ridge", "ranpac", "layup")},
    **{name: STRATEGIES[name] for name in ("td-vcl", "duct")},
    "two-samples": {**STRATEGIES["covon-gradsq"], "mc_samples": 2},
    "regmean": {**STRATEGIES["covon-gradsq"], "merge": "regmean", "input_anchor": 0.1},
    "fisher": {**STRATEGIES["finetune"], "merge": "fisher"},
}
RESUMED = {"resumed": STRATEGIES["covon-gradsq"]}


def recipe() -> Recipe:
    """Two domains of 207 images, whose last batch has one: a process has no share of it."""
    stream = {**FEW, "validation_size": 1230}
    sizes = {"train_mb_size": 103, "eval_mb_size": 100, "epochs": 2, "posterior_samples": 2}
    return small_recipe(KINDS | RESUMED, stream=stream, **sizes)


def work(rank: int, folder: str) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    options = RunOptions(processes=2, checkpoint_seconds=OFTEN.checkpoint_seconds)
    for name in KINDS | RESUMED:
        run = run_in_folder if rank == 0 else join_run
        run(recipe(), name, 0, Path(folder), options)
    dist.destroy_process_group()
