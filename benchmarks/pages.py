"""Tables and figures of the pages that compare strategies, from stored results.

    python benchmarks/pages.py [PAGE ...]          write the pages, all by default
    python benchmarks/pages.py --store RUNS FILE   add finished runs to stored results

Runs are made by ``covon run RECIPE``, with the recipes beside this file or with shipped ones.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Iterable, Sequence
from itertools import product
from pathlib import Path

import pandas as pd
from comparison import RESULTS, ROOT, compared, mean_and_std, origin, replace_part
from scipy.stats import t as student_t

from covon_avalanche.atomic_write import write_atomically
from covon_avalanche.experiment.recipe import load_recipe
from covon_avalanche.report import Comparison, figures, load_results
from covon_avalanche.report.results import read_results
from covon_avalanche.report.tables import (
    FULL,
    METRICS,
    MISSING,
    SHORT,
    aligned,
    markdown_table,
)

NAME = "benchmarks/pages.py"
CURVES = "Average accuracy over the domains learned"


def store(runs: Path, file: Path) -> None:
    """Add the finished runs below a folder to a ``.jsonl`` file, in place of those with the same
    strategy and seed, and without their epochs."""
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    found = {}
    for line in lines:
        case = json.loads(line)
        found[case["strategy"], case["seed"]] = line
    for result in read_results([runs]):
        short = result.model_copy(update={"epochs": []})
        found[result.strategy, result.seed] = short.to_json()
    write_atomically(file, "".join(f"{line}\n" for line in found.values()))


def write_part(page: str, part: str, *texts: str) -> None:
    """Put paragraphs between the markers of a part of a page."""
    text = "\n\n".join(text.strip() for text in texts)
    replace_part(ROOT / "docs" / page, f"{NAME}, {part}", text)


def save_figure(comparison: Comparison, name: str, file: str, title: str = "") -> str:
    """Save a figure in ``docs``.

    :return: the Markdown that shows it.
    """
    figures.save(comparison, name, ROOT / f"docs/{file}.png")
    return f"![{title}]({file}.png)"


# README ------------------------------------------------------------------------------------

STREAMS = {
    "PACS": ("pacs/forward.jsonl",),
    "PACS, reverse": ("pacs/reverse.jsonl",),
    "PACS, ViT": ("pacs-vit-all/forward.jsonl", "pacs-vit-all/reverse.jsonl"),
    "permuted MNIST": ("permuted-mnist-hard/results.jsonl",),
    "permuted digits": ("permuted-digits/results.jsonl",),
}
"""Results of one order, or of several, which are averaged seed by seed."""
ROWS = {
    "frozen features: LayUP": ("layup-flip", "layup"),
    "frozen features: ridge": ("ridge",),
    "RegMean, retrained classifier": ("regmean-slca",),
    "**CoVON**, retrained classifier": ("covon-slca",),
    "**CoVON + RegMean**": ("covon-inputs", "covon-regmean"),
    "AdamW + RegMean": ("finetune-regmean",),
    "EWC + RegMean": ("ewc-regmean",),
    "**CoVON**": ("covon-gradsq", "covon"),
    "CoVON-NoM": ("covon-nom",),
    "EMA of the means": ("ema",),
    "EVCL": ("evcl",),
    "LwF": ("avalanche-lwf", "lwf"),
    "EWC": ("avalanche-ewc", "ewc"),
    "SI": ("avalanche-si", "si"),
    "MAS": ("mas",),
    "Ada-Reg": ("ada-reg",),
    "VCL": ("vcl",),
    "fine-tuning": ("finetune",),
    "joint training (offline)": ("joint",),
}
"""Strategies of the recipes; where a stream has two, the better one."""


def overview() -> None:
    """A_T in percent on each stream, mean ± standard deviation over seeds."""
    columns: dict[str, dict[str, str]] = {}
    for stream, files in STREAMS.items():
        runs = pd.concat([load_results(RESULTS / file) for file in files])
        runs["A_T"] = 100 * runs["average_accuracy"]
        by_seed = runs.groupby(["strategy", "seed"])["A_T"].mean()
        means = by_seed.groupby("strategy").mean()
        accuracy = by_seed.groupby("strategy").agg(mean_and_std, digits=1)
        columns[stream] = {}
        for row, names in ROWS.items():
            known = means.reindex(names).dropna()
            columns[stream][row] = MISSING if known.empty else accuracy[known.idxmax()]
    table = pd.DataFrame(columns).rename_axis("method").reset_index()
    replace_part(ROOT / "README.md", "benchmarks/pages.py, overview", aligned(table))


# Permuted digits and permuted MNIST ----------------------------------------------------------

ABLATION = {
    "ivon": "fast, without a prior",
    "ivon-prior": "fast, the last task as prior",
    "ema": "fast and slow, means averaged without precision",
    "covon-nom": "fast and slow, Eq. 8, gamma = 1",
    "covon": "fast and slow, Eq. 8, gamma < 1",
    "covon-gradsq": "squared gradients as curvature, gamma 1 for the mean, 2 for the precision",
}
PAPER = {
    "ivon": "40.23 ± 2.98",
    "ivon-prior": "77.03 ± 1.03",
    "ema": "89.56 ± 0.25",
    "covon-nom": "90.32 ± 0.27",
    "covon": "92.12 ± 0.35",
    "td-vcl-n": "about 90",
    "td-vcl-lambda": "about 90",
}


def digits() -> None:
    """A table of all strategies, and curves of those of the shipped recipe."""
    comparison = compared(results := RESULTS / "permuted-digits/results.jsonl")
    shipped = compared(results, *load_recipe("permuted-digits").strategies)
    save_figure(shipped, "curves", "permuted-digits")
    table = markdown_table(comparison, SHORT)
    write_part("digits.md", "digits", table, origin(comparison.runs))


def permuted_mnist() -> None:
    """All strategies, with the paper's A_T and the share of the gap between fine-tuning and joint
    training that each closes; and the paper's Figure 2b."""
    comparison = compared(RESULTS / "permuted-mnist-hard/results.jsonl")
    save_figure(comparison, "curves", "permuted-mnist")
    for strategy in ("finetune", "ewc-star", "covon", "covon-gradsq"):
        save_figure(comparison, f"matrix-{strategy}", f"permuted-mnist-{strategy}")
    accuracy = comparison.summary["average_accuracy_mean"]
    low, high = accuracy["finetune"], accuracy["joint"]
    gap = (100 * (accuracy - low) / (high - low)).map("{:.0f}".format)
    paper = pd.Series(PAPER).reindex(accuracy.index, fill_value="-")
    extra = pd.DataFrame({"gap closed %": gap, "paper": paper})
    table = markdown_table(comparison, SHORT, extra)
    write_part("permuted-mnist.md", "permuted-mnist", table, origin(comparison.runs))
    summary = comparison.summary.reindex(ABLATION).dropna(how="all")
    columns = {
        "update": summary.index.map(ABLATION),
        "strategy": summary.index,
        "A_T %": [METRICS[0].text(row) for _, row in summary.iterrows()],
        "paper": paper[summary.index],
    }
    write_part("permuted-mnist.md", "Figure 2b", aligned(pd.DataFrame(columns), left=2))


