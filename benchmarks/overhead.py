"""What metrics, checkpoints and messages cost: a run of a recipe against the bare strategy loop.

    python benchmarks/overhead.py --dataset-root DATA

Ratios of the seconds of whole runs on PermutedMNIST, interleaved, medians of the rounds. The
strategy loop trains and evaluates the same strategy without any metric; the tensor loop is plain
PyTorch with the same optimizer, network and batches' sizes. Written to
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
from covon_avalanche.atomic_write import write_atomically
from covon_avalanche.experiment.build import build_benchmark, build_model
from covon_avalanche.experiment.machine import machine, versions
from covon_avalanche.experiment.recipe import Recipe
from covon_avalanche.experiment.run import run_in_folder
from covon_avalanche.experiment.run_folder import RunFolder
from covon_avalanche.experiment.run_options import RunOptions

STORED = Path(__file__).parent / "results" / "overhead.json"
SETTINGS = {
    "ess": 1e5,
    "hess_init": 0.03,
    "hess_approx": "reparam",
    "gamma": 0.9,
    "beta2": 0.998,
    "clip_radius": 0.1,
}
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


def optimizer_of(model: torch.nn.Module) -> CoVON:
    """As the recipe has it."""
    options = dict(SETTINGS, betas=(0.9, SETTINGS["beta2"]), lr=0.03)
    del options["beta2"]
    return CoVON(model.named_parameters(), **options)


def columns(dataset) -> tuple[torch.Tensor, torch.Tensor]:
    """All images, flat, and labels."""
    rows = [dataset[i] for i in range(len(dataset))]
    return torch.stack([row[0].flatten() for row in rows]), torch.tensor([row[1] for row in rows])


def tensor_loop(recipe: Recipe, root: str) -> float:
    """Seconds without Avalanche, on tensors that are there."""
    benchmark = build_benchmark(recipe, seed=0, dataset_root=root)
    train = [columns(e.dataset.train()) for e in benchmark.train_stream]
    test = [columns(e.dataset.eval()) for e in benchmark.test_stream]
    torch.manual_seed(0)
    model = build_model(recipe.model, benchmark)
    optimizer, criterion = optimizer_of(model), torch.nn.CrossEntropyLoss()
    start = time.perf_counter()
    for x, y in train:
        for _ in range(recipe.epochs):
            for rows in torch.randperm(len(y)).split(recipe.train_mb_size):
                batch, targets = x.index_select(0, rows), y.index_select(0, rows)
                with optimizer.sampled_params():
                    optimizer.zero_grad()
                    criterion(model(batch), targets).backward()
                optimizer.step()
        optimizer.consolidate()
        with torch.no_grad():
            for images, labels in test:
                parts = zip(images.split(1024), labels.split(1024), strict=True)
                sum((model(part).argmax(1) == truth).sum().item() for part, truth in parts)
    return time.perf_counter() - start


def bare(recipe: Recipe, root: str) -> float:
    """Seconds of the loop that a user of the strategy writes."""
    benchmark = build_benchmark(recipe, seed=0, dataset_root=root)
    torch.manual_seed(0)
    model = build_model(recipe.model, benchmark)
    strategy = CoVONStrategy(
        model=model,
        optimizer=optimizer_of(model),
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
        RunFolder.write_status = noting(RunFolder.write_status, marks)
        run_in_folder(recipe, "covon", 0, Path(folder), RunOptions(dataset_root=Path(root)))
        end = time.perf_counter()
    first = marks[0]
    return end - first


def noting(write_status, marks: list[float]):
    """Notes when the first epoch began, from its end and its seconds."""

    def noted(self, status) -> None:
        marks.append(time.perf_counter() - status.epoch.seconds)
        write_status(self, status)

    return noted


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
        loops = {"run": whole, "strategy loop": bare, "tensor loop": tensor_loop}
        rounds.append({name: loop(recipe, arguments.dataset_root) for name, loop in loops.items()})
        print(rounds[-1], flush=True)
    ratios = {
        name: statistics.median(seconds["run"] / seconds[name] for seconds in rounds)
        for name in ("strategy loop", "tensor loop")
    }
    found = {"script": "benchmarks/overhead.py", "run / loop": ratios, "seconds": rounds}
    found |= {"recipe": RECIPE, "versions": versions(), "machine": machine()}
    write_atomically(STORED, json.dumps(found, indent=1) + "\n")
    for name, ratio in ratios.items():
        print(f"a run takes {ratio:.3f} times the {name}")


if __name__ == "__main__":
    main()
