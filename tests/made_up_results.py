"""Results with given accuracies, for tests of reports."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from covon_avalanche.evaluation import AccuracyMatrix
from covon_avalanche.experiment.result import Result
from covon_avalanche.report import Comparison, comparisons, results_frame

Rows = Sequence[Sequence[float] | None]


def made_up(
    strategy: str,
    seed: int,
    rows: Rows,
    *,
    kind: str = "covon",
    recipe: str = "r",
    counts: Sequence[int] = (),
    held_out: bool = False,
    stream: dict[str, Any] | None = None,
    own: dict[str, Any] | None = None,
    seconds: float = 2.0,
    **changes: Any,
) -> Result:
    """A run with these accuracies."""
    counts = list(counts or [10] * len(rows[-1]))
    matrix = AccuracyMatrix(counts, [row and [*row] for row in rows], held_out)
    known: dict[str, Any] = dict(
        recipe=recipe,
        strategy=strategy,
        seed=seed,
        stream="test",
        settings={
            "name": recipe,
            "title": f"title of {recipe}",
            "stream": stream or {"name": "Made", "n_experiences": len(rows)},
            "epochs": 3,
            "strategy": {"kind": kind, **(own or {})},
        },
        accuracy=matrix.rows,
        counts=counts,
        held_out=held_out,
        average_accuracy=matrix.average_accuracy(),
        weighted_accuracy=matrix.weighted_accuracy(),
        bwt=matrix.bwt(),
        calibration={"nll": 0.5, "brier": 0.25, "ece": 0.125},
        train_seconds=[seconds] * len(rows),
        parameters=5,
        memory_ratio=5.0,
        versions={"torch": "2.15.0"},
        machine={"cores": 2},
    )
    return Result(**(known | changes))


def made_up_comparison() -> list[Result]:
    """Three learners and offline training on two domains; counts differ, so weighting matters."""
    found = []
    for seed, drop in enumerate((0.0, 0.1, 0.05)):
        rows: dict[str, tuple[str, Rows]] = {
            "naive": ("finetune", [[0.9, 0.1], [0.3 + drop, 0.9]]),
            "covon": ("covon", [[0.9, 0.1], [0.8 - drop, 0.8]]),
            "buffer": ("replay", [[0.9, 0.1], [0.6, 0.85 + drop]]),
            "joint": ("joint", [None, [0.95, 0.95]]),
        }
        for name, (kind, cells) in rows.items():
            found.append(made_up(name, seed, cells, kind=kind, counts=[30, 10]))
    return found


def compared(*results: Result) -> Comparison:
    """The comparison of results that may be compared with each other."""
    (comparison,) = comparisons(results_frame(results))
    return comparison


def stored(folder: Path, *results: Result) -> Path:
    """A file with one result per line."""
    file = folder / "stored.jsonl"
    lines = [f"{result.to_json()}\n" for result in results]
    file.write_text("".join(lines), encoding="utf-8")
    return file
