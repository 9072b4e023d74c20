"""What CoVON's settings do on Permuted MNIST-Hard, on validation images of a tuning permutation.

    python benchmarks/study_permuted_mnist.py --dataset-root DATA [PART ...]   run what is missing
    python benchmarks/study_permuted_mnist.py --report                         tables and pictures

Parts: ``sensitivity`` (the paper's Figure 4: one setting at a time around a centre, 5 epochs a
task), ``gamma`` (merging with more tasks, larger steps, a wrong ess), ``length`` (epochs a task),
``defaults`` (what someone gets who gives ess alone, in Avalanche and in plain PyTorch), ``fifty``
(50 tasks, memory), ``vcl`` (with settings that other searches found). Each run is one line of
``benchmarks/results/permuted-mnist-hard/study.jsonl``; they are shown in
``docs/permuted-mnist.md`` and ``docs/permuted-mnist-sensitivity.png``.
"""

from __future__ import annotations

import argparse
import inspect
import json
import multiprocessing
import time
import warnings
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from typing import Any

import torch
from comparison import ROOT, replace_part
from overhead import columns
from search_permuted_mnist import BASE, CENTRES, RESULTS

from covon_avalanche import CoVON
from covon_avalanche.atomic_write import write_atomically
from covon_avalanche.evaluation.accuracy_matrix import AccuracyMatrix
from covon_avalanche.experiment.build import build_benchmark, build_model
from covon_avalanche.experiment.machine import machine, versions
from covon_avalanche.experiment.recipe import Recipe, load_recipe
from covon_avalanche.experiment.registry import CoVON as CoVONSettings
from covon_avalanche.experiment.run import run_strategy
from covon_avalanche.experiment.run_options import RunOptions

FILE = RESULTS / "study.jsonl"
PAGE = ROOT / "docs/permuted-mnist.md"
NAME = "benchmarks/study_permuted_mnist.py"
SEED = 1002

