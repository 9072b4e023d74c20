"""What metrics, checkpoints and status files cost: a run of a recipe against bare loops.

    python benchmarks/overhead.py --dataset-root DATA     # 5 minutes; results/overhead.json

Three domains of PermutedMNIST, five epochs each. The strategy loop trains and evaluates the same
strategy without metrics; the tensor loop is plain PyTorch with the same optimizer, network and
batch sizes. They take turns; ratios are medians of those within a round. Building data and model is
not counted.
"""

from __future__ import annotations

import argparse
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from avalanche.benchmarks import CLScenario
from avalanche.training.plugins import EvaluationPlugin
from comparison import RESULTS, tensors_of, write_measurement
from torch import nn

from covon_avalanche.experiment.build import build_benchmark, build_model, build_strategy
from covon_avalanche.experiment.epoch_log import EpochLog
from covon_avalanche.experiment.recipe import Recipe, load_recipe
from covon_avalanche.experiment.run import run_in_folder
from covon_avalanche.experiment.run_options import RunOptions

SHORTER = ("epochs=5", "stream.n_experiences=3", "final_lr_factor=1.0")


def build(recipe: Recipe, root: Path) -> tuple[CLScenario, nn.Module]:
    """Data and model."""
    benchmark = build_benchmark(recipe, seed=0, dataset_root=root)
    torch.manual_seed(0)
    return benchmark, build_model(recipe.model, benchmark)


def run(recipe: Recipe, root: Path) -> float:
    """Seconds of a run in a folder, without what building takes."""
    start = time.perf_counter()
    build(recipe, root)
    built = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        run_in_folder(recipe, "covon", 0, Path(folder), RunOptions(dataset_root=root))
    return time.perf_counter() - built - (built - start)


def strategy_loop(recipe: Recipe, root: Path) -> float:
    """Seconds of the loop that a user of the strategy writes."""
    benchmark, model = build(recipe, root)
    settings = recipe.strategies["covon"]
    strategy = build_strategy(settings, recipe, model, EvaluationPlugin(), EpochLog())
    start = time.perf_counter()
    for experience in benchmark.train_stream:
        strategy.train(experience)
        strategy.eval(benchmark.test_stream)
    return time.perf_counter() - start


def tensor_loop(recipe: Recipe, root: Path) -> float:
    """Seconds without Avalanche, with all images in memory."""
    benchmark, model = build(recipe, root)
    train = [tensors_of(e.dataset.train()) for e in benchmark.train_stream]
    test = [tensors_of(e.dataset.eval()) for e in benchmark.test_stream]
    optimizer: Any = recipe.strategies["covon"].make_optimizer(model)
    start = time.perf_counter()
    for x, y in train:
        for _ in range(recipe.epochs):
            for rows in torch.randperm(len(y)).split(recipe.train_mb_size):
                with optimizer.sampled_params():
                    optimizer.zero_grad()
                    nn.functional.cross_entropy(model(x[rows]), y[rows]).backward()
                optimizer.step()
        optimizer.consolidate()
        with torch.no_grad():
            for images, labels in test:
                for part, truth in zip(images.split(1024), labels.split(1024), strict=True):
                    (model(part).argmax(1) == truth).sum().item()
    return time.perf_counter() - start


LOOPS = {"run": run, "strategy loop": strategy_loop, "tensor loop": tensor_loop}


def main() -> None:
    """Measure."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dataset-root", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    recipe = load_recipe("permuted-mnist-hard", SHORTER)
    strategy_loop(load_recipe("permuted-mnist-hard", [*SHORTER, "epochs=1"]), given.dataset_root)
    rows = []
    for _ in range(given.rounds):
        rows.append({name: loop(recipe, given.dataset_root) for name, loop in LOOPS.items()})
        print(rows[-1], flush=True)
    seconds = pd.DataFrame(rows)
    ratios = (1 / seconds.div(seconds["run"], axis=0)).median().drop("run").to_dict()
    print("run / loop:", ratios)
    about = {"script": "benchmarks/overhead.py", "run / loop": ratios, "changes": SHORTER}
    write_measurement(RESULTS / "overhead.json", rows, **about)


if __name__ == "__main__":
    main()