# PACS ----------------------------------------------------------------------------------------

CALIBRATION = ("NLL", "ECE", "sampled A_T %", "sampled NLL", "sampled ECE")


def across_orders(folder: str, orders: Sequence[str]) -> str:
    """A table of A_T (domain mean) by order of the domains."""
    found = {order: load_results(RESULTS / folder / f"{order}.jsonl") for order in orders}
    runs = pd.concat(found, names=["order"]).reset_index("order")
    runs["A_T"] = 100 * runs["average_accuracy"]
    table = runs.pivot_table("A_T", "strategy", "order", aggfunc=mean_and_std)[list(orders)]
    means = runs.groupby(["strategy", "order"])["A_T"].mean().unstack()
    table["all orders"] = means.mean(axis=1, skipna=False).map("{:.2f}".format)
    ranked = means.mean(axis=1).sort_values(ascending=False).index
    return aligned(table.loc[ranked].replace({"nan": MISSING}).fillna(MISSING).reset_index())


def paired_differences(pairs: Iterable[tuple[str, str]], orders: Sequence[str]) -> str:
    """A table of the difference in A_T between two strategies by order of the domains, and averaged
    over the orders seed by seed: mean over common seeds with its 95 % confidence interval
    (Student's t)."""
    table = pd.DataFrame()
    scores = {}
    for order in orders:
        runs = load_results(RESULTS / f"pacs/{order}.jsonl")
        scores[order] = 100 * runs.pivot(
            index="seed", columns="strategy", values="average_accuracy"
        )
    scores["all orders"] = sum(scores.values()) / len(orders)
    for order, own in scores.items():
        for first, second in pairs:
            found = (own[first] - own[second]).dropna()
            half = found.sem() * student_t.ppf(0.975, len(found) - 1)
            row = f"{first} - {second}"
            table.loc[row, order] = f"{found.mean():+.1f} ± {half:.1f} ({len(found)} seeds)"
    return aligned(table.rename_axis("difference").reset_index())


