"""DualPrompt: prefixes and selection per layer by hand, and experts that stay as they are."""

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
from covon_avalanche.prompting import DualPrompt

X = torch.cat([toy_images(domain, 3)[0] for domain in range(3)])


def small(make=toy_vit, domains=3):
    """With random prefixes and keys of different directions."""
    model = DualPrompt(make(), 3, general_length=4, expert_length=6, key_weight=0.7)
    with torch.no_grad():
        for p in (*model.keys, *model.experts, model.general):
            p.copy_(torch.randn_like(p))
    for _ in range(domains):
        model.begin_domain()
    return model


def cosine(a, b):
    return a @ b / (np.linalg.norm(a) * np.linalg.norm(b))


def logits_by_hand(model, chosen):
    """Image by image, with the expert of the domain ``chosen[image][layer]``.

    The first half of a prefix are keys, the second half values.
    """
    rows = []
    for x, domains in zip(X, chosen, strict=True):
        prefixes = {i: (model.general[i][None, :2], model.general[i][None, 2:]) for i in (0, 1)}
        for j, domain in enumerate(domains):
            tokens = model.experts[int(domain)][j][None]
            prefixes[2 + j] = (tokens[:, :3], tokens[:, 3:])
        rows.append(model.head(model.vit(x[None], prefixes=prefixes)))
    return torch.cat(rows)


@pytest.mark.parametrize("make", [toy_vit, toy_clip])
@pytest.mark.parametrize("domains", [1, 2, 3])
def test_a_test_image_uses_in_each_layer_the_expert_of_the_nearest_learned_key(make, domains):
    model = small(make, domains).eval()
    q = model.vit(X).detach().numpy()
    keys = [k.detach().numpy() for k in model.keys][:domains]
    chosen = [[int(np.argmax([cosine(q_i, k[j]) for k in keys])) for j in range(3)] for q_i in q]
    if domains == 3:
        assert len({tuple(row) for row in chosen}) > 1
        assert any(len(set(row)) > 1 for row in chosen)
    torch.testing.assert_close(model(X), logits_by_hand(model, chosen), rtol=1e-4, atol=1e-5)
    assert model.auxiliary_loss == 0


def test_training_uses_the_current_expert_and_pulls_its_keys_to_the_images():
    model = small(domains=2).train()
    logits = model(X)
    wanted = logits_by_hand(model, [[1, 1, 1]] * len(X))
    torch.testing.assert_close(logits, wanted, rtol=1e-4, atol=1e-5)
    q, keys = model.vit(X).detach().numpy(), model.keys[1].detach().numpy()
    total = 0.0
    for q_i in q:
        for key in keys:
            total += 1 - cosine(q_i, key)
    assert float(model.auxiliary_loss.detach()) == pytest.approx(0.7 * total / len(X), rel=1e-4)


@pytest.mark.parametrize("make_optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_a_domain_trains_its_experts_and_keys_and_what_is_shared(make_optimizer):
    """Not a bit of the backbone, nor of other domains: by one optimizer, whose state is kept."""
    model = small(domains=0)
    optimizer = make_optimizer(model.parameters())
    for domain in range(3):
        before = copied(model.state_dict().items())
        train_domain(model, optimizer, *toy_images(domain))
        own = {f"experts.{domain}", f"keys.{domain}"}
        changed = names_changed(before, model.state_dict().items())
        assert changed == {"domains", "general", "head.weight", "head.bias", *own}


def test_it_learns_toy_images():
    assert accuracy_after_all_domains(DualPrompt(toy_vit(), 2)) > 0.6  # chance is 1/3


def test_published_settings():
    model = DualPrompt(toy_vit(6), 4)
    assert model.general_layers == (0, 1)
    assert model.expert_layers == (2, 3, 4)
    assert model.general.shape == (2, 6, 16)
    assert [e.shape for e in model.experts] == [(3, 20, 16)] * 4
    assert [k.shape for k in model.keys] == [(3, 16)] * 4
    assert model.key_weight == 1
    recipe = KINDS["dualprompt"](kind="dualprompt", lr=0.001).wrap_model(toy_vit(), 3, 4, X)
    assert (recipe.general.shape, recipe.experts[3].shape) == ((2, 6, 16), (3, 20, 16))
    assert recipe.key_weight == 1
    for drawn in (model.general, *model.experts):  # U(0, 1)
        assert 0 <= drawn.min() < 0.1
        assert 0.9 < drawn.max() <= 1
    clip = DualPrompt(toy_clip(), 2)
    assert clip.experts[0].shape == (3, 20, 16)
    assert clip.keys[0].shape == (3, 12)


def test_layers_that_the_network_lacks_are_left_out():
    model = DualPrompt(toy_vit(3), 2)
    assert (model.general_layers, model.expert_layers) == ((0, 1), (2,))
    assert model.experts[0].shape[0] == model.keys[0].shape[0] == 1
    assert model.eval()(X).shape == (len(X), 3)
    says = r"at least one of the layers \[2, 3, 4\], got one with 2 layers"
    with pytest.raises(ValueError, match=says):
        DualPrompt(toy_vit(2), 2)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"general_length": 5}, "general_length must be even and >= 2, got 5"),
        ({"expert_length": 0}, "expert_length must be even and >= 2, got 0"),
        ({"key_weight": -1.0}, "key_weight must be >= 0, got -1.0"),
        ({"general_layers": (1, 2)}, r"must differ, both have \[2\]"),
    ],
)
def test_unsuitable_settings_are_refused(changes, says):
    with pytest.raises(ValueError, match=says):
        DualPrompt(toy_vit(), 3, **changes)
