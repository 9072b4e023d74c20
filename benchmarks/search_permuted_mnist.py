"""Choose the hyperparameters of the ``permuted-mnist-hard`` recipe on validation data.

    python benchmarks/search_permuted_mnist.py --dataset-root DATA [STRATEGY ...]   (resumes)
    python benchmarks/search_permuted_mnist.py --write-recipe

The same budget for every strategy: 8 Optuna trials (TPE, the first at the centre given below,
the next three at random) of the recipe's own protocol, ten tasks of 30 epochs (shorter ones
prefer other settings), pruned by Optuna's median rule (of the best mean accuracy so far) from the
third task on. The best wins. All on 10,000 validation images and permutations that no report
uses. Trials are stored after each one in
``benchmarks/results/permuted-mnist-hard/search-STRATEGY.json``.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import time
import warnings
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import optuna
import torch

from covon_avalanche.atomic_write import write_atomically
from covon_avalanche.experiment.recipe import Recipe, shipped_recipes
from covon_avalanche.experiment.run import run_strategy
from covon_avalanche.experiment.run_options import RunOptions

TRIALS = 8
RANDOM = 4  # of them, with the centre
SEED = 1000
RESULTS = Path(__file__).resolve().parent / "results" / "permuted-mnist-hard"
RECIPES = Path(__file__).parents[1] / "covon_avalanche/experiment/recipes"

BASE: dict[str, Any] = {
    "name": "permuted-mnist-hard",
    "title": "Permuted MNIST-Hard: ten pixel orders, one head, MLP 784-100-100-10",
    "epochs": 30,
    "train_mb_size": 256,
    "final_lr_factor": 0.01,
    "seeds": [0, 1, 2, 3, 4],
    "stream": {"name": "PermutedMNIST", "n_experiences": 10, "validation_size": 10_000},
    "model": {"hidden_size": 100, "hidden_layers": 2},
}

ADAMW = {"lr": (1e-4, 1e-2), "weight_decay": (1e-6, 1e-1)}
VCL = {
    "ess": (1e4, 1e6),
    "weight_decay": (1e-6, 1e-2),
    "lr": (3e-4, 1e-2),
    "std_init": (1e-3, 0.1),
}
NEWTON = {
    "kind": "covon",
    "hess_approx": "reparam",
    "ess": (1e4, 1e6),
    "weight_decay": (2e-5, 2e-3),
    "lr": (5e-3, 0.2),
    "hess_init": (3e-3, 0.5),
    "clip_radius": (0.03, 1.0),
    "beta2": [0.99, 0.995, 0.998, 0.999, 0.9995],
}
# Pairs are ranges on a log scale, lists are choices, other values are fixed.
SPACES: dict[str, dict[str, Any]] = {
    "finetune": {"kind": "finetune", **ADAMW},
    "lwf": {"kind": "lwf", **ADAMW, "alpha": (0.1, 100.0)},
    "si": {"kind": "si", **ADAMW, "si_lambda": (0.1, 1e4)},
    "ewc": {"kind": "ewc", **ADAMW, "ewc_lambda": (1e2, 1e8)},
    "ewc-star": {"kind": "ewc-star", **ADAMW, "strength": (1.0, 1e7)},
    "ada-reg": {"kind": "ada-reg", **ADAMW, "strength": (1e2, 1e10)},
    "vcl": {"kind": "vcl", **VCL},
    "evcl": {"kind": "evcl", **VCL, "strength": (1e-3, 1e4)},
    "td-vcl-n": {"kind": "td-vcl", **VCL, "n_steps": 5},
    "td-vcl-lambda": {"kind": "td-vcl", **VCL, "n_steps": 8, "decay": (0.2, 1.0)},
    "ivon": {**NEWTON, "lr": (5e-5, 5e-3), "gamma": 1.0, "consolidation": "none"},
    "ivon-prior": {**NEWTON, "gamma": 1.0, "consolidation": "replace"},
    "ema": {**NEWTON, "gamma": (0.5, 1.0), "consolidation": "ema"},
    "covon-nom": {**NEWTON, "gamma": 1.0},
    "covon": {**NEWTON, "gamma": (0.5, 1.0)},
    "covon-gradsq": {
        **NEWTON,
        "hess_approx": "gradsq",
        "gamma": (0.5, 1.0),
        "gamma_precision": (0.7, 7.0),
    },
    "joint": {"kind": "joint", **ADAMW},
}
_NEWTON = {
    "ess": 1e5,
    "weight_decay": 2e-4,
    "lr": 0.03,
    "hess_init": 0.03,
    "clip_radius": 0.1,
}
_ADAMW = {"lr": 1e-3, "weight_decay": 1e-4}
_VCL = {"ess": 5e4, "weight_decay": 2e-5, "lr": 1e-3, "std_init": 0.02}
CENTRES: dict[str, dict[str, Any]] = {
    "finetune": _ADAMW,
    "lwf": {**_ADAMW, "alpha": 1.0},
    "si": {**_ADAMW, "si_lambda": 30.0},
    "ewc": {**_ADAMW, "ewc_lambda": 1e5},
    "ewc-star": {**_ADAMW, "strength": 1e4},
    "ada-reg": {**_ADAMW, "strength": 2e6},
    "vcl": _VCL,
    "evcl": {**_VCL, "strength": 1.0},
    "td-vcl-n": _VCL,
    "td-vcl-lambda": {**_VCL, "decay": 0.5},
    "ivon": {**_NEWTON, "beta2": 0.998, "lr": 1e-3},
    "ivon-prior": {**_NEWTON, "beta2": 0.998},
    "ema": {**_NEWTON, "beta2": 0.998, "gamma": 0.9},
    "covon-nom": {**_NEWTON, "beta2": 0.998},
    "covon": {**_NEWTON, "beta2": 0.998, "gamma": 0.9},
    "covon-gradsq": {**_NEWTON, "beta2": 0.998, "gamma": 1.0, "gamma_precision": 2.0},
    "joint": _ADAMW,
}


class Pruned(Exception):
    """A trial that is not worth finishing."""


def suggest(trial: optuna.Trial, space: dict[str, Any]) -> dict[str, Any]:
    """The settings of a trial."""
    settings = {}
    for key, values in space.items():
        if isinstance(values, tuple):
            settings[key] = float(f"{trial.suggest_float(key, *values, log=True):.3g}")
        elif isinstance(values, list):
            settings[key] = trial.suggest_categorical(key, values)
        else:
            settings[key] = values
    return settings


def distributions(space: dict[str, Any]) -> dict[str, optuna.distributions.BaseDistribution]:
    """What a stored trial's settings were drawn from."""
    found: dict[str, optuna.distributions.BaseDistribution] = {}
    for key, values in space.items():
        if isinstance(values, tuple):
            found[key] = optuna.distributions.FloatDistribution(*values, log=True)
        elif isinstance(values, list):
            found[key] = optuna.distributions.CategoricalDistribution(values)
    return found


