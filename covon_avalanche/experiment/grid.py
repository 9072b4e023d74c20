"""A grid of runs in a pool of local processes. Nothing here imports torch."""

from __future__ import annotations

import multiprocessing
import queue
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.queues import Queue
from pathlib import Path

from covon_avalanche.experiment.recipe import Recipe
from covon_avalanche.experiment.result import Result


@dataclass(frozen=True)
class Job:
    """One run of a grid."""

    strategy: str
    seed: int

    def file(self, folder: Path) -> Path:
        """Where its result goes."""
        return folder / self.strategy / f"seed-{self.seed}" / "result.json"


@dataclass(frozen=True)
class Event:
    """What happened to a job: it has learned so many domains, is done, or failed."""

    job: Job
    domains: int = 0
    result: Result | None = None
    error: str | None = None


def run_grid(
    recipe: Recipe,
    jobs: list[Job],
    folder: Path,
    *,
    processes: int,
    dataset_root: str | None = None,
    notify: Callable[[Event], None] = lambda event: None,
) -> list[Result]:
    """Run all jobs, one thread each; every finished one has written its result file.

    A job that fails does not stop the others; what it raised comes as an event.

    :param folder: results go to ``folder/STRATEGY/seed-SEED/result.json``.
    :param processes: how many runs at a time.
    :param notify: called in this process for each event.
    :return: the results of the jobs that did not fail, in the order of the jobs.
    """
    results: dict[Job, Result] = {}
    with _no_parts_left(folder), _pool(processes) as (pool, messages), _ctrl_c() as pressed:
        futures: dict[Future[Result], Job] = {
            pool.submit(_work, recipe, job, folder, dataset_root): job for job in jobs
        }
        while futures:
            if pressed():
                raise KeyboardInterrupt
            running = set(futures.values())
            for job, domains in _drain(messages):
                if job in running:  # a message may arrive later than the result
                    notify(Event(job, domains))
            for future in [f for f in futures if f.done()]:
                job = futures.pop(future)
                error = future.exception()
                if error is None:
                    results[job] = future.result()
                    notify(Event(job, recipe.stream.n_experiences, result=results[job]))
                else:
                    notify(Event(job, error=f"{type(error).__name__}: {error}"))
    return [results[job] for job in jobs if job in results]


@contextmanager
def _ctrl_c() -> Iterator[Callable[[], bool]]:
    """Whether Ctrl-C was pressed, to be asked for where stopping is safe: an exception that
    Python raises by itself may be lost, in a callback or a destructor."""
    if threading.current_thread() is not threading.main_thread():
        yield lambda: False  # signals are the main thread's business
        return
    seen = threading.Event()
    before = signal.signal(signal.SIGINT, lambda *_: seen.set())
    try:
        yield seen.is_set
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def _no_parts_left(folder: Path) -> Iterator[None]:
    """Remove what a worker that was stopped while writing has left."""
    try:
        yield
    except BaseException:
        for part in folder.rglob(".*.part"):
            part.unlink()
        raise


@contextmanager
def _pool(processes: int) -> Iterator[tuple[ProcessPoolExecutor, Queue[tuple[Job, int]]]]:
    context = multiprocessing.get_context("spawn")
    messages: Queue[tuple[Job, int]] = context.Queue()
    pool = ProcessPoolExecutor(processes, context, initializer=_start, initargs=(messages,))
    try:
        yield pool, messages
        pool.shutdown()
    except BaseException:  # Ctrl-C: whole files only, so the workers may go at once
        workers = list((pool._processes or {}).values())
        pool.shutdown(wait=False, cancel_futures=True)
        for worker in workers:
            worker.terminate()
        for worker in workers:
            worker.join()
        raise
    finally:
        messages.close()
        messages.cancel_join_thread()


def _drain(messages: Queue[tuple[Job, int]]) -> Iterator[tuple[Job, int]]:
    """The waiting messages; waits a moment where there are none."""
    try:
        while True:
            yield messages.get_nowait()
    except queue.Empty:
        time.sleep(0.05)


# In the worker processes ---------------------------------------------------------------

_messages: Queue[tuple[Job, int]]


def _start(messages: Queue[tuple[Job, int]]) -> None:
    global _messages
    _messages = messages
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's business
    warnings.filterwarnings("ignore", category=DeprecationWarning)
    warnings.filterwarnings("ignore", module=r"avalanche\.|qpsolvers\.")  # not about our runs
    import torch

    torch.set_num_threads(1)


def _work(recipe: Recipe, job: Job, folder: Path, dataset_root: str | None) -> Result:
    from covon_avalanche.experiment.run import run_strategy

    result = run_strategy(
        recipe,
        job.strategy,
        job.seed,
        dataset_root=dataset_root,
        progress=lambda domains, _: _messages.put((job, domains)),
    )
    result.save(job.file(folder))
    return result
