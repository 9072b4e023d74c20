"""One run in several processes, which compute shares of each batch."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import as_completed, wait
from concurrent.futures.process import BrokenProcessPool

import torch.distributed as dist
from avalanche.distributed import DistributedHelper

from covon_avalanche.experiment.result import Result
from covon_avalanche.experiment.run_folder import RunFolder
from covon_avalanche.experiment.run_options import RunOptions
from covon_avalanche.experiment.worker_pool import WorkerPool

Train = Callable[[RunFolder, RunOptions], Result]
_GRACE_SECONDS = 2.0  # after a failure, for the other processes to say why


def run_in_processes(train: Train, folder: RunFolder, options: RunOptions) -> Result:
    """Train in ``options.processes`` processes of their own: on a GPU each with NCCL, or on the
    CPU with gloo. ``torch.multiprocessing.spawn`` returns no results and its errors are texts;
    torchrun's launcher leaves semaphores if all processes are killed.

    :param train: called in each process.
    :raises BrokenProcessPool: if one of them was killed.
    :raises Exception: what stopped the first of the others. No process is left behind.
    """
    count = options.processes
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with WorkerPool(count) as pool:
        arguments = store.port, train, folder, options
        ranks = [pool.submit(_work, rank, *arguments) for rank in range(count)]
        for rank in as_completed(ranks):
            if rank.exception() is None:
                continue
            # The main process writes its log; a killed one stops the others.
            wait(ranks, _GRACE_SECONDS)
            errors = [r.exception() for r in ranks if r.done()]
            killed = [e for e in errors if isinstance(e, BrokenProcessPool)]
            raise next(e for e in (*killed, *errors) if e is not None)
    return ranks[0].result()


def _work(rank: int, port: int, train: Train, folder: RunFolder, options: RunOptions) -> Result:
    """Train in each process, as torchrun would start it with the store of its agent."""
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": options.processes}
    os.environ |= {key: str(value) for key, value in (numbers | {"MASTER_PORT": port}).items()}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    use_cuda = folder.recipe.device == "cuda"
    DistributedHelper.init_distributed(folder.spec.seed % 2**32, use_cuda=use_cuda)
    result = train(folder, options)
    dist.destroy_process_group()  # not after an error, which would make the others fail first
    return result
