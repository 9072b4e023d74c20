"""Does CoVON's accuracy depend on the implementation? Permuted digits, 30 seeds.

    python benchmarks/implementations.py     # about 10 minutes

The ``covon`` of the recipe ``permuted-digits``. On a CPU all implementations draw the same noise
and differ in the order of additions. Results go to ``benchmarks/results/speed/accuracy.json``,
the table to ``docs/speed.md``.
"""

from __future__ import annotations

import warnings

import torch
from comparison import RESULTS, strategy_of, write_measurement
from speed_table import write_tables

from covon_avalanche.evaluation import DomainMetrics
from covon_avalanche.experiment.build import build_benchmark, build_model
from covon_avalanche.experiment.recipe import Recipe, load_recipe

IMPLEMENTATIONS = ("compiled", "foreach", "reference")
SEEDS = range(30)


def average_accuracy(recipe: Recipe, implementation: str, seed: int) -> float:
    """A_T on the test images."""
    benchmark = build_benchmark(recipe, seed=seed)
    torch.manual_seed(seed)
    model, metrics = build_model(recipe.model, benchmark), DomainMetrics()
    strategy = strategy_of(recipe.strategies["covon"], recipe, model, metrics)
    strategy.optimizer.implementation = implementation
    for experience in benchmark.train_stream:
        strategy.train(experience)
    strategy.eval(benchmark.test_stream)
    return metrics.matrix.average_accuracy()


def main() -> None:
    """Measure and report."""
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    recipe = load_recipe("permuted-digits")
    rows = [
        {"case": f"CoVON {name}", "a_t": [average_accuracy(recipe, name, seed) for seed in SEEDS]}
        for name in IMPLEMENTATIONS
    ]
    write_measurement(RESULTS / "speed/accuracy.json", rows, script="benchmarks/implementations.py")
    write_tables()


if __name__ == "__main__":
    main()
