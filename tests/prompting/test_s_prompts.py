"""S-iPrompts: the nearest of scikit-learn's centres, and parameters of one domain at a time."""

import numpy as np
import pytest
import torch
from sklearn.cluster import KMeans
from toy_domains import changed_by, learn, make_optimizer, normalised_queries, some_images
from toy_vits import toy_clip, toy_images, toy_vit

from covon_avalanche.prompting import NearestCentre, SPrompts


@pytest.fixture(params=[toy_vit, toy_clip], scope="module")
def trained(request):
    torch.manual_seed(0)
    model = SPrompts(request.param(), 3, prompts=4)
    optimizer = make_optimizer(model)
    for domain in range(3):
        learn(model, domain, optimizer)
    return model


def nearest(model, x):
    """By explicit L1 distances to the centres of KMeans."""
    queries, distances = normalised_queries(model, x), []
    for domain in range(3):
        features = normalised_queries(model, toy_images(domain)[0]).astype(np.float32)
        centres = KMeans(5, n_init=10, random_state=0).fit(features).cluster_centers_
        distances.append(np.abs(queries[:, None] - centres).sum(-1).min(1))
    return np.argmin(distances, 0)


def test_the_domain_is_that_of_the_nearest_centre(trained):
    x = some_images()
    wanted = nearest(trained, x)
    assert set(wanted) == {0, 1, 2}
    assert trained.selector(trained.vit.query(x)).tolist() == wanted.tolist()


@torch.no_grad()
def test_images_grouped_by_domain_are_those_predicted_one_by_one(trained):
    x = some_images()
    found = trained(x)
    for image, logits, domain in zip(x, found, nearest(trained, x), strict=True):
        feature = trained.vit(image[None], trained.prompts[domain])
        torch.testing.assert_close(trained.heads[domain](feature)[0], logits, rtol=1e-4, atol=1e-5)


def test_a_domain_changes_its_own_prompts_head_and_centres_only():
    model = SPrompts(toy_vit(), 3, prompts=4)
    for domain in range(3):
        own = {f"prompts.{domain}", f"heads.{domain}.weight", f"heads.{domain}.bias"}
        centres = model.selector.centres.clone()
        assert changed_by(model, domain) == own | {"domains", "selector.centres"}
        others = [d for d in range(3) if d != domain]
        assert torch.equal(model.selector.centres[others], centres[others])
        trained = {name for name, p in model.named_parameters() if p.requires_grad}
        assert trained == own


def test_domains_that_have_not_been_learned_are_never_selected():
    model = SPrompts(toy_vit(), 3)
    learn(model, 0)
    assert set(model.selector(model.vit.query(some_images())).tolist()) == {0}


def test_few_images_have_as_many_centres():
    selector = NearestCentre(4, 2, centres=5)
    features = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
    selector.fit(1, features)
    assert torch.isfinite(selector.centres[1]).all(1).tolist() == [True] * 3 + [False] * 2
    found = selector.centres[1, :3].sort(0).values
    normalised = torch.nn.functional.normalize(features)
    torch.testing.assert_close(found, normalised.sort(0).values)
    assert selector(features).tolist() == [1, 1, 1]


def test_wrong_numbers_are_named():
    for options, says in (
        ({"prompts": 0}, "prompts must be >= 1, got 0"),
        ({"centres": 0}, "centres must be >= 1, got 0"),
    ):
        with pytest.raises(ValueError, match=says):
            SPrompts(toy_vit(), 2, **options)
    with pytest.raises(ValueError, match="num_domains must be >= 1, got 0"):
        SPrompts(toy_vit(), 0)
    model = SPrompts(toy_vit(), 1)
    model.begin_domain()
    with pytest.raises(ValueError, match="SPrompts was created for num_domains = 1, and all"):
        model.begin_domain()
