"""Statistics by strategy, and which runs may be compared with each other."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from textwrap import shorten
from typing import Any

import numpy as np
import pandas as pd

from covon_avalanche.experiment.registry.base import flat
from covon_avalanche.experiment.result import ResultError
from covon_avalanche.experiment.run_folder import distinct_settings
from covon_avalanche.experiment.run_settings import WITHOUT_EFFECT, result_settings
from covon_avalanche.report.results import MEASURES
from covon_avalanche.safe_text import printable

_ADVICE = "(docs/how-to/choose-settings.md)"
MIN_SEEDS = 3  # in common, which a paired test needs
NOTE = (
    "Mean ± standard deviation over seeds. In bold: the best continual learner, among those with "
    f"at least {MIN_SEEDS} seeds if there are any."
)
TEST = (
    f"A_T minus that of the best strategy, over the seeds that both have, if there are {MIN_SEEDS} "
    "or more: mean ± 95 % confidence interval (Student's t, without a correction); p: two-sided "
    "paired t-test, with Holm's (1979) correction for the number of strategies"
)


def strategy_summary(runs: pd.DataFrame, by: str = "strategy") -> pd.DataFrame:
    """Mean and standard deviation over seeds, one row per strategy, highest A_T first.

    Columns ``average_accuracy_mean``, ``average_accuracy_std`` and so on (n - 1; NaN for a single
    run, or if any run lacks the measure), the largest ``memory_ratio`` and ``peak_memory``, the
    number of ``seeds``, ``best`` (the highest A_T without offline training, and without strategies
    with fewer seeds than a test needs, if others have as many), and of the others the paired
    ``difference`` in A_T from it (a fraction), with ``difference_ci95``, half the width of its 95 %
    confidence interval, and ``p_value``, of a two-sided paired t-test with Holm's correction.

    :param runs: of one comparison, see :func:`~covon_avalanche.load_results`.
    :param by: the column that names the rows.
    """
    groups = runs.groupby(by, sort=False)
    names = ["recipe", "stream", "evaluated", "kind", "offline", "replay", "untuned"]
    summary = groups[names].first().assign(seeds=groups.size())
    for name in MEASURES:
        summary[f"{name}_mean"] = groups[name].agg(lambda values: values.mean(skipna=False))
        with np.errstate(invalid="ignore"):  # NaN where the NLL of a run is infinite
            summary[f"{name}_std"] = groups[name].agg(lambda values: values.std(skipna=False))
    summary = summary.join(groups[["memory_ratio", "peak_memory"]].max())
    summary = summary.sort_values("average_accuracy_mean", ascending=False, kind="stable")
    learners = summary.loc[~summary["offline"] & summary["average_accuracy_mean"].notna()]
    often = learners.index[learners["seeds"] >= MIN_SEEDS]
    best = next(iter([*often, *learners.index]), None)
    summary.insert(7, "best", summary.index == best)
    scores = runs.pivot(index="seed", columns=by, values="average_accuracy")
    return summary.join(_differences(scores[learners.index], best))


def _differences(scores: pd.DataFrame, best: str | None) -> pd.DataFrame:
    """Differences of each learner (a column) from the best over common seeds (rows), half of their
    95 % confidence intervals, and p-values adjusted by Holm's step-down method; without those with
    fewer than three pairs or equal differences."""
    found = {}
    for name in scores.columns.drop(best, errors="ignore"):
        first, second = scores[[best, name]].dropna().to_numpy().T
        if len(first) >= MIN_SEEDS and np.ptp(first - second) > 1e-12:
            from scipy.stats import ttest_rel

            test = ttest_rel(second, first)
            half = np.ptp(test.confidence_interval(0.95)) / 2
            found[name] = (second - first).mean(), half, test.pvalue
    columns = ["difference", "difference_ci95", "p_value"]
    table = pd.DataFrame.from_dict(found, orient="index", columns=columns, dtype=float)
    ranked = table["p_value"].sort_values()
    adjusted = (ranked * np.arange(len(ranked), 0, -1)).cummax().clip(upper=1)
    return table.assign(p_value=adjusted)


@dataclass(frozen=True)
class Comparison:
    """Runs of one recipe with the same settings, those of the strategies aside."""

    name: str
    """The recipe's, followed by a hash of its settings if the report has several."""
    title: str
    """The recipe's, followed by the settings in which comparisons of the report differ."""
    runs: pd.DataFrame
    """Runs, with a column ``label``: the strategy, and a hash of its settings if it has several."""
    summary: pd.DataFrame
    """:func:`strategy_summary`, by label."""

    def runs_of(self, label: str) -> pd.DataFrame:
        """The runs of a strategy, by seed."""
        return self.runs[self.runs["label"] == label].sort_values("seed")

    def by_strategy(self, function: Callable[[pd.DataFrame], Any]) -> dict[str, Any]:
        """A function of the runs of each strategy, in the order of the summary."""
        return {label: function(self.runs_of(label)) for label in self.summary.index}

    def strategies(self) -> dict[str, dict[str, Any]]:
        """The settings of each strategy, in the order of the summary."""
        return self.by_strategy(lambda runs: runs["settings"].iloc[0]["strategy"])

    @property
    def first(self) -> pd.Series:
        """The first run."""
        return self.runs.iloc[0]

    @property
    def domains(self) -> list[str]:
        """Names of the domains in the order they are learned, or their numbers."""
        names = self.first["settings"].get("stream", {}).get("domains", [])
        learned = len(self.first["accuracy"])
        known = isinstance(names, list) and len(names) == learned
        return [printable(str(n)) for n in (names if known else range(1, learned + 1))]

    @property
    def tested_domains(self) -> list[str]:
        """Names of the domains that are evaluated, or their numbers if they are never learned."""
        count = len(self.first["counts"])
        numbers = self.first["held_out"] or len(self.domains) != count
        return [str(n) for n in range(1, count + 1)] if numbers else self.domains

    @property
    def same_seeds(self) -> bool:
        """Whether all continual learners were run with the same seeds."""
        learners = self.runs[~self.runs["offline"]]
        return learners.groupby("label")["seed"].agg(frozenset).nunique() <= 1

    @property
    def remarks(self) -> list[str]:
        """Sentences on what makes the comparison unfair or unfinished, and what to try."""
        by_label = self.runs.groupby("label", sort=False)
        first = by_label.first()
        found = self._changed_data()
        used = (str(run.get("covon_avalanche", "unknown")) for run in self.runs["versions"])
        versions = sorted({*map(printable, used)})
        if len(versions) > 1:
            found.append(
                f"Runs are of versions {' and '.join(versions)} of covon_avalanche, whose results "
                "may differ."
            )
        if not self.same_seeds:
            found.append(
                "The learners were not all run with the same seeds: differences may be due to the "
                "seeds."
            )
        if self.first["evaluated"] == "valid":
            found.append("Accuracies are those on validation images, not on test images.")
        trials = first["trials"].where(first["trials"] > 0).dropna().astype(int)
        if trials.nunique() > 1:
            numbers = ", ".join(f"{label} {number}" for label, number in trials.items())
            found.append(f"Searches had different numbers of trials: {numbers}.")
        at_end = [f"{name} ({', '.join(keys)})" for name, keys in first["at_end"].items() if keys]
        if at_end:
            found.append(
                f"Best value at an end of what the search tried: {', '.join(at_end)}. A wider "
                f"range may be better {_ADVICE}."
            )
        falling = by_label["still_falling"].any()
        if falling.any():
            names = ", ".join(falling.index[falling])
            found.append(
                f"Training loss still falling at the end of a domain: {names}. More epochs or a "
                f"larger learning rate may be better {_ADVICE}."
            )
        accuracy = by_label["average_accuracy"].mean()
        spread, settings = by_label["average_accuracy"].std(), self.strategies()
        changed = {"merge", "align_classifier"}
        plain = [k for k, s in settings.items() if s["kind"] == "finetune" and not changed & {*s}]
        highest = accuracy[plain].idxmax() if plain else None
        below = [
            name
            for name, own in settings.items()
            if highest is not None
            and name not in plain
            and "lr" in own
            and accuracy[name] + spread[name] + spread[highest] < accuracy[highest]
        ]
        if below:
            own = [settings[name] for name in below]
            preset = any(s["kind"] == "covon" and "noise" not in s for s in own)
            found.append(
                f"Below fine-tuning: {', '.join(below)}. Search their settings"
                f"{', or for CoVON take a preset' * preset} {_ADVICE}."
            )
        return found

    def _changed_data(self) -> list[str]:
        """A sentence, if not all runs were tested on as many images of the same classes in each
        domain."""
        by_data: dict[tuple[str, frozenset[str]], str] = {}
        for run in self.runs[self.runs["evaluated"] == "test"].to_dict("records"):
            key = " + ".join(map(str, run["counts"])), frozenset(run["class_accuracy"])
            by_data.setdefault(key, f"{run['label']} with seed {run['seed']}")
        for images in {images for images, names in by_data if names}:
            by_data.pop((images, frozenset()), None)  # results of earlier versions lack the names
        if len(by_data) < 2:
            return []
        known = [names for _, names in by_data if names]
        common = frozenset.intersection(*known) if known else frozenset()
        found = [
            f"{images} images{_also_of(names - common)} ({run}, for example)"
            for (images, names), run in by_data.items()
        ]
        sentence = (
            f"The data have changed: runs were tested on {'; '.join(found)}. Their means and "
            "differences are meaningless; repeat all runs with another --out."
        )
        return [sentence]

    @property
    def best(self) -> str | None:
        """The continual learner with the highest A_T."""
        return next(iter(self.summary.index[self.summary["best"]]), None)


