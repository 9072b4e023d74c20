"""Many runs in a pool of local processes. Nothing here imports torch in this process."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace

from covon_avalanche.experiment.result import Result, ResultError
from covon_avalanche.experiment.run_errors import is_bad_input, run_error
from covon_avalanche.experiment.run_folder import RunFolder, RunningElsewhere
from covon_avalanche.experiment.run_options import RunOptions
from covon_avalanche.experiment.worker_pool import WorkerPool, ignore_imports_in_gc

_POLL_SECONDS = 0.2


@dataclass(frozen=True)
class Outcome:
    """How a run ended: with a result or an error."""

    folder: RunFolder
    result: Result | None = None
    cached: bool = False
    """Whether the run had been finished before."""
    error: str | None = None
    bad_input: bool = False
    """Whether the user's input caused the error."""


def run_grid(
    folders: Sequence[RunFolder],
    options: RunOptions = RunOptions(),
    *,
    processes: int = 1,
    on_end: Callable[[Outcome], Iterable[RunFolder] | None] = lambda outcome: None,
    poll: Callable[[list[RunFolder], list[RunFolder]], None] = lambda here, elsewhere: None,
) -> None:
    """Run all that is not finished; every finished run has written its result file.

    Finished runs are not repeated, interrupted ones are resumed. Several processes or machines
    that share the folders may run the same grid at the same time: each run is run by one of them,
    and all wait for the last. A run that fails, or whose process is killed, does not stop the
    others; running the grid again resumes it.

    :param processes: number of parallel runs.
    :param on_end: called in this process when a run has ended; returns runs to add, if any.
    :param poll: called in this process several times a second with the runs in progress, and those
        in progress elsewhere that it waits for.
    """
    waiting: list[RunFolder] = []

    def end(outcome: Outcome) -> None:
        waiting.extend(on_end(outcome) or ())

    for folder in folders:
        if (outcome := _finished(folder)) is not None:
            end(outcome)
        else:
            waiting.append(folder)
    pending: dict[Future[Outcome], RunFolder] = {}
    device = waiting[0].recipe.device if waiting else "cpu"
    with _interrupts() as interrupts, WorkerPool(processes, device) as pool:
        while waiting or pending:
            elsewhere = []
            for folder in waiting.copy():
                if len(pending) == processes:
                    break
                if folder.is_running():
                    elsewhere.append(folder)
                    continue
                waiting.remove(folder)
                pending[pool.submit(_run, folder, options)] = folder
            if interrupts:
                raise KeyboardInterrupt
            done = wait(pending, _POLL_SECONDS, FIRST_COMPLETED).done
            poll(list(pending.values()), elsewhere)
            for future in done:
                folder, error = pending.pop(future), future.exception()
                if isinstance(error, RunningElsewhere):
                    waiting.append(folder)
                else:
                    killed = isinstance(error, BrokenProcessPool)
                    outcome = _killed(folder) if killed else future.result()
                    end(replace(outcome, folder=folder))  # not the worker's copy
            if waiting and not pending and not done:
                time.sleep(_POLL_SECONDS)


def _finished(folder: RunFolder) -> Outcome | None:
    """The outcome of a run that was finished or given up before, or whose result is damaged."""
    try:
        result = folder.result(store=True)
    except ResultError as error:
        return Outcome(folder, error=str(error), bad_input=True)
    if result is not None:
        return Outcome(folder, result, cached=True)
    if (status := folder.status()).given_up:
        return Outcome(folder, error=status.error, cached=True)
    return None


def _killed(folder: RunFolder) -> Outcome:
    """The outcome of a run whose process was killed; another one may be running it by now."""
    error = (
        "its process was killed, perhaps for lack of memory; the same command resumes it, with "
        "--jobs 1 one run at a time"
    )
    with suppress(RunningElsewhere, OSError), folder.opened():
        folder.write_failure(error, folder.gives_up(BrokenProcessPool(error)))
    return Outcome(folder, error=error)


@contextmanager
def _interrupts() -> Iterator[list[int]]:
    """A list that grows with each Ctrl-C, for a loop that stops where it is safe: Python would lose
    a KeyboardInterrupt that it raises in a callback or destructor."""
    signals: list[int] = []  # a second one within Event.set() would wait for its lock for ever
    before = signal.signal(signal.SIGINT, lambda number, _: signals.append(number))
    try:
        yield signals
    finally:
        signal.signal(signal.SIGINT, before)


def _run(folder: RunFolder, options: RunOptions) -> Outcome:
    """Run in a worker. Errors are returned as text, because unpickling an exception may fail."""
    try:
        from covon_avalanche.experiment.run import run_in_folder

        ignore_imports_in_gc()
        if (outcome := _finished(folder)) is not None:  # elsewhere, while this process imported
            return outcome
        return Outcome(folder, run_in_folder(folder, options))
    except RunningElsewhere:
        raise
    except (Exception, SystemExit) as error:
        return Outcome(folder, error=run_error(error), bad_input=is_bad_input(error))
