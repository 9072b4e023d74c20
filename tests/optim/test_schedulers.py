"""Every scheduler of torch drives CoVON and VCL as it drives Adam."""

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as torch_schedulers
from torch.optim import swa_utils
from torch.optim.lr_scheduler import ConstantLR, StepLR
from toy_optimizers import make_covon, make_vcl

from covon_avalanche import CoVON

SCHEDULERS = {
    "ChainedScheduler": lambda o, cls: cls([ConstantLR(o), StepLR(o, 2)]),
    "ConstantLR": lambda o, cls: cls(o),
    "CosineAnnealingLR": lambda o, cls: cls(o, 4),
    "CosineAnnealingWarmRestarts": lambda o, cls: cls(o, 2),
    "CyclicLR": lambda o, cls: cls(o, 0.001, 0.1, 2, cycle_momentum=False),
    "ExponentialLR": lambda o, cls: cls(o, 0.9),
    "LambdaLR": lambda o, cls: cls(o, lambda t: 0.9**t),
    "LinearLR": lambda o, cls: cls(o),
    "MultiStepLR": lambda o, cls: cls(o, [1, 3]),
    "MultiplicativeLR": lambda o, cls: cls(o, lambda t: 0.9),
    "OneCycleLR": lambda o, cls: cls(o, 0.1, total_steps=8),  # the first beta, too
    "PolynomialLR": lambda o, cls: cls(o, 4),
    "ReduceLROnPlateau": lambda o, cls: cls(o, patience=1),
    "SWALR": lambda o, cls: cls(o, 0.05),
    "SequentialLR": lambda o, cls: cls(o, [ConstantLR(o), StepLR(o, 1)], [2]),
    "StepLR": lambda o, cls: cls(o, 2),
}
MAKE = {
    "adam": lambda p: torch.optim.Adam([p], lr=0.01),
    "covon": lambda p: make_covon([p], lr=0.01, betas=(0.9, None)),
    "natural": lambda p: CoVON([p], lr=0.01, batch_size=1),
    "vcl": lambda p: make_vcl([p], lr=0.01),
}


def step(optimizer) -> None:
    """With a loss that is its parameter's square."""

    def loss():
        optimizer.zero_grad()
        optimizer.param_groups[0]["params"][0].square().sum().backward()

    optimizer.step(loss)


def settings(kind: str, name: str) -> list[float]:
    """Learning rate and first beta after each of some steps."""
    optimizer, found = MAKE[kind](nn.Parameter(torch.ones(3))), []
    cls = getattr(torch_schedulers, name, None) or getattr(swa_utils, name)
    scheduler = SCHEDULERS[name](optimizer, cls)
    for _ in range(8):
        step(optimizer)
        scheduler.step(1.0) if name == "ReduceLROnPlateau" else scheduler.step()
        group = optimizer.param_groups[0]
        found += [group["lr"], group["betas"][0]]
    return found


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", SCHEDULERS)
def test_the_learning_rates_are_those_of_adam(name):
    adam, *ours = (settings(kind, name) for kind in MAKE)
    assert ours == [pytest.approx(adam)] * 3


def test_no_scheduler_of_torch_is_missing():
    own = {name for name in torch_schedulers.__all__ if name != "LRScheduler"}
    assert own | {"SWALR"} == set(SCHEDULERS)


def test_a_task_without_learning_rate_is_warned_of(recwarn):
    """As of a new cosine schedule that starts where the last one ended."""
    optimizer = CoVON([nn.Parameter(torch.ones(3))], lr=0.01, batch_size=1)
    warned = []
    for start in (0.01, 0.01, None):
        if start is not None:
            optimizer.param_groups[0]["lr"] = start
        scheduler = torch_schedulers.CosineAnnealingLR(optimizer, 4)
        for _ in range(4):
            step(optimizer)
            scheduler.step()
        optimizer.consolidate()
        warned.append(["was lr 0, or the loss?" in str(warning.message) for warning in recwarn])
        recwarn.clear()
    assert warned == [[], [], [True]]
