"""Two processes under Avalanche and DistributedDataParallel do what one does on whole batches."""

import pytest
import torch
import torch.distributed as dist
from avalanche.distributed import DistributedHelper
from avalanche_processes import IMAGES, KINDS, train, work
from terminal import in_two_processes
from toys import make_naive, sgd, toy_benchmark, toy_model

from covon_avalanche import plugins
from covon_avalanche.strategies import ERACEStrategy

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="needs torch.distributed")

two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=two_gpus)])
def test_two_processes_equal_one(device, tmp_path):
    """All kinds in the same two processes."""
    in_two_processes(work, str(tmp_path), device)
    for kind in KINDS:
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


def test_plugins_that_declare_support_are_tested():
    declared = {n for n in plugins.__all__ if getattr(plugins, n).supports_distributed}
    tested = {type(p).__name__ for make in KINDS.values() for p in make(toy_model()).plugins}
    assert declared <= tested


def test_methods_with_a_memory_of_their_own_are_refused(monkeypatch):
    monkeypatch.setattr(type(DistributedHelper), "world_size", 2)
    model = toy_model()
    der = make_naive(model, sgd(model), plugins.DERPlugin())
    for strategy in der, make_naive(model, sgd(model), cls=ERACEStrategy):
        with pytest.raises(ValueError, match="needs whole batches: train in one process"):
            strategy.train(toy_benchmark().train_stream)
