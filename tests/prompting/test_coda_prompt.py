"""CODA-Prompt: orthonormal components, the sums by hand, and domains that stay as they are."""

import numpy as np
import pytest
import torch
from toy_prompting import (
    OPTIMIZERS,
    accuracy_after_all_domains,
    copied,
    names_changed,
    train_domain,
)
from toy_vits import toy_clip, toy_images, toy_vit

from covon_avalanche.experiment.registry import KINDS
from covon_avalanche.prompting import CODAPrompt

X = toy_images(0, 5)[0]
PARTS = ("components", "keys", "attention")


def small(make=toy_vit, pool=11):
    return CODAPrompt(make(), 3, pool=pool, length=4)


def vectors(model, part, layer, domain):
    return getattr(model, part)[domain][layer].flatten(1).detach().double().numpy()


@pytest.mark.parametrize("make", [toy_vit, toy_clip])
def test_a_domain_starts_with_vectors_of_gram_schmidt_against_earlier_ones(make):
    """Earlier ones have been trained: they are no longer orthonormal themselves."""
    model = small(make)
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
        model.domains -= 1
        train_domain(model, optimizer, *toy_images(domain))
    moved = vectors(model, "keys", 0, 0)
    assert np.abs(moved @ moved.T - np.eye(3)).max() > 1e-3


@pytest.mark.parametrize("make", [toy_vit, toy_clip])
@pytest.mark.parametrize("domains", [1, 2, 3])
def test_prefixes_are_weighted_sums_of_the_components_so_far(make, domains):
    model = small(make)
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


@pytest.mark.parametrize("make_optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_a_domain_trains_its_own_components_and_the_head(make_optimizer):
    """Not a bit of the backbone, nor of other domains: by one optimizer, whose state is kept."""
    model = small()
    optimizer = make_optimizer(model.parameters())
    for domain in range(3):
        before = copied(model.state_dict().items())
        train_domain(model, optimizer, *toy_images(domain))
        own = {f"{part}.{domain}" for part in PARTS}
        changed = names_changed(before, model.state_dict().items())
        assert changed == {"domains", "head.weight", "head.bias", *own}
        for part in PARTS:  # of all layers, beyond the start of the domain
            started = small()
            started.load_state_dict(before)
            started.begin_domain()
            moved = getattr(model, part)[domain] - getattr(started, part)[domain]
            assert (moved.flatten(1).abs().amax(1) > 0).all()


def test_a_restored_model_starts_a_domain_the_same_and_does_not_train_earlier_ones():
    """What a domain starts with is in the state, not in a generator of random numbers."""
    model, network = small(), toy_vit()
    torch.manual_seed(5)
    other = CODAPrompt(network, 3, pool=11, length=4)
    model.begin_domain()
    assert names_changed(copied(model.state_dict().items()), other.state_dict().items())
    other.load_state_dict(model.state_dict())
    model.begin_domain()
    other.begin_domain()
    assert not names_changed(model.state_dict(), other.state_dict().items())
    other.requires_grad_(True)  # as in a new model that loads a state dict within a domain
    other.train()(X).sum().backward()
    for part in PARTS:
        earlier, current, later = getattr(other, part)
        assert earlier.grad is None
        assert later.grad is None
        assert current.grad.abs().sum() > 0


def test_it_learns_toy_images():
    model = CODAPrompt(toy_vit(), 2, pool=8)
    assert accuracy_after_all_domains(model) > 0.6  # chance is 1/3


def test_published_settings():
    model = CODAPrompt(toy_vit_of_width(128), 6)
    assert model.layers == (0, 1, 2, 3, 4)
    assert [c.shape for c in model.components] == [(5, 16, 8, 128)] * 6  # floor(100 / 6)
    assert [k.shape for k in model.keys] == [(5, 16, 128)] * 6
    assert [a.shape for a in model.attention] == [(5, 16, 128)] * 6
    recipe = KINDS["coda-p"](kind="coda-p", lr=0.001).wrap_model(toy_vit_of_width(128), 3, 6, X)
    assert [c.shape for c in recipe.components] == [(5, 16, 8, 128)] * 6


def toy_vit_of_width(width):
    vision = pytest.importorskip("timm.models.vision_transformer", reason="needs the extra vision")
    shape = dict(img_size=8, patch_size=4, embed_dim=width, depth=6, num_heads=2)
    return vision.VisionTransformer(**shape, num_classes=3)


def test_layers_that_the_network_lacks_are_left_out():
    model = CODAPrompt(toy_vit(2), 2, pool=4)
    assert model.layers == (0, 1)
    model.begin_domain()
    assert model.prefix_tokens(X).shape == (2, len(X), 8, 16)
    with pytest.raises(ValueError, match=r"at least one of the layers \[3\], got one with 2 layer"):
        CODAPrompt(toy_vit(2), 2, pool=4, layers=(3,))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"length": 7}, "length must be even and >= 2, got 7"),
        ({"pool": 2}, "pool must be >= num_domains = 3, got 2"),
        ({"pool": 18}, "pool must be <= 16, the width of the features, .* got 18"),
    ],
)
def test_unsuitable_settings_are_refused(changes, says):
    with pytest.raises(ValueError, match=says):
        CODAPrompt(toy_vit(), 3, **{"pool": 9} | changes)
