"""Schedulers drive CoVON and VCL as they drive Adam."""

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler
from torch.optim.swa_utils import SWALR
from toy_optimizers import make_covon, make_vcl

from covon_avalanche import CoVON

SCHEDULERS = {
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda t: 0.9**t),
    "one cycle": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=8),  # the first beta, too
    "plateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=1),
    "averaged weights": lambda o: SWALR(o, 0.05),
    "one after another": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o), lr_scheduler.StepLR(o, 1)], [2]
    ),
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
    scheduler = SCHEDULERS[name](optimizer)

    def loss():
        optimizer.zero_grad()
        p.square().sum().backward()

    for _ in range(8):
        optimizer.step(loss)
        scheduler.step(1.0) if name == "plateau" else scheduler.step()
        group = optimizer.param_groups[0]
        found += [group["lr"], group["betas"][0]]
    return found


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["covon", "vcl"])
@pytest.mark.parametrize("name", SCHEDULERS)
def test_the_learning_rates_are_those_of_adam(kind, name):
    assert settings(kind, name) == pytest.approx(settings("adam", name))


def test_a_task_without_learning_rate_is_warned_of(recwarn):
    """As of a new cosine schedule that starts where the last one ended."""
    p = nn.Parameter(torch.ones(3))
    optimizer = CoVON([p], lr=0.01, batch_size=1)

    def loss():
        optimizer.zero_grad()
        p.square().sum().backward()

    warned = []
    for start in (0.01, 0.01, None):
        if start is not None:
            optimizer.param_groups[0]["lr"] = start
        scheduler = lr_scheduler.CosineAnnealingLR(optimizer, 4)
        for _ in range(4):
            optimizer.step(loss)
            scheduler.step()
        optimizer.consolidate()
        warned.append(["was lr 0?" in str(warning.message) for warning in recwarn])
        recwarn.clear()
    assert warned == [[], [], [True]]
