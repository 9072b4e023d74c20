"""Schedulers of torch drive CoVON and VCL as they drive Adam."""

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as torch_schedulers
from torch.optim import swa_utils
from torch.optim.lr_scheduler import ConstantLR, StepLR
from toy_optimizers import make_covon, make_vcl

SCHEDULERS = {
    "ChainedScheduler": lambda o, cls: cls([ConstantLR(o), StepLR(o, 2)]),
    "CosineAnnealingLR": lambda o, cls: cls(o, 4),
    "LambdaLR": lambda o, cls: cls(o, lambda t: 0.9**t),
    "OneCycleLR": lambda o, cls: cls(o, 0.1, total_steps=8),  # the first beta, too
    "ReduceLROnPlateau": lambda o, cls: cls(o, patience=1),
    "SWALR": lambda o, cls: cls(o, 0.05),
}
MAKE = {
    "adam": lambda p: torch.optim.Adam([p], lr=0.01),
    "covon": lambda p: make_covon([p], lr=0.01, betas=(0.9, None)),
    "vcl": lambda p: make_vcl([p], lr=0.01),
}


def settings(kind: str, name: str) -> list[float]:
    """Learning rate and first beta after each of some steps."""
    p = nn.Parameter(torch.ones(3))
    optimizer, found = MAKE[kind](p), []
    cls = getattr(torch_schedulers, name, None) or getattr(swa_utils, name)
    scheduler = SCHEDULERS[name](optimizer, cls)

    def loss():
        optimizer.zero_grad()
        p.square().sum().backward()

    for _ in range(8):
        optimizer.step(loss)
        scheduler.step(1.0) if name == "ReduceLROnPlateau" else scheduler.step()
        group = optimizer.param_groups[0]
        found += [group["lr"], group["betas"][0]]
    return found


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["covon", "vcl"])
@pytest.mark.parametrize("name", SCHEDULERS)
def test_the_learning_rates_are_those_of_adam(kind, name):
    assert settings(kind, name) == pytest.approx(settings("adam", name))
