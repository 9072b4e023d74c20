"""What CoVON's settings do on Permuted MNIST-Hard, on validation images of a tuning permutation.

    python benchmarks/study_permuted_mnist.py --dataset-root DATA [PART ...]   run what is missing
    python benchmarks/study_permuted_mnist.py --report                         tables and figure

Parts: ``sensitivity`` (the paper's Figure 4: one setting at a time around a centre, 5 epochs per
task), ``gamma`` (merging with more tasks, larger steps, a wrong ess), ``length`` (epochs per
task), ``defaults`` (CoVON with ``ess`` alone, in Avalanche and in plain PyTorch), ``fifty``
(50 tasks, memory), ``vcl`` (with settings that other searches found). Each run is one line of
``benchmarks/results/permuted-mnist-hard/study.jsonl``; tables go to ``docs/permuted-mnist.md``, the
figure to ``docs/permuted-mnist-sensitivity.png``. Some of the stored runs are of options that
version 0.1 had (``hess_approx="per_example"`` and ``"auto"``).
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from comparison import (
    RESULTS,
    ROOT,
    Case,
    arguments,
    new_figure,
    read_cases,
    replace_part,
    run_cases,
    tensors_of,
)

from covon_avalanche import CoVON
from covon_avalanche.evaluation.accuracy_matrix import AccuracyMatrix
from covon_avalanche.experiment.build import build_benchmark, build_model
from covon_avalanche.experiment.recipe import Recipe, load_recipe, validate
from covon_avalanche.experiment.registry import CoVON as CoVONSettings
from covon_avalanche.experiment.run import run_strategy
from covon_avalanche.experiment.run_options import RunOptions
from covon_avalanche.report.tables import aligned

FILE = RESULTS / "permuted-mnist-hard/study.jsonl"
PAGE = ROOT / "docs/permuted-mnist.md"
NAME = "benchmarks/study_permuted_mnist.py"
SEARCH = load_recipe(str(ROOT / "benchmarks/permuted_mnist.toml"))
SEED = 1002
Settings = dict[str, Any]

CENTRE: Settings = {
    "kind": "covon",
    "lr": 0.02,
    "ess": 50_000.0,
    "weight_decay": 2e-4,
    "hess_init": 0.03,
    "hess_approx": "reparam",
    "clip_radius": 0.1,
    "gamma": 1.0,
    "beta2": 0.99,
}
GRADSQ = {**CENTRE, "hess_approx": "gradsq"}
LINES = (("reparam", CENTRE, "#0b6e4f"), ("gradsq", GRADSQ, "#c2571a"))
SENSITIVITY: dict[str, list[float]] = {
    "ess": [1e4, 2e5, 1e6, 1e7, 1e8],
    "hess_init": [0.003, 0.01, 0.1, 0.3],
    "beta2": [0.9, 0.96, 0.98, 0.995, 0.999, 0.9999],
    "clip_radius": [0.01, 0.03, 0.3, 1.0, 10.0],
    "lr": [0.003, 0.007, 0.05, 0.15, 0.5],
    "gamma": [0.3, 0.5, 0.7, 0.9],
}

# Cases -------------------------------------------------------------------------------------


def case(part: str, name: str, settings: Settings, **protocol: Any) -> Case:
    """One run; the protocol is the recipe's with 5 epochs, except for what is given."""
    return {"part": part, "name": name, "settings": settings, "protocol": protocol}


def sensitivity() -> Iterator[Case]:
    for label, centre, _ in LINES:
        yield case("sensitivity", label, centre)
        for key, values in SENSITIVITY.items():
            for value in values:
                yield case("sensitivity", f"{label} {key}={value:g}", {**centre, key: value})
    yield case("sensitivity", "reparam mc_samples=4", {**CENTRE, "mc_samples": 4})
    for value in (0.5, 2.0, 4.0, 8.0):
        settings = {**GRADSQ, "gamma_precision": value}
        yield case("sensitivity", f"gradsq gamma_precision={value:g}", settings)
    by_inputs = {**GRADSQ, "gamma_precision": 2.0, "merge": "regmean"}
    yield case("sensitivity", "gradsq gamma_precision=2 merged by inputs", by_inputs)


def gamma() -> Iterator[Case]:
    changes: dict[str, tuple[Settings, Settings]] = {
        "10 tasks": ({}, {}),
        "20 tasks": ({}, {"n_experiences": 20}),
        "5 tasks, twice": ({}, {"n_permutations": 5}),
        "1 epoch": ({}, {"epochs": 1}),
        "lr 0.15": ({"lr": 0.15}, {}),
        "ess 1e6": ({"ess": 1e6}, {}),
        "ess 1e4": ({"ess": 1e4}, {}),
    }
    for label, (settings, protocol) in changes.items():
        for value in (1.0, 0.8, 0.6):
            name = f"{label}, gamma {value:g}"
            yield case("gamma", name, {**CENTRE, **settings, "gamma": value}, **protocol)
    for tasks in (20, 50):
        for value in (1.0, 0.8, 0.6):
            name = f"{tasks} tasks, gradsq, gamma {value:g}"
            yield case("gamma", name, {**GRADSQ, "gamma": value}, n_experiences=tasks)


