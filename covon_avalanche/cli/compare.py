"""``covon compare``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from covon_avalanche.cli.options import fail

if TYPE_CHECKING:
    import pandas as pd


def compare(
    first: Annotated[Path, typer.Argument(help="Folder of a run, or its result.json.")],
    second: Annotated[Path, typer.Argument(help="The run to compare with.")],
) -> None:
    """Print what differs between two runs, in settings and in results."""
    a, b = _one_run(first), _one_run(second)
    for title, part in (("settings", _settings), ("results", _results)):
        left, right = part(a).align(part(b))  # NaN where one run has no such value
        differences = left.compare(right, result_names=("first", "second"))
        if differences.empty:
            typer.echo(f"The {title} are the same.")
        else:
            table = differences.to_string(na_rep="-", float_format="{:.6g}".format)
            typer.echo(f"Different {title}:\n{table}")


def _one_run(path: Path) -> pd.Series:
    from covon_avalanche.report import load_results

    runs = load_results(path)
    if len(runs) > 1:
        fail(f"{path} has {len(runs)} runs; name the folder of one")
    return runs.iloc[0]


def _settings(run: pd.Series) -> pd.Series:
    """Settings, seed, versions and machine."""
    import pandas as pd

    from covon_avalanche.experiment.registry.base import flat

    others = run[["seed", "evaluated", "versions", "machine"]].to_dict()
    return pd.Series(flat(run["settings"] | others), dtype=object)


def _results(run: pd.Series) -> pd.Series:
    """Accuracies in [0, 1], calibration and cost."""
    import pandas as pd

    from covon_avalanche.report.results import MEASURES, accuracy_matrix

    matrix = accuracy_matrix(run)
    after = {f"average accuracy after domain {t}": a for t, a in enumerate(matrix.curve(), 1)}
    last = {f"final accuracy on domain {i}": a for i, a in enumerate(matrix.last, 1)}
    measures = run[[*MEASURES, "memory_ratio", "peak_memory"]].to_dict()
    return pd.Series(measures | after | last, dtype=float).round(12) + 0  # no rounding errors or -0
