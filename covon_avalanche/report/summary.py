"""Statistics by strategy, and which runs may be compared with each other."""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from covon_avalanche.experiment.result import ResultError
from covon_avalanche.experiment.run_folder import result_settings
from covon_avalanche.report.results import MEASURES, accuracy_matrix, flatten

MIN_SEEDS = 3
"""Paired tests need at least so many common seeds."""
TEST = (
    "two-sided paired t test of A_T over the seeds that a strategy has in common with the best "
    "one, with Holm's (1979) correction for the number of strategies"
)


def strategy_summary(runs: pd.DataFrame, by: str = "strategy") -> pd.DataFrame:
    """Mean and standard deviation over seeds, one row per strategy, highest A_T first.

    Columns ``average_accuracy_mean``, ``average_accuracy_std`` and so on (n - 1; NaN for a single
    run, or if any run lacks the measure), the largest ``memory_ratio`` and ``peak_memory``, the
    number of ``seeds``, ``best`` (the highest A_T, ceilings aside) and ``p_value`` against it.

    :param runs: of one comparison, see :func:`~covon_avalanche.load_results`.
    """
    groups = runs.groupby(by, sort=False)
    names = ["recipe", "stream", "evaluated", "kind", "ceiling", "replay"]
    summary = groups[names].first().assign(seeds=groups.size())
    for name in MEASURES:
        summary[f"{name}_mean"] = groups[name].agg(lambda values: values.mean(skipna=False))
        summary[f"{name}_std"] = groups[name].agg(lambda values: values.std(skipna=False))
    summary = summary.join(groups[["memory_ratio", "peak_memory"]].max())
    summary = summary.sort_values("average_accuracy_mean", ascending=False, kind="stable")
    learners = summary.index[~summary["ceiling"] & summary["average_accuracy_mean"].notna()]
    summary.insert(6, "best", summary.index == (learners[0] if len(learners) else None))
    scores = runs.pivot(index="seed", columns=by, values="average_accuracy")
    return summary.assign(p_value=_p_values(scores, list(learners)))


def _p_values(scores: pd.DataFrame, learners: Sequence[str]) -> pd.Series:
    """p-values of each learner against the first, corrected for their number.

    :param scores: by seed (rows) and strategy (columns).
    """
    found = {}
    for name in learners[1:]:
        pairs = scores[[learners[0], name]].dropna()
        found[name] = paired_p(pairs[learners[0]].tolist(), pairs[name].tolist())
    known = {name: p for name, p in found.items() if p is not None}
    return pd.Series(holm(list(known.values())), index=list(known), dtype=float)


def paired_p(first: Sequence[float], second: Sequence[float]) -> float | None:
    """p-value of the paired t test; ``None`` if it is not defined: for fewer than three pairs, or
    if all differences are equal but not zero."""
    differences = np.subtract(first, second)
    if len(differences) < MIN_SEEDS:
        return None
    if np.ptp(differences) < 1e-12:
        return 1.0 if abs(differences[0]) < 1e-12 else None
    from scipy.stats import ttest_rel

    return float(ttest_rel(first, second).pvalue)


def holm(p_values: Sequence[float]) -> list[float]:
    """p-values adjusted by Holm's step-down method, in the given order."""
    p = pd.Series(p_values, dtype=float).sort_values()
    adjusted = (p * np.arange(len(p), 0, -1)).cummax().clip(upper=1)
    return adjusted.sort_index().tolist()