def searches_table(folder: str) -> str:
    """How the settings of a recipe were searched: trials, best A_T on validation images, what was
    tried, and settings whose best value is at an end of it."""
    rows = [
        {
            "strategy": name,
            "trials": str(found.trials),
            "best A_T %": f"{100 * (found.accuracy or 0):.1f}",
            "at an end": ", ".join(found.at_end),
            "tried": "; ".join(f"{key} {values}" for key, values in found.ranges.items()),
        }
        for name, found in load_recipe(str(RESULTS / folder / "best.toml")).searched.items()
        if found.trials
    ]
    return str(pd.DataFrame(rows).to_markdown(index=False, disable_numparse=True))


def pacs() -> None:
    """Curves and tables of each order; matrices and calibration of those with all strategies."""
    orders = ("forward", "reverse", "third", "fourth")
    for order in orders:
        comparison = compared(RESULTS / f"pacs/{order}.jsonl")
        parts = [
            save_figure(comparison, "curves", f"pacs-{order}", CURVES),
            markdown_table(comparison, FULL),
            origin(comparison.runs),
        ]
        if order in orders[:2]:
            of_interest = {"avalanche-lwf", "covon", "covon-inputs"}
            shown = [strategy for strategy in comparison.summary.index if strategy in of_interest]
            matrices = pd.DataFrame(
                {s: [save_figure(comparison, f"matrix-{s}", f"pacs-{order}-{s}")] for s in shown}
            )
            parts += [
                "Accuracy on each domain (across) after learning each (down), mean over seeds:",
                aligned(matrices, left=len(shown)),
                "Calibration, with the mean weights and with 8 posterior samples:",
                markdown_table(comparison, CALIBRATION),
            ]
        write_part("pacs.md", f"pacs, {order}", *parts)
    write_part("pacs.md", "pacs, all orders", across_orders("pacs", orders))
    pairs = (
        ("covon-inputs", "finetune-regmean"),
        ("ewc-regmean", "finetune-regmean"),
        ("ewc-regmean", "covon-inputs"),
        ("finetune-regmean", "finetune"),
    )
    write_part("pacs.md", "pacs, pairs", paired_differences(pairs, orders[:2]))
    write_part("pacs.md", "pacs, search", searches_table("pacs"))


