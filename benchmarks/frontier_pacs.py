"""What limits A_T on PACS: the last domain learned in many ways from the same slow posterior.

    python benchmarks/frontier_pacs.py --dataset-root DATA   run what is missing, then report
    python benchmarks/frontier_pacs.py --report              from stored results only

CoVON, merging with RegMean, learns the first three domains. From there CoVON, AdamW, and AdamW with
EWC's penalty learn the last one, with weak and strong priors. Their precision is CoVON's own or the
exact Fisher information of all earlier images, which no method without replay has. Each end
point is blended with the slow mean, weight by weight, the share of the new being ``h / (h + k s)``,
where ``h`` is the curvature of the last domain and ``s`` the precision of the prior, both scaled to
mean 1: ``k`` trades learning (0) for keeping (infinity). Besides, each end point is merged with
RegMean, which has no such factor. All is evaluated on validation images of a seed that no report
uses. Each way is a line of ``benchmarks/results/pacs/frontier-1000.jsonl``; ``docs/pacs.md`` has
the table and the figure.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch
from avalanche.benchmarks import CLExperience
from avalanche.training.plugins import SupervisedPlugin
from comparison import (
    RESULTS,
    ROOT,
    Case,
    arguments,
    new_figure,
    read_cases,
    replace_part,
    run_cases,
    strategy_of,
)
from torch import Tensor, nn
from torch.func import functional_call

from covon_avalanche.experiment.build import build_benchmark, build_model
from covon_avalanche.experiment.recipe import Recipe, load_recipe
from covon_avalanche.experiment.registry import Finetune
from covon_avalanche.merging import Task
from covon_avalanche.plugins import CoVONPlugin
from covon_avalanche.plugins.task_loader import dataset_loader
from covon_avalanche.posterior.fisher import squared_example_gradients
from covon_avalanche.posterior.gaussian import DiagGaussian
from covon_avalanche.report.tables import aligned

NAME = "benchmarks/frontier_pacs.py"
SEED = 1000  # that no report uses
FILE = RESULTS / f"pacs/frontier-{SEED}.jsonl"
VALIDATION = 0.2
FACTORS = (0.0, 0.1, 0.3, 1.0, 3.0, 10.0, math.inf)
START = "covon-inputs"
FLOOR = 1e-3  # smallest relative precision


class Way(NamedTuple):
    """How the last domain is learned."""

    strength: float
    """Strength of the prior, or of EWC's penalty."""
    covon: bool = True
    exact: bool = False
    """Exact Fisher information instead of CoVON's Hessian estimate."""


WAYS = {
    "CoVON": Way(1),
    "CoVON, prior times 100": Way(100),
    "CoVON, exact Fisher, prior times 100": Way(100, exact=True),
    "AdamW": Way(0, covon=False),
    "AdamW, EWC's penalty times 1000": Way(1000, covon=False),
}
Tensors = dict[str, Tensor]


class Penalty(SupervisedPlugin):
    """EWC's: the squared distance from the prior's mean, weighted by its precision."""

    def __init__(self, prior: DiagGaussian) -> None:
        super().__init__()
        self.prior = prior

    def before_backward(self, strategy: Any, **kwargs: Any) -> None:
        """Add it to the loss (Eq. 6)."""
        weights = dict(strategy.model.named_parameters())
        terms = [
            0.5 * (self.prior.precision[name] * (weights[name] - mean).square()).sum()
            for name, mean in self.prior.mean.items()
        ]
        strategy.loss += torch.stack(terms).sum()


def covon_plugin(strategy: Any) -> CoVONPlugin:
    """The strategy's."""
    return next(p for p in strategy.plugins if isinstance(p, CoVONPlugin))


def fisher(strategy: Any, experiences: Sequence[CLExperience]) -> Tensors:
    """Exact, over all training images, at the present weights; summed over images."""
    found: Tensors = {}
    for experience in experiences:
        data = experience.dataset.eval()
        squares = squared_example_gradients(strategy.model, dataset_loader(data, strategy, 64))
        for name, square in squares.items():
            found[name] = found.get(name, 0.0) + len(data) * square
    return found


def average(tensors: Mapping[str, Tensor]) -> Tensor:
    """Over all entries."""
    return torch.cat([t.flatten() for t in tensors.values()]).mean()


def scaled(tensors: Mapping[str, Tensor], size: Tensor | float = 1.0) -> Tensors:
    """To this average, with no entry below a small part of it."""
    factor = size / average(tensors)
    return {name: (t * factor).clamp(min=FLOOR * size) for name, t in tensors.items()}


class Start(NamedTuple):
    """After the domains before the last one."""

    recipe: Recipe
    strategy: Any
    slow: DiagGaussian
    exact: Tensors
    last: CLExperience
    domains: list[list[list[Tensor]]]
    """Validation batches by domain."""


@cache
def start(root: Path) -> Start:
    """Learn the domains before the last one; once for all ways."""
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    recipe = load_recipe(str(RESULTS / "pacs/best.toml"), [f"stream.validation_size={VALIDATION}"])
    data = build_benchmark(recipe, seed=SEED, dataset_root=root)
    torch.manual_seed(SEED)
    model = build_model(recipe.model, data, root)
    strategy = strategy_of(recipe.strategies[START], recipe, model)
    *earlier, last = data.train_stream
    for experience in earlier:
        strategy.train(experience)
    slow = strategy.optimizer.prior(model.named_parameters())
    exact = scaled(fisher(strategy, earlier), average(slow.precision))
    domains = [list(dataset_loader(e.dataset.eval(), strategy, 256)) for e in data.valid_stream]
    return Start(recipe, strategy, slow, exact, last, domains)


