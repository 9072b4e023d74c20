"""The accuracy matrix of a domain-incremental run, and what is computed from it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

Row = list[float]


@dataclass
class AccuracyMatrix:
    """``rows[t][i]``: accuracy on domain ``i`` after training on domain ``t``, in [0, 1].

    Domains of the test stream are those of the training stream, in the same order. Rows of
    evaluations that were left out are ``None``; a run that trains on all domains at once (joint
    training) has the last row alone. With more rows than domains, what compares before and
    after is not defined.

    :param counts: test images per domain.
    :param held_out: the domains of the test stream are never trained on (CORe50's test
        sessions): what compares before and after is not defined, and averages are over all.
    """

    counts: list[int]
    rows: list[Row | None] = field(default_factory=list)
    held_out: bool = False

    @property
    def last(self) -> Row:
        """The row after the last domain."""
        if not self.rows or self.rows[-1] is None:
            raise ValueError("the accuracy matrix has no last row yet")
        return self.rows[-1]

    def average_accuracy(self) -> float:
        """A_T, the mean over domains after the last one."""
        return sum(self.last) / len(self.last)

    def weighted_accuracy(self, domains: int | None = None) -> float:
        """A_T, pooled over the images of all domains, or of the first so many."""
        hits = [a * n for a, n in zip(self.last, self.counts, strict=True)]
        return sum(hits[:domains]) / sum(self.counts[:domains])

    def curve(self) -> list[float | None]:
        """Mean accuracy over the domains seen so far, after each domain."""

        def mean(row: Row, seen: int) -> float:
            return sum(row[:seen]) / len(row[:seen])

        everything = len(self.counts)
        return [
            None if row is None else mean(row, everything if self.held_out else t + 1)
            for t, row in enumerate(self.rows)
        ]

    def bwt(self) -> float | None:
        """Backward transfer, the paper's F_T: mean over past domains of last minus first
        accuracy, ``mean_i<T (a[T, i] - a[i, i])``. Negative means forgetting; ``None`` where
        it is not defined (a single domain, or joint training)."""
        return self._mean_over_past(lambda i, before: self.last[i] - before[0])

    def forgetting(self) -> float | None:
        """``-bwt``, what Avalanche calls StreamForgetting."""
        bwt = self.bwt()
        return None if bwt is None else -bwt

    def max_forgetting(self) -> float | None:
        """Mean over past domains of the best accuracy since they were learned minus the last
        (Chaudhry et al., 2018)."""
        return self._mean_over_past(lambda i, before: max(before) - self.last[i])

    def plasticity(self) -> float | None:
        """Mean of the diagonal: accuracy on each domain right after it was learned."""
        if not self.rows or not self._has_diagonal:
            return None
        diagonal = [row[i] for i, row in enumerate(self.rows) if row is not None]
        return sum(diagonal) / len(diagonal)

    @property
    def _has_diagonal(self) -> bool:
        """Whether row t is from after training on domain t."""
        fits = not self.held_out and len(self.rows) <= len(self.counts)
        return fits and None not in self.rows

    def _mean_over_past(self, change: Callable[[int, Row], float]) -> float | None:
        """Mean of ``change(i, before)`` with ``before`` the accuracies on domain i from when it
        was learned to before the last domain; ``None`` where that is not defined."""
        rows = self.rows[:-1]
        if not rows or not self._has_diagonal:
            return None
        past = [
            change(i, [row[i] for row in rows[i:] if row is not None]) for i in range(len(rows))
        ]
        return sum(past) / len(past)


def mean_and_std(values: Sequence[float]) -> tuple[float, float]:
    """Mean and sample standard deviation (n - 1); NaN deviation for a single value."""
    mean = sum(values) / len(values)
    if len(values) < 2:
        return mean, math.nan
    return mean, math.sqrt(sum((v - mean) ** 2 for v in values) / (len(values) - 1))