def comparisons(runs: pd.DataFrame) -> list[Comparison]:
    """Split runs into those that may be compared, in order of first appearance.

    :param runs: see :func:`~covon_avalanche.load_results`.
    :raises ValueError: if there are no runs.
    :raises ResultError: if a strategy has two results with the same seed and settings, or if runs
        with the same settings have different numbers of domains.
    """
    if runs.empty:
        raise ValueError("a report needs at least one result, got none")
    runs = runs.reset_index(drop=True)
    settings = runs.apply(_shared_settings, axis=1)
    shared, titles = settings.map(_hash), runs["title"].copy()
    for title, own in settings.groupby(runs["title"]):
        texts = distinct_settings([flat(each) for each in own])
        titles[own.index] = [f"{title} ({printable(text)})" if text else title for text in texts]
    names = _unambiguous(runs["recipe"], "-" + shared)
    found = []
    for _, group in runs.groupby(shared, sort=False):
        first = group.index[0]
        own = group["settings"].map(lambda settings: _hash(settings["strategy"]))
        labelled = group.assign(label=_unambiguous(group["strategy"], "-" + own))
        for _, run in labelled[labelled.duplicated(["label", "seed"])].iterrows():
            raise ResultError(
                "a strategy must have one result per seed and settings, got two of "
                f"{run['strategy']!r} in recipe {run['recipe']!r} with seed {run['seed']}"
            )
        for what in ("counts", "accuracy"):  # domains that are tested, and learned
            domains = group[what].map(len).unique()
            if len(domains) > 1:
                raise ResultError(
                    f"runs with the same settings must have the same domains, got {domains[0]} and "
                    f"{domains[1]} in recipe {runs['recipe'][first]!r}"
                )
        summary = strategy_summary(labelled, "label")
        found.append(Comparison(names[first], titles[first], labelled, summary))
    return found


def _shared_settings(run: pd.Series) -> dict[str, Any]:
    """Settings that all runs of a comparison have in common and that have an effect."""
    common = result_settings(run["settings"]) | run[["recipe", "evaluated"]].to_dict()
    return {key: value for key, value in common.items() if key not in ("strategy", *WITHOUT_EFFECT)}


def _also_of(classes: frozenset[str]) -> str:
    return f", also of {printable(shorten(', '.join(sorted(classes)), 60))}" if classes else ""


def _hash(settings: dict[str, Any]) -> str:
    text = json.dumps(flat(settings), sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:6]


def _unambiguous(names: pd.Series, suffixes: pd.Series) -> pd.Series:
    """The names, with a suffix where one name has several."""
    several = suffixes.groupby(names).transform("nunique") > 1
    return names + suffixes.where(several, "")
