"""The accuracy matrix of a domain-incremental run, and the metrics derived from it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

Row = list[float]


@dataclass
class AccuracyMatrix:
    """``rows[t][i]``: accuracy on domain ``i`` after training on domain ``t``, in [0, 1].

    The domains of the test stream are those of the training stream, in the same order. A row
    without evaluation is ``None``; joint training has the last row only. If there are more rows
    than domains, metrics that compare with earlier rows are undefined.

    :param counts: test images per domain.
    :param held_out: the test domains are never trained on (CORe50's test sessions): metrics that
        compare with earlier rows are undefined, and averages are over all domains.
    """

    counts: list[int]
    rows: list[Row | None] = field(default_factory=list)
    held_out: bool = False

    @property
    def last(self) -> Row:
        """The row after the last domain."""
        if not self.rows or self.rows[-1] is None:
            raise ValueError(
                "the accuracy matrix has no last row yet: evaluate the whole stream after "
                "training, as strategy.eval(benchmark.test_stream) does"
            )
        return self.rows[-1]

    def average_accuracy(self) -> float:
        """A_T, domain mean: mean of the accuracies on all domains after the last one."""
        return sum(self.last) / len(self.last)

    def weighted_accuracy(self, domains: int | None = None) -> float:
        """A_T, pooled: accuracy over the images of all, or of the first few, domains."""
        counts = self.counts[:domains]
        row = zip(self.last[:domains], counts, strict=True)
        return sum(accuracy * count for accuracy, count in row) / sum(counts)

    def curve(self) -> list[float | None]:
        """A_t, domain mean: accuracy on the domains seen so far, after each domain."""
        n = len(self.counts)
        seen = [row and row[: n if self.held_out else t + 1] for t, row in enumerate(self.rows)]
        return [None if row is None else sum(row) / len(row) for row in seen]

    def incremental_accuracy(self) -> float | None:
        """Average incremental accuracy: mean of A_t over time, that is, of :meth:`curve` (Rebuffi
        et al., "iCaRL", CVPR 2017). ``None`` if a row was not evaluated (joint training)."""
        curve = [a for a in self.curve() if a is not None]
        return sum(curve) / len(curve) if curve and len(curve) == len(self.rows) else None

    def bwt(self) -> float | None:
        """Backward transfer, the paper's F_T: mean over earlier domains of the final accuracy
        minus that right after training, ``mean_i<T (a[T, i] - a[i, i])``. Negative values are
        forgetting; ``None`` if undefined (a single domain, joint training)."""
        return self._mean_over_earlier(lambda i, before: self.last[i] - before[0])

    def forgetting(self) -> float | None:
        """``-bwt``, Avalanche's StreamForgetting."""
        bwt = self.bwt()
        return None if bwt is None else -bwt

    def max_forgetting(self) -> float | None:
        """Mean over earlier domains of the best earlier accuracy minus the final one (Chaudhry et
        al., "Riemannian Walk for Incremental Learning", 2018)."""
        return self._mean_over_earlier(lambda i, before: max(before) - self.last[i])

    def plasticity(self) -> float | None:
        """Mean of the diagonal: accuracy on each domain right after training on it."""
        if not self.rows or not self._has_diagonal:
            return None
        diagonal = [row[i] for i, row in enumerate(self.rows) if row is not None]
        return sum(diagonal) / len(diagonal)

    def forward_transfer(self) -> float | None:
        """Mean accuracy on domains that are not learned yet, ``mean_t<i a[t, i]`` (Díaz-Rodríguez
        et al., "Don't forget, there is more than forgetting", 2018); the accuracy of an untrained
        network is not subtracted. ``None`` if undefined (a single domain, joint training)."""
        if not self._has_diagonal:
            return None
        ahead = [a for t, row in enumerate(self.rows) for a in (row or ())[t + 1 :]]
        return sum(ahead) / len(ahead) if ahead else None

    @property
    def _has_diagonal(self) -> bool:
        """Whether every row t was evaluated right after training on domain t."""
        valid = not self.held_out and len(self.rows) <= len(self.counts)
        return valid and None not in self.rows

    def _mean_over_earlier(self, change: Callable[[int, Row], float]) -> float | None:
        """Mean of ``change(i, before)`` over all domains but the last; ``before`` are the
        accuracies on domain i in the rows i to T - 1. ``None`` if undefined."""
        rows = self.rows[:-1]
        if not rows or not self._has_diagonal:
            return None
        changes = [
            change(i, [row[i] for row in rows[i:] if row is not None]) for i in range(len(rows))
        ]
        return sum(changes) / len(changes)
