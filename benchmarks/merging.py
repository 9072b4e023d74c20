"""How much of A_T is due to training, how much to merging: each training with each merge rule.

    python benchmarks/merging.py --dataset-root DATA           run what is missing, then report
    python benchmarks/merging.py --dataset-root DATA forward   only PACS in the first order
    python benchmarks/merging.py --report                      from stored results only

The cells are AdamW and CoVON with six merges each, and Avalanche's EWC and Ada-Reg without a
merge and with RegMean, on PACS in two orders and on permuted MNIST-Hard. Their settings are
``benchmarks/results/merging/{pacs,mnist}/best.toml``, searched on validation images from
``benchmarks/merging_pacs.toml`` and ``merging_mnist.toml``. Every cell has three seeds, the best
four of a stream five. Results go to ``benchmarks/results/merging/STREAM.jsonl``, the tables and
``docs/merging.png`` to ``docs/merging.md``, which also has ``docs/merging-idea.png``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from comparison import (
    RESULTS,
    ROOT,
    arguments,
    compared,
    in_order,
    mean_and_std,
    new_figure,
    origin,
    replace_part,
    run_recipe,
)
from pacs import ORDERS

from covon_avalanche.experiment.recipe import Recipe, load_recipe
from covon_avalanche.experiment.registry.merge_rules import KFAC
from covon_avalanche.report import load_results
from covon_avalanche.report.tables import aligned

NAME = "benchmarks/merging.py"
PAGE = ROOT / "docs/merging.md"
FOLDER = RESULTS / "merging"
STREAMS = {
    "forward": "pacs",
    "reverse": "pacs",
    "mnist": "mnist",
    "forward-longer": "pacs",
    "reverse-longer": "pacs",
}
"""The search of each stream."""
LONGER = {"epochs": 10, "strategies": ("adamw-regmean", "covon-regmean")}
"""What streams named ``-longer`` run, with the settings found for the recipe's number of epochs;
each also with K-FAC instead of RegMean."""
TITLES = {
    "forward": "PACS: photo, art painting, cartoon, sketch",
    "reverse": "PACS: sketch, cartoon, art painting, photo",
    "mnist": "Permuted MNIST-Hard",
    "forward-longer": "PACS, 10 epochs: photo, art painting, cartoon, sketch",
    "reverse-longer": "PACS, 10 epochs: sketch, cartoon, art painting, photo",
}
TRAININGS = {
    "adamw": "AdamW",
    "covon": "CoVON",
    "avalanche-ewc": "Avalanche's EWC",
    "ada-reg": "Ada-Reg",
}
MERGES = {
    "none": "none",
    "average": "average",
    "ema": "EMA",
    "fisher": "Eq. 8 / diagonal Fisher",
    "magmax": "MagMax",
    "regmean": "RegMean",
    "kfac": "K-FAC",
}
SEEDS, MORE_SEEDS, BEST = 3, 5, 4


def stored(stream: str) -> Path:
    """The results of a stream."""
    return FOLDER / f"{stream}.jsonl"


def recipe_of(stream: str) -> Recipe:
    """The searched recipe, in the stream's order of domains."""
    best = FOLDER / STREAMS[stream] / "best.toml"
    if not best.exists():
        raise SystemExit(
            f"{best.relative_to(ROOT)} does not exist: run the covon search in the first lines of "
            f"benchmarks/merging_{STREAMS[stream]}.toml"
        )
    recipe = load_recipe(str(best))
    update: dict[str, Any] = {"name": f"merging-{stream}"}
    update["title"] = f"{TITLES[stream]}; training by merge rule"
    order = stream.removesuffix("-longer")
    if order != stream:
        update["epochs"] = LONGER["epochs"]
        own = {name: recipe.strategies[name] for name in LONGER["strategies"]}
        for name, settings in list(own.items()):
            kfac = settings.model_copy(update={"merge": KFAC(rule="kfac")})
            own[name.replace("regmean", "kfac")] = kfac
        update["strategies"] = own
    if order not in ORDERS:
        return recipe.model_copy(update=update)
    return in_order(recipe, ORDERS[order], **update)


def cells(runs: pd.DataFrame) -> pd.DataFrame:
    """The runs with the columns ``training``, ``merge`` and ``A_T`` in percent."""
    names = {f"{t}-{m}": (t, m) for t in TRAININGS for m in MERGES}
    names["covon-eq8"] = names.pop("covon-fisher")
    pairs = [names[name] for name in runs["strategy"]]
    return runs.assign(
        training=[pair[0] for pair in pairs],
        merge=[pair[1] for pair in pairs],
        A_T=100 * runs["average_accuracy"],
    )


def best_strategies(stream: str) -> list[str]:
    """The strategies with the highest mean A_T."""
    runs = load_results(stored(stream))
    return list(runs.groupby("strategy")["average_accuracy"].mean().nlargest(BEST).index)


def factorial_table(found: pd.DataFrame) -> str:
    """A_T with a row per merge and a column per training."""
    table = found.pivot_table("A_T", "merge", "training", aggfunc=mean_and_std)
    table = table.reindex(index=list(MERGES), columns=list(TRAININGS)).dropna(how="all")
    table = table.rename(index=MERGES, columns=TRAININGS).astype(object).fillna("")
    return aligned(table.reset_index())


