"""Continual pretraining of a small GPT-2: English, German, French, from random weights.

    python benchmarks/manual_pages.py CORPORA          download the text
    python benchmarks/language.py CORPORA --trials 3   search what is missing, on validation text
    python benchmarks/language.py CORPORA              run what is missing, on test text, and report
    python benchmarks/language.py --report             from stored results only

Settings and ranges are in ``benchmarks/language.toml``. Trials and results go to
``benchmarks/results/language/{trials,results}.jsonl``, table and figure to ``docs/language.md`` and
``docs/language.png``.
"""

from __future__ import annotations

import argparse
import json
import math
import random
from pathlib import Path

import pandas as pd
from comparison import (
    RESULTS,
    ROOT,
    Case,
    mean_and_std,
    new_figure,
    origin,
    read_cases,
    replace_part,
    run_cases,
)
from language_training import LANGUAGES, measure, tokenized

from covon_avalanche.experiment.recipe import tomllib
from covon_avalanche.report.figures import INK
from covon_avalanche.report.tables import aligned

NAME = "benchmarks/language.py"
SETTINGS = Path(__file__).with_suffix(".toml")
MARKERS = "osD^vPX*"
TRIALS, STORED = (RESULTS / f"language/{name}.jsonl" for name in ("trials", "results"))


# Search and results --------------------------------------------------------------------------


def log_perplexities(case: Case) -> pd.DataFrame:
    """Nats per token, a row per evaluation and a column per language."""
    curve = pd.DataFrame(case["curve"])
    return curve.pivot(index="step", columns="language", values="nats")[list(LANGUAGES)]


def average(case: Case) -> float:
    """A_T: mean log-perplexity over the languages at the end; infinite if training diverged."""
    return math.inf if "error" in case else float(log_perplexities(case).iloc[-1].mean())


def forgetting(case: Case) -> float:
    """Increase of the log-perplexity since a language was learned, mean over all but the last."""
    curve = pd.DataFrame(case["curve"])
    learned = curve[curve["learned"] == curve["language"]].groupby("language")["nats"].last()
    final = log_perplexities(case).iloc[-1]
    return float((final - learned).reindex(list(LANGUAGES)[:-1]).mean())


def drawn(recipe: Case, strategy: str, trial: int) -> Case:
    """The settings of a trial: the starting values, or a draw from the ranges."""
    settings = dict(recipe["strategies"][strategy])
    generator = random.Random(f"{strategy}/{trial}")
    for name, (low, high) in recipe["search"][strategy].items() if trial else ():
        value = math.exp(generator.uniform(math.log(low), math.log(high)))
        settings[name] = float(f"{value:.3g}")
    return settings


def best_settings(recipe: Case, strategy: str) -> Case:
    """The settings of the best trial, or the starting values without trials."""
    known = {json.dumps(drawn(recipe, strategy, i)) for i in range(100)}
    trials = [t for t in read_cases(TRIALS) if json.dumps(t["settings"]) in known]
    trials = [t for t in trials if t["strategy"] == strategy]
    return dict(min(trials, key=average)["settings"] if trials else drawn(recipe, strategy, 0))


def measure_or_error(case: Case, file: Path, recipe: Case) -> Case:
    """As :func:`measure`; a training that diverges has an ``error``."""
    try:
        return measure(case, file, recipe)
    except (FloatingPointError, ValueError) as error:
        return {"error": str(error)}


def search(recipe: Case, trials: int, file: Path, jobs: int | None) -> None:
    """Run the trials that are missing, of all strategies the first, then the second."""
    cases = [
        {"strategy": name, "seed": 1000, "part": "valid", "settings": drawn(recipe, name, i)}
        for i in range(trials)
        for name in recipe["strategies"]
    ]
    run_cases(cases, measure_or_error, TRIALS, file, recipe, processes=jobs)


def finals(recipe: Case) -> list[Case]:
    """The runs of the report: the best settings with three seeds, on test text."""
    return [
        {"strategy": name, "seed": seed, "part": "test", "settings": best_settings(recipe, name)}
        for seed in range(3)
        for name in recipe["strategies"]
    ]