def learn(way: Way, begun: Start, slow: DiagGaussian) -> Any:
    """A strategy that has learned the last domain from the slow posterior, unmerged."""
    recipe, model = begun.recipe, copy.deepcopy(begun.strategy.model)
    if way.covon:
        strategy = strategy_of(recipe.strategies[START], recipe, model)
        strategy.optimizer.load_state_dict(copy.deepcopy(begun.strategy.optimizer.state_dict()))
        for name, p in model.named_parameters():
            prior = strategy.optimizer.state[p]["prior_precision"]
            prior.copy_(way.strength * slow.precision[name])
        covon_plugin(strategy).merge = "none"
    else:
        ewc: Any = recipe.strategies["avalanche-ewc"]
        adamw = Finetune(kind="finetune", lr=ewc.lr, weight_decay=ewc.weight_decay)
        strategy = strategy_of(adamw, recipe, model)
        factor = way.strength / recipe.strategies[START].ess
        precision = {name: factor * s for name, s in slow.precision.items()}
        strategy.plugins.append(Penalty(DiagGaussian(slow.mean, precision)))
    strategy.train(begun.last)
    return strategy


def accuracies(
    model: nn.Module, weights: Tensors, domains: list[list[list[Tensor]]]
) -> list[float]:
    """On each domain's validation images."""
    model.eval()
    found = []
    for batches in domains:
        hits = 0
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            for x, y in batches:
                hits += (functional_call(model, weights, (x,)).argmax(1) == y).sum().item()
        found.append(hits / sum(len(y) for _, y in batches))
    return found


def measure(case: Case, root: Path) -> Case:
    """Learn the last domain in one way, and evaluate blends and merge."""
    begun, way = start(root), WAYS[case["way"]]
    torch.manual_seed(SEED)
    slow = begun.slow
    prior = DiagGaussian(slow.mean, begun.exact if way.exact else slow.precision)
    strategy = learn(way, begun, prior)
    model = strategy.model
    weights = {name: p.detach() for name, p in model.named_parameters()}
    if way.covon and not way.exact:
        hess = {n: strategy.optimizer.state[p]["hess"] for n, p in model.named_parameters()}
    else:
        hess = fisher(strategy, [begun.last])
    h, s = scaled(hess), scaled(prior.precision)
    blends = [
        {n: torch.lerp(slow.mean[n], w, h[n] / (h[n] + k * s[n])) for n, w in weights.items()}
        for k in FACTORS
    ]
    data = begun.last.dataset.eval()
    task = Task(model, slow.mean, lambda: dataset_loader(data, strategy, 64))
    merged = weights | covon_plugin(begun.strategy).merge.merge(task)
    return {
        "dials": [str(k) for k in FACTORS],
        "accuracy": [accuracies(model, blend, begun.domains) for blend in blends],
        "by_inputs": accuracies(model, merged, begun.domains),
    }


# Report ------------------------------------------------------------------------------------


def point(accuracy: Sequence[float]) -> tuple[float, float]:
    """Accuracy on the last domain, and the mean of those before, in percent."""
    *before, last = accuracy
    return 100 * last, 100 * float(np.mean(before))


def plot(runs: list[Case]) -> None:
    """What is kept against what is learned."""
    with new_figure(ROOT / "docs/pacs-frontier.png", 6.6, 4.6) as figure:
        axes = figure.subplots()
        for total in range(60, 84, 2):  # lines of equal A_T
            axes.plot([40, 90], [(4 * total - x) / 3 for x in (40, 90)], color="#e5e7eb", lw=0.8)
        colours = ("#0b6e4f", "#2a9d6f", "#1f4e9c", "#9a9a9a", "#c2571a")
        for run, colour in zip(runs, colours, strict=True):
            line = {"ls": "-" if WAYS[run["way"]].covon else "--", "label": run["way"]}
            x, y = zip(*map(point, run["accuracy"]), strict=True)
            axes.plot(x, y, marker=".", color=colour, **line)
            axes.plot(*point(run["by_inputs"]), "*", ms=11, color=colour)
        axes.plot([], [], "*", ms=11, color="#6b7280", label="merged with RegMean")
        axes.set(xlim=(45, 88), ylim=(48, 84))
        axes.set_xlabel("accuracy on the last domain (%)")
        axes.set_ylabel("mean accuracy on the three before (%)")
        axes.legend(fontsize=8, loc="lower left")


def write_report() -> None:
    """The table of A_T by factor, and the figure."""
    stored = {run["way"]: run for run in read_cases(FILE)}
    runs = [stored[way] for way in WAYS if way in stored]
    plot(runs)
    names = ["the new alone", *(f"k = {k:g}" for k in FACTORS[1:-1])]
    a_t = pd.DataFrame([100 * np.mean(run["accuracy"], axis=1) for run in runs])
    table = a_t.iloc[:, :-1].set_axis(names, axis=1)
    table["merged with RegMean"] = [100 * np.mean(run["by_inputs"]) for run in runs]
    table = table.map("{:.1f}".format)
    table.insert(0, "last domain learned by", [run["way"] for run in runs])
    said = (
        f"A_T on validation images after the last domain, seed {SEED}; with the old "
        f"mean alone it is {a_t.iloc[:, -1].mean():.1f}."
    )
    figure = "![What is kept against what is learned](pacs-frontier.png)"
    replace_part(ROOT / "docs/pacs.md", NAME, f"{figure}\n\n{aligned(table)}\n\n{said}")


def main() -> None:
    """Measure and report."""
    given = arguments(__doc__)
    if not given.report:
        cases = [{"seed": SEED, "way": name} for name in WAYS]
        run_cases(cases, measure, FILE, given.dataset_root, processes=given.jobs or 1)
    write_report()


if __name__ == "__main__":
    main()
