"""Random numbers of processes that share batches."""

from types import SimpleNamespace

import torch
from avalanche.benchmarks.utils import as_classification_dataset
from torch.utils.data import TensorDataset

from covon_avalanche.data_loading import ShareLoader, data_parallel


def noisy(x):
    """A random transform."""
    return -x - torch.rand(1) / 2


def test_random_transforms_differ_between_processes_and_leave_the_global_generator(monkeypatch):
    data = TensorDataset(torch.arange(22.0)[:, None], torch.arange(22) % 2)
    data.targets = data.tensors[1]
    groups = {"train": (noisy, None), "eval": (noisy, None)}
    data = as_classification_dataset(data, transform_groups=groups)
    drawn, states = [], []
    for rank in range(3):
        helper = SimpleNamespace(rank=rank, world_size=3)
        monkeypatch.setattr(data_parallel, "DistributedHelper", helper)
        torch.manual_seed(3)
        *whole, last = [x.flatten() for x, *_ in ShareLoader(data, 7, True, 0)]
        drawn += torch.cat(whole).tolist()
        states.append(torch.get_rng_state())
        assert (len(whole), len(last)) == (3, 1)
        assert len([*ShareLoader(data, 7, True, 0, drop_last=True)]) == 3
    assert len({int(x) for x in drawn}) == len({x % 1 for x in drawn}) == 21
    assert all(torch.equal(state, states[0]) for state in states)


def test_dropout_differs_between_processes_and_steps_and_repeats_after_a_resume(monkeypatch):
    helper = type(data_parallel.DistributedHelper)
    monkeypatch.setattr(helper, "is_distributed", True)

    def masks(rank, step):
        monkeypatch.setattr(helper, "rank", rank)
        monkeypatch.setattr(helper, "world_size", 2)
        strategy = data_parallel.DataParallel()
        strategy.is_training, strategy.device = True, torch.device("cpu")
        strategy.clock = SimpleNamespace(train_iterations=step)
        strategy.parallel_model, strategy.mb_x = torch.nn.Dropout(), torch.ones(64)
        return strategy.forward()

    torch.manual_seed(0)
    before = torch.get_rng_state()
    found = [masks(rank, step) for rank in range(2) for step in range(2)]
    assert all(not torch.equal(a, b) for i, a in enumerate(found) for b in found[:i])
    assert torch.equal(before, torch.get_rng_state())
    torch.randn(100)  # a resume has another state here, and the same seed
    assert torch.equal(masks(1, 1), found[3])
