"""Many runs in a pool of local processes. Nothing here imports torch in this process."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass

from covon_avalanche.experiment.result import Result, ResultError
from covon_avalanche.experiment.run_folder import RunFolder, RunSpec, is_bad_input, run_error
from covon_avalanche.experiment.run_options import RunOptions
from covon_avalanche.experiment.worker_pool import worker_pool

_POLL_SECONDS = 0.2


@dataclass(frozen=True)
class Outcome:
    """How a run ended: with a result or an error."""

    spec: RunSpec
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
    on_end: Callable[[Outcome], None] = lambda outcome: None,
    poll: Callable[[list[RunSpec]], None] = lambda running: None,
) -> None:
    """Run all that is not finished; every finished run has written its result file.

    Finished runs are not repeated, interrupted ones are resumed. A run that fails, or whose
    process is killed, does not stop the others; running the grid again resumes it.

    :param processes: number of parallel runs.
    :param on_end: called in this process when a run has ended.
    :param poll: called in this process several times a second with the runs in progress.
    """
    unfinished: list[RunFolder] = []
    for folder in folders:
        try:
            result = folder.result(store=True)
        except ResultError as error:
            on_end(Outcome(folder.spec, error=str(error), bad_input=True))
            continue
        if result is None:
            unfinished.append(folder)
        else:
            on_end(Outcome(folder.spec, result, cached=True))
    workers = max(1, min(processes, len(unfinished)))
    pending: dict[Future[Outcome], RunFolder] = {}
    try:
        with _interrupts() as interrupts, worker_pool(workers) as pool:
            for folder in unfinished:
                pending[pool.submit(_run, folder, options)] = folder
            while pending:
                if interrupts:
                    raise KeyboardInterrupt
                done = wait(pending, _POLL_SECONDS, FIRST_COMPLETED).done
                poll([folder.spec for future, folder in pending.items() if future.running()])
                for future in done:
                    folder = pending.pop(future)
                    killed = isinstance(future.exception(), BrokenProcessPool)
                    on_end(_killed(folder) if killed else future.result())
    except KeyboardInterrupt:
        for future, folder in pending.items():
            if not future.cancelled():  # it had been started
                folder.remove_partial_files()
        raise


def _killed(folder: RunFolder) -> Outcome:
    """The outcome of a run whose process was killed."""
    error = (
        "its process was killed, perhaps for lack of memory; the same command resumes it, with "
        "--jobs 1 one run at a time"
    )
    folder.write_failure(error)
    return Outcome(folder.spec, error=error)


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

        return Outcome(folder.spec, run_in_folder(folder, options))
    except BrokenProcessPool:  # one of the run's own processes
        raise
    except (Exception, SystemExit) as error:
        return Outcome(folder.spec, error=run_error(error), bad_input=is_bad_input(error))
