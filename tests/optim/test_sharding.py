"""Two processes with parameters sharded by ``fully_shard`` do what one does with whole ones."""

import itertools

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from sharded_processes import OPTIMIZERS, RESUMED, resumed, train, work

from covon_avalanche.optim import CoVON, samples
from covon_avalanche.posterior.gaussian import DiagGaussian


@pytest.mark.skipif(not dist.is_available(), reason="this torch has no torch.distributed")
def test_two_processes_with_a_part_each_equal_one_with_the_whole(tmp_path):
    mp.spawn(work, args=(str(tmp_path),), nprocs=2)
    for kind in OPTIMIZERS:
        alone = train(kind)
        for rank in range(2):
            found = torch.load(tmp_path / f"{kind}-{rank}")
            for what, tensors in alone.items():
                for name, expected in tensors.items():
                    message = f"{kind}, rank {rank}: {what} of {name}"
                    torch.testing.assert_close(
                        found[what][name],
                        expected,
                        rtol=1e-4,
                        atol=1e-5,
                        msg=lambda m, t=message: f"{t}: {m}",
                    )
    for rank, kind in itertools.product(range(2), RESUMED):
        straight = DiagGaussian.load(tmp_path / f"straight-{kind}-{rank}")
        assert_equal(straight, DiagGaussian.load(tmp_path / f"by-checkpoint-{kind}-{rank}"))


def assert_equal(straight, by_checkpoint):
    assert straight.mean.keys() == by_checkpoint.mean.keys()
    for name, mean in straight.mean.items():
        assert torch.equal(mean, by_checkpoint.mean[name])
        assert torch.equal(straight.precision[name], by_checkpoint.precision[name])


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("kind", RESUMED)
def test_a_state_of_torch_distributed_checkpoint_fits_into_a_fresh_optimizer(kind, tmp_path):
    folder = tmp_path if RESUMED[kind]["sharded"] else None
    assert_equal(*resumed(folder=folder, steps=RESUMED[kind]["steps"]))


def test_only_entries_of_a_fresh_optimizer_are_allocated():
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = CoVON([("weight", weight)], ess=10)
    with pytest.raises(ValueError, match=r"no key of the checkpoint .* \['weight'\]"):
        optimizer.allocate_state(["optimizer.state.bias.hess", "model.weight"])
    optimizer.allocate_state(["optimizer.state.weight.prior_mean", "optimizer.state.weight.step"])
    assert optimizer.state[weight].keys() == {"prior_mean", "step"}
    with pytest.raises(ValueError, match="for a fresh optimizer, this one has a state"):
        optimizer.allocate_state(["optimizer.state.weight.hess"])


def test_a_step_without_samples_is_no_initialisation_where_anything_would_change():
    weight = torch.nn.Parameter(torch.ones(3))
    for lr, grad in ((0.1, 0.0), (0.0, 1.0)):
        optimizer = CoVON([weight], ess=10, lr=lr, batch_size=4)
        weight.grad = torch.full((3,), grad)
        with pytest.raises(RuntimeError, match="needs mc_samples=1 samples, got 0"):
            optimizer.step()
        assert not optimizer.state


@pytest.mark.parametrize("compiled", [True, False])
def test_a_part_has_the_noise_of_its_place_in_the_whole(compiled, monkeypatch):
    if not compiled:
        monkeypatch.setattr(samples, "compiled_fill", lambda: None)
        monkeypatch.setattr(samples, "_BLOCK", 700)
    whole = samples.fill_normal_(torch.empty(5000), 3, 4)
    assert 0.9 < whole.std() < 1.1
    assert whole.unique().numel() > 4900  # no block is another's copy
    for begin, size in ((0, 5000), (0, 1), (1023, 2), (1024, 1024), (699, 3000), (4999, 1), (7, 0)):
        part = samples._noise(begin, size, 5000, 3, 4, whole)
        assert torch.equal(part, whole[begin : begin + size])
