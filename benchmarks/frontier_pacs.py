"""What limits A_T on PACS: the last domain learned in many ways from the same slow posterior.

    python benchmarks/frontier_pacs.py --dataset-root DATA   run what is missing, then report
    python benchmarks/frontier_pacs.py --report              from stored results only

CoVON, merging by inputs, learns the first three domains. From there CoVON, AdamW, and AdamW with
EWC's penalty learn the last one, with weak and strong priors. Their precision is CoVON's own or the
exact Fisher information of all earlier images, which no method without replay can know. Each end
point is blended with the slow mean, weight by weight, the share of the new being ``h / (h + k s)``,
where ``h`` is the curvature of the last domain and ``s`` the precision of the prior, both scaled to
mean 1: ``k`` is a dial between learning (0) and keeping (infinity). Beside that, each end point is
merged by inputs, which has no dial. All is evaluated on validation images of seeds that no report
uses. Each way is a line of ``benchmarks/results/pacs/frontier-SEED.jsonl``; ``docs/pacs.md`` has
the table and the picture.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from avalanche.benchmarks import CLExperience
from avalanche.training.plugins import EvaluationPlugin, SupervisedPlugin
from comparison import ROOT, replace_part
from pacs import SEARCHED
from torch import Tensor, nn
from torch.func import functional_call

from covon_avalanche.atomic_write import write_atomically
from covon_avalanche.experiment.build import build_benchmark, build_model, build_strategy
from covon_avalanche.experiment.epoch_log import EpochLog
from covon_avalanche.experiment.machine import machine, versions
from covon_avalanche.experiment.recipe import Recipe, load_recipe
from covon_avalanche.experiment.registry import Finetune, Strategy
from covon_avalanche.merging import Eq8, RegMean, Task
from covon_avalanche.plugins import CoVONPlugin
from covon_avalanche.plugins.task_loader import dataset_loader
from covon_avalanche.posterior.fisher import squared_example_gradients
from covon_avalanche.posterior.gaussian import DiagGaussian, quadratic_penalty

RESULTS = ROOT / "benchmarks/results/pacs"
PAGE = ROOT / "docs/pacs.md"
NAME = "benchmarks/frontier_pacs.py"
SEEDS = (1000,)  # none that a report uses
VALIDATION = 0.2
DIALS = (0.0, 0.1, 0.3, 1.0, 3.0, 10.0, math.inf)
START = "covon-inputs"
FLOOR = 1e-3  # least precision, against the mean: what no image needs is not free


@dataclass(frozen=True)
class Way:
    """How the last domain is learned."""

    strength: float  # of the prior, or of EWC's penalty
    covon: bool = True
    exact: bool = False  # curvature


WAYS = {
    "CoVON": Way(1),
    "CoVON, prior times 100": Way(100),
    "CoVON, exact Fisher, prior times 100": Way(100, exact=True),
    "AdamW": Way(0, covon=False),
    "AdamW, EWC's penalty times 1000": Way(1000, covon=False),
}
Tensors = dict[str, Tensor]


class Penalty(SupervisedPlugin):
    """EWC's: the squared distance from the prior's mean, weighed with its precision."""

    def __init__(self, prior: DiagGaussian) -> None:
        super().__init__()
        self.prior = prior

    def before_backward(self, strategy: Any, **kwargs: Any) -> None:
        strategy.loss += quadratic_penalty(dict(strategy.model.named_parameters()), self.prior)


def strategy_of(settings: Strategy, recipe: Recipe, model: nn.Module) -> Any:
    """As the recipe trains, without metrics."""
    return build_strategy(settings, recipe, model, EvaluationPlugin(), EpochLog())


def fisher(strategy: Any, experiences: Sequence[CLExperience]) -> Tensors:
    """Exact, over all training images, at the weights as they are; summed over images."""
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


def learn(
    way: Way, recipe: Recipe, model: nn.Module, start: Any, slow: DiagGaussian, last: Any
) -> Any:
    """A strategy that has learned the last domain from the slow posterior."""
    if way.covon:
        strategy = strategy_of(recipe.strategies[START], recipe, model)
        strategy.optimizer.load_state_dict(start)
        for name, p in model.named_parameters():
            prior = strategy.optimizer.state[p]["prior_precision"]
            prior.copy_(way.strength * slow.precision[name])
        for group in strategy.optimizer.param_groups:
            group["consolidation"] = "none"
        next(p for p in strategy.plugins if isinstance(p, CoVONPlugin)).merge = Eq8()
    else:
        ewc: Any = recipe.strategies["ewc"]
        adamw = Finetune(kind="finetune", lr=ewc.lr, weight_decay=ewc.weight_decay)
        strategy = strategy_of(adamw, recipe, model)
        factor = way.strength / recipe.strategies[START].ess
        precision = {name: factor * s for name, s in slow.precision.items()}
        strategy.plugins.append(Penalty(DiagGaussian(slow.mean, precision)))
    strategy.train(last)
    return strategy


def accuracies(
    strategy: Any, weights: Tensors, domains: Sequence[Sequence[list[Tensor]]]
) -> list[float]:
    """On each domain's validation images."""
    model = strategy.model.eval()
    found = []
    for batches in domains:
        hits = 0
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            for x, y in batches:
                hits += (functional_call(model, weights, (x,)).argmax(1) == y).sum().item()
        found.append(hits / sum(len(y) for _, y in batches))
    return found


