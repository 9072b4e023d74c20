"""How often CoVON's Hessian estimate is negative, and how close its precision comes to zero.

    python benchmarks/negative_hessian.py     # half a minute; results/negative-hessian.json

The ``permuted-digits`` recipe's CoVON, seed 0, after every step.
"""

from __future__ import annotations

from typing import Any

import torch
from avalanche.training.plugins import EvaluationPlugin, SupervisedPlugin
from comparison import RESULTS, write_measurement

from covon_avalanche.experiment.build import build_benchmark, build_model, build_strategy
from covon_avalanche.experiment.epoch_log import EpochLog
from covon_avalanche.experiment.recipe import choose, load_recipe


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


def measure(epochs: int | None = None) -> list[dict[str, float]]:
    """Train once.

    :param epochs: per domain, instead of the recipe's.
    """
    torch.set_num_threads(1)
    recipe = choose(load_recipe("permuted-digits"), epochs=epochs)
    benchmark = build_benchmark(recipe, seed=0)
    torch.manual_seed(0)
    model = build_model(recipe.model, benchmark)
    settings = recipe.strategies["covon"]
    strategy = build_strategy(settings, recipe, model, EvaluationPlugin(), EpochLog())
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
        print(rows[-1], flush=True)
    return rows


if __name__ == "__main__":
    write_measurement(
        RESULTS / "negative-hessian.json", measure(), script="benchmarks/negative_hessian.py"
    )
