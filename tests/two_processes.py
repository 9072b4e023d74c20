"""What two processes train in ``optim/test_distributed.py``; they import it by name."""

from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from toy_optimizers import train_task

from covon_avalanche.optim import BayesByBackprop, CoVON
from covon_avalanche.posterior.gaussian import DiagGaussian

NEWTON = dict(ess=100, hess_init=0.5, betas=(0.9, 0.9), batch_size=24)
OPTIMIZERS = {
    "covon": lambda p, g: CoVON(p, **NEWTON, generator=g),
    "covon, two samples": lambda p, g: CoVON(p, **NEWTON, mc_samples=2, generator=g),
    "vcl": lambda p, g: BayesByBackprop(p, ess=100, std_init=0.1, generator=g),
}


def train(kind: str, rank: int, world: int, wrap) -> DiagGaussian:
    """Two tasks on this rank's share of the data; the posterior in the end."""
    data = torch.Generator().manual_seed(1)
    x, y = torch.randn(24, 4, generator=data), torch.randint(3, (24,), generator=data)
    x, y = x.double().chunk(world)[rank], y.chunk(world)[rank]
    torch.manual_seed(0)
    model = nn.Linear(4, 3).double()
    wrapped = wrap(model)
    optimizer = OPTIMIZERS[kind](model.named_parameters(), torch.Generator().manual_seed(5))
    for _ in range(2):
        train_task(optimizer, wrapped, (x, y), steps=10)
    return optimizer.posterior()


def work(rank: int, folder: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    wrap = partial(DistributedDataParallel, gradient_as_bucket_view=True)  # reuses its memory
    for kind in OPTIMIZERS:
        posterior = train(kind, rank, 2, wrap)
        posterior.save(Path(folder) / f"{kind}-{rank}")
    dist.destroy_process_group()
