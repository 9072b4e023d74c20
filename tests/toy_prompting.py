"""Prompt methods in a plain PyTorch loop over the toy images."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from toy_vits import toy_image_benchmark

from covon_avalanche.prompting import PromptModel

OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=0.1),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.02, weight_decay=0.1),
}
"""Both would change a parameter with a gradient of zero."""


def train_domain(model: PromptModel, optimizer: torch.optim.Optimizer, x, y, steps: int = 3):
    """One domain, in whole batches."""
    model.begin_domain()
    model.train()
    for _ in range(steps):
        optimizer.zero_grad()
        (F.cross_entropy(model(x), y) + model.auxiliary_loss).backward()
        optimizer.step()
    model.end_domain(lambda: [(x, y)])
    model.eval()


def images(stream, domain: int):
    """All images and labels of a domain of the toy benchmark."""
    x, y, *_ = zip(*stream[domain].dataset, strict=True)
    return torch.stack([torch.as_tensor(v) for v in x]), torch.as_tensor(y)


@torch.no_grad()
def accuracy_after_all_domains(model: PromptModel, lr: float = 0.01, steps: int = 60) -> float:
    """Mean test accuracy over the domains, learned one after the other with Adam."""
    benchmark = toy_image_benchmark(model.num_domains)
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    with torch.enable_grad():
        for domain in range(model.num_domains):
            train_domain(model, optimizer, *images(benchmark.train_stream, domain), steps)
    right = []
    for domain in range(model.num_domains):
        x, y = images(benchmark.test_stream, domain)
        right.append(model(x).argmax(1) == y)
    return torch.cat(right).float().mean().item()


def copied(state):
    """A copy of tensors by name."""
    return {name: value.detach().clone() for name, value in state}


def names_changed(before, state):
    """The names whose tensors differ in a bit."""
    return {name for name, value in state if not torch.equal(value, before[name])}
