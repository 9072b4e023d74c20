"""S-iPrompts, S-liPrompts and methods that mix domains, by explicit formulas in numpy."""

import numpy as np
import pytest
import torch
from scipy.special import logsumexp, softmax
from toy_prompting import k_means, learn, normalised_queries, numpy_of, some_images, trained
from toy_text import tokenize, toy_clip_with_text
from toy_vits import toy_clip, toy_images, toy_vit

from covon_avalanche.prompting import HEDP, SLiPrompts, SLiPromptsMixture, SPrompts


def make(cls, **options):
    torch.manual_seed(0)
    return cls(toy_clip_with_text(), 3, **{"prompts": 4, "context": 6, **options})


def explicit_logits(model, x, domain):
    """With cosines from numpy; contexts were replaced by words that the tower encodes."""
    if isinstance(model, HEDP):
        halves = [(layer[None, :2], layer[None, 2:]) for layer in model.prompts[domain]]
        images = numpy_of(model.vit(x, prefixes=dict(enumerate(halves))))
    else:
        images = numpy_of(model.vit(x, model.prompts[domain]))
    with torch.no_grad():
        model.contexts[domain].copy_(words(model, domain))
        text = model.vit.network.text.clip
        sentences = [f"{SENTENCES[domain]} {name}." for name in ("dog", "police car", "fish")]
        classes = numpy_of(text.encode_text(tokenize(sentences)))
    norms = np.linalg.norm(images, axis=1)[:, None] * np.linalg.norm(classes, axis=1)
    return np.exp(numpy_of(text.logit_scale)) * (images @ classes.T) / norms


SENTENCES = ["a photo of a very old", "the small sketch of this one", "my new painting of some big"]


def words(model, domain):
    tokens = tokenize(SENTENCES[domain])[0, 1:7]
    assert tokens.argmax() < 49406
    return model.vit.network.text.clip.token_embedding(tokens)


def explicit_distances(model, x, p=None):
    """1 - cosine, or L1 or L2 distance, to the nearest of KMeans' centres, by domain."""
    queries, columns = normalised_queries(model, x), []
    for domain in range(3):
        centres = k_means(model, domain)
        norms = np.linalg.norm(queries[:, None] - centres, p, axis=-1)
        cosines = queries @ centres.T / np.linalg.norm(centres, axis=1)
        columns.append((norms if p else 1 - cosines).min(1))
    return np.stack(columns, 1)


@torch.no_grad()
def test_logits_are_scaled_cosines_of_the_selected_domains_prompts():
    with torch.enable_grad():
        model, x = trained(make(SLiPrompts)), some_images()
    domains = model.selector(model.vit.query(x)).numpy()
    assert set(domains) == {0, 1, 2}
    wanted = np.stack([explicit_logits(model, x, domain) for domain in range(3)])
    found = model(x)
    selected = wanted[domains, np.arange(len(x))]
    np.testing.assert_allclose(found.numpy(), selected, rtol=1e-3, atol=1e-3)
    assert np.abs(wanted[0] - wanted[1]).max() > 0.1


def mixed(weights, logits):
    """Means over domains, of shapes (images, domains) and (domains, images, classes)."""
    return np.einsum("nd,dnc->nc", weights, softmax(logits, -1))


@torch.no_grad()
def test_the_mixture_averages_probabilities_by_distance():
    with torch.enable_grad():
        model, x = trained(make(SLiPromptsMixture, temperature=0.1)), some_images()
    logits = np.stack([explicit_logits(model, x, domain) for domain in range(3)])
    weights = softmax(-explicit_distances(model, x) / 0.1, -1)
    assert (weights.max(1) < 0.99).any()
    np.testing.assert_allclose(model(x).exp().numpy(), mixed(weights, logits), atol=1e-4)


@pytest.mark.parametrize("p", [1, 2])
@torch.no_grad()
def test_hedp_mixes_logits_by_energy_and_distance(p):
    options = dict(energy_temperature=2.0, distance_temperature=0.3, temperature=1.5)
    with torch.enable_grad():
        model = trained(make(HEDP, distance=f"l{p}", **options))
        x = some_images()
    logits = np.stack([explicit_logits(model, x, domain) for domain in range(3)])
    energies, distances = -1.5 * logsumexp(logits / 1.5, -1).T, explicit_distances(model, x, p)
    scores = (energies.min(1, keepdims=True) - energies) / 2
    scores += (distances.min(1, keepdims=True) - distances) / 0.3
    weights = softmax(scores, -1)
    assert (weights.max(1) < 0.99).any()
    wanted = np.einsum("nd,dnc->nc", weights, logits)
    np.testing.assert_allclose(model(x).numpy(), wanted, rtol=1e-3, atol=1e-3)


def test_hedps_domains_start_from_a_common_draw():
    model = make(HEDP)
    for own in (model.prompts, model.contexts):
        assert all(torch.equal(p, own[0]) for p in own)


@pytest.mark.parametrize("target", [-1.0, -40.0])
def test_hedps_loss_is_that_of_its_formula(target):
    """The border counts over the images above it alone."""
    probe = make(HEDP, temperature=1.5)
    probe.begin_domain()
    x, _ = toy_images(0)
    energies = -1.5 * logsumexp(numpy_of(probe.train()(x)) / 1.5, -1)
    margin = float(np.quantile(energies, 0.7))
    own = dict(temperature=1.5, regularisation=0.3, target=target)
    model = make(HEDP, margin=margin, **own)
    model.begin_domain()
    model.train()
    model(x)
    excess = (energies - margin)[energies > margin]
    assert 0 < len(excess) < len(x) / 2
    wanted = 0.3 * (excess.mean() + abs(target - energies.mean()))
    assert model.auxiliary_loss.item() == pytest.approx(wanted, rel=1e-4)
    assert model.auxiliary_loss.requires_grad
    model.eval()(x)
    assert model.auxiliary_loss == 0
    none_above = make(HEDP, margin=float(energies.max()) + 1, **own)
    none_above.begin_domain()
    none_above.train()(x)
    wanted = 0.3 * abs(target - energies.mean())
    assert none_above.auxiliary_loss.item() == pytest.approx(wanted, rel=1e-4)


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return trained(SPrompts(toy_clip(), 3, prompts=4))


def nearest(model, x):
    """By explicit L1 distances to the centres of KMeans."""
    return np.argmin(explicit_distances(model, x, 1), 1)


def test_the_domain_is_that_of_the_nearest_centre(model):
    x = some_images()
    wanted = nearest(model, x)
    assert set(wanted) == {0, 1, 2}
    assert model.selector(model.vit.query(x)).tolist() == wanted.tolist()


@torch.no_grad()
def test_images_grouped_by_domain_are_those_predicted_one_by_one(model):
    x = some_images()
    found = model(x)
    for image, logits, domain in zip(x, found, nearest(model, x), strict=True):
        feature = model.vit(image[None], model.prompts[domain])
        torch.testing.assert_close(model.heads[domain](feature)[0], logits, rtol=1e-4, atol=1e-5)


def test_there_are_no_more_domains_than_planned():
    model = SPrompts(toy_vit(), 1)
    learn(model, 0)
    with pytest.raises(ValueError, match="SPrompts was created for num_domains = 1, and all"):
        model.begin_domain()
