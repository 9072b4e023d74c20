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


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=two_gpus)])
def test_two_processes_equal_one(device, tmp_path):
    """All kinds in the same two processes."""
    pytest.importorskip("timm", reason="needs the extra vision")
    in_two_processes(work, str(tmp_path), device)
    for kind in (*KINDS, *MIXED):
        alone = train(kind, device=device)
        for rank in range(2):
            found = torch.load(tmp_path / f"{kind} {rank}")
            torch.testing.assert_close(
                found["weights"], alone["weights"], rtol=1e-4, atol=1e-5,
                msg=lambda text, kind=kind: f"{kind}: {text}",
            )  # fmt: skip
            assert (kind, found["rows"]) == (kind, alone["rows"])
            assert (kind, found["counts"]) == (kind, [IMAGES] * 3)
            for numbers, rel in (("classes", 1e-6), ("nll", 1e-4)):
                assert found[numbers] == pytest.approx(alone[numbers], rel=rel), kind


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["replay", "rwalk", "avalanche-rwalk", "l2p"])
def test_data_parallel_changes_nothing_in_one_process(kind):
    expected, found = train(kind), train(kind, parallel=True)
    torch.testing.assert_close(found["weights"], expected["weights"])
    assert found["rows"] == expected["rows"]
