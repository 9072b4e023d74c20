"""Selectors of domains against scikit-learn, and SOYO's resampling step by step."""

import numpy as np
import pytest
import torch
from sklearn.mixture import GaussianMixture
from torch.nn.functional import normalize
from toy_vits import toy_vit

from covon_avalanche.prompting import L2P, DualPrompt, MixtureSelector, NearestCentre
from covon_avalanche.prompting.selectors import cosines

WIDTH = 6


def features_of(domain: int, n: int = 60, seed: int = 0) -> torch.Tensor:
    """Features of two clusters, overlapping with those of other domains; not normalised."""
    means = torch.randn(5, 2, WIDTH, generator=torch.Generator().manual_seed(3))[domain]
    noise = torch.randn(n, WIDTH, generator=torch.Generator().manual_seed(10 * domain + seed))
    return means[torch.arange(n) % 2] + 0.7 * noise


def fitted(selector, sizes=(60, 40, 50)):
    torch.manual_seed(0)
    for domain, n in enumerate(sizes):
        selector.fit(domain, features_of(domain, n))
    return selector


def test_a_domain_is_remembered_as_scikit_learns_mixture():
    selector = fitted(MixtureSelector(WIDTH, 4, epochs=1))
    for domain, n in enumerate((60, 40, 50)):
        x = normalize(features_of(domain, n)).double().numpy()
        mixture = GaussianMixture(2, random_state=0).fit(x)
        assert np.allclose(selector.log_shares[domain].exp(), mixture.weights_)
        assert np.allclose(selector.means[domain], mixture.means_, atol=1e-6)
        scales = selector.scales[domain].double()
        assert np.allclose(scales @ scales.mT, mixture.covariances_, rtol=1e-4, atol=1e-6)


def test_resampled_features_have_the_moments_of_the_mixture():
    selector = fitted(MixtureSelector(WIDTH, 2, epochs=1), (60,))
    torch.manual_seed(1)
    drawn = selector.sample(0, 200_000).double()
    shares, means = selector.log_shares[0].exp().double(), selector.means[0].double()
    mean = shares @ means
    scales = selector.scales[0].double()
    within = (shares[:, None, None] * (scales @ scales.mT)).sum(0)
    between = (means - mean).T @ (shares[:, None] * (means - mean))
    torch.testing.assert_close(drawn.mean(0), mean, atol=0.003, rtol=0)
    torch.testing.assert_close(drawn.T.cov(), within + between, atol=0.003, rtol=0)


def test_the_classifier_is_kept_and_trained_on_equal_shares(monkeypatch):
    """The domain's own features, as many in a batch as of each earlier domain together."""
    batches = []
    cross_entropy = torch.nn.functional.cross_entropy
    weight = []

    def recorded(logits, labels):
        batches.append(labels.clone())
        weight.append(logits.shape[1])
        return cross_entropy(logits, labels)

    selector = fitted(MixtureSelector(WIDTH, 4, epochs=30, batch_size=24), (48, 48))
    before = selector.weight.clone()
    monkeypatch.setattr(torch.nn.functional, "cross_entropy", recorded)
    selector.fit(2, features_of(2, 48))
    assert len(batches) == 30 * 6
    for labels in batches:
        assert (labels == 2).sum() == 8
        assert len(labels) == 24
    for epoch in range(30):  # each feature once an epoch
        counts = torch.cat(batches[6 * epoch : 6 * epoch + 6]).bincount()
        assert counts.tolist() == [48, 48, 48]
    assert set(weight) == {3}  # domains to come take no part
    assert torch.equal(selector.weight[3], before[3])
    assert selector.bias[3] == -torch.inf
    assert not torch.equal(selector.weight[:3], before[:3])


def test_one_epoch_of_training_is_gradient_descent():
    """With one batch a domain, on the features that the same random numbers give."""
    torch.manual_seed(0)
    selector = MixtureSelector(WIDTH, 2, epochs=1, batch_size=80, lr=0.3, weight_decay=0.1)
    selector.fit(0, features_of(0, 40))
    weight, bias = selector.weight.clone(), selector.bias.clone()
    torch.manual_seed(5)
    old = selector.sample(0, 40)
    torch.manual_seed(5)
    selector.fit(1, features_of(1, 40))
    x = torch.cat([old, normalize(features_of(1, 40))])
    bias[1] = 0
    error = torch.softmax(x @ weight.T + bias, 1)
    error[:40, 0] -= 1
    error[40:, 1] -= 1
    wanted = weight - 0.3 * (error.T @ x / 80 + 0.1 * weight)
    torch.testing.assert_close(selector.weight, wanted)
    torch.testing.assert_close(selector.bias, bias - 0.3 * (error.mean(0) + 0.1 * bias))


def test_most_features_are_recognised_and_unseen_domains_never_selected():
    selector = MixtureSelector(WIDTH, 5)
    test = torch.cat([features_of(d, seed=1) for d in range(5)])
    fitted(selector)
    found = selector(test)
    assert set(found.tolist()) == {0, 1, 2}
    right = found[:180] == torch.arange(3).repeat_interleave(60)
    assert right.float().mean() > 0.7
    assert selector(features_of(0) * 100).tolist() == selector(features_of(0)).tolist()


def test_a_domain_with_one_image_is_an_error():
    with pytest.raises(ValueError, match="a domain needs at least 2 images, got 1"):
        MixtureSelector(WIDTH, 2).fit(0, features_of(0, 1))


def test_a_domain_of_few_images_has_as_many_centres_and_others_none():
    selector = NearestCentre(4, 3, centres=5)
    features = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
    selector.fit(0, features)
    numbers = torch.isfinite(selector.centres).all(2).sum(1)
    assert numbers.tolist() == [3, 0, 0]
    found, wanted = selector.centres[0, :3], normalize(features)
    torch.testing.assert_close(found.sort(0).values, wanted.sort(0).values)
    assert selector(features).tolist() == [0, 0, 0]
    assert selector.learned == 1
    wanted = 1 - (normalize(-features) @ normalize(features).T).max(1).values
    torch.testing.assert_close(selector.cosine_distances(-features), wanted[:, None])


def test_under_autocast_what_is_nearest_is_decided_in_float32():
    x = features_of(0)
    near = x.mean(0) + 0.003 * torch.randn(20, WIDTH, generator=torch.Generator().manual_seed(1))
    mixture = MixtureSelector(WIDTH, 20)
    mixture.weight.copy_(near)
    mixture.bias.zero_()
    exact = cosines(x, near), mixture(x)
    with torch.autocast("cpu", torch.bfloat16):
        assert not torch.equal((normalize(x) @ normalize(near).T).argmax(1), exact[0].argmax(1))
        assert torch.equal(cosines(x, near), exact[0])
        assert torch.equal(mixture(x), exact[1])


@pytest.mark.parametrize("method", [L2P, DualPrompt])
def test_under_autocast_images_use_the_prompts_that_they_use_without(method, monkeypatch):
    model = method(toy_vit(), 10)
    model.domains.fill_(10)
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(30, 16, generator=generator)
    with torch.no_grad():
        for key in model.keys:
            key.copy_(q[0] + 0.01 * torch.randn(16, generator=generator))
    monkeypatch.setattr(model.vit, "query", lambda x: q)
    monkeypatch.setattr(model, "_logits", lambda x, chosen: chosen)
    exact = model.predicted_logits(q)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(model.predicted_logits(q), exact)
