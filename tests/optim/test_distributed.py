"""Two processes under DistributedDataParallel do what one does on the whole batch."""

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from two_processes import OPTIMIZERS, train, work

from covon_avalanche.posterior.gaussian import DiagGaussian


@pytest.mark.skipif(not dist.is_available(), reason="this torch has no torch.distributed")
def test_two_processes_equal_one(tmp_path):
    """The Hessian is the one of the whole batch, not that divided by the number of ranks."""
    mp.spawn(work, args=(str(tmp_path),), nprocs=2)
    for kind in OPTIMIZERS:
        alone = train(kind, 0, 1, lambda model: model)
        for rank in range(2):
            posterior = DiagGaussian.load(tmp_path / f"{kind}-{rank}")
            torch.testing.assert_close(dict(posterior.mean), dict(alone.mean))
            torch.testing.assert_close(dict(posterior.precision), dict(alone.precision))