def length() -> Iterator[Case]:
    for epochs in (1, 5, 30):
        for label, centre, _ in LINES:
            for beta2 in (0.99, 0.998, 0.999):
                name = f"{epochs} epochs, {label}, beta2 {beta2:g}"
                yield case("length", name, {**centre, "beta2": beta2}, epochs=epochs)


def fifty() -> Iterator[Case]:
    """Searched settings for 10 tasks and 30 epochs; VCL's are those its search begins with."""
    searched = load_recipe("permuted-mnist-hard").strategies
    settings = {name: s.model_dump() for name, s in searched.items()}
    settings["vcl"] = SEARCH.strategies["vcl"].model_dump()
    for name in ("finetune", "ewc-star", "ada-reg", "vcl", "covon", "covon-gradsq"):
        for tasks in (10, 50):
            yield case("fifty", f"{name}, {tasks} tasks", settings[name], n_experiences=tasks)


def defaults() -> Iterator[Case]:
    """The optimizer's own defaults and a constant learning rate, in Avalanche and in plain
    PyTorch. The others differ in one default, or have the defaults of earlier versions."""
    own = CoVON([torch.zeros(1, requires_grad=True)], ess=50_000.0).defaults
    own |= {"kind": "covon", "beta2": own["betas"][1]}
    settings = {key: own[key] for key in CoVONSettings.model_fields if key in own}
    old: Settings = {"beta2": 0.998, "gamma_precision": None}
    for epochs in (5, 30):
        protocol = {"epochs": epochs, "final_lr_factor": 1.0}
        changes: dict[str, Settings] = {
            "": {},
            ", gamma_precision None": {"gamma_precision": None},
            ", gamma_precision 4": {"gamma_precision": 4.0},
            ", beta2 0.998, gamma_precision 4": {**old, "gamma_precision": 4.0},
            ", beta2 0.998, gamma_precision None": old,
            ", reparam, beta2 0.998": {**old, "hess_approx": "reparam"},
        }
        for label, changed in changes.items():
            name = f"{epochs} epochs, Avalanche{label}"
            yield case("defaults", name, {**settings, **changed}, **protocol)
        plain: list[Settings] = [{"hess_approx": "reparam"}]
        if epochs == 5:
            plain += [{"batch_size": size} for size in (32, 64, 256, 512, 1024, 2048)]
        for given in plain:
            words = ["plain PyTorch", *(f"{key} {value}" for key, value in given.items())]
            name = f"{epochs} epochs, {', '.join(words)}"
            yield case("defaults", name, settings, **protocol, plain=given)


def vcl() -> Iterator[Case]:
    """The settings that won in the searches of EVCL and TD-VCL, which VCL's does not have."""
    searched = load_recipe("permuted-mnist-hard").strategies
    settings = searched["vcl"].model_dump()
    yield case("vcl", "VCL as searched", settings, epochs=30)
    evcl = searched["evcl"].model_dump()
    others = {key: evcl[key] for key in ("ess", "weight_decay", "lr", "std_init")}
    yield case("vcl", "VCL with EVCL's settings", {**settings, **others}, epochs=30)


PARTS = {
    "sensitivity": sensitivity,
    "gamma": gamma,
    "length": length,
    "defaults": defaults,
    "fifty": fifty,
    "vcl": vcl,
}

# Measuring ---------------------------------------------------------------------------------


def recipe_of(run: Case) -> Recipe:
    """The recipe of a case, with one strategy."""
    protocol = {"epochs": 5, "final_lr_factor": 0.01, **run["protocol"]}
    data = SEARCH.model_dump(exclude={"search"})
    data |= {key: protocol[key] for key in ("epochs", "final_lr_factor")}
    for key in ("n_experiences", "n_permutations"):
        data["stream"][key] = protocol.get(key, data["stream"].get(key))
    return validate({**data, "strategies": {"it": run["settings"]}}, run["name"])


def measure(run: Case, root: Path) -> Case:
    """Run it; a run that diverges has an error instead of an accuracy."""
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    recipe = recipe_of(run)
    if "plain" in run["protocol"]:
        return measure_plain(recipe, root, run["protocol"]["plain"])
    try:
        result = run_strategy(recipe, "it", SEED, RunOptions(dataset_root=root), stream="valid")
    except (FloatingPointError, ValueError) as error:
        return {"error": str(error)}
    return {
        "seed": SEED,
        "a_t": result.average_accuracy,
        "bwt": result.bwt,
        "curve": result.matrix.curve(),
        "seconds": sum(result.train_seconds),
        "memory": result.memory_ratio,
        "diagnostics": result.diagnostics,
    }


