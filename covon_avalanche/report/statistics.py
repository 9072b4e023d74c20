"""Whether a difference in accuracy is more than the luck of the seeds."""

from __future__ import annotations

import math
from collections.abc import Sequence

from covon_avalanche.report.standing import Standing

LEAST_SEEDS = 3
"""Fewer pairs are not tested."""
TEST = (
    "two-sided paired t test of A_T over the seeds that a strategy has in common with the best "
    "one, corrected for the number of strategies after Holm (1979)"
)


def paired_p(first: Sequence[float], second: Sequence[float]) -> float | None:
    """p-value of the paired t test.

    :returns: 1 for equal numbers; ``None`` for fewer than three pairs, where a number is NaN,
        and where all differences are the same, which have no spread to be compared with.
    """
    differences = [a - b for a, b in zip(first, second, strict=True)]
    if len(differences) < LEAST_SEEDS or any(math.isnan(d) for d in differences):
        return None
    if max(differences) - min(differences) < 1e-12:
        return 1.0 if abs(differences[0]) < 1e-12 else None
    from scipy.stats import ttest_rel

    return float(ttest_rel(first, second).pvalue)


def holm(p_values: Sequence[float]) -> list[float]:
    """Adjusted p-values, in the order given (Holm, "A simple sequentially rejective multiple
    test procedure", 1979)."""
    adjusted = [0.0] * len(p_values)
    largest = 0.0
    for rank, i in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[i]))
        adjusted[i] = largest
    return adjusted


def p_against(winner: Standing, others: Sequence[Standing]) -> dict[str, float]:
    """Corrected p-values of the strategies that can be tested against the winner, by name."""
    raw = {}
    for other in others:
        ours = {run.seed: run.average_accuracy for run in winner.runs}
        theirs = {run.seed: run.average_accuracy for run in other.runs}
        common = sorted(ours.keys() & theirs.keys())
        p = paired_p([ours[seed] for seed in common], [theirs[seed] for seed in common])
        if p is not None:
            raw[other.strategy] = p
    return dict(zip(raw, holm(list(raw.values())), strict=True))
