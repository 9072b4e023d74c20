"""The accuracy matrix of a domain-incremental run, and what is computed from it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

Row = list[float]


@dataclass
class AccuracyMatrix:
    """``rows[t][i]``: accuracy on domain ``i`` after training on domain ``t``, in [0, 1].

    Domains of the test stream are those of the training stream, in the same order. A run
    that trains on all domains at once (joint training) has the last row alone; the rows
    before it are ``None``.

    :param counts: test images per domain.
    """

    counts: list[int]
    rows: list[Row | None] = field(default_factory=list)

    def add_row(self, metrics: Mapping[str, float], stream: str = "test") -> None:
        """Append the row of an evaluation over the whole stream.

        :param metrics: what ``strategy.eval`` returns, with ``accuracy_metrics(experience=True)``
            in its evaluator.
        :param stream: name of the stream evaluated.
        :raises ValueError: if a domain's accuracy is missing.
        """
        row = []
        for i in range(len(self.counts)):
            prefix, suffix = f"Top1_Acc_Exp/eval_phase/{stream}_stream", f"/Exp{i:03d}"
            found = [v for k, v in metrics.items() if k.startswith(prefix) and k.endswith(suffix)]
            if not found:
                raise ValueError(
                    f"no accuracy of experience {i} of the {stream!r} stream among the metrics: "
                    "is accuracy_metrics(experience=True) in the evaluator?"
                )
            row.append(float(found[-1]))
        self.rows.append(row)

    @property
    def last(self) -> Row:
        """The row after the last domain."""
        if not self.rows or self.rows[-1] is None:
            raise ValueError("the accuracy matrix has no last row yet")
        return self.rows[-1]

    def average_accuracy(self) -> float:
        """A_T, the mean over domains after the last one."""
        return sum(self.last) / len(self.last)

    def weighted_accuracy(self) -> float:
        """A_T, pooled over the images of all domains."""
        hits = (a * n for a, n in zip(self.last, self.counts, strict=True))
        return sum(hits) / sum(self.counts)

    def curve(self) -> list[float | None]:
        """Mean accuracy over the domains seen so far, after each domain."""
        return [
            None if row is None else sum(row[: t + 1]) / (t + 1) for t, row in enumerate(self.rows)
        ]

    def bwt(self) -> float | None:
        """Backward transfer, the paper's F_T: mean over past domains of last minus first
        accuracy, ``mean_i<T (a[T, i] - a[i, i])``. Negative means forgetting; ``None`` where
        it is not defined (a single domain, or joint training)."""
        changes = [self.last[i] - row[i] for i, row in enumerate(self.rows[:-1]) if row is not None]
        if not changes or len(changes) < len(self.rows) - 1:
            return None
        return sum(changes) / len(changes)

    def forgetting(self) -> float | None:
        """``-bwt``, what Avalanche calls StreamForgetting."""
        bwt = self.bwt()
        return None if bwt is None else -bwt


def mean_and_std(values: Sequence[float]) -> tuple[float, float]:
    """Mean and sample standard deviation (n - 1); NaN deviation for a single value."""
    mean = sum(values) / len(values)
    if len(values) < 2:
        return mean, math.nan
    return mean, math.sqrt(sum((v - mean) ** 2 for v in values) / (len(values) - 1))
