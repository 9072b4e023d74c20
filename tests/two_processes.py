"""What two processes train in ``optim/test_sharding.py``; they import it by name."""

import itertools

import pytest
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
from toy_optimizers import record_sample, same, step_on, train_step, train_task

from covon_avalanche.optim import BayesByBackprop, CoVON
from covon_avalanche.posterior import DiagGaussian

NEWTON = dict(ess=100, hess_init=0.5, betas=(0.9, 0.9), batch_size=24)
OPTIMIZERS = {
    "covon": lambda p, g: CoVON(p, **NEWTON, generator=g),
    "reference": lambda p, g: CoVON(p, **NEWTON, generator=g, implementation="reference"),
    "reparam": lambda p, g: CoVON(p, **NEWTON, hess_approx="reparam", generator=g),
    "two samples": lambda p, g: CoVON(p, **NEWTON, mc_samples=2, prior_mean="init", generator=g),
    "finetuning": lambda p, g: CoVON.finetuning(p, lr=0.01, generator=g),
    "finetuning, reference": lambda p, g: CoVON.finetuning(
        p, lr=0.01, generator=g, implementation="reference"
    ),
    "bfloat16 prior": lambda p, g: CoVON(p, lr=0.01, bfloat16_prior=True, generator=g),
    "vcl": lambda p, g: BayesByBackprop(p, ess=100, std_init=0.1, generator=g),
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
        train_task(optimizer, wrapped, share)
    with torch.no_grad(), optimizer.sampled_params(train=False):
        sampled = wrapped(x)
    posterior, prior = optimizer.posterior(), optimizer.prior()
    outputs = {"sampled": sampled, "after": wrapped(x).detach()}
    return [posterior.mean, posterior.precision, prior.precision, outputs]


def made(mesh, **changes):
    """A fresh model and a fresh optimizer."""
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))
    if mesh is not None:
        fully_shard(model, mesh=mesh)
    options = dict(lr=0.01, generator=torch.Generator().manual_seed(5))
    return model, CoVON(model.named_parameters(), **NEWTON | options | changes)


def made_natural(mesh):
    """The same with settings relative to the weights."""
    return made(mesh, ess=None, hess_init=None, batch_size=None)


def made_bfloat16(mesh):
    """The same with a prior in bfloat16."""
    return made(mesh, ess=None, hess_init=None, batch_size=None, bfloat16_prior=True)


def batch_of_five():
    """A batch for these models."""
    x = torch.randn(24, 5, generator=torch.Generator().manual_seed(1))
    return x, (x[:, 0] > 0).long()


def check_resuming(folder, mesh=None, made=made):
    """A second task, straight on and by a checkpoint into fresh objects, is the same bit by bit."""
    batch = batch_of_five()
    for gathered, steps in ((True, 1), (False, 1), (False, 0)):  # 0: between two tasks
        options = StateDictOptions(full_state_dict=gathered)
        found = []
        for restarts in (False, True):
            torch.manual_seed(0)
            model, optimizer = made(mesh)
            train_task(optimizer, model, batch, steps=2)
            for _ in range(steps):
                train_step(optimizer, model, batch)
            if restarts:
                saved = get_model_state_dict(model, options=options)
                state = get_optimizer_state_dict(model, optimizer, options=options)
                path = f"{folder}/after-{steps}"
                if not gathered:
                    checkpoint.save({"model": saved, "optimizer": state}, checkpoint_id=path)
                model, optimizer = made(mesh)
                if not gathered:
                    metadata = checkpoint.FileSystemReader(path).read_metadata()
                    optimizer.allocate_state(metadata.state_dict_metadata)
                    saved = get_model_state_dict(model)
                    state = get_optimizer_state_dict(model, optimizer)
                    checkpoint.load({"model": saved, "optimizer": state}, checkpoint_id=path)
                set_model_state_dict(model, saved, options=options)
                set_optimizer_state_dict(model, optimizer, state, options=options)
                assert optimizer.param_groups[0]["lr"] == 0.01
            half = {state["prior_mean"].dtype for state in optimizer.state.values()}
            assert half == {torch.bfloat16 if made is made_bfloat16 else torch.float32}
            for _ in range(2):
                train_step(optimizer, model, batch)
            found.append(optimizer.posterior())
        straight, by_checkpoint = found
        if mesh is not None and mesh.get_rank() == 0:
            straight.save(f"{folder}/straight-{steps}.safetensors")
        assert same(straight.mean, by_checkpoint.mean)
        assert same(straight.precision, by_checkpoint.precision)


