"""A pool of processes for runs and searches. Nothing here imports torch in this process."""

from __future__ import annotations

import logging
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from importlib import import_module
from importlib.util import find_spec
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from types import ModuleType
from typing import Any, TypeVar

_T = TypeVar("_T")


def default_processes(device: str) -> int:
    """One per core that this process may use, or one on an accelerator, because several would share
    its memory."""
    from joblib import cpu_count

    return cpu_count() if device == "cpu" else 1


class WorkerPool:
    """Spawned processes, each of which takes its tasks from a thread through a pipe.

    ``ProcessPoolExecutor`` would leave named semaphores after a kill, and fail all tasks in
    progress if one process is killed. Here only that task raises ``BrokenProcessPool``.
    """

    def __init__(self, processes: int) -> None:
        self._threads = ThreadPoolExecutor(processes)
        self._own = threading.local()  # the thread's end of its pipe
        self._lock = threading.Lock()
        self._closed = False
        self.workers: list[tuple[BaseProcess, Connection]] = []

    def submit(self, function: Callable[..., _T], *arguments: Any) -> Future[_T]:
        """Like ``Executor.submit``."""
        return self._threads.submit(self._call, function, *arguments)

    def _call(self, function: Callable[..., _T], *arguments: Any) -> _T:
        if not hasattr(self._own, "pipe"):
            self._own.pipe = self._start()
        try:
            self._own.pipe.send((function, arguments))
            value, error = self._own.pipe.recv()
        except (EOFError, OSError):
            del self._own.pipe
            raise BrokenProcessPool("a worker process was killed") from None
        if error is not None:
            raise error
        return value

    def _start(self) -> Connection:
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        worker = context.Process(target=_work, args=(theirs,))
        with self._lock:
            if self._closed:
                raise BrokenProcessPool("the pool is closed")
            _block_ctrl_c()
            worker.start()
            self.workers.append((worker, ours))
        theirs.close()
        return ours

    def finish(self) -> None:
        """Wait for all tasks, then end the processes."""
        self._threads.shutdown()
        for worker, pipe in self.workers:
            pipe.close()
            worker.join()

    def terminate(self) -> None:
        """End the processes at once."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        with self._lock:
            self._closed = True
        for worker, _ in self.workers:
            worker.terminate()
        for worker, _ in self.workers:
            worker.join(10)
            worker.kill()


def _block_ctrl_c() -> None:
    """In this thread: processes that it starts inherit its mask, and miss a Ctrl-C while they
    import."""
    resource_tracker.ensure_running()  # which would set another mask
    if hasattr(signal, "pthread_sigmask"):  # not on Windows
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})


@contextmanager
def worker_pool(processes: int) -> Iterator[WorkerPool]:
    """Spawned processes with one thread each, which end when this process is killed.

    After an exception such as KeyboardInterrupt they are terminated at once.
    """
    pool = WorkerPool(processes)
    try:
        yield pool
        pool.finish()
    except BaseException:
        pool.terminate()
        raise


def _work(pipe: Connection) -> None:
    _start_worker()
    with suppress(EOFError, KeyboardInterrupt):  # the pool is finished, or terminated
        while True:
            function, arguments = pipe.recv()
            try:
                pipe.send((function(*arguments), None))
            except (Exception, SystemExit) as error:
                pipe.send((None, _picklable(error)))


def _picklable(error: BaseException) -> BaseException:
    """The error, or its text if another process could not load it."""
    with suppress(Exception):
        if isinstance(error, Exception) and type(pickle.loads(pickle.dumps(error))) is type(error):
            return error
    return RuntimeError(f"{type(error).__name__}: {error}")


def _start_worker() -> None:
    for library in ("OMP", "OPENBLAS", "MKL"):  # of scikit-learn, which is imported later
        os.environ[f"{library}_NUM_THREADS"] = "1"
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_end_after, args=(parent,), daemon=True).start()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    logging.raiseExceptions = False  # no traceback for each line of a log on a full disk
    warnings.filterwarnings("ignore", category=DeprecationWarning)
    warnings.filterwarnings("ignore", module=r"avalanche\.|qpsolvers\.")  # not about our runs
    import_wandb_when_used()
    import torch

    torch.set_num_threads(1)


class _LazyModule(ModuleType):
    """Stands in for a package until one of its names is used."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != "__version__":  # ``inspect`` asks all for __file__
            raise AttributeError(name)
        if sys.modules[self.__name__] is self:
            del sys.modules[self.__name__]
        return getattr(import_module(self.__name__), name)


def import_wandb_when_used() -> None:
    """Import wandb when one of its names is used. Avalanche always imports it, and a kill then
    leaves temporary folders."""
    if "wandb" not in sys.modules:
        module = _LazyModule("wandb")
        module.__spec__ = find_spec("wandb")
        sys.modules["wandb"] = module


def _end_after(parent: multiprocessing.process.BaseProcess) -> None:
    parent.join()
    os._exit(1)
