"""Does CoVON's accuracy depend on the implementation? Permuted digits, 30 seeds.

    python benchmarks/implementations.py     # about 10 minutes

CoVON with the settings of the recipe ``permuted-digits``, but a constant learning rate and one
``hess_init``. On a CPU all implementations draw the same noise and differ in the order of
additions. Results go to ``benchmarks/results/speed/accuracy.json``, the table to
``docs/speed.md``.
"""

from __future__ import annotations

import warnings

import torch
from avalanche.training.plugins import EvaluationPlugin
from comparison import RESULTS, write_measurement
from speed_table import write_tables

from covon_avalanche import CoVON, CoVONStrategy
from covon_avalanche.evaluation import DomainMetrics
from covon_avalanche.experiment.build import build_benchmark, build_model
from covon_avalanche.experiment.recipe import load_recipe

IMPLEMENTATIONS = ("compiled", "foreach", "reference")
SEEDS = range(30)


def average_accuracy(implementation: str, seed: int, epochs: int | None = None) -> float:
    """A_T on the test images.

    :param epochs: per domain, instead of the recipe's.
    """
    recipe = load_recipe("permuted-digits")
    settings = recipe.strategies["covon"]
    benchmark = build_benchmark(recipe, seed=seed)
    torch.manual_seed(seed)
    model = build_model(recipe.model, benchmark)
    optimizer = CoVON(
        model.named_parameters(),
        **settings.only("lr", "ess", "weight_decay", "hess_init", "hess_approx", "gamma"),
        betas=(0.9, settings.beta2),
        clip_radius=settings.clip_radius,
        implementation=implementation,
    )
    metrics = DomainMetrics()
    strategy = CoVONStrategy(
        model=model,
        optimizer=optimizer,
        train_mb_size=recipe.train_mb_size,
        train_epochs=epochs or recipe.epochs,
        eval_mb_size=recipe.eval_mb_size,
        evaluator=EvaluationPlugin(metrics, loggers=[]),
    )
    for experience in benchmark.train_stream:
        strategy.train(experience)
    strategy.eval(benchmark.test_stream)
    return metrics.matrix.average_accuracy()


def main() -> None:
    """Measure and report."""
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    rows = [
        {"case": f"CoVON {name}", "a_t": [average_accuracy(name, seed) for seed in SEEDS]}
        for name in IMPLEMENTATIONS
    ]
    write_measurement(RESULTS / "speed/accuracy.json", rows, script="benchmarks/implementations.py")
    write_tables()


if __name__ == "__main__":
    main()
