"""Does it matter for the accuracy how CoVON's arithmetic is run? Permuted digits, 30 seeds.

    python benchmarks/implementations.py

CoVON with the settings of the recipe ``permuted-digits``, but a constant learning rate and one
``hess_init``, by each implementation that a CPU has: they draw the same noise and add up in another
order. Results go to ``benchmarks/results/speed/accuracy.json``, the table to ``docs/speed.md``.
"""

from __future__ import annotations

import json
import warnings

import torch
from avalanche.training.plugins import EvaluationPlugin
from speed import RESULTS, ROOT, machine
from speed_table import write_table

from covon_avalanche import CoVON, CoVONStrategy
from covon_avalanche.atomic_write import write_atomically
from covon_avalanche.evaluation import DomainMetrics
from covon_avalanche.experiment.build import build_benchmark, build_model
from covon_avalanche.experiment.recipe import load_recipe

IMPLEMENTATIONS = ("compiled", "eager", "foreach")
SEEDS = range(30)


def accuracy(implementation: str, seed: int) -> float:
    """A_T on the test images."""
    recipe = load_recipe("permuted-digits")
    settings = recipe.strategies["covon"]
    benchmark = build_benchmark(recipe, seed=seed)
    torch.manual_seed(seed)
    model = build_model(recipe.model, benchmark)
    optimizer = CoVON(
        model.named_parameters(),
        lr=settings.lr,
        ess=settings.ess,
        weight_decay=settings.weight_decay,
        hess_init=settings.hess_init,
        hess_approx=settings.hess_approx,
        gamma=settings.gamma,
        betas=(0.9, settings.beta2),
        clip_radius=settings.clip_radius,
        implementation=implementation,
    )
    metrics = DomainMetrics()
    strategy = CoVONStrategy(
        model=model,
        optimizer=optimizer,
        train_mb_size=recipe.train_mb_size,
        train_epochs=recipe.epochs,
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
        {"case": f"CoVON {name}", "a_t": [accuracy(name, seed) for seed in SEEDS]}
        for name in IMPLEMENTATIONS
    ]
    text = json.dumps({"machine": machine(), "rows": rows}, indent=1)
    write_atomically(RESULTS / "accuracy.json", text + "\n")
    write_table(RESULTS, ROOT / "docs/speed.md")


if __name__ == "__main__":
    main()