def measure_plain(recipe: Recipe, root: Path, given: Settings) -> Case:
    """The same in a plain PyTorch loop.

    :param given: the optimizer's settings, beside ``ess``.
    """
    benchmark = build_benchmark(recipe, seed=SEED, dataset_root=root)
    train = [tensors_of(e.dataset.train()) for e in benchmark.train_stream]
    valid = [tensors_of(e.dataset.eval()) for e in benchmark.valid_stream]
    torch.manual_seed(SEED)
    model = build_model(recipe.model, benchmark)
    optimizer = CoVON(model.parameters(), ess=len(train[0][1]), **given)
    matrix, memory = AccuracyMatrix([len(y) for _, y in valid]), 0.0
    start = time.perf_counter()
    for x, y in train:
        for _ in range(recipe.epochs):
            for rows in torch.randperm(len(y)).split(recipe.train_mb_size):
                with optimizer.sampled_params():
                    optimizer.zero_grad()
                    torch.nn.functional.cross_entropy(model(x[rows]), y[rows]).backward()
                optimizer.step()
        entries = [v for state in optimizer.state.values() for v in state.values()]
        held = sum(v.numel() for v in entries if isinstance(v, torch.Tensor))
        memory = 2 + held / sum(p.numel() for p in model.parameters())  # weights and a sample
        optimizer.consolidate()
        with torch.no_grad():
            matrix.rows.append([(model(x).argmax(1) == y).float().mean().item() for x, y in valid])
    return {
        "seed": SEED,
        "a_t": matrix.average_accuracy(),
        "bwt": matrix.bwt(),
        "curve": matrix.curve(),
        "seconds": time.perf_counter() - start,
        "memory": memory,
    }


# Report ------------------------------------------------------------------------------------


def plot_sensitivity(values: dict[str, float]) -> None:
    """One panel per setting, one line per Hessian estimate.

    :param values: A_T in percent, by name of the run.
    """
    with new_figure(ROOT / "docs/permuted-mnist-sensitivity.png", 9.5, 5.2) as figure:
        all_axes = figure.subplots(2, 3, sharey=True)
        for axes, (key, others) in zip(all_axes.flat, SENSITIVITY.items(), strict=True):
            for label, centre, colour in LINES:
                names = {centre[key]: label} | {v: f"{label} {key}={v:g}" for v in others}
                points = sorted((x, values[name]) for x, name in names.items() if name in values)
                x = [1 - x if key == "beta2" else x for x, _ in points]
                axes.plot(x, [y for _, y in points], "o-", ms=4, color=colour, label=label)
            axes.set_xlabel("1 - beta2" if key == "beta2" else key)
            axes.set_xscale("linear" if key == "gamma" else "log")
            axes.set_ylim(35, 97)
            axes.grid(axis="y")
        all_axes[0][0].legend()
        figure.supylabel("A_T on validation images (%)", fontsize=10)


def table(runs: pd.DataFrame) -> str:
    """All runs of a part."""
    diverged = runs["a_t"].isna()
    columns = {
        "run": runs["name"],
        "A_T %": (100 * runs["a_t"]).map("{:.2f}".format).mask(diverged, "diverged"),
        "BWT %": (100 * runs["bwt"]).map("{:.2f}".format).mask(diverged, "-"),
        "memory": runs["memory"].map("{:.1f}".format).mask(diverged, "-"),
    }
    return aligned(pd.DataFrame(columns))


def write_report() -> None:
    """Tables and figure; runs of options that are gone come last in their part."""
    runs = pd.DataFrame(read_cases(FILE))
    scores = (100 * runs.set_index(["part", "name"])["a_t"]).fillna(0)
    plot_sensitivity(scores["sensitivity"].to_dict())
    for part, group in runs.groupby("part"):
        order = {run["name"]: i for i, run in enumerate(PARTS[part]())}
        rank = group["name"].map(order).fillna(len(order))
        ordered = group.loc[rank.sort_values(kind="stable").index]
        replace_part(PAGE, f"{NAME}, {part}", table(ordered))


def main() -> None:
    """Run and report."""
    given = arguments(__doc__, *PARTS)
    if not given.report:
        cases = [run for part in given.parts or PARTS for run in PARTS[part]()]
        key = ("part", "name")
        run_cases(cases, measure, FILE, given.dataset_root, key=key, processes=given.jobs)
    write_report()


if __name__ == "__main__":
    main()
