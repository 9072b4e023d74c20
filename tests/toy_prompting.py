"""Prompt methods learn the domains of toy images in a plain PyTorch loop."""

from __future__ import annotations

import itertools

import torch
import torch.nn.functional as F
from sklearn.cluster import KMeans
from toy_vits import toy_images

from covon_avalanche.prompting import L2P, PINA, SOYO, CODAPrompt, DualPrompt, PromptModel, SPrompts

OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=0.1),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.02, weight_decay=0.1),
}
"""Both would change a parameter with a gradient of zero."""
ON_A_VIT = {
    "coda-p": lambda vit: CODAPrompt(vit, 3, pool=11, length=4),
    "dualprompt": lambda vit: DualPrompt(vit, 3, general_length=4, expert_length=6),
    "l2p": lambda vit: L2P(vit, 3, pool=6, length=2, top_k=3),
    "s-iprompts": lambda vit: SPrompts(vit, 3),
    "pina": lambda vit: PINA(vit, 3),
    "pina, shallow": lambda vit: PINA(vit, 3, adapter="shallow"),
    "soyo": lambda vit: SOYO(vit, 3),
}
"""Methods for three domains, whose network needs no texts."""


def take_steps(model: PromptModel, domain: int, optimizer, steps: int = 3) -> None:
    """Steps on all images of a domain."""
    model.train()
    x, y = toy_images(domain)
    for _ in range(steps):
        optimizer.zero_grad()
        (F.cross_entropy(model(x), y) + model.auxiliary_loss).backward()
        optimizer.step()
    model.eval()


def batches_of(domain: int):
    """Starts a pass over a domain in two batches."""
    x, y = toy_images(domain)
    return lambda: zip(x.split(13), y.split(13), strict=True)


def learn(model: PromptModel, domain: int, optimizer=None, steps: int = 3) -> None:
    """A whole domain."""
    model.begin_domain()
    take_steps(model, domain, optimizer or OPTIMIZERS["sgd"](model.parameters()), steps)
    model.end_domain(batches_of(domain))


def trained(model: PromptModel, domains: int = 3) -> PromptModel:
    """The model after these domains, which one optimizer has trained."""
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    for domain in range(domains):
        learn(model, domain, optimizer)
    return model


def copy_of(model: PromptModel) -> dict[str, torch.Tensor]:
    """Parameters and buffers."""
    return {name: value.clone() for name, value in model.state_dict().items()}


def changed_since(before: dict[str, torch.Tensor], model: PromptModel) -> set[str]:
    """Names of parameters and buffers that differ in a bit."""
    return {n for n, value in model.state_dict().items() if not torch.equal(value, before[n])}


def some_images(n_domains: int = 3) -> torch.Tensor:
    """Images of each domain, and between domains, in a mixed order."""
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


def k_means(model: PromptModel, domain: int):
    """scikit-learn's centres of a domain, in these features."""
    features = normalised_queries(model, toy_images(domain)[0]).astype("float32")
    return KMeans(5, n_init=10, random_state=0).fit(features).cluster_centers_


def explicit_adapters(adapters):
    """What linear adapters add to tokens or features, by matrix products."""
    return [
        lambda t, a=a: (t @ a[0].weight.T + a[0].bias) @ a[1].weight.T + a[1].bias for a in adapters
    ]
