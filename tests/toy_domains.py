"""Prompt methods learn the domains of toy images in a plain loop."""

from __future__ import annotations

import itertools

import torch
from toy_vits import toy_images

from covon_avalanche.prompting import PromptModel


def make_optimizer(model: PromptModel) -> torch.optim.SGD:
    """Of all parameters, with what could change frozen ones: momentum and weight decay."""
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.1)


def batches_of(domain: int, n: int = 24):
    """Starts a pass over a domain in two batches."""
    x, y = toy_images(domain, n)
    return lambda: zip(x.split(n // 2 + 1), y.split(n // 2 + 1), strict=True)


def learn(model: PromptModel, domain: int, optimizer=None, steps: int = 3, n: int = 24) -> None:
    """The next domain of a model, with the images of a given one."""
    optimizer = optimizer or make_optimizer(model)
    model.begin_domain()
    model.train()
    x, y = toy_images(domain, n)
    for _ in range(steps):
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(x), y) + model.auxiliary_loss
        loss.backward()
        optimizer.step()
    model.eval()
    model.end_domain(batches_of(domain, n))


def some_images(n_domains: int = 3) -> torch.Tensor:
    """Of each domain, and between domains, in a mixed order."""
    own = [toy_images(domain, 8, seed=1)[0] for domain in range(n_domains)]
    between = [(a + b) / 2 for a, b in itertools.pairwise(own)]
    x = torch.cat([*own, *between])
    return x[torch.randperm(len(x), generator=torch.Generator().manual_seed(0))]


def numpy_of(x: torch.Tensor):
    """In double precision."""
    return x.detach().double().numpy()


def normalised_queries(model: PromptModel, x: torch.Tensor):
    """Features of the frozen network, of unit length."""
    features = numpy_of(model.vit.query(x))
    return features / (features**2).sum(1, keepdims=True) ** 0.5


def changed_by(model: PromptModel, *domains: int) -> set[str]:
    """Names of parameters and buffers that change when these domains are learned."""
    before = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer = make_optimizer(model)
    for domain in domains:
        learn(model, domain, optimizer)
    return {n for n, value in model.state_dict().items() if not torch.equal(value, before[n])}