@dataclass(frozen=True)
class Comparison:
    """Runs of one recipe with the same settings, those of the strategies aside."""

    slug: str
    """Letters, digits and hyphens, unique in a report."""
    title: str
    runs: pd.DataFrame
    """Of :func:`~covon_avalanche.load_results`, with a column ``label``: the strategy, and its
    settings where these tell several rows of one strategy apart."""
    summary: pd.DataFrame
    """:func:`strategy_summary`, by label."""

    def runs_of(self, label: str) -> pd.DataFrame:
        """The runs of a strategy, by seed."""
        return self.runs[self.runs["label"] == label].sort_values("seed")

    @property
    def first(self) -> pd.Series:
        """The first run."""
        return self.runs.iloc[0]

    @property
    def domains(self) -> list[str]:
        """Names of the domains in the order they are learned, or their numbers."""
        names = self.first["settings"].get("stream", {}).get("domains", [])
        learned = len(self.first["accuracy"])
        return [str(n) for n in (names if len(names) == learned else range(1, learned + 1))]

    @property
    def tested_domains(self) -> list[str]:
        """Names of the domains that are evaluated, or their numbers if they are never learned."""
        count = len(self.first["counts"])
        numbers = self.first["held_out"] or len(self.domains) != count
        return [str(n) for n in range(1, count + 1)] if numbers else self.domains

    @property
    def same_seeds(self) -> bool:
        """Whether all continual learners were run with the same seeds."""
        learners = self.runs[~self.runs["ceiling"]]
        return learners.groupby("label")["seed"].agg(frozenset).nunique() <= 1

    @property
    def best(self) -> str | None:
        """The continual learner with the highest A_T."""
        return next(iter(self.summary.index[self.summary["best"]]), None)


def comparisons(runs: pd.DataFrame) -> list[Comparison]:
    """Split runs into those that may be compared, in order of first appearance.

    :param runs: see :func:`~covon_avalanche.load_results`.
    :raises ValueError: if there are no runs.
    :raises ResultError: if a strategy has two results with the same seed and settings, or runs
        with different numbers of domains.
    """
    if runs.empty:
        raise ValueError("a report needs at least one result, got none")
    runs = runs.reset_index(drop=True).assign(
        _shared=[_shared_settings(run) for _, run in runs.iterrows()],
        _own=[flatten(settings["strategy"]) for settings in runs["settings"]],
    )
    groups = [group for _, group in runs.groupby(runs["_shared"].map(_key), sort=False)]
    slugs = unique_slugs([group["recipe"].iloc[0] for group in groups])
    firsts = pd.DataFrame([group.iloc[0] for group in groups])
    titles = _told_apart(firsts["title"], firsts["_shared"], "{} ({})")
    found = []
    for slug, title, group in zip(slugs, titles, groups, strict=True):
        labelled = _labelled(group).drop(columns=["_shared", "_own"])
        found.append(Comparison(slug, title, labelled, strategy_summary(labelled, "label")))
    return found


def _shared_settings(run: pd.Series) -> dict[str, Any]:
    """What all runs of a comparison have in common."""
    settings = {k: v for k, v in result_settings(run["settings"]).items() if k != "strategy"}
    return {"recipe": run["recipe"], "evaluated": run["evaluated"], **flatten(settings)}


def _labelled(runs: pd.DataFrame) -> pd.DataFrame:
    """With a column ``label`` that tells a strategy's different settings apart."""
    rows = [group for _, group in runs.groupby(["strategy", runs["_own"].map(_key)], sort=False)]
    firsts = pd.DataFrame([group.iloc[0] for group in rows])
    labels = _told_apart(firsts["strategy"], firsts["_own"], "{}, {}")
    for group in rows:
        name = f"{group['strategy'].iloc[0]!r} in recipe {group['recipe'].iloc[0]!r}"
        if (again := group["seed"].duplicated()).any():
            raise ResultError(
                f"a strategy must have one result per seed and settings, got two of {name} with "
                f"seed {group['seed'][again].iloc[0]}"
            )
        shapes = {(len(run["accuracy"]), len(run["counts"])) for _, run in group.iterrows()}
        if len(shapes) > 1:
            learned = sorted(shape[0] for shape in shapes)
            raise ResultError(f"runs of {name} must have the same domains, got {learned}")
    return pd.concat([g.assign(label=n) for g, n in zip(rows, labels, strict=True)]).sort_index()


