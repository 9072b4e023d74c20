"""Rows on several devices."""

import torch
from torch.overrides import TorchFunctionMode

from covon_avalanche.data_loading import Columns
from covon_avalanche.data_loading.rows import WithColumns


class OneDevice(TorchFunctionMode):
    """Refuses tensors of two devices in one call, as CUDA does and "meta" does not."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        assert len({a.device for a in args if isinstance(a, torch.Tensor)}) < 2
        return func(*args, **(kwargs or {}))


def test_tensors_may_lie_on_another_device():
    far, near = torch.empty(5, 2, device="meta"), torch.arange(5)
    rows = WithColumns(Columns([far, near]), [far])
    with OneDevice():
        batch = rows.tensor_batch(torch.tensor([3, 1]))
    assert [tuple(column.shape) for column in batch] == [(2, 2), (2,), (2, 2)]
    assert batch[1].tolist() == [3, 1]
