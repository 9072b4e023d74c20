"""What metrics, checkpoints and messages cost: a run of a recipe against the bare strategy loop.

    python benchmarks/overhead.py --dataset-root DATA

Ratios of the seconds of whole runs on PermutedMNIST, interleaved, medians of the rounds; the bare
loop trains and evaluates the same strategy without any metric. Written to
``benchmarks/results/overhead.json``.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
import warnings
from pathlib import Path

import torch
from avalanche.training.plugins import EvaluationPlugin

from covon_avalanche import CoVON, CoVONStrategy
from covon_avalanche.experiment.atomic import write_atomically
from covon_avalanche.experiment.build import build_benchmark, build_model
from covon_avalanche.experiment.grid import Job, run_job
from covon_avalanche.experiment.machine import machine, versions
from covon_avalanche.experiment.recipe import Recipe

STORED = Path(__file__).parent / "results" / "overhead.json"
SETTINGS = {"ess": 1e5, "hess_init": 0.03, "gamma": 0.9, "beta2": 0.998, "clip_radius": 0.1}
RECIPE = {
    "name": "overhead",
    "title": "PermutedMNIST",
    "epochs": 5,
    "train_mb_size": 256,
    "final_lr_factor": 1.0,
    "seeds": [0],
    "stream": {"name": "PermutedMNIST", "n_experiences": 3, "validation_size": 10_000},
    "model": {"hidden_size": 100, "hidden_layers": 2},
    "strategies": {"covon": {"kind": "covon", "lr": 0.03, **SETTINGS}},
}


def bare(recipe: Recipe, root: str) -> float:
    """Seconds of the loop that a user of the strategy writes."""
    benchmark = build_benchmark(recipe, seed=0, dataset_root=root)
    torch.manual_seed(0)
    model = build_model(recipe.model, benchmark)
    options = dict(SETTINGS, betas=(0.9, SETTINGS["beta2"]), lr=0.03, hess_approx="reparam")
    del options["beta2"]
    strategy = CoVONStrategy(
        model=model,
        optimizer=CoVON(model.named_parameters(), **options),
        train_mb_size=recipe.train_mb_size,
        train_epochs=recipe.epochs,
        eval_mb_size=recipe.eval_mb_size,
        evaluator=EvaluationPlugin(),
    )
    start = time.perf_counter()
    for experience in benchmark.train_stream:
        strategy.train(experience)
        strategy.eval(benchmark.test_stream)
    return time.perf_counter() - start


def whole(recipe: Recipe, root: str) -> float:
    """Seconds of a run with everything, without building data and model, as above."""
    marks = []
    with tempfile.TemporaryDirectory() as folder:
        run_job(recipe, Job("covon", 0), Path(folder), root, {}, marks_of(marks))
        end = time.perf_counter()
    first = marks[0]
    return end - first


def marks_of(marks: list[float]):
    """Notes when the first epoch began, from its end and its seconds."""

    def notify(event) -> None:
        if event.epoch is not None and not marks:
            marks.append(time.perf_counter() - event.epoch.seconds)

    return notify


def main() -> None:
    """Measure."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dataset-root", required=True)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    recipe = Recipe.model_validate(RECIPE)
    bare(recipe, arguments.dataset_root)  # compiles
    rounds = []
    for _ in range(arguments.rounds):
        rounds.append((bare(recipe, arguments.dataset_root), whole(recipe, arguments.dataset_root)))
        print(rounds[-1], flush=True)
    ratio = statistics.median(w / b for b, w in rounds)
    found = {"script": "benchmarks/overhead.py", "ratio": ratio, "seconds": rounds}
    found |= {"recipe": RECIPE, "versions": versions(), "machine": machine()}
    write_atomically(STORED, json.dumps(found, indent=1) + "\n")
    print(f"a run takes {ratio:.3f} times the bare loop")


if __name__ == "__main__":
    main()
