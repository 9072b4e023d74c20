"""How often CoVON's Hessian estimate is negative, and how close its precision comes to zero.

    python benchmarks/negative_hessian.py     writes benchmarks/results/negative-hessian.json

The ``permuted-digits`` recipe's CoVON, seed 0, looked at after every step.
"""

from __future__ import annotations

import json
import platform
from pathlib import Path
from typing import Any

import torch
from avalanche.training.plugins import EvaluationPlugin, SupervisedPlugin

from covon_avalanche.atomic_write import write_atomically
from covon_avalanche.evaluation import DomainMetrics
from covon_avalanche.experiment.build import build_benchmark, build_model, build_strategy
from covon_avalanche.experiment.epoch_log import EpochLog
from covon_avalanche.experiment.recipe import load_recipe

FILE = Path(__file__).parent / "results" / "negative-hessian.json"


class Watch(SupervisedPlugin):
    """Counts after each update."""

    def __init__(self) -> None:
        super().__init__()
        self.negative, self.entries, self.smallest = 0, 0, float("inf")

    def after_update(self, strategy: Any, **kwargs: Any) -> None:
        """Look at all parameters."""
        for group in strategy.optimizer.param_groups:
            for p in group["params"]:
                state = strategy.optimizer.state[p]
                prior = state.get("prior_precision", group["ess"] * group["weight_decay"])
                relative = (state["hess"] + prior / group["ess"]) / group["hess_init"]
                self.negative += int((state["hess"] < 0).sum())
                self.entries += p.numel()
                self.smallest = min(self.smallest, relative.min().item())


def main() -> None:
    """Train once."""
    torch.set_num_threads(1)
    recipe = load_recipe("permuted-digits")
    benchmark = build_benchmark(recipe, seed=0)
    torch.manual_seed(0)
    model = build_model(recipe.model, benchmark)
    strategy = build_strategy(
        recipe.strategies["covon"], recipe, model, EvaluationPlugin(DomainMetrics()), EpochLog()
    )
    rows = []
    for experience in benchmark.train_stream:
        watch = Watch()
        strategy.plugins.append(watch)
        strategy.train(experience)
        strategy.plugins.remove(watch)
        rows.append(
            {
                "domain": experience.current_experience,
                "negative_hess_percent": 100 * watch.negative / watch.entries,
                "smallest_precision_per_example_over_hess_init": watch.smallest,
            }
        )
        print(rows[-1])
    result = {"domains": rows, "torch": torch.__version__, "machine": platform.platform()}
    write_atomically(FILE, json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
