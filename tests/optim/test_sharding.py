"""Two processes with parameters sharded by ``fully_shard`` do what one does with whole ones."""

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from sharded_processes import OPTIMIZERS, resumed, train, work

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
    for rank in range(2):
        straight = DiagGaussian.load(tmp_path / f"straight-{rank}")
        by_checkpoint = DiagGaussian.load(tmp_path / f"by-checkpoint-{rank}")
        for name, mean in straight.mean.items():
            assert torch.equal(mean, by_checkpoint.mean[name])
            assert torch.equal(straight.precision[name], by_checkpoint.precision[name])


def test_a_state_of_torch_distributed_checkpoint_fits_into_a_fresh_optimizer():
    straight, by_checkpoint = resumed()
    for name, mean in straight.mean.items():
        assert torch.equal(mean, by_checkpoint.mean[name])
        assert torch.equal(straight.precision[name], by_checkpoint.precision[name])


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
