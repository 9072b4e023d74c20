"""What two processes run in ``experiment/test_data_parallel.py``; they import it by name."""

import os
import warnings
from functools import cache
from pathlib import Path

import torch
import torch.distributed as dist
from small_recipes import FEW, OFTEN, STRATEGIES, small_recipe
from toy_vits import add_tiny_clip

from covon_avalanche import streams
from covon_avalanche.experiment.recipe import Recipe
from covon_avalanche.experiment.run import train_in_folder
from covon_avalanche.experiment.run_folder import RunFolder
from covon_avalanche.experiment.run_options import RunOptions
from covon_avalanche.streams.transforms import image_transforms

KINDS = {
    **{name: own for name, own in STRATEGIES.items() if name not in ("covon-nom", "ema", "cofima")},
    "custom": {
        "kind": "custom",
        "lr": 0.01,
        "implementation": "avalanche.training.plugins:ReplayPlugin",
        "arguments": {"mem_size": 100},
    },
    "custom-strategy": {
        "kind": "custom",
        "lr": 0.01,
        "implementation": "avalanche_processes:ParallelNaive",
    },
    "two-samples": {**STRATEGIES["covon-gradsq"], "mc_samples": 2},
    "regmean": {**STRATEGIES["covon-gradsq"], "merge": "regmean"},
    "kfac": {**STRATEGIES["finetune"], "merge": "kfac"},
    "fisher": {**STRATEGIES["finetune"], "merge": "fisher"},
}
RESUMED = {"resumed": STRATEGIES["covon-gradsq"]}
VIT = {
    **{kind: {"kind": kind, "lr": 0.01} for kind in ("l2p", "dualprompt", "s-iprompts", "pina")},
    "coda-p": {"kind": "coda-p", "lr": 0.01, "pool": 8},
    "soyo": {"kind": "soyo", "lr": 0.01},
    "covon-adapter": {**STRATEGIES["covon"], "tuning": "adapter"},
    "finetune-prompt": {**STRATEGIES["finetune"], "tuning": "prompt"},
    # Standardised features have larger ridges, which do not amplify rounding.
    "ranpac-adapter": {"kind": "ranpac", "projection": 50, "adapter": 4, "standardize": True},
}
CLIP = {kind: {"kind": kind, "lr": 0.01} for kind in ("s-liprompts", "s-liprompts-mixture", "hedp")}


def recipe() -> Recipe:
    """Two domains of 207 images, whose last batch has one: a process has no share of it."""
    stream = {**FEW, "validation_size": 1230}
    sizes = {"train_mb_size": 103, "eval_mb_size": 100, "epochs": 2, "posterior_samples": 2}
    return small_recipe(KINDS | RESUMED, stream=stream, **sizes)


def image_recipe(strategies: dict, backbone: str) -> Recipe:
    """Two domains of 21 images, whose last batch has one."""
    return small_recipe(
        strategies,
        stream={"name": "PACS", "domains": ["sketch", "photo"], "image_size": 32, "limit": 3},
        model={"backbone": backbone, "weights": ""},
        train_mb_size=5,
        epochs=1,
    )


def recipes(folder: Path) -> dict[str, Recipe]:
    """The recipe of each strategy; some need ``PACS`` in the folder."""
    vit, clip = image_recipe(VIT, "timm/test_vit"), image_recipe(CLIP, add_tiny_clip(folder))
    parts = ((KINDS | RESUMED, recipe()), (VIT, vit), (CLIP, clip))
    return {name: own for names, own in parts for name in names}


def plain_transforms(*args, **options):
    """In place of the default ones."""
    _, plain = image_transforms(*args, **options)
    return plain, plain


def remove_randomness(set_attribute=setattr) -> None:
    """Replace dropout and random transforms, which differ between processes."""
    set_attribute(torch.nn.Dropout, "forward", lambda self, x: x)
    set_attribute(streams, "image_transforms", plain_transforms)


def work(rank: int, folder: str) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    remove_randomness()
    streams.PermutedDigits = cache(streams.PermutedDigits)  # runs share their data
    path, often = Path(folder), OFTEN.checkpoint_seconds
    options = RunOptions(path, processes=2, checkpoint_seconds=often)
    for name, own in recipes(path).items():
        run = RunFolder(path, own, name, 0)
        run.path.mkdir(parents=True, exist_ok=True)
        result = train_in_folder(run, options)
        if rank == 0:
            run.write_result(result)
    dist.destroy_process_group()