def evaluate(settings: dict[str, Any], root: str, trial: optuna.Trial) -> dict[str, Any]:
    """A_T on validation images; 0 where the training diverged."""
    recipe = Recipe.model_validate({**BASE, "strategies": {"it": settings}})
    curve: list[float] = []
    record = {"settings": settings, "seed": SEED, "curve": curve}

    def report(domains: int, accuracy: float) -> None:
        curve.append(accuracy)
        if settings["kind"] != "joint":
            trial.report(accuracy, domains)
            if trial.should_prune():
                raise Pruned

    start = time.perf_counter()
    try:
        options = RunOptions(dataset_root=Path(root))
        run_strategy(recipe, "it", SEED, options, stream="valid", on_domain=report)
        state = "complete"
    except Pruned:
        state = "pruned"
    except (FloatingPointError, ValueError) as error:
        state = f"failed: {error}"
    value = curve[-1] if state == "complete" else 0.0
    return {**record, "value": value, "state": state, "seconds": time.perf_counter() - start}


def stored_trial(record: dict[str, Any], space: dict[str, Any]) -> optuna.trial.FrozenTrial:
    """A record of an earlier session as Optuna knows it."""
    known = distributions(space)
    pruned = record["state"] == "pruned"
    return optuna.trial.create_trial(
        params={k: record["settings"][k] for k in known},
        distributions=known,
        state=optuna.trial.TrialState.PRUNED if pruned else optuna.trial.TrialState.COMPLETE,
        value=None if pruned else record["value"],
        intermediate_values={i + 1: a for i, a in enumerate(record["curve"])},
    )