def pacs_vit() -> None:
    """A_T in both orders; tables and, of strategies that differ in kind, figures of each."""
    orders = ("forward", "reverse")
    parts = ["A_T as domain mean, in percent:", across_orders("pacs-vit", orders)]
    drawn = ["joint", "finetune", "ewc", "covon", "covon-regmean", "covon-slca", "regmean-slca"]
    drawn += ["slca", "ridge", "ranpac-adapter", "duct", "dualprompt"]
    for order in orders:
        results, file = RESULTS / f"pacs-vit/{order}.jsonl", f"pretrained-{order}"
        comparison, some = compared(results), compared(results, *drawn)
        parts += [
            f"### {', '.join(comparison.domains)}",
            markdown_table(comparison, FULL),
            origin(comparison.runs),
            "Twelve of the strategies:",
            save_figure(some, "curves", file, CURVES),
            save_figure(some, "time", f"{file}-time", "Accuracy against time"),
            save_figure(some, "memory", f"{file}-memory", "Accuracy against memory"),
        ]
    write_part("pretrained.md", "pacs-vit", *parts)
    write_part("pretrained.md", "pacs-vit, longer", longer_training())
    write_part("pretrained.md", "pacs-vit, search", searches_table("pacs-vit"))


def longer_training() -> str:
    """A_T of frozen backbones by the number of epochs, in the first order, of one seed."""
    files = {3: "forward", 15: "longer"}
    runs = pd.concat(load_results(RESULTS / f"pacs-vit/{file}.jsonl") for file in files.values())
    longer = runs["settings"].map(lambda settings: settings["epochs"] == max(files))
    runs = runs[runs["strategy"].isin(runs["strategy"][longer]) & (runs["seed"] == 0)]
    epochs = runs["settings"].map(lambda settings: f"{settings['epochs']} epochs: A_T %")
    cells = runs.pivot_table("average_accuracy", "strategy", epochs, sort=False)
    return aligned((100 * cells).map("{:.1f}".format).reset_index())


def pacs_vit_all() -> None:
    """A_T and BWT in both orders, and the search, if there are results."""
    orders, folder = ["forward", "reverse"], RESULTS / "pacs-vit-all"
    if not all((folder / f"{order}.jsonl").exists() for order in orders):
        return
    found = {order: load_results(folder / f"{order}.jsonl") for order in orders}
    runs = pd.concat(found, names=["order"]).reset_index("order")
    runs["A_T %"], runs["BWT %"] = 100 * runs["average_accuracy"], 100 * runs["bwt"]
    by_order = runs.groupby(["strategy", "order"])
    cells = by_order[["A_T %", "BWT %"]].agg(mean_and_std, digits=1).unstack("order")
    means = by_order["A_T %"].mean().unstack()
    seeds = by_order["seed"].nunique().unstack(fill_value=0)[orders].astype(str)
    table = pd.DataFrame(
        {f"{order}: {name}": cells[name, order] for order in orders for name in ("A_T %", "BWT %")}
    )
    table["both orders: A_T %"] = means.mean(axis=1, skipna=False).map("{:.1f}".format)
    on_gpu = runs[runs["machine"].map(lambda machine: "accelerator" in machine)]
    table["seconds"] = on_gpu.groupby("strategy")["train_seconds"].mean().map("{:.0f}".format)
    table["seeds"] = seeds.agg(lambda row: ", ".join(dict.fromkeys(row)), axis=1)
    table = table.loc[means.mean(axis=1).sort_values(ascending=False).index]
    shown = table.replace(["nan", "nan ± nan"], MISSING).fillna(MISSING).reset_index()
    with figures.style():
        searched = figures.learning_rates(pd.read_csv(folder / "trials.csv"))
        write_atomically(ROOT / "docs/pretrained-search.png", figures.rendered(searched, "png"))
    picture = "![A_T on validation images against the learning rate](pretrained-search.png)"
    parts = aligned(shown), origin(runs), searches_table("pacs-vit-all"), picture
    write_part("pretrained.md", "pacs-vit-all", *parts)


# Presets -------------------------------------------------------------------------------------

