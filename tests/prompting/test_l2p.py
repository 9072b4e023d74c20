"""L2P: selection and losses computed by hand with numpy."""

from collections import Counter

import numpy as np
import pytest
import torch
from toy_vits import toy_clip, toy_images, toy_vit

from covon_avalanche.prompting import L2P

X = torch.cat([toy_images(domain, 3)[0] for domain in range(3)])


def small(**changes):
    """With keys of which the images choose different ones."""
    model = L2P(toy_clip(), 3, **{"pool": 6, "length": 2, "top_k": 3} | changes)
    model.begin_domain()
    common = torch.nn.functional.normalize(model.vit.query(X).mean(0), dim=0)
    with torch.no_grad():
        model.keys -= (model.keys @ common)[:, None] * common
    return model


def cosines_by_hand(model):
    q, keys = model.vit(X).detach().numpy(), model.keys.detach().numpy()
    norm = np.linalg.norm
    return np.array([[q_i @ k / (norm(q_i) * norm(k)) for k in keys] for q_i in q])


def logits_by_hand(model, chosen):
    """Image by image: the mean output of the chosen prompts, with the class token's position."""
    rows = []
    for x, indices in zip(X, chosen, strict=True):
        tokens = torch.cat([model.prompts[int(i)] for i in indices])
        features = model.vit(x[None], tokens, prompt_positions=True, readout="prompts")
        rows.append(model.head(features))
    return torch.cat(rows)


def test_a_test_image_uses_the_prompts_of_the_nearest_keys():
    """Whatever the other images of the batch."""
    model = small().eval()
    chosen = np.argsort(-cosines_by_hand(model), 1)[:, :3]
    assert len({tuple(sorted(row)) for row in chosen}) > 1
    torch.testing.assert_close(model(X), logits_by_hand(model, chosen), rtol=1e-4, atol=1e-5)
    assert model.auxiliary_loss == 0


@pytest.mark.parametrize("batchwise", [True, False])
def test_training_uses_the_majority_of_the_batch_or_the_prompts_of_each_image(batchwise):
    model = small(batchwise=batchwise, key_weight=0.3).train()
    cosines = cosines_by_hand(model)
    chosen = np.argsort(-cosines, 1)[:, :3]
    if batchwise:
        counts = Counter(chosen.ravel().tolist())
        most = sorted(range(6), key=lambda i: (-counts[i], i))[:3]
        assert not all(set(row) == set(most) for row in chosen)
        chosen = np.tile(most, (len(X), 1))
    torch.testing.assert_close(model(X), logits_by_hand(model, chosen), rtol=1e-4, atol=1e-5)
    total = 0.0
    for image, indices in enumerate(chosen):
        for index in indices:
            total += cosines[image, index]
    assert float(model.auxiliary_loss.detach()) == pytest.approx(-0.3 * total / len(X), rel=1e-4)


def test_prompts_and_keys_are_drawn_as_published():
    model = L2P(toy_vit(), 3)
    for drawn in (model.prompts, model.keys):  # U(-1, 1)
        assert -1 <= drawn.min() < -0.9
        assert 0.9 < drawn.max() <= 1


def test_only_the_loss_of_the_keys_moves_the_keys():
    model = small().train()
    model(X).sum().backward(retain_graph=True)
    assert model.keys.grad is None
    assert model.prompts.grad.abs().sum() > 0
    before = float(model.auxiliary_loss.detach())
    model.auxiliary_loss.backward()
    with torch.no_grad():
        model.keys -= 0.1 * model.keys.grad
    model(X)
    assert float(model.auxiliary_loss.detach()) < before
