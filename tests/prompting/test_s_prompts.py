"""S-iPrompts: the nearest of scikit-learn's centres."""

import numpy as np
import pytest
import torch
from toy_prompting import k_means, learn, normalised_queries, some_images, trained
from toy_vits import toy_clip, toy_vit

from covon_avalanche.prompting import SPrompts


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return trained(SPrompts(toy_clip(), 3, prompts=4))


def nearest(model, x):
    """By explicit L1 distances to the centres of KMeans."""
    queries = normalised_queries(model, x)
    distances = [
        np.abs(queries[:, None] - k_means(model, domain)).sum(-1).min(1) for domain in range(3)
    ]
    return np.argmin(distances, 0)


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