FIRST_TRY = {
    "pacs": ("forward", "reverse", "third", "fourth"),
    "pacs-vit": ("forward", "reverse"),
    "permuted-mnist-hard": ("results",),
}
"""The orders of their domains, which are also the names of the searched methods' results."""
BESIDE = (
    *("finetune", "avalanche-lwf", "avalanche-ewc", "avalanche-si", "lwf", "ewc", "si", "mas"),
    *("rwalk", "ewc-star", "ada-reg", "evcl", "covon", "covon-gradsq"),
)
"""Searched methods that are shown beside the presets."""
TITLES = {
    "covon": "CoVON",
    "covon-clip-2": "CoVON, `clip_radius` 2",
    "finetune": "AdamW",
    "covon-knob": "CoVON, `gamma` searched",
    "covon-regmean": "CoVON + RegMean",
    "finetune-regmean": "AdamW + RegMean",
    "covon-slca": "CoVON + retrained classifier",
    "covon-half": "CoVON, bfloat16 prior",
    "covon-scratch": "CoVON, default preset",
}


def title(name: str) -> str:
    """Such as ``CoVON + RegMean, lr 2.1e-04`` for ``covon-regmean-2.1e-04``."""
    kind, lr = re.split(r"-(?=\d\.)", name, maxsplit=1)
    return f"{TITLES[kind]}, lr {lr}"


def searched_title(name: str) -> str | None:
    """``None`` for strategies that are not shown beside presets."""
    return f"{name}, searched" if name in BESIDE else None


def first_try_table(stream: str) -> str:
    """A_T and BWT of presets without a search and of searched methods in each order, mean ±
    standard deviation over the seeds; those that were run again in float32 have their own rows."""
    parts = []
    for order, precision in product(orders := FIRST_TRY[stream], ("", "-float32")):
        files = {f"first-try/{stream}-{order}": title, f"{stream}/{order}": searched_title}
        for file, named in files.items():
            if (whole := RESULTS / f"{file}{precision}.jsonl").exists():
                own = load_results(whole)
                rows = own["strategy"].map(named) + precision.replace("-", ", ")
                parts.append(own.assign(order=order, row=rows).dropna(subset="row"))
    runs = pd.concat(parts, ignore_index=True)
    by_order = runs.groupby(["row", "order"])
    bwt = by_order["bwt"].mean().map(lambda value: f" ({100 * value:.1f})")
    cells = (100 * runs["average_accuracy"]).groupby([runs["row"], runs["order"]])
    rows = (cells.agg(mean_and_std, digits=1) + bwt).unstack()[list(orders)]
    means = cells.mean().unstack()
    rows["all orders"] = means.mean(axis=1, skipna=False).map("{:.1f}".format)
    rows = rows.loc[means.mean(axis=1).sort_values(ascending=False).index]
    if len(orders) == 1:
        rows = rows.drop(columns="all orders").rename(columns={orders[0]: "A_T % (BWT)"})
    rows = rows.replace({"nan": MISSING}).fillna(MISSING)
    return f"{aligned(rows.rename_axis('method').reset_index())}\n\n{origin(runs)}"


def first_try() -> None:
    """Presets without a search, beside searched methods."""
    for stream in FIRST_TRY:
        write_part("presets.md", f"first-try, {stream}", first_try_table(stream))


PAGES: dict[str, Callable[[], None]] = {
    "overview": overview,
    "digits": digits,
    "permuted-mnist": permuted_mnist,
    "pacs": pacs,
    "pacs-vit": pacs_vit,
    "pacs-vit-all": pacs_vit_all,
    "first-try": first_try,
}


def main() -> None:
    """Store runs, or write pages."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("pages", nargs="*", choices=[[], *PAGES], metavar="PAGE")
    parser.add_argument("--store", nargs=2, type=Path, metavar=("RUNS", "FILE"))
    given = parser.parse_args()
    if given.store:
        store(*given.store)
        return
    for page in given.pages or PAGES:
        PAGES[page]()


if __name__ == "__main__":
    main()
