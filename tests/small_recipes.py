"""Recipes that run in a moment: all kinds of strategies on a few domains of digits."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

from covon_avalanche.experiment.recipe import Recipe, load_recipe, recipe_text
from covon_avalanche.experiment.result import EvaluatedOn, Result
from covon_avalanche.experiment.run_folder import RunFolder
from covon_avalanche.experiment.run_options import RunOptions

FEW = {"name": "PermutedDigits", "n_experiences": 2, "validation_size": 1237}
"""Two domains of 200 images."""
PACS = {"name": "PACS", "domains": ["sketch", "photo"], "image_size": 32}
"""Of which ``miniature.pacs`` makes the files."""
NETWORK = {"backbone": "squeezenet", "weights": ""}

NEWTON = dict(kind="covon", lr=0.1, ess=1437.0, hess_init=0.05, later_hess_init=0.05)
NEWTON |= dict(beta2=0.99, hess_approx="reparam")
BAYES = dict(lr=0.01, ess=1437.0, std_init=0.01, weight_decay=1e-4)
ALIGNED = dict(kind="finetune", lr=0.1, align_classifier=True)
STRATEGIES = {
    "finetune": dict(kind="finetune", lr=0.01),
    "ewc": dict(kind="ewc", lr=0.01, ewc_lambda=1.0),
    "ewc-star": dict(kind="ewc-star", lr=0.01, strength=1.0),
    "ada-reg": dict(kind="ada-reg", lr=0.01, strength=10.0),
    "lwf": dict(kind="lwf", lr=0.01, alpha=1.0),
    "mas": dict(kind="mas", lr=0.01, mas_lambda=1.0),
    "rwalk": dict(kind="rwalk", lr=0.01, rwalk_lambda=0.1, delta_t=2),
    "avalanche-ewc": dict(kind="avalanche-ewc", lr=0.01, ewc_lambda=1.0),
    "avalanche-lwf": dict(kind="avalanche-lwf", lr=0.01, alpha=1.0),
    "avalanche-si": dict(kind="avalanche-si", lr=0.01, si_lambda=10.0),
    "avalanche-mas": dict(kind="avalanche-mas", lr=0.01, lambda_reg=1.0),
    "avalanche-rwalk": dict(kind="avalanche-rwalk", lr=0.01, ewc_lambda=0.1, delta_t=2),
    "replay": dict(kind="replay", lr=0.01, mem_size=100),
    "der": dict(kind="der", lr=0.01, mem_size=100, batch_size_mem=16),
    "er-ace": dict(kind="er-ace", lr=0.01, mem_size=100),
    "icarl": dict(kind="icarl", lr=0.01, mem_size=40),
    "gem": dict(kind="gem", lr=0.1, patterns_per_exp=20, optimizer="sgd", momentum=0.9),
    "agem": dict(kind="agem", lr=0.1, patterns_per_exp=20, optimizer="sgd"),
    "cumulative": dict(kind="cumulative", lr=0.01),
    "custom": dict(kind="custom", lr=0.01, implementation="avalanche.training.supervised:Naive"),
    "si": dict(kind="si", lr=0.01, si_lambda=10.0),
    "upgd": dict(kind="upgd", lr=0.1, sigma=0.01),
    "vcl": dict(kind="vcl", **BAYES),
    "evcl": dict(kind="evcl", strength=1.0, **BAYES),
    "td-vcl": dict(kind="td-vcl", n_steps=3, decay=0.5, replay_examples=20, **BAYES),
    "covon-nom": dict(**NEWTON, clip_radius=0.1, gamma=1.0, weight_decay=1e-4),
    "covon": dict(**NEWTON, clip_radius=0.1, gamma=0.9, weight_decay=1e-4),
    "covon-gradsq": NEWTON
    | dict(later_hess_init=None, hess_approx="gradsq", clip_radius=0.1)
    | dict(gamma=1.0, gamma_precision=2.0, weight_decay=1e-4),
    "covon-finetune": dict(kind="covon", preset="finetune", lr=0.01),
    "covon-small": dict(kind="covon", preset="perceptron", lr=0.01),
    "ema": dict(**NEWTON, clip_radius=0.1, gamma=0.9, weight_decay=1e-4, merge="ema"),
    "joint": dict(kind="joint", lr=0.01),
    "duct": dict(kind="duct"),
    "slca": dict(kind="slca", merge="ema"),
    "aligned": ALIGNED | dict(optimizer="sgd", momentum=0.9, backbone_lr_factor=0.1),
    "cofima": ALIGNED | dict(lr=0.01, merge={"rule": "cofima", "gamma": 0.4}),
}
CLOSED_FORM = {
    "ncm": dict(kind="ncm"),
    "ridge": dict(kind="ridge"),
    "ranpac": dict(kind="ranpac", projection=50),
    "layup": dict(kind="layup", blocks=None),
}
STRATEGIES |= CLOSED_FORM


def small_recipe(strategies: dict[str, dict[str, Any]], **changes: Any) -> Recipe:
    """Two domains, a network of 32 units."""
    data = load_recipe("permuted-digits").model_dump()
    data |= {
        "stream": {"name": "PermutedDigits", "n_experiences": 2},
        "model": {"hidden_size": 32, "hidden_layers": 1},
        "strategies": strategies,
        **changes,
    }
    return Recipe.model_validate(data)


def short_recipe(name: str, **changes: Any) -> Recipe:
    """One strategy, two epochs of four batches in each domain."""
    changes = {"epochs": 2, "train_mb_size": 64, "stream": FEW} | changes
    return small_recipe({name: STRATEGIES[name]}, **changes)


def saved(recipe: Recipe, folder: Path) -> Path:
    """The recipe as a file."""
    file = folder / "tiny.toml"
    file.write_text(recipe_text(recipe), encoding="utf-8")
    return file


def run_strategy(
    recipe: Recipe,
    strategy: str,
    seed: int,
    dataset_root: Path | None = None,
    *,
    stream: EvaluatedOn = "test",
) -> Result:
    """The result of a run with Avalanche's own training loop, which stores no checkpoints."""
    from covon_avalanche.experiment.resumable import Checkpointer, Resumable
    from covon_avalanche.experiment.run import Run

    never = property(lambda self: None, lambda self, checkpointer: None)
    with (
        TemporaryDirectory() as path,
        patch.object(Resumable, "checkpointer", never),
        patch.object(Checkpointer, "end_experience", lambda self: None),
    ):
        folder = RunFolder(Path(path), recipe, strategy, seed, dataset_root)
        folder.evaluated_on = stream
        return Run(folder, RunOptions()).finish()


def reproducible(result: Result) -> dict[str, Any]:
    """The part of a result that repeats: without times, memory, versions and machine."""
    other = {"train_seconds", "peak_memory", "resumed", "versions", "machine"}
    data = result.model_dump(exclude=other)
    for epoch in data["epochs"]:
        del epoch["seconds"]
    return data