def measure(seed: int, root: str, done: Sequence[str]) -> Iterator[dict[str, Any]]:
    """All ways that are not done."""
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    recipe = load_recipe(str(SEARCHED), [f"stream.validation_size={VALIDATION}"])
    data = build_benchmark(recipe, seed=seed, dataset_root=root)
    torch.manual_seed(seed)
    model = build_model(recipe.model, data, root)
    before = strategy_of(recipe.strategies[START], recipe, model)
    *earlier, last = data.train_stream
    for experience in earlier:
        before.train(experience)
    slow = before.optimizer.prior(model.named_parameters())
    plugin = next(p for p in before.plugins if isinstance(p, CoVONPlugin))
    assert isinstance(plugin.merge, RegMean)
    exact = scaled(fisher(before, earlier), average(slow.precision))
    domains = [list(dataset_loader(e.dataset.eval(), before, 256)) for e in data.valid_stream]
    for name, way in WAYS.items():
        if name in done:
            continue
        torch.manual_seed(seed)
        prior = DiagGaussian(slow.mean, exact if way.exact else slow.precision)
        start = copy.deepcopy(before.optimizer.state_dict())
        strategy = learn(way, recipe, copy.deepcopy(model), start, prior, last)
        weights = dict(strategy.model.named_parameters())
        if way.covon and not way.exact:
            hess = {n: strategy.optimizer.state[p]["hess"] for n, p in weights.items()}
        else:
            hess = fisher(strategy, [last])
        h, s = scaled(hess), scaled(prior.precision)
        blends = {
            k: {
                n: torch.lerp(slow.mean[n], w.detach(), h[n] / (h[n] + k * s[n]))
                for n, w in weights.items()
            }
            for k in DIALS
        }
        task = Task(
            strategy.model, slow.mean, partial(dataset_loader, last.dataset.eval(), strategy, 64)
        )
        merged = plugin.merge.merge(task)
        yield {
            "seed": seed,
            "way": name,
            "dials": [str(k) for k in DIALS],
            "accuracy": [accuracies(strategy, blend, domains) for blend in blends.values()],
            "by_inputs": accuracies(strategy, merged, domains),
            "versions": versions(),
            "machine": machine(),
        }


# Stored --------------------------------------------------------------------------------


def file_of(seed: int) -> Path:
    return RESULTS / f"frontier-{seed}.jsonl"


