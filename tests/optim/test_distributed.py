"""Two processes, with replicated parameters (DistributedDataParallel) or sharded ones
(``fully_shard``), do what one does on the whole batch."""

import itertools

import pytest
import torch
import torch.distributed as dist
from terminal import in_two_processes
from two_processes import OPTIMIZERS, WRAPPERS, train, work


@pytest.mark.skipif(not dist.is_available(), reason="this torch has no torch.distributed")
def test_two_processes_equal_one(tmp_path):
    """The Hessian is the one of the whole batch, not that divided by the number of ranks. A
    checkpoint of sharded parameters continues exactly."""
    in_two_processes(work, str(tmp_path))
    for kind in OPTIMIZERS:
        alone = train(kind)
        for how, rank in itertools.product(WRAPPERS, range(2)):
            found = torch.load(tmp_path / f"{how}-{kind}-{rank}")
            for what, tensors in alone.items():
                for name, expected in tensors.items():
                    torch.testing.assert_close(
                        found[what][name],
                        expected,
                        rtol=1e-4,
                        atol=1e-5,
                        msg=lambda m, t=f"{how} {kind}, rank {rank}: {what} of {name}": f"{t}: {m}",
                    )
