"""A trial of a search: a run on validation images. Nothing here imports torch."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Any

from covon_avalanche.experiment.result import Result, ResultError
from covon_avalanche.experiment.run_errors import is_out_of_memory
from covon_avalanche.experiment.run_folder import GivenUp, RunFolder

_STARTS = 3  # after which a trial whose process is killed counts as failed
_OTHERS = 4  # finished trials, at least, with which a draw is compared


class Pruned(Exception):
    """A trial is worse than others were after as many domains."""


class Trial(RunFolder):
    """A run on validation images with settings of a search."""

    evaluated_on = "valid"
    number = 0
    """Its place in the plan, from 1."""
    searched: dict[str, Any]
    """Its settings that are searched, by key."""
    others: Sequence[Path] = ()
    """Folders of trials with which it is compared."""
    _score: float | None = None

    @property
    def title(self) -> str:
        drawn = ", ".join(f"{key} {value}" for key, value in self.searched.items())
        return f"{self.strategy}, trial {self.number} ({drawn or 'as in the recipe'})"

    def score(self) -> float | None:
        """A_T on validation images; 0 if it was pruned or has failed, ``None`` before its end or if
        its result is damaged."""
        if self._score is None:
            with suppress(ResultError):
                if (result := self.result()) is not None:
                    self._score = result.average_accuracy
                elif self.status().given_up:
                    self._score = 0.0
        return self._score

    def on_domain(self, domains: int, accuracy: float) -> None:
        """Compare the mean accuracy on the domains so far with those of the others, after a third
        of the domains at the earliest and not after the last.

        A trial that is below the others now may forget less later. It must therefore also be below
        their best A_T, because accuracy seldom rises with more domains.

        :raises Pruned: if it is below their median after as many domains, and below their best A_T.
        """
        whole = self.recipe.stream.n_experiences
        if not max(1, whole // 3) <= domains < whole:
            return
        found, best = [], 0.0
        for path in self.others:
            with suppress(ResultError):  # not finished, or damaged
                curve = Result.load(path / "result.json").matrix.curve()
                found.append(curve[domains - 1] or 0.0)
                best = max(best, curve[-1] or 0.0)
        if len(found) >= _OTHERS and accuracy < min(median(found), best):
            raise Pruned(
                f"{100 * accuracy:.2f} % after domain {domains}, below the median of "
                f"{len(found)} other trials, {100 * median(found):.2f} %, and their best A_T, "
                f"{100 * best:.2f} %"
            )

    def gives_up(self, error: BaseException) -> GivenUp | None:
        """If it is pruned, diverges, needs more memory than there is, or was killed, perhaps for
        lack of memory, after its third start."""
        if isinstance(error, Pruned):
            return "pruned"
        if isinstance(error, BrokenProcessPool):
            return "failed" if self.starts >= _STARTS else None
        diverged = isinstance(error, FloatingPointError) or type(error).__name__ == "LinAlgError"
        return "failed" if diverged or is_out_of_memory(error) else None