def continue_alone(folder, steps, made=made):
    """The posterior of one process that continues the sharded checkpoint of two."""
    model, optimizer = made(None)
    metadata = checkpoint.FileSystemReader(f"{folder}/after-{steps}").read_metadata()
    optimizer.allocate_state(metadata.state_dict_metadata)
    optimizer_state = get_optimizer_state_dict(model, optimizer)
    state = {"model": get_model_state_dict(model), "optimizer": optimizer_state}
    checkpoint.load(state, checkpoint_id=f"{folder}/after-{steps}")
    set_model_state_dict(model, state["model"])
    set_optimizer_state_dict(model, optimizer, state["optimizer"])
    for _ in range(2):
        train_step(optimizer, model, batch_of_five())
    return optimizer.posterior()


def check_given_prior(mesh):
    """A posterior, whose tensors are whole, is the prior of sharded parameters, too."""
    model, _ = made(mesh)
    torch.manual_seed(0)
    whole = {name: torch.rand(p.shape) + 1 for name, p in made(None)[0].named_parameters()}
    given = DiagGaussian(whole, whole)
    for options in (dict(ess=100, bfloat16_prior=False), dict(lr=1e-3, bfloat16_prior=True)):
        optimizer = CoVON(model.named_parameters(), batch_size=24, prior=given, **options)
        half = torch.bfloat16 if options["bfloat16_prior"] else torch.float32
        expected = {name: value.to(half).float() for name, value in whole.items()}
        assert same(dict(optimizer.prior().mean), expected)
        assert same(dict(optimizer.prior().precision), expected)


def check_uneven(kind, rank, mesh):
    """A process without a row of a layer; what is bad in one process only."""
    model, x = nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 1)), torch.ones(4, 5)
    fully_shard(model, mesh=mesh)
    optimizer = OPTIMIZERS[kind](model.named_parameters(), torch.Generator().manual_seed(5))
    step_on(optimizer, lambda: model(x).square().mean())
    if kind != "vcl":
        assert 0 <= optimizer.diagnostics()["all"].hess_at_start <= 1
        hess = optimizer.state[model[0].weight]["hess"].to_local()
        kept = hess.clone()
        if rank == 1:
            hess.fill_(torch.nan)
        sentence = "'0.weight' is not finite" if rank == 1 else "the error of another process"
        with pytest.raises(ValueError, match=sentence):
            optimizer.consolidate()
        hess.copy_(kept)
    optimizer.consolidate()
    for _ in range(optimizer.mc_samples):
        record_sample(optimizer, lambda: model(x).square().mean())
    before = optimizer.posterior()
    if rank == 1:
        model[0].weight.grad.to_local().fill_(torch.nan)
    with pytest.raises(FloatingPointError, match=r"gradient of '0\.weight' is not finite"):
        optimizer.step()
    assert same(optimizer.posterior().mean, before.mean)


def work(rank: int, folder: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    for how, kind in itertools.product(WRAPPERS, OPTIMIZERS):
        torch.save(train(kind, rank, 2, WRAPPERS[how], mesh), f"{folder}/{how}-{kind}-{rank}")
    for kind in OPTIMIZERS:
        check_uneven(kind, rank, mesh)
    check_given_prior(mesh)
    check_resuming(f"{folder}/papers", mesh)
    check_resuming(f"{folder}/bfloat16", mesh, made_bfloat16)
    model, optimizer = made(mesh, betas=(0.9, 1 - 1e-9))
    train_step(optimizer, model, (torch.ones(24, 5), torch.arange(24) % 3))
    assert optimizer.diagnostics()["all"].hess_at_start == 1.0  # it cannot have moved
    means = {p: torch.arange(p.numel() * 1.0).view(p.shape) for p in model.parameters()}
    optimizer.consolidate(means=means)
    assert all(p.full_tensor().equal(mean) for p, mean in means.items())
    dist.destroy_process_group()