# Report --------------------------------------------------------------------------------------


def table(runs: pd.DataFrame) -> str:
    """Perplexity per language at the end, bits per byte, A_T, forgetting, seconds."""
    rows = []
    for name, group in runs.groupby("strategy"):
        last = [log_perplexities(case).iloc[-1] for case in group.to_dict("records")]
        curves = [pd.DataFrame(case) for case in group["curve"]]
        bits = pd.Series([c[c["step"] == c["step"].max()]["bits_per_byte"].mean() for c in curves])
        offline = " (offline)" if name == "joint" else ""
        row: Case = {"strategy": f"{name}{offline}", "A_T (nats)": mean_and_std(group["A_T"], 3)}
        row["forgetting (nats)"] = "–" if offline else mean_and_std(group["forgetting"], 3)  # noqa: RUF001
        for language, title in LANGUAGES.items():
            perplexity = pd.Series([math.exp(nats[language]) for nats in last])
            row[f"perplexity {title}"] = mean_and_std(perplexity, 1)
        row |= {"bits per byte": mean_and_std(bits, 3), "CPU s": f"{group['seconds'].mean():.0f}"}
        rows.append((group["A_T"].mean(), row))
    return aligned(pd.DataFrame([row for _, row in sorted(rows, key=lambda pair: pair[0])]))


def save_figure(runs: pd.DataFrame, path: Path) -> None:
    """Log-perplexity of each language over the training steps, mean over seeds."""
    groups = {name: group.to_dict("records") for name, group in runs.groupby("strategy")}
    with new_figure(path, 9, 3.6) as figure:
        panels = figure.subplots(1, len(LANGUAGES), sharey=True)
        for i, (name, cases) in enumerate(groups.items()):
            mean = sum(log_perplexities(case) for case in cases) / len(cases)
            look = {"color": INK, "linestyle": "--"} if name == "joint" else {"color": f"C{i}"}
            for axes, language in zip(panels, LANGUAGES, strict=True):
                axes.plot(mean[language], **look, marker=MARKERS[i % len(MARKERS)], label=name)
                axes.set(title=LANGUAGES[language], xlabel="steps")
        panels[0].set(ylabel="log-perplexity (nats per token)")
        handles, labels = panels[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=5)


def write_report(recipe: Case) -> None:
    """Table and figure of the finished runs with the present settings."""
    wanted = [(case["strategy"], case["settings"]) for case in finals(recipe)]
    cases = [case for case in read_cases(STORED) if (case["strategy"], case["settings"]) in wanted]
    cases = [
        case | {"A_T": average(case), "forgetting": forgetting(case)}
        for case in cases
        if "error" not in case
    ]
    if not cases:
        print("there are no results yet")
        return
    runs = pd.DataFrame(cases)
    save_figure(runs, ROOT / "docs/language.png")
    figure = "![Log-perplexity of each language while training](language.png)"
    replace_part(ROOT / "docs/language.md", NAME, f"{table(runs)}\n\n{origin(runs)}\n\n{figure}")


def main() -> None:
    """Search, or run and report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("corpora", type=Path, nargs="?", help="the folder of manual_pages.py")
    parser.add_argument("--trials", type=int, help="search with this many trials per strategy")
    parser.add_argument("--jobs", type=int, help="parallel runs; one per core by default")
    parser.add_argument("--report", action="store_true", help="from stored results only")
    given = parser.parse_args()
    recipe = tomllib.loads(SETTINGS.read_text(encoding="utf-8"))
    if not given.report:
        if given.corpora is None:
            parser.error("CORPORA, the folder written by benchmarks/manual_pages.py, is missing")
        file = tokenized(given.corpora)
        if given.trials is not None:
            search(recipe, given.trials, file, given.jobs)
            return
        run_cases(finals(recipe), measure_or_error, STORED, file, recipe, processes=given.jobs)
    write_report(recipe)


if __name__ == "__main__":
    main()
