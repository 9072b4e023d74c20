"""What two processes train in ``optim/test_distributed.py``; they import it by name."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from toy_optimizers import same, train_step, train_task

from covon_avalanche.optim import BayesByBackprop, CoVON

NEWTON = dict(ess=100, hess_init=0.5, betas=(0.9, 0.9), batch_size=24)
OPTIMIZERS = {
    "covon": lambda p, g: CoVON(p, **NEWTON, generator=g),
    "reference": lambda p, g: CoVON(p, **NEWTON, generator=g, implementation="reference"),
    "reparam": lambda p, g: CoVON(p, **{**NEWTON, "hess_approx": "reparam"}, generator=g),
    "two samples": lambda p, g: CoVON(p, **NEWTON, mc_samples=2, prior_mean="init", generator=g),
    "vcl": lambda p, g: BayesByBackprop(p, ess=100, std_init=0.1, generator=g),
}

RESUMED = {
    "whole": {"sharded": False, "steps": 3},
    "sharded": {"sharded": True, "steps": 3},
    "sharded, between tasks": {"sharded": True, "steps": 0},
}


def replicate(model, mesh):
    """DDP that reuses the gradients' memory."""
    return DistributedDataParallel(model, gradient_as_bucket_view=True)


def shard(model, mesh):
    """FSDP2, layer by layer."""
    for part in (model[0], model[2], model):
        fully_shard(part, mesh=mesh, reshard_after_forward=True)
    return model


WRAPPERS = {"replicated": replicate, "sharded": shard}


def train(kind, rank=0, world=1, wrap=lambda model, mesh: model, mesh=None):
    """Two tasks on this rank's share of the data; posterior, prior and predicted outputs."""
    data = torch.Generator().manual_seed(1)
    x, y = torch.randn(24, 5, generator=data), torch.randint(3, (24,), generator=data)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 900), nn.Tanh(), nn.Linear(900, 3))  # uneven: 3 rows
    wrapped = wrap(model, mesh)
    optimizer = OPTIMIZERS[kind](model.named_parameters(), torch.Generator().manual_seed(5))
    share = x.chunk(world)[rank], y.chunk(world)[rank]
    for _ in range(2):
        train_task(optimizer, wrapped, share, steps=6)
    with torch.no_grad(), optimizer.sampled_params(train=False):
        output = wrapped(x)
    posterior, prior = optimizer.posterior(), optimizer.prior()
    return {
        "mean": posterior.mean,
        "precision": posterior.precision,
        "prior": prior.precision,
        "sampled": {"output": output},
        "after": {"output": wrapped(x).detach()},
    }


def check_resuming(mesh=None, folder=None, steps=3):
    """A second task, straight on and by a checkpoint into fresh objects, is the same bit by bit.

    :param folder: for a sharded checkpoint; by default the state is gathered.
    :param steps: of the second task before the checkpoint.
    """
    x = torch.randn(24, 5, generator=torch.Generator().manual_seed(1))
    y = (x[:, 0] > 0).long()
    options = StateDictOptions(full_state_dict=folder is None)
    found = []
    for restarts in (False, True):
        torch.manual_seed(0)
        model, optimizer = made(mesh)
        train_task(optimizer, model, (x, y), steps=4)
        train_steps(optimizer, model, (x, y), steps)
        if restarts:
            saved = get_model_state_dict(model, options=options)
            state = get_optimizer_state_dict(model, optimizer, options=options)
            if folder is not None:
                checkpoint.save({"model": saved, "optimizer": state}, checkpoint_id=folder)
            model, optimizer = made(mesh)
            if folder is not None:
                metadata = checkpoint.FileSystemReader(folder).read_metadata()
                optimizer.allocate_state(metadata.state_dict_metadata)
                saved = get_model_state_dict(model)
                state = get_optimizer_state_dict(model, optimizer)
                checkpoint.load({"model": saved, "optimizer": state}, checkpoint_id=folder)
            set_model_state_dict(model, saved, options=options)
            set_optimizer_state_dict(model, optimizer, state, options=options)
            assert optimizer.param_groups[0]["lr"] == 0.01
        train_steps(optimizer, model, (x, y), 3)
        found.append(optimizer.posterior())
    straight, by_checkpoint = found
    assert same(straight.mean, by_checkpoint.mean)
    assert same(straight.precision, by_checkpoint.precision)


def made(mesh):
    """A fresh model and a fresh optimizer."""
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))
    if mesh is not None:
        fully_shard(model, mesh=mesh)
    generator = torch.Generator().manual_seed(5)
    return model, CoVON(model.named_parameters(), **NEWTON, lr=0.01, generator=generator)


def train_steps(optimizer, model, batch, steps):
    """Some steps, without the end of a task."""
    for _ in range(steps):
        train_step(optimizer, model, batch)


def share_at_start(mesh):
    """``hess_at_start`` of a task whose Hessian cannot have moved."""
    model, _ = made(mesh)
    slow = {**NEWTON, "betas": (0.9, 1 - 1e-9)}
    optimizer = CoVON(model.named_parameters(), **slow, generator=torch.Generator())
    train_steps(optimizer, model, (torch.ones(24, 5), torch.arange(24) % 3), 2)
    return optimizer.diagnostics()["all"].hess_at_start


def work(rank: int, folder: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    for how, wrap in WRAPPERS.items():
        for kind in OPTIMIZERS:
            torch.save(train(kind, rank, 2, wrap, mesh), f"{folder}/{how}-{kind}-{rank}")
    assert share_at_start(mesh) == 1.0
    for name, arguments in RESUMED.items():
        sharded = f"{folder}/checkpoint-{name}" if arguments["sharded"] else None
        check_resuming(mesh, sharded, arguments["steps"])
    dist.destroy_process_group()