def _key(settings: dict[str, Any]) -> str:
    return json.dumps(settings, sort_keys=True, default=str)


def _told_apart(names: pd.Series, settings: pd.Series, form: str) -> list[str]:
    """The names; equal ones with those of their settings that differ."""
    texts = [{key: setting_text(value) for key, value in one.items()} for one in settings]
    table = pd.DataFrame(texts, index=names)
    found = []
    for name, mine in zip(names, texts, strict=True):
        differing = table.columns[table.loc[[name]].nunique(dropna=False) > 1]
        text = ", ".join(f"{key}={mine[key]}" for key in differing if key in mine)
        found.append(form.format(name, text) if text else name)
    return found


def setting_text(value: Any) -> str:
    """A setting as one reads it: text without quotes, everything else as JSON."""
    if isinstance(value, str):
        return value or '""'
    return json.dumps(value, sort_keys=True, default=str)


def unique_slugs(names: Sequence[str]) -> list[str]:
    """Names for files and anchors: letters, digits and hyphens, numbered where they are equal."""
    slugs: list[str] = []
    for name in names:
        slug = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-") or "unnamed"
        numbered = (slug if n == 1 else f"{slug}-{n}" for n in itertools.count(1))
        slugs.append(next(name for name in numbered if name not in slugs))
    return slugs


def mean_matrix(runs: pd.DataFrame) -> np.ndarray:
    """Accuracy matrix, mean over seeds; NaN in rows that were not measured."""
    unknown = [math.nan] * len(runs["counts"].iloc[0])
    return np.mean([[row or unknown for row in rows] for rows in runs["accuracy"]], axis=0)


def learning_curve(runs: pd.DataFrame) -> pd.DataFrame:
    """``mean`` and ``std`` over seeds of the average accuracy after each domain, which are the
    index from 1; empty for joint training."""
    curves = [accuracy_matrix(run).curve() for _, run in runs.iterrows()]
    if any(None in curve for curve in curves):
        return pd.DataFrame(columns=["mean", "std"])
    table = pd.DataFrame(curves, columns=range(1, len(curves[0]) + 1))
    return pd.DataFrame({"mean": table.mean(skipna=False), "std": table.std(skipna=False)})


def forgetting_by_domain(runs: pd.DataFrame) -> np.ndarray | None:
    """For each domain but the last, accuracy when it was learned minus accuracy at the end;
    ``None`` where that is not defined."""
    if not all(accuracy_matrix(run).bwt() is not None for _, run in runs.iterrows()):
        return None
    matrix = mean_matrix(runs)
    return (np.diagonal(matrix) - matrix[-1])[: len(matrix) - 1]


def pooled_reliability(runs: pd.DataFrame) -> pd.DataFrame:
    """``images``, ``confidence`` and ``accuracy`` of each bin, the images of all runs together;
    without empty bins."""
    bins = [run for run in runs["reliability"] if run]
    if len({len(run) for run in bins}) != 1:
        return pd.DataFrame(columns=["images", "confidence", "accuracy"])
    table = np.array(bins, dtype=float)  # runs, bins, columns
    images = table[:, :, 0].sum(0)
    used = images > 0
    means = (table[:, :, :1] * table[:, :, 1:]).sum(0)[used] / images[used, None]
    return pd.DataFrame(means, columns=["confidence", "accuracy"]).assign(images=images[used])


def training_losses(runs: pd.DataFrame) -> pd.Series:
    """Mean training loss by epoch from 1, all domains in order; empty if it was not recorded or
    if runs differ in their epochs (early stopping)."""
    losses = [[epoch["loss"] for epoch in epochs] for epochs in runs["epochs"]]
    means = np.mean(losses, axis=0) if len({len(run) for run in losses}) == 1 else []
    return pd.Series(means, index=range(1, len(means) + 1), dtype=float)
