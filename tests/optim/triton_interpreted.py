"""Run by test_kernels.py with TRITON_INTERPRET=1: the GPU kernel on CPU tensors."""

import sys
from pathlib import Path
from unittest import mock

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from jobs import largest_error, make_jobs, same_as_drawn_anew

from covon_avalanche.optim.kernels import fused_cuda
from covon_avalanche.optim.kernels.fused_cuda import CudaPlan

SIZES = (1, 7, 511, 2047, 2049, 5000)
for dtype, prior, holds in (
    (torch.float32, "tensors", "theta"),
    (torch.float32, "numbers", "theta"),
    (torch.float32, "centre", "product"),
    (torch.float32, "numbers", "hess"),
    (torch.float32, "tensors", "nothing"),
    (torch.float64, "tensors", "theta"),
):
    jobs = make_jobs(dtype, prior, holds=holds, sizes=SIZES)
    plan = CudaPlan(jobs)
    error = largest_error(jobs, lambda plan=plan: plan.step(None))
    assert error < (2e-5 if dtype == torch.float32 else 1e-13), error
    if holds == "theta":
        assert same_as_drawn_anew(plan, jobs)
    print("ok")
jobs = make_jobs(torch.float32, "tensors", sizes=SIZES)
jobs[2].hess[3] = -1.0
assert [job.name for job in CudaPlan(jobs).draw(5)] == ["p2"]
with (
    mock.patch.object(torch.cuda, "device_of") as device_of,
    mock.patch.object(fused_cuda, "_draw") as draw,
    mock.patch.object(fused_cuda, "_step") as step,
):  # each launch on the device of its tensors
    entered = device_of.return_value.__enter__
    for kernel, launch in ((draw, plan.draw), (step, plan.step)):
        kernel.__getitem__.side_effect = lambda _: entered.assert_called_once() or mock.Mock()
        launch(7)
        kernel.__getitem__.assert_called_once()
        assert device_of.call_args.args[0].device == jobs[0].mean.device
        entered.reset_mock()
print("ok")
jobs[1].grad[0] = float("nan")
assert not CudaPlan(jobs).safe()
print("ok")
