"""Two processes do what one does on the whole batch; checkpoints of torch.distributed."""

import itertools

import pytest
import torch
import torch.distributed as dist
from terminal import in_two_processes
from two_processes import (
    OPTIMIZERS,
    WRAPPERS,
    check_resuming,
    continue_alone,
    made,
    made_bfloat16,
    train,
    work,
)

from covon_avalanche.optim import CoVON, samples
from covon_avalanche.posterior import DiagGaussian

TORCH = tuple(map(int, torch.__version__.split(".")[:2]))


@pytest.mark.skipif(not dist.is_available(), reason="this torch has no torch.distributed")
@pytest.mark.skipif(TORCH < (2, 9), reason="FSDP2 on CPUs sums gradients before torch 2.9")
def test_two_processes_equal_one(tmp_path):
    """Replicated or sharded; a sharded checkpoint continues exactly, alone up to rounding."""
    in_two_processes(work, str(tmp_path))
    for kind in OPTIMIZERS:
        alone = train(kind)
        for how, rank in itertools.product(WRAPPERS, range(2)):
            found = torch.load(tmp_path / f"{how}-{kind}-{rank}")
            for tensors, expected in zip(found, alone, strict=True):
                rtol = 2**-7 if "bfloat16" in kind else 1e-4  # few entries are rounded otherwise
                torch.testing.assert_close(tensors, expected, rtol=rtol, atol=rtol / 10)
    for folder, make in {"papers": made, "bfloat16": made_bfloat16}.items():
        for steps in (1, 0):
            straight = DiagGaussian.load(tmp_path / folder / f"straight-{steps}.safetensors")
            alone = continue_alone(tmp_path / folder, steps, make)
            for field in ("mean", "precision"):
                found, expected = (dict(getattr(q, field)) for q in (alone, straight))
                torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("make", [made, made_bfloat16])
def test_a_state_of_torch_distributed_checkpoint_fits_into_a_fresh_optimizer(tmp_path, make):
    check_resuming(tmp_path, made=make)


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
        monkeypatch.setattr(samples, "compiled_kernel", lambda: None)
        monkeypatch.setattr(samples, "_BLOCK", 700)
    whole = samples.fill_normal_(torch.empty(5000), 3, 4)
    assert 0.9 < whole.std() < 1.1
    assert whole.unique().numel() > 4900  # no block is another's copy
    for begin, size in ((0, 5000), (0, 1), (1023, 2), (1024, 1024), (699, 3000), (4999, 1), (7, 0)):
        part = samples._noise(begin, size, 5000, 3, 4, whole)
        assert torch.equal(part, whole[begin : begin + size])
