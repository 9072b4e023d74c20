"""The progress of many runs, read from their folders."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from covon_avalanche.experiment.grid import Outcome, RunSpec
from covon_avalanche.experiment.recipe import Recipe
from covon_avalanche.experiment.run_folder import RunFolder, Status


class GridProgress:
    """One bar per run in progress and one for all of them, in a terminal; elsewhere a line per
    domain and finished run.

    Its methods fit :func:`run_grid`.
    """

    def __init__(
        self, console: Console, recipe: Recipe, specs: Sequence[RunSpec], runs: Path
    ) -> None:
        self.console = console
        self.outcomes: list[Outcome] = []
        """In the order in which the runs ended."""
        self._folders = {spec: RunFolder(runs, recipe, *spec) for spec in specs}
        self._bars = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.percentage:.0f} %"),
            TimeRemainingColumn(),
            TextColumn("{task.fields[text]}"),
            console=console,
            transient=True,
            speed_estimate_period=3600,
        )
        self._all = self._bars.add_task(self._count(), total=len(specs), text="")
        self._tasks: dict[RunSpec, TaskID] = {}
        self._statuses: dict[RunSpec, Status] = {}

    def __enter__(self) -> GridProgress:
        if self.console.is_terminal:
            self._bars.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self.console.is_terminal:
            self._bars.stop()

    def poll(self, running: list[RunSpec]) -> None:
        """Read how far these runs are."""
        for spec in running:
            if spec not in self._tasks:
                self._tasks[spec] = self._bars.add_task(_name(spec), total=1.0, text="")
            status = self._folders[spec].status()
            if status is not None and status != self._statuses.get(spec):
                self._update(spec, status)
        self._update_all()

    def _update(self, spec: RunSpec, status: Status) -> None:
        before, task = self._statuses.get(spec), self._tasks[spec]
        if before is None:  # what an earlier session did says nothing about the speed of this one
            self._bars.reset(task, completed=status.share)  # type: ignore[arg-type]
        self._bars.update(task, completed=status.share, text=str(status))
        self._statuses[spec] = status
        known = 0 if before is None else before.domains
        if status.domains > known and not self.console.is_terminal:
            seconds = next(t.time_remaining for t in self._bars.tasks if t.id == task)
            left = "?" if seconds is None else str(timedelta(seconds=round(seconds)))
            domains = f"domain {status.domains}/{status.of_domains}"
            accuracy = f"accuracy so far {100 * (status.accuracy or 0.0):.2f} %"
            line = f"{_name(spec)}: {domains}, {accuracy}, {left} left"
            self.console.print(line, soft_wrap=True)

    def end(self, outcome: Outcome) -> None:
        """A run has ended."""
        self.outcomes.append(outcome)
        if outcome.spec in self._tasks:
            self._bars.remove_task(self._tasks.pop(outcome.spec))
        result = outcome.result
        if result is not None and not self.console.is_terminal:
            accuracy, seconds = 100 * result.average_accuracy, sum(result.train_seconds)
            line = f"{_name(outcome.spec)}: A_T {accuracy:.2f} %, {seconds:.1f} s"
            self.console.print(line, soft_wrap=True)
        self._update_all()

    def _update_all(self) -> None:
        shares = [self._statuses[spec].share for spec in self._tasks if spec in self._statuses]
        completed = len(self.outcomes) + sum(shares)
        self._bars.update(self._all, completed=completed, description=self._count())

    def _count(self) -> str:
        return f"{len(self.outcomes)} of {len(self._folders)} runs"


def _name(spec: RunSpec) -> str:
    return f"{spec.strategy}, seed {spec.seed}"