CENTRE: dict[str, Any] = {
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
PER_EXAMPLE = {**CENTRE, "hess_approx": "per_example"}
OLD: dict[str, Any] = {"beta2": 0.998, "gamma_precision": None}  # defaults before
LINES = (("reparam", CENTRE, "#0b6e4f"), ("gradsq", GRADSQ, "#c2571a"))
SENSITIVITY: dict[str, list[float]] = {
    "ess": [1e4, 2e5, 1e6, 1e7, 1e8],
    "hess_init": [0.003, 0.01, 0.1, 0.3],
    "beta2": [0.9, 0.96, 0.98, 0.995, 0.999, 0.9999],
    "clip_radius": [0.01, 0.03, 0.3, 1.0, 10.0],
    "lr": [0.003, 0.007, 0.05, 0.15, 0.5],
    "gamma": [0.3, 0.5, 0.7, 0.9],
}


def run_of(part: str, name: str, settings: dict[str, Any], **protocol: Any) -> dict[str, Any]:
    """One run; the protocol is the recipe's with 5 epochs but for what is given."""
    return {"part": part, "name": name, "settings": settings, "protocol": protocol}


def sensitivity() -> Iterator[dict[str, Any]]:
    for label, centre, _ in LINES:
        yield run_of("sensitivity", f"{label}", centre)
        for key, values in SENSITIVITY.items():
            for value in values:
                yield run_of("sensitivity", f"{label} {key}={value:g}", {**centre, key: value})
    yield run_of("sensitivity", "per_example", PER_EXAMPLE)
    yield run_of("sensitivity", "reparam mc_samples=4", {**CENTRE, "mc_samples": 4})
    for value in (0.5, 2.0, 4.0, 8.0):
        settings = {**GRADSQ, "gamma_precision": value}
        yield run_of("sensitivity", f"gradsq gamma_precision={value:g}", settings)
    by_inputs = {**GRADSQ, "gamma_precision": 2.0, "consolidation": "inputs"}
    yield run_of("sensitivity", "gradsq gamma_precision=2 merged by inputs", by_inputs)


def gamma() -> Iterator[dict[str, Any]]:
    changes: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
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
            yield run_of("gamma", name, {**CENTRE, **settings, "gamma": value}, **protocol)
    for tasks in (20, 50):
        for value in (1.0, 0.8, 0.6):
            name = f"{tasks} tasks, gradsq, gamma {value:g}"
            yield run_of("gamma", name, {**GRADSQ, "gamma": value}, n_experiences=tasks)


def length() -> Iterator[dict[str, Any]]:
    for epochs in (1, 5, 30):
        for label, centre, _ in LINES:
            for beta2 in (0.99, 0.998, 0.999):
                name = f"{epochs} epochs, {label}, beta2 {beta2:g}"
                yield run_of("length", name, {**centre, "beta2": beta2}, epochs=epochs)


def fifty() -> Iterator[dict[str, Any]]:
    """Searched settings for 10 tasks and 30 epochs; VCL's are those its search begins with."""
    searched = load_recipe("permuted-mnist-hard").strategies
    settings = {name: s.model_dump() for name, s in searched.items()}
    settings["vcl"] = {"kind": "vcl", **CENTRES["vcl"]}
    for name in ("finetune", "ewc-star", "ada-reg", "vcl", "covon", "covon-gradsq"):
        for tasks in (10, 50):
            yield run_of("fifty", f"{name}, {tasks} tasks", settings[name], n_experiences=tasks)


def defaults() -> Iterator[dict[str, Any]]:
    """The optimizer's own defaults and a constant learning rate; in Avalanche the plugin tells
    the size of the batch, in plain PyTorch nobody does. The others have one default less, or
    what the defaults were before."""
    own = {k: p.default for k, p in inspect.signature(CoVON).parameters.items()}
    own |= {"kind": "covon", "ess": 50_000.0, "beta2": own["betas"][1]}
    settings = {key: own[key] for key in CoVONSettings.model_fields if key in own}
    for epochs in (5, 30):
        protocol = {"epochs": epochs, "final_lr_factor": 1.0}
        for label, changes in (
            ("Avalanche", {}),
            ("Avalanche, gamma_precision None", {"gamma_precision": None}),
            ("Avalanche, gamma_precision 4", {"gamma_precision": 4.0}),
            ("Avalanche, beta2 0.998, gamma_precision 4", {**OLD, "gamma_precision": 4.0}),
            ("Avalanche, beta2 0.998, gamma_precision None", OLD),
            ("Avalanche, reparam, beta2 0.998", {**OLD, "hess_approx": "reparam"}),
        ):
            yield run_of(
                "defaults", f"{epochs} epochs, {label}", {**settings, **changes}, **protocol
            )
        plain: list[dict[str, Any]] = [{}, {"hess_approx": "reparam"}]
        if epochs == 5:
            plain += [{"batch_size": size} for size in (32, 64, 256, 512, 1024, 2048)]
        for given in plain:
            words = ["plain PyTorch", *(f"{key} {value}" for key, value in given.items())]
            name = f"{epochs} epochs, {', '.join(words)}"
            yield run_of("defaults", name, settings, **protocol, plain=given)


def vcl() -> Iterator[dict[str, Any]]:
    """The settings that won in the searches of EVCL and TD-VCL, which VCL's does not have."""
    searched = load_recipe("permuted-mnist-hard").strategies
    settings = searched["vcl"].model_dump()
    yield run_of("vcl", "VCL as searched", settings, epochs=30)
    evcl = searched["evcl"].model_dump()
    others = {key: evcl[key] for key in ("ess", "weight_decay", "lr", "std_init")}
    yield run_of("vcl", "VCL with EVCL's settings", {**settings, **others}, epochs=30)


PARTS = {
    "sensitivity": sensitivity,
    "gamma": gamma,
    "length": length,
    "defaults": defaults,
    "fifty": fifty,
    "vcl": vcl,
}


def measure(run: dict[str, Any], root: str) -> dict[str, Any]:
    """Run it; what diverges has an error instead of an accuracy."""
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    protocol = {"epochs": 5, "n_experiences": 10, "final_lr_factor": 0.01, **run["protocol"]}
    recipe = Recipe.model_validate(
        {
            **BASE,
            "epochs": protocol["epochs"],
            "final_lr_factor": protocol["final_lr_factor"],
            "stream": {
                **BASE["stream"],
                "n_experiences": protocol["n_experiences"],
                "n_permutations": protocol.get("n_permutations"),
            },
            "strategies": {"it": run["settings"]},
        }
    )
    if "plain" in protocol:
        return measure_plain(run, recipe, root)
    try:
        result = run_strategy(recipe, "it", SEED, RunOptions(dataset_root=root), stream="valid")
    except (FloatingPointError, ValueError) as error:
        return {**run, "error": str(error)}
    return {
        **run,
        "seed": SEED,
        "a_t": result.average_accuracy,
        "bwt": result.bwt,
        "curve": result.matrix.curve(),
        "seconds": sum(result.train_seconds),
        "memory": result.parameters_worth,
        "diagnostics": result.diagnostics,
        "versions": result.versions,
        "machine": result.machine,
    }


def in_plain_pytorch(
    recipe: Recipe, root: str, given: dict[str, Any]
) -> tuple[AccuracyMatrix, float]:
    """Accuracies on validation images, and what weights and optimizer take before the last
    merge, in copies of the weights.

    :param given: to the optimizer, beside ``ess``.
    """
    benchmark = build_benchmark(recipe, seed=SEED, dataset_root=root)
    train = [columns(e.dataset.train()) for e in benchmark.train_stream]
    valid = [columns(e.dataset.eval()) for e in benchmark.valid_stream]
    torch.manual_seed(SEED)
    model = build_model(recipe.model, benchmark)
    optimizer = CoVON(model.parameters(), ess=len(train[0][1]), **given)
    matrix = AccuracyMatrix([len(y) for _, y in valid])
    for x, y in train:
        for _ in range(recipe.epochs):
            for rows in torch.randperm(len(y)).split(recipe.train_mb_size):
                with optimizer.sampled_params():
                    optimizer.zero_grad()
                    torch.nn.functional.cross_entropy(model(x[rows]), y[rows]).backward()
                optimizer.step()
        memory = optimizer.memory()
        optimizer.consolidate()
        with torch.no_grad():
            row = [(model(x).argmax(1) == y).float().mean().item() for x, y in valid]
        matrix.rows.append(row)
    kept = sum(memory.values()) - memory["gradients"]
    return matrix, kept / memory["parameters"]


def measure_plain(run: dict[str, Any], recipe: Recipe, root: str) -> dict[str, Any]:
    """The same numbers of a plain loop."""
    start = time.perf_counter()
    matrix, memory = in_plain_pytorch(recipe, root, run["protocol"]["plain"])
    seconds = time.perf_counter() - start
    return {
        **run,
        "seed": SEED,
        "a_t": matrix.average_accuracy(),
        "bwt": matrix.bwt(),
        "curve": matrix.curve(),
        "seconds": seconds,
        "memory": memory,
        "versions": versions(),
        "machine": machine(),
    }


def stored() -> list[dict[str, Any]]:
    """What has been measured so far."""
    if not FILE.exists():
        return []
    return [json.loads(line) for line in FILE.read_text().splitlines()]


def run_missing(parts: list[str], root: str, jobs: int) -> None:
    """Measure what is missing, storing each run as it comes."""
    records = stored()
    have = {(r["part"], r["name"]) for r in records}
    runs = [r for part in parts for r in PARTS[part]() if (r["part"], r["name"]) not in have]
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, context) as pool:
        for future in as_completed([pool.submit(measure, run, root) for run in runs]):
            record = future.result()
            records.append(record)
            write_atomically(FILE, "".join(json.dumps(r) + "\n" for r in records))
            print(record["name"], f"{100 * record.get('a_t', 0):.2f}", flush=True)


