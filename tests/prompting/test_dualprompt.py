"""DualPrompt: prefixes and selection per layer by hand."""

import numpy as np
import pytest
import torch
from toy_vits import toy_clip, toy_images, toy_vit

from covon_avalanche.prompting import DualPrompt

X = torch.cat([toy_images(domain, 3)[0] for domain in range(3)])


def small(domains):
    """With random prefixes and keys of different directions."""
    model = DualPrompt(toy_clip(), 3, general_length=4, expert_length=6, key_weight=0.7)
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


@pytest.mark.parametrize("domains", [1, 2, 3])
def test_a_test_image_uses_in_each_layer_the_expert_of_the_nearest_learned_key(domains):
    model = small(domains).eval()
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


def test_layers_that_the_network_lacks_are_left_out():
    model = DualPrompt(toy_vit(3), 2)
    assert (model.general_layers, model.expert_layers) == ((0, 1), (2,))
    assert model.experts[0].shape[0] == model.keys[0].shape[0] == 1
    assert model.eval()(X).shape == (len(X), 3)
    for drawn in (model.general, *model.experts):  # U(0, 1), as published
        assert 0 <= drawn.min() < 0.1
        assert 0.9 < drawn.max() <= 1
