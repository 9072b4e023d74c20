"""CODA-Prompt: orthonormal components, and prefixes by hand."""

import numpy as np
import pytest
import torch
from toy_prompting import OPTIMIZERS, take_steps
from toy_vits import toy_clip, toy_images

from covon_avalanche.prompting import CODAPrompt

X = toy_images(0, 5)[0]
PARTS = ("components", "keys", "attention")


def small():
    return CODAPrompt(toy_clip(), 3, pool=11, length=4)


def model_parts(model):
    return [getattr(model, part) for part in PARTS]


def vectors(model, part, layer, domain):
    return getattr(model, part)[domain][layer].flatten(1).detach().double().numpy()


def test_a_domain_starts_with_vectors_of_gram_schmidt_against_earlier_ones():
    """Earlier ones have been trained: they are no longer orthonormal themselves."""
    model = small()
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    for domain in range(3):
        drawn = {(p, i): vectors(model, p, i, domain) for p in PARTS for i in range(5)}
        model.begin_domain()
        for (part, layer), random in drawn.items():
            earlier = [vectors(model, part, layer, d) for d in range(domain)]
            basis = []
            for v in np.concatenate([*earlier, random]):
                for u in basis + basis:  # twice, for accuracy
                    v = v - (u @ v) * u
                basis.append(v / np.linalg.norm(v))
            found = vectors(model, part, layer, domain)
            np.testing.assert_allclose(found, np.array(basis[-3:]), atol=1e-5)
            np.testing.assert_allclose(found @ found.T, np.eye(3), atol=1e-5)
            for other in earlier:
                np.testing.assert_allclose(found @ other.T, 0, atol=1e-5)
        started = [part[domain].clone() for part in model_parts(model)]
        take_steps(model, domain, optimizer)
        for part, before in zip(model_parts(model), started, strict=True):  # in every layer
            assert ((part[domain] - before).flatten(1).abs().amax(1) > 0).all()
    moved = vectors(model, "keys", 0, 0)
    assert np.abs(moved @ moved.T - np.eye(3)).max() > 1e-3


@pytest.mark.parametrize("domains", [1, 2, 3])
def test_prefixes_are_weighted_sums_of_the_components_so_far(domains):
    model = small()
    for _ in range(domains):
        model.begin_domain()
    q = model.vit(X).detach().double().numpy()
    wanted = np.zeros((5, len(X), 4, 16))
    for layer in range(5):
        for image in range(len(X)):
            for domain in range(domains):
                for m in range(3):
                    key = vectors(model, "keys", layer, domain)[m]
                    query = q[image] * vectors(model, "attention", layer, domain)[m]
                    cosine = query @ key / (np.linalg.norm(query) * np.linalg.norm(key))
                    component = vectors(model, "components", layer, domain)[m].reshape(4, 16)
                    wanted[layer, image] += cosine * component
    found = model.prefix_tokens(X)
    np.testing.assert_allclose(found.detach().numpy(), wanted, rtol=1e-4, atol=1e-6)
    # The first half are keys, the second half values; the same in training and evaluation.
    prefixes = {i: (found[i][:, :2], found[i][:, 2:]) for i in range(5)}
    logits = model.head(model.vit(X, prefixes=prefixes))
    torch.testing.assert_close(model.train()(X), logits)
    torch.testing.assert_close(model.eval()(X), logits)
    assert model.auxiliary_loss == 0


def test_components_of_earlier_domains_have_no_gradient():
    """Even in a model that loads a state dict within a domain, where nothing is frozen."""
    model = small()
    for _ in range(2):
        model.begin_domain()
    model.requires_grad_(True).train()(X).sum().backward()
    for earlier, current, later in model_parts(model):
        assert earlier.grad is None
        assert later.grad is None
        assert current.grad.abs().sum() > 0
