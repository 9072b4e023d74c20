"""Small things that several test modules step through."""

from __future__ import annotations

import torch
from torch import nn

from covon_avalanche.optim import CoVON


def make_covon(parameters, seed: int = 0, **changes) -> CoVON:
    """A CoVON with settings under which a few steps move everything visibly."""
    options = dict(ess=100.0, lr=0.1, hess_init=0.5, weight_decay=0.01, gamma=0.7)
    generator = torch.Generator().manual_seed(seed)
    return CoVON(parameters, **{**options, "generator": generator, **changes})


def train_step(optimizer, model, batch) -> float:
    """One step of any posterior optimizer on a batch."""
    x, y = batch
    for _ in range(optimizer.mc_samples):
        with optimizer.sampled_params():
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
    optimizer.step()
    return loss.item()
