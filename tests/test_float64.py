"""Devices without float64: nothing on them is computed with it."""

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from toy_optimizers import make_covon, make_vcl, train_step

from covon_avalanche import CoVON, float64


class WithoutFloat64(TorchDispatchMode):
    """Raises PyTorch's error of Apple's GPUs for every tensor in float64."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        if isinstance(found, torch.Tensor) and found.dtype == torch.float64:
            raise TypeError(f"Cannot convert a MPS Tensor to float64 dtype: {func}")
        return found


def two_tasks(make) -> list[torch.Tensor]:
    """The weights after two tasks."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
    optimizer = make(model.named_parameters())
    for _ in range(2):
        for _ in range(3):
            train_step(optimizer, model, (torch.randn(24, 4), torch.arange(24) % 3))
        if hasattr(optimizer, "diagnostics"):
            optimizer.diagnostics()
        optimizer.load_state_dict(optimizer.state_dict())
        optimizer.consolidate()
    return [p.detach() for p in model.parameters()]


@pytest.mark.parametrize(
    "make",
    [
        lambda p: CoVON(p, batch_size=24, implementation="foreach"),
        lambda p: CoVON(p, batch_size=24, implementation="reference"),
        make_covon,
        make_vcl,
    ],
    ids=["foreach", "reference", "the paper's", "vcl"],
)
def test_optimizers_train_where_there_is_no_float64(make, monkeypatch):
    expected = two_tasks(make)
    monkeypatch.setattr(float64, "_SUPPORTED", frozenset())
    with WithoutFloat64():
        found = two_tasks(make)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)
