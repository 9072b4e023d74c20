"""What differs between two runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pandas as pd

from covon_avalanche.report.results import flatten


def settings_differences(first: pd.Series, second: pd.Series) -> pd.DataFrame:
    """Settings, seed, versions and machine that differ, by name, in two rows of
    :func:`~covon_avalanche.load_results`; columns ``first`` and ``second``."""
    return _differences(
        *(
            {
                **flatten(run["settings"]),
                "seed": run["seed"],
                "evaluated on": run["evaluated"],
                **flatten(run["versions"], "version of "),
                **flatten(run["machine"], "machine."),
            }
            for run in (first, second)
        )
    )


def result_differences(first: pd.Series, second: pd.Series) -> pd.DataFrame:
    """Accuracies in percent, calibration and cost that differ; of the accuracies before the last
    domain the one that differs most."""
    found = _differences(_results(first), _results(second))
    earlier = {
        f"accuracy % on domain {i} after domain {t} (differs most)": (100 * a, 100 * b)
        for t, (mine, other) in enumerate(
            zip(first["accuracy"][:-1], second["accuracy"][:-1], strict=False), 1
        )
        for i, (a, b) in enumerate(zip(mine or [], other or [], strict=False), 1)
        if a != b
    }
    if earlier:
        most = max(earlier, key=lambda name: abs(earlier[name][0] - earlier[name][1]))
        found.loc[most] = earlier[most]
    return found


def _results(run: pd.Series) -> dict[str, Any]:
    return {
        "A_T %": 100 * run["average_accuracy"],
        "A_T % by images": 100 * run["weighted_accuracy"],
        "BWT %": 100 * run["bwt"],
        **{f"last accuracy on domain {i} %": 100 * a for i, a in enumerate(run["accuracy"][-1], 1)},
        **{f"last {name}": run[name] for name in ("nll", "brier", "ece")},
        **{
            f"with posterior samples: {name}": run[f"sampled_{name}"]
            for name in ("average_accuracy", "nll", "brier", "ece")
        },
        "training seconds": run["train_seconds"],
        "memory, in units of the weights": run["memory_ratio"],
        "peak memory, MiB": run["peak_memory"] / 2**20,
    }


def _differences(first: Mapping[str, Any], second: Mapping[str, Any]) -> pd.DataFrame:
    """Values that differ; ``None`` where one has none."""
    rows = {}
    for name in dict.fromkeys([*first, *second]):
        pair = [None if _missing(one.get(name)) else one[name] for one in (first, second)]
        if pair[0] != pair[1]:
            rows[name] = pair
    return pd.DataFrame.from_dict(rows, orient="index", columns=["first", "second"], dtype=object)


def _missing(value: Any) -> bool:
    return value is None or (pd.api.types.is_scalar(value) and bool(pd.isna(value)))
