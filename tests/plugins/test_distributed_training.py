"""Two processes under Avalanche and DistributedDataParallel do what one does on whole batches."""

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from avalanche_processes import IMAGES, KINDS, train, work


@pytest.mark.skipif(not dist.is_available(), reason="this torch has no torch.distributed")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", KINDS)
def test_two_processes_equal_one(kind, tmp_path):
    mp.spawn(work, args=(str(tmp_path), kind), nprocs=2)
    alone = train(kind)
    for rank in range(2):
        found = torch.load(tmp_path / str(rank))
        torch.testing.assert_close(found["weights"], alone["weights"], rtol=1e-4, atol=1e-5)
        assert found["rows"] == alone["rows"]
        assert found["classes"] == pytest.approx(alone["classes"])
        assert found["counts"] == [IMAGES] * 3
        assert found["nll"] == pytest.approx(alone["nll"], rel=1e-4)
