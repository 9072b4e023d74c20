"""What a user sees while runs go on."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from covon_avalanche.experiment.grid import Event, Job
from covon_avalanche.experiment.recipe import Recipe
from covon_avalanche.experiment.result import Epoch, Result


@dataclass
class _Progress:
    """One run as its latest event tells it."""

    started: float
    share_at_start: float
    """Of all epochs; more than 0 where a run was taken up again."""
    domains: int = 0
    epoch: Epoch | None = None
    epochs: int = 1
    done: bool = False

    def share(self, experiences: int) -> float:
        """Of all epochs, made so far."""
        if self.done:
            return 1.0
        if self.epoch is None:
            return self.domains / experiences
        whole = self.epoch.experience + (self.epoch.epoch + 1) / max(1, self.epochs)
        return min(1.0, max(whole, self.domains) / experiences)

    def left(self, experiences: int) -> str:
        """Time to its end, as fast as since this session took it up; empty where not known."""
        share = self.share(experiences)
        fresh = share - self.share_at_start
        passed = time.monotonic() - self.started
        return _duration(passed * (1 - share) / fresh) if fresh > 0 else ""


@dataclass
class Display:
    """A live table of the runs in a terminal; elsewhere a line per domain and finished run."""

    console: Console
    recipe: Recipe
    jobs: list[Job]
    finished: list[Result] = field(default_factory=list)
    failures: list[Event] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._runs: dict[Job, _Progress] = {}
        self._begin = time.monotonic()
        self._live = Live(get_renderable=self._render, console=self.console, transient=True)

    def __enter__(self) -> Display:
        if self.console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._live.stop()

    def show(self, event: Event) -> None:
        """Take in one event."""
        if event.error is not None:
            self.failures.append(event)
            self._runs.pop(event.job, None)
            return
        experiences = self._experiences(event.job)
        if event.job not in self._runs:
            run = _Progress(time.monotonic(), 0.0, event.domains)
            self._runs[event.job] = run
            run.epoch, run.epochs = event.epoch, max(1, event.epochs)
            run.share_at_start = run.share(experiences) if event.result is None else 1.0
        run = self._runs[event.job]
        run.domains = max(run.domains, event.domains)
        if event.epoch is not None:
            run.epoch, run.epochs = event.epoch, max(1, event.epochs)
        if event.accuracy is not None and not self.console.is_terminal:
            self.console.print(self._domain_line(event, run), soft_wrap=True)
        if event.result is not None:
            run.done = True
            self.finished.append(event.result)
            if not self.console.is_terminal:
                self.console.print(_line(event.result), soft_wrap=True)

    def _experiences(self, job: Job) -> int:
        joint = self.recipe.strategies[job.strategy].kind == "joint"
        return 1 if joint else self.recipe.stream.n_experiences

    def _render(self) -> RenderableType:
        table = Table(box=None, pad_edge=False, header_style="dim")
        for column in ("run", "domain", "epoch", "loss", "accuracy", "images/s", "left"):
            table.add_column(column, justify="left" if column == "run" else "right", no_wrap=True)
        runs = dict(self._runs)  # rich draws in a thread of its own, while runs come and go
        for job, run in runs.items():
            if not run.done:
                table.add_row(*self._row(job, run))
        shares = [run.share(self._experiences(job)) for job, run in runs.items()]
        share = sum(shares) / max(1, len(self.jobs) - len(self.failures))
        text = f" {len(self.finished)} of {len(self.jobs)} runs, {self._left(share, runs)} left"
        bar = Table.grid()
        bar.add_row(ProgressBar(1.0, share, width=40), Text(text))
        return Group(table, bar)

    def _row(self, job: Job, run: _Progress) -> tuple[str, ...]:
        experiences = self._experiences(job)
        name = f"{job.strategy}, seed {job.seed}"
        epoch = run.epoch
        if epoch is None:
            return name, f"{run.domains}/{experiences}", "", "", "", "", ""
        return (
            name,
            f"{epoch.experience + 1}/{experiences}",
            f"{epoch.epoch + 1}/{run.epochs}",
            f"{epoch.loss:.3f}",
            f"{100 * epoch.accuracy:.1f} %",
            f"{epoch.images / max(1e-9, epoch.seconds):,.0f}",
            run.left(experiences),
        )

    def _domain_line(self, event: Event, run: _Progress) -> str:
        """Another domain learned, where there is no terminal."""
        name = f"{event.job.strategy}, seed {event.job.seed}"
        domains = f"domain {event.domains}/{self.recipe.stream.n_experiences}"
        accuracy = f"accuracy so far {100 * (event.accuracy or 0.0):.2f} %"
        left = run.left(self._experiences(event.job)) or "?"
        return f"{name}: {domains}, {accuracy}, {left} left"

    def _left(self, share: float, runs: dict[Job, _Progress]) -> str:
        old = sum(run.share_at_start for run in runs.values()) / max(1, len(self.jobs))
        if share - old <= 0:
            return "?"
        return _duration((time.monotonic() - self._begin) * (1 - share) / (share - old))


def _line(result: Result) -> str:
    """A finished run, where there is no terminal."""
    accuracy, seconds = 100 * result.average_accuracy, sum(result.train_seconds)
    return f"{result.strategy}, seed {result.seed}: A_T {accuracy:.2f} %, {seconds:.1f} s"


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