# Report --------------------------------------------------------------------------------


def plot_sensitivity(records: list[dict[str, Any]]) -> None:
    """A panel a setting, a line an estimator."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, all_axes = plt.subplots(
        2, 3, figsize=(9.5, 5.2), layout="constrained", sharey=True, squeeze=False
    )
    values = {r["name"]: 100 * r.get("a_t", 0.0) for r in records if r["part"] == "sensitivity"}
    for axes, (key, others) in zip(all_axes.flat, SENSITIVITY.items(), strict=True):
        for label, centre, colour in LINES:
            points = {centre[key]: values.get(label)}
            points |= {value: values.get(f"{label} {key}={value:g}") for value in others}
            found = sorted((x, y) for x, y in points.items() if y is not None)
            x = [1 - a if key == "beta2" else a for a, _ in found]
            axes.plot(x, [y for _, y in found], marker="o", markersize=4, color=colour, label=label)
        axes.set_xlabel("1 - beta2" if key == "beta2" else key)
        if key != "gamma":
            axes.set_xscale("log")
        axes.set_ylim(35, 97)
        axes.grid(axis="y", color="#e5e7eb", linewidth=0.8)
        axes.spines[["top", "right"]].set_visible(False)
    all_axes[0][0].legend(frameon=False)
    figure.supylabel("A_T on validation images (%)", fontsize=10)
    path = ROOT / "docs/permuted-mnist-sensitivity.png"
    figure.savefig(path, dpi=160)
    plt.close(figure)


def table(records: list[dict[str, Any]], part: str) -> str:
    """All runs of a part."""
    lines = ["| run | A_T % | BWT % | memory |", "|---|---:|---:|---:|"]
    for r in records:
        if r["part"] == part and "error" in r:
            lines.append(f"| {r['name']} | diverged | - | - |")
        elif r["part"] == part:
            numbers = f"{100 * r['a_t']:.2f} | {100 * r['bwt']:.2f} | {r['memory']:.1f}"
            lines.append(f"| {r['name']} | {numbers} |")
    return "\n".join(lines) + "\n"


def write_report() -> None:
    """Tables into the page, and the picture."""
    records = stored()
    present = [part for part in PARTS if any(r["part"] == part for r in records)]
    order = [(part, run["name"]) for part in present for run in PARTS[part]()]
    records.sort(key=lambda r: order.index((r["part"], r["name"])))
    plot_sensitivity(records)
    for part in present:
        replace_part(PAGE, f"{NAME}, {part}", table(records, part))


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", choices=[[], *PARTS], metavar="PART")
    parser.add_argument("--dataset-root", help="the folder that has MNIST/raw")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time")
    parser.add_argument("--report", action="store_true")
    arguments = parser.parse_args()
    if not arguments.report:
        run_missing(arguments.parts or list(PARTS), arguments.dataset_root, arguments.jobs)
    write_report()


if __name__ == "__main__":
    main()
