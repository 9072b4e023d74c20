"""One run in several processes, which compute shares of each batch."""

from __future__ import annotations

import os
from concurrent.futures import as_completed, wait
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

import torch.distributed as dist
from avalanche.distributed import DistributedHelper

from covon_avalanche.experiment.recipe import Recipe
from covon_avalanche.experiment.result import Result
from covon_avalanche.experiment.run_options import RunOptions
from covon_avalanche.experiment.worker_pool import worker_pool

_GRACE_SECONDS = 2.0  # after a failure, for the other processes to say why


def run_in_processes(
    recipe: Recipe, strategy: str, seed: int, runs: Path, options: RunOptions
) -> Result:
    """As ``train_in_folder``, in ``options.processes`` processes of their own: on a GPU each with
    NCCL, or on the CPU with gloo.

    :raises BrokenProcessPool: if one of them was killed.
    :raises Exception: what stopped the first of the others. No process is left behind.
    """
    count = options.processes
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with worker_pool(count) as pool:
        arguments = recipe, strategy, seed, runs, options
        ranks = [pool.submit(_work, rank, store.port, *arguments) for rank in range(count)]
        for rank in as_completed(ranks):
            if rank.exception() is None:
                continue
            # The main process writes its log; a killed one stops the others.
            wait(ranks, _GRACE_SECONDS)
            errors = [r.exception() for r in ranks if r.done()]
            killed = [e for e in errors if isinstance(e, BrokenProcessPool)]
            raise next(e for e in (*killed, *errors) if e is not None)
    return ranks[0].result()


def _work(
    rank: int, port: int, recipe: Recipe, strategy: str, seed: int, runs: Path, options: RunOptions
) -> Result:
    """Train in each process, as torchrun would start it with the store of its agent."""
    from covon_avalanche.experiment.run import train_in_folder

    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": options.processes}
    os.environ |= {key: str(value) for key, value in (numbers | {"MASTER_PORT": port}).items()}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    DistributedHelper.init_distributed(seed % 2**32, use_cuda=recipe.device == "cuda")
    result = train_in_folder(recipe, strategy, seed, runs, options)
    dist.destroy_process_group()  # not after an error, which would make the others fail first
    return result
