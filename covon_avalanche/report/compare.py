"""What differs between two runs, rows of :func:`~covon_avalanche.load_results`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pandas as pd

from covon_avalanche.report.results import MEASURES, flatten


def settings_differences(first: pd.Series, second: pd.Series) -> pd.DataFrame:
    """Settings, seed, versions and machine that differ, by dotted name."""
    others = ["seed", "evaluated", "versions", "machine"]
    flat = (flatten(run["settings"]) | flatten(dict(run[others])) for run in (first, second))
    return _differences(*flat)


def result_differences(first: pd.Series, second: pd.Series) -> pd.DataFrame:
    """Accuracies in [0, 1], calibration and cost that differ; of the accuracies before the last
    domain the one that differs most."""
    found = _differences(*(_results(run) for run in (first, second)))
    matrices = [pd.DataFrame([row or [] for row in run["accuracy"]]) for run in (first, second)]
    earlier = (matrices[0] - matrices[1])[:-1].abs().stack()
    if len(earlier) and earlier.max() > 0:
        t, i = earlier.idxmax()
        pair = [float(matrix.loc[t, i]) for matrix in matrices]
        found.loc[f"accuracy on domain {i + 1} after domain {t + 1} (differs most)"] = pair
    return found


def _results(run: pd.Series) -> dict[str, Any]:
    last = {f"accuracy on domain {i}": value for i, value in enumerate(run["accuracy"][-1], 1)}
    return {**run[[*MEASURES, "memory_ratio", "peak_memory"]], **last}


def _differences(first: Mapping[str, Any], second: Mapping[str, Any]) -> pd.DataFrame:
    """Columns ``first`` and ``second``; ``None`` where one has no value."""
    rows = {}
    for name in dict.fromkeys([*first, *second]):
        values = [one.get(name) for one in (first, second)]
        pair = [None if isinstance(v, float) and pd.isna(v) else v for v in values]
        if pair[0] != pair[1]:
            rows[name] = pair
    return pd.DataFrame.from_dict(rows, orient="index", columns=["first", "second"], dtype=object)