def stored(seed: int) -> list[dict[str, Any]]:
    """What has been measured so far."""
    file = file_of(seed)
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def run_missing(seed: int, root: str) -> None:
    """Measure what is missing of a seed, storing each way as it comes."""
    records = stored(seed)
    done = {record["way"] for record in records}
    if done >= set(WAYS):
        return
    for record in measure(seed, root, sorted(done)):
        records.append(record)
        write_atomically(file_of(seed), "".join(json.dumps(r) + "\n" for r in records))
        best = max(mean(row) for row in record["accuracy"])
        print(seed, record["way"], f"{100 * best:.2f}", flush=True)


# Report --------------------------------------------------------------------------------


Runs = list[dict[str, Any]]


def runs_by_way() -> dict[str, Runs]:
    """What is stored, a run a seed."""
    found: dict[str, Runs] = {way: [] for way in WAYS}
    for seed in SEEDS:
        for record in stored(seed):
            found[record["way"]].append(record)
    return {way: runs for way, runs in found.items() if runs}


def point(rows: Sequence[Sequence[float]]) -> tuple[float, float]:
    """Accuracy on the last domain and mean of that on those before, in percent, over runs."""
    return 100 * mean(row[-1] for row in rows), 100 * mean(mean(row[:-1]) for row in rows)


def plot(found: dict[str, Runs]) -> None:
    """What is kept against what is learned."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(6.6, 4.6), layout="constrained")
    for total in range(60, 84, 2):  # lines of equal A_T
        axes.plot([40, 90], [(4 * total - x) / 3 for x in (40, 90)], color="#e5e7eb", linewidth=0.8)
    colours = ("#0b6e4f", "#2a9d6f", "#1f4e9c", "#9a9a9a", "#c2571a")
    for (way, runs), colour in zip(found.items(), colours, strict=False):
        points = [point([r["accuracy"][i] for r in runs]) for i in range(len(DIALS))]
        style = "-" if WAYS[way].covon else "--"
        axes.plot(*zip(*points, strict=True), style, marker=".", color=colour, label=way)
        axes.plot(*point([r["by_inputs"] for r in runs]), marker="*", markersize=11, color=colour)
    axes.plot([], [], "*", markersize=11, color="#6b7280", label="merged by inputs")
    axes.set_xlim(45, 88)
    axes.set_ylim(48, 84)
    axes.set_xlabel("accuracy on the last domain (%)")
    axes.set_ylabel("mean accuracy on the three before (%)")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8, loc="lower left")
    figure.savefig(ROOT / "docs/pacs-frontier.png", dpi=160)
    plt.close(figure)


def write_report() -> None:
    """The table of A_T by dial, and the picture."""
    found = runs_by_way()
    if not found:
        return
    plot(found)
    names = ["the new alone", *(f"k = {k:g}" for k in DIALS[1:-1]), "merged by inputs"]
    lines = [f"| last domain learned by | {' | '.join(names)} |", "|---|" + "---:|" * len(names)]
    for way, runs in found.items():
        shown = [[r["accuracy"][i] for r in runs] for i in range(len(DIALS) - 1)]
        shown.append([r["by_inputs"] for r in runs])
        cells = [f"{100 * mean(mean(row) for row in rows):.1f}" for rows in shown]
        lines.append(f"| {way} | {' | '.join(cells)} |")
    before = 100 * mean(mean(r["accuracy"][-1]) for runs in found.values() for r in runs)
    seeds = ", ".join(str(seed) for seed in SEEDS)
    said = (
        f"A_T on validation images after the last domain, seed {seeds}; with the old "
        f"mean alone it is {before:.1f}."
    )
    picture = "![What is kept against what is learned](pacs-frontier.png)"
    table = "\n".join(lines)
    replace_part(PAGE, NAME, f"{picture}\n\n{table}\n\n{said}\n")


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--report", action="store_true")
    parser.add_argument("--dataset-root", help="the folder that has PACS and weights")
    arguments = parser.parse_args()
    if not arguments.report:
        for seed in SEEDS:
            run_missing(seed, arguments.dataset_root)
    write_report()


if __name__ == "__main__":
    main()