def shares(found: pd.DataFrame) -> str:
    """One sentence on AdamW and CoVON: main effects of training and merge, and what remains."""
    means = found.groupby(["merge", "training"])["A_T"].mean().unstack()
    both = means.reindex(columns=["adamw", "covon"]).dropna()
    if len(both) < 2:
        return ""
    by_merge = both.mean(axis=1)
    gap = both["covon"].mean() - both["adamw"].mean()
    rest = both.sub(by_merge, axis=0).sub(both.mean() - both.to_numpy().mean(), axis=1)
    low, high = by_merge.idxmin(), by_merge.idxmax()
    return (
        f"Averaged over the {len(both)} merges that both have, CoVON is {gap:+.1f} points from "
        f"AdamW. Averaged over the two trainings, merges range from {by_merge[low]:.1f} "
        f"({MERGES[low]}) to {by_merge[high]:.1f} ({MERGES[high]}). The interaction has a root "
        f"mean square of {np.sqrt((rest.to_numpy() ** 2).mean()):.1f} points."
    )


def save_figure(by_stream: dict[str, pd.DataFrame], path: Path) -> None:
    """A_T of each cell: a panel per stream, a row per merge, a marker per training."""
    with new_figure(path, 3.1 * len(by_stream) + 1.4, 3.2) as figure:
        panels = figure.subplots(1, len(by_stream), sharey=True, squeeze=False)[0]
        shown = set().union(*(found["merge"] for found in by_stream.values()))
        rows = [merge for merge in reversed(MERGES) if merge in shown]
        for axes, (stream, found) in zip(panels, by_stream.items(), strict=True):
            for (key, label), marker in zip(TRAININGS.items(), "osD^", strict=True):
                values = found[found["training"] == key].groupby("merge")["A_T"]
                mean, std = values.mean(), values.std().fillna(0.0)
                heights = [rows.index(merge) for merge in mean.index]
                axes.errorbar(mean, heights, xerr=std, marker=marker, linestyle="", label=label)
            axes.set_xlabel("A_T (%)")
            axes.set_title(TITLES[stream].replace(": ", "\n"), fontsize="small")
            axes.grid(axis="x")
        panels[0].set_yticks(range(len(rows)), [MERGES[merge] for merge in rows])
        handles, names = panels[0].get_legend_handles_labels()
        figure.legend(handles, names, loc="outside lower center", ncols=len(names))


def save_idea(path: Path) -> None:
    """Two domains of one output with two correlated inputs: the optimum of each, and the merges by
    the diagonal and by the whole second moments."""
    moments = [np.array([[1.0, 0.9], [0.9, 1.0]]), np.array([[1.0, -0.7], [-0.7, 0.6]])]
    optima = [np.array([-1.0, 0.6]), np.array([1.0, 0.4])]

    def merged(by: list[np.ndarray]) -> np.ndarray:
        right = sum(a @ w for a, w in zip(by, optima, strict=True))
        return np.asarray(np.linalg.solve(sum(by), right))

    grid = np.stack(np.meshgrid(np.linspace(-2.2, 2.2, 200), np.linspace(-1.6, 2.6, 200)), -1)
    with new_figure(path, 4.6, 3.4) as figure:
        axes = figure.subplots()
        for a, w, name, colour in zip(
            moments, optima, ("earlier domains", "new domain"), ("#1d6fb8", "#e8650a"), strict=True
        ):
            change = np.einsum("...i,ij,...j->...", grid - w, a, grid - w)
            axes.contour(grid[..., 0], grid[..., 1], change, [0.05, 0.2, 0.5], colors=colour)
            axes.plot(*w, "o", color=colour, label=name)
        axes.plot(*merged([np.diag(a.diagonal()) for a in moments]), "kX", label="weight by weight")
        axes.plot(*merged(moments), "k*", ms=11, label="RegMean")
        axes.set(xlabel="weight 1", ylabel="weight 2", xticks=[], yticks=[])
        figure.legend(loc="outside lower center", ncols=2)


def write_report() -> None:
    """The figure, a table per stream, and the shares of training and merge."""
    save_idea(ROOT / "docs/merging-idea.png")
    comparisons = {
        stream: compared(stored(stream)) for stream in STREAMS if stored(stream).exists()
    }
    if not comparisons:
        print("there are no results yet")
        return
    found = {stream: cells(comparison.runs) for stream, comparison in comparisons.items()}
    main = {stream: runs for stream, runs in found.items() if not stream.endswith("-longer")}
    save_figure(main, ROOT / "docs/merging.png")
    parts = ["![A_T by training and merge](merging.png)"]
    for stream, comparison in comparisons.items():
        parts += [f"### {TITLES[stream]}", "A_T as domain mean, in percent:"]
        parts += [factorial_table(found[stream]), shares(found[stream]), origin(comparison.runs)]
    replace_part(PAGE, NAME, "\n\n".join(part for part in parts if part))


def main() -> None:
    """Run and report."""
    given = arguments(__doc__, *STREAMS)
    streams = given.parts or list(STREAMS)
    if not given.report:
        recipes = {stream: recipe_of(stream) for stream in streams}
        for seeds in (1, SEEDS):  # one of everything first
            for stream, recipe in recipes.items():
                run_recipe(recipe, range(seeds), stored(stream), given.dataset_root, given.jobs)
        for stream, recipe in recipes.items():
            best = [] if stream.endswith("-longer") else best_strategies(stream)
            run_recipe(
                recipe, range(MORE_SEEDS), stored(stream), given.dataset_root, given.jobs, best
            )
    write_report()


if __name__ == "__main__":
    main()
