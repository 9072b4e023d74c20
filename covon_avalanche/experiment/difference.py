"""What differs between two runs. Nothing here imports torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from covon_avalanche.experiment.result import Result


class Difference(NamedTuple):
    """A value that two runs do not share; ``None`` where one has none."""

    name: str
    first: Any
    second: Any


def settings_differences(first: Result, second: Result) -> list[Difference]:
    """Settings, seed, versions and machine, by dotted names."""
    return _differences(
        *(
            {
                **_flat(r.settings),
                "seed": r.seed,
                "evaluated on": r.stream,
                **_flat(r.versions, "version of "),
                **_flat(r.machine, "machine."),
            }
            for r in (first, second)
        )
    )


def result_differences(first: Result, second: Result) -> list[Difference]:
    """Accuracies in percent, calibration and cost; of the accuracies on the way the one that
    differs most."""
    return _differences(*(_numbers(r) for r in (first, second))) + _earlier(first, second)


def _earlier(first: Result, second: Result) -> list[Difference]:
    """Of the accuracies before the last domain was learned, the one that differs most."""
    found = [
        Difference(f"accuracy % on domain {i} after domain {t} (differs most)", 100 * a, 100 * b)
        for t, pair in enumerate(zip(first.accuracy[:-1], second.accuracy[:-1], strict=False), 1)
        for i, (a, b) in enumerate(zip(*(row or [] for row in pair), strict=False), 1)
        if a != b
    ]
    return [max(found, key=lambda pair: abs(pair.first - pair.second))] if found else []


def _numbers(result: Result) -> dict[str, Any]:
    last = result.accuracy[-1] or []
    return {
        "A_T %": 100 * result.average_accuracy,
        "A_T % by images": 100 * result.weighted_accuracy,
        "BWT %": None if result.bwt is None else 100 * result.bwt,
        **{f"last accuracy on domain {i} %": 100 * a for i, a in enumerate(last, 1)},
        **{f"last {name}": value for name, value in result.calibration.items()},
        **{f"with posterior samples: {name}": value for name, value in result.sampled.items()},
        "training seconds": sum(result.train_seconds),
        "memory, in units of the weights": result.parameters_worth,
        "peak memory, MiB": None if result.peak_memory is None else result.peak_memory / 2**20,
    }


def _differences(first: Mapping[str, Any], second: Mapping[str, Any]) -> list[Difference]:
    names = [*first, *(name for name in second if name not in first)]
    pairs = (Difference(name, first.get(name), second.get(name)) for name in names)
    return [pair for pair in pairs if pair.first != pair.second]


def _flat(value: Any, prefix: str = "") -> dict[str, Any]:
    """Nested tables with dotted names."""
    if isinstance(value, Mapping):
        items = [(str(k), v) for k, v in value.items()]
    elif isinstance(value, Sequence) and any(isinstance(v, Mapping) for v in value):
        items = [(str(i), v) for i, v in enumerate(value)]
    else:
        return {prefix.removesuffix("."): value}
    found: dict[str, Any] = {}
    for name, child in items:
        found |= _flat(child, f"{prefix}{name}.")
    return found
