"""One strategy over its seeds: what the report says about it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from covon_avalanche.evaluation import mean_and_std
from covon_avalanche.evaluation.reliability import ReliabilityBin
from covon_avalanche.experiment.registry import stored_strategy
from covon_avalanche.experiment.result import Result

Spread = tuple[float, float]
"""Mean and standard deviation over seeds; the deviation of a single seed is NaN."""


@dataclass(frozen=True)
class Standing:
    """A strategy's runs, sorted by seed and set alike. Accuracies are in [0, 1]."""

    strategy: str
    """Its name, with what tells it from the same strategy set otherwise."""
    runs: tuple[Result, ...]

    @property
    def settings(self) -> dict[str, Any]:
        """Of the strategy, as its first run had them."""
        return dict(self.runs[0].settings["strategy"])

    @property
    def kind(self) -> str:
        """The strategy's kind in the recipe."""
        return str(self.settings["kind"])

    @property
    def ceiling(self) -> bool:
        """Whether it is a bound and no continual learner."""
        return stored_strategy(self.settings).ceiling

    @property
    def replay(self) -> bool:
        """Whether it keeps examples; of a strategy of the user's, whether the recipe says so."""
        return stored_strategy(self.settings).stores_examples

    @property
    def seeds(self) -> list[int]:
        """In ascending order."""
        return [run.seed for run in self.runs]

    @property
    def accuracy(self) -> Spread:
        """A_T, domain mean."""
        return mean_and_std([run.average_accuracy for run in self.runs])

    @property
    def weighted_accuracy(self) -> Spread:
        """A_T, image-weighted."""
        return mean_and_std([run.weighted_accuracy for run in self.runs])

    @property
    def bwt(self) -> Spread | None:
        """Backward transfer, where it is defined."""
        return _spread(run.bwt for run in self.runs)

    @property
    def forgetting(self) -> Spread | None:
        """``-bwt``."""
        return None if self.bwt is None else (-self.bwt[0], self.bwt[1])

    @property
    def seconds(self) -> Spread:
        """Training of one run."""
        return mean_and_std([sum(run.train_seconds) for run in self.runs])

    @property
    def parameters_worth(self) -> float:
        """Tensors kept between steps, in units of the weights; the largest of the runs."""
        return max(run.parameters_worth for run in self.runs)

    @property
    def peak_memory(self) -> int | None:
        """Bytes, the largest of the runs; ``None`` where it was not measured."""
        peaks = [run.peak_memory for run in self.runs]
        return max((peak for peak in peaks if peak is not None), default=None)

    def calibration(self, name: str) -> Spread | None:
        """``nll``, ``brier`` or ``ece`` after the last domain, where they mean something."""
        if not stored_strategy(self.settings).has_probabilities:
            return None
        return _spread(run.calibration.get(name) for run in self.runs)

    @property
    def reliability(self) -> list[ReliabilityBin]:
        """Accuracy by confidence, the images of all runs together; empty bins left out."""
        runs = [run.reliability for run in self.runs if run.reliability]
        probabilities = stored_strategy(self.settings).has_probabilities
        if not probabilities or len({len(bins) for bins in runs}) != 1:
            return []
        pooled = []
        for bins in zip(*runs, strict=True):
            count = sum(b.images for b in bins)
            if count:
                confidence = sum(b.images * b.confidence for b in bins) / count
                accuracy = sum(b.images * b.accuracy for b in bins) / count
                pooled.append(ReliabilityBin(count, confidence, accuracy))
        return pooled

    def sampled(self, name: str) -> Spread | None:
        """``average_accuracy`` or calibration, predicting with posterior samples."""
        return _spread(run.sampled.get(name) for run in self.runs)

    @property
    def curve(self) -> list[Spread]:
        """Average accuracy after each domain; empty for joint training."""
        curves = [run.matrix.curve() for run in self.runs]
        points = [[a for a in point if a is not None] for point in zip(*curves, strict=True)]
        if not all(points):
            return []
        return [mean_and_std(point) for point in points]

    @property
    def matrix(self) -> list[list[float]]:
        """Mean accuracies; NaN where a row was not measured."""
        return _mean_cells([run.accuracy for run in self.runs], len(self.runs[0].counts))

    @property
    def forgetting_by_domain(self) -> list[float] | None:
        """For each domain but the last, accuracy when it was learned minus at the end."""
        if self.bwt is None:
            return None
        cells = self.matrix
        return [row[i] - cells[-1][i] for i, row in enumerate(cells[:-1])]

    @property
    def losses(self) -> list[float]:
        """Mean training loss of each epoch, all domains in order; empty if not recorded."""
        runs = [[epoch.loss for epoch in run.epochs] for run in self.runs]
        if len({len(run) for run in runs}) > 1:  # stopped early: not comparable epoch by epoch
            return []
        return [sum(losses) / len(losses) for losses in zip(*runs, strict=True)]


def by_accuracy(standings: Sequence[Standing]) -> list[Standing]:
    """Highest A_T first, those without a number last."""

    def place(standing: Standing) -> tuple[bool, float]:
        mean = standing.accuracy[0]
        return (math.isnan(mean), 0.0 if math.isnan(mean) else -mean)

    return sorted(standings, key=place)


def best(
    standings: Sequence[Standing], among: Callable[[Standing], bool] = lambda _: True
) -> Standing | None:
    """The highest A_T, ceilings aside."""
    learners = [
        s for s in standings if not s.ceiling and not math.isnan(s.accuracy[0]) and among(s)
    ]
    return by_accuracy(learners)[0] if learners else None


def _spread(values: Iterable[float | None]) -> Spread | None:
    known = [value for value in values if value is not None]
    return mean_and_std(known) if known else None


def _mean_cells(matrices: Sequence[Sequence[list[float] | None]], width: int) -> list[list[float]]:
    unknown = [math.nan] * width
    return [
        [sum(cells) / len(cells) for cells in zip(*(row or unknown for row in rows), strict=True)]
        for rows in zip(*matrices, strict=True)
    ]
