"""Every scheduler of torch drives CoVON and VCL as it drives Adam, and resumes."""

import copy

import pytest
import torch
from torch import nn
from torch.optim import Adam, swa_utils
from torch.optim import lr_scheduler as torch_schedulers
from torch.optim.lr_scheduler import ConstantLR, StepLR
from toy_optimizers import make_covon, make_vcl

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
    "adam": lambda net: Adam(net.parameters(), lr=0.01),
    "covon": lambda net: make_covon(net.parameters(), lr=0.01, betas=(0.9, None)),
    "vcl": lambda net: make_vcl(net.parameters(), lr=0.01),
}


def make(kind: str, name: str, net: nn.Module):
    optimizer = MAKE[kind](net)
    cls = getattr(torch_schedulers, name, None) or getattr(swa_utils, name)
    return optimizer, SCHEDULERS[name](optimizer, cls)


def steps(net: nn.Module, optimizer, scheduler, number: int = 4) -> list[float]:
    """Learning rate and first beta after each of some steps."""
    found = []
    for _ in range(number):
        optimizer.zero_grad()

        def loss():
            value = net(torch.ones(5, 4)).square().sum()
            value.backward()
            return value

        optimizer.step(loss)
        plateau = isinstance(scheduler, torch_schedulers.ReduceLROnPlateau)
        scheduler.step(1.0) if plateau else scheduler.step()
        group = optimizer.param_groups[0]
        found += [group["lr"], group["betas"][0]]
    return found


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["covon", "vcl"])
@pytest.mark.parametrize("name", SCHEDULERS)
def test_the_learning_rates_are_those_of_adam_and_resume(kind, name, linear):
    net = copy.deepcopy(linear)
    whole = make(kind, name, net)
    first = steps(net, *whole)
    states = copy.deepcopy([net.state_dict(), *(part.state_dict() for part in whole)])
    last = steps(net, *whole)
    adams = copy.deepcopy(linear)
    assert first + last == pytest.approx(steps(adams, *make("adam", name, adams), 8))
    again = copy.deepcopy(linear)
    resumed = make(kind, name, again)
    for part, state in zip((again, *resumed), states, strict=True):
        part.load_state_dict(state)
    assert steps(again, *resumed) == last
    assert torch.equal(again.weight, net.weight)


def test_no_scheduler_of_torch_is_missing():
    own = {name for name in torch_schedulers.__all__ if name != "LRScheduler"}
    assert own | {"SWALR"} == set(SCHEDULERS)