def search(name: str, root: str) -> None:
    """Run what is missing of a strategy's trials."""
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    file, space = RESULTS / f"search-{name}.json", SPACES[name]
    stored = json.loads(file.read_text()) if file.exists() else {"trials": []}
    trials = stored["trials"]
    sampler = optuna.samplers.TPESampler(seed=len(trials), n_startup_trials=RANDOM)
    pruner = optuna.pruners.MedianPruner(n_startup_trials=3, n_warmup_steps=3)
    study = optuna.create_study(direction="maximize", sampler=sampler, pruner=pruner)
    study.add_trials([stored_trial(record, space) for record in trials])

    def store() -> None:
        best = max(trials, key=lambda r: r["value"], default=None)
        summary = {
            "strategy": name,
            "objective": "A_T on 10,000 validation images",
            "sampler": "Optuna TPE; the first trial at the centre, three at random",
            "pruner": "median of the mean accuracy on the tasks so far, from the third on",
            "versions": {"optuna": optuna.__version__, "torch": torch.__version__},
            "space": space,
            "best": best,
            "trials": trials,
        }
        write_atomically(file, json.dumps(summary, indent=1) + "\n")

    for number in range(len(trials), TRIALS):
        if number == 0:
            study.enqueue_trial(CENTRES[name])
        trial = study.ask()
        record = evaluate(suggest(trial, space), root, trial)
        pruned = record["state"] == "pruned"
        if pruned:
            study.tell(trial, state=optuna.trial.TrialState.PRUNED)
        else:
            study.tell(trial, record["value"])
        trials.append(record)
        store()
        print(f"{name} {len(trials)}/{TRIALS} {record['state']} {record['value']:.4f}", flush=True)


def write_recipe() -> None:
    """The best trial of each strategy as the shipped recipe."""
    lines = [
        "# Written by benchmarks/search_permuted_mnist.py; do not edit.",
        f"# The settings are the best of {TRIALS} trials for every strategy, by A_T on 10,000",
        "# validation images; all trials are in benchmarks/results/permuted-mnist-hard.",
    ]
    flat = {k: v for k, v in BASE.items() if not isinstance(v, dict)}
    lines += [f"{key} = {json.dumps(value)}" for key, value in flat.items()]
    tables = {k: v for k, v in BASE.items() if isinstance(v, dict)}
    comments = {}
    for name in SPACES:
        file = RESULTS / f"search-{name}.json"
        stored = json.loads(file.read_text()) if file.exists() else {"trials": []}
        if len(stored["trials"]) < TRIALS:  # not searched with the budget of the others yet
            continue
        best = stored["best"]
        tables[f"strategies.{name}"] = best["settings"]
        comments[f"strategies.{name}"] = f"  # validation A_T {100 * best['value']:.2f} %"
    for title, table in tables.items():
        lines += ["", f"[{title}]{comments.get(title, '')}"]
        lines += [f"{key} = {json.dumps(value)}" for key, value in table.items()]
    write_atomically(RECIPES / f"{BASE['name']}.toml", "\n".join(lines) + "\n")


def main() -> None:
    """Search, or write the recipe."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("strategies", nargs="*", choices=[[], *SPACES], metavar="STRATEGY")
    parser.add_argument("--dataset-root", help="the folder that has MNIST/raw")
    parser.add_argument("--jobs", type=int, default=2, help="strategies at a time")
    parser.add_argument("--write-recipe", action="store_true")
    arguments = parser.parse_args()
    if arguments.write_recipe:
        write_recipe()
        print(f"recipes: {', '.join(shipped_recipes())}")
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(arguments.jobs, context) as pool:
        names = arguments.strategies or list(SPACES)
        for future in [pool.submit(search, name, arguments.dataset_root) for name in names]:
            future.result()


if __name__ == "__main__":
    main()
