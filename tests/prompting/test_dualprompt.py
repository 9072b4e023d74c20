"""DualPrompt: prefixes and selection per layer by hand."""

import numpy as np
import pytest
import torch
from toy_vits import toy_clip, toy_images, toy_vit

from covon_avalanche.prompting import DualPrompt

X = torch.cat([toy_images(domain, 3)[0] for domain in range(3)])


def small(domains):
    """With random prefixes, and keys that are nearest to some images."""
    model = DualPrompt(toy_clip(), 3, general_length=4, expert_length=6, key_weight=0.7)
    with torch.no_grad():
        for p in (*model.experts, model.general):
            p.copy_(torch.randn_like(p))
        for key, x in zip(model.keys, X[::3], strict=True):
            key.copy_(model.vit(x[None])[0])
        model.domains.fill_(domains)
    return model


def cosine(a, b):
    return a @ b / (np.linalg.norm(a) * np.linalg.norm(b))


def logits_by_hand(model, chosen):
    """Image by image, with the experts of ``chosen[image]``; a prefix is keys, then values."""
    rows = []
    for x, domain in zip(X, chosen, strict=True):
        prefixes = {i: (model.general[i][None, :2], model.general[i][None, 2:]) for i in (0, 1)}
        for j in range(3):
            tokens = model.experts[domain][j][None]
            prefixes[2 + j] = (tokens[:, :3], tokens[:, 3:])
        rows.append(model.head(model.vit(x[None], prefixes=prefixes)))
    return torch.cat(rows)


@pytest.mark.parametrize("domains", [1, 2, 3])
def test_a_test_image_uses_the_experts_of_the_nearest_learned_key(domains):
    model = small(domains).eval()
    q = model.vit(X).detach().numpy()
    keys = [k.detach().numpy() for k in model.keys][:domains]
    chosen = [int(np.argmax([cosine(q_i, k) for k in keys])) for q_i in q]
    if domains == 3:
        assert len(set(chosen)) > 1
    torch.testing.assert_close(model(X), logits_by_hand(model, chosen), rtol=1e-4, atol=1e-5)
    assert model.auxiliary_loss == 0


def test_training_uses_the_current_experts_and_pulls_its_key_to_the_images():
    model = small(domains=2).train()
    logits = model(X)
    torch.testing.assert_close(logits, logits_by_hand(model, [1] * len(X)), rtol=1e-4, atol=1e-5)
    q, key = model.vit(X).detach().numpy(), model.keys[1].detach().numpy()
    total = sum(1 - cosine(q_i, key) for q_i in q)
    assert float(model.auxiliary_loss.detach()) == pytest.approx(0.7 * total / len(X), rel=1e-4)


def test_a_domain_begins_with_a_copy_of_the_experts_before_and_a_key_of_its_own():
    model = DualPrompt(toy_vit(), 3)
    keys = [key.detach().clone() for key in model.keys]
    for domain in range(3):
        model.begin_domain()
        if domain > 0:
            assert torch.equal(model.experts[domain], model.experts[domain - 1])
        with torch.no_grad():
            model.experts[domain].add_(torch.randn_like(model.experts[domain]))
    assert all(map(torch.equal, model.keys, keys))


def test_layers_that_the_network_lacks_are_left_out():
    model = DualPrompt(toy_vit(3), 2)
    assert model.general.shape == (2, 10, 16)
    assert model.experts[0].shape == (1, 40, 16)
    assert model.eval()(X).shape == (len(X), 3)
    for drawn in (model.general, *model.experts):  # U(-1, 1), as published
        assert -1 <= drawn.min() < -0.9
        assert 0.9 < drawn.max() <= 1
