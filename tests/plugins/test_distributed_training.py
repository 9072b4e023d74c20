"""Two processes under Avalanche and DistributedDataParallel do what one does on whole batches."""

import pytest
import torch
import torch.distributed as dist
from avalanche_processes import IMAGES, KINDS, MIXED, train, work
from terminal import in_two_processes

pytestmark = pytest.mark.skipif(
    not dist.is_available(), reason="this torch has no torch.distributed"
)


two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=two_gpus)])
def device(request):
    return request.param


@pytest.fixture(scope="module")
def folder(tmp_path_factory, device):
    """What each of two processes finds."""
    pytest.importorskip("timm", reason="needs the extra vision")
    path = tmp_path_factory.mktemp("processes")
    in_two_processes(work, str(path), device)
    return path


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", [*KINDS, *MIXED])
def test_two_processes_equal_one(kind, folder, device):
    alone = train(kind, device=device)
    for rank in range(2):
        found = torch.load(folder / f"{kind} {rank}")
        torch.testing.assert_close(found["weights"], alone["weights"], rtol=1e-4, atol=1e-5)
        assert found["rows"] == alone["rows"]
        assert found["classes"] == pytest.approx(alone["classes"])
        assert found["counts"] == [IMAGES] * 3
        assert found["nll"] == pytest.approx(alone["nll"], rel=1e-4)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["replay", "rwalk", "avalanche-rwalk", "l2p"])
def test_data_parallel_changes_nothing_in_one_process(kind):
    expected, found = train(kind), train(kind, parallel=True)
    torch.testing.assert_close(found["weights"], expected["weights"])
    assert found["rows"] == expected["rows"]
