"""Ridge regression over domains against scikit-learn's on all domains at once; class means."""

import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from sklearn.linear_model import Ridge
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from torch import nn

from covon_avalanche.closed_form import (
    ClosedFormModel,
    FeatureExtractor,
    NearestClassMean,
    RidgeClassifier,
)
from covon_avalanche.experiment.registry import KINDS


def domain(seed, examples=60, width=8, classes=3):
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(examples, width, generator=generator) + seed
    labels = torch.randint(classes, (examples,), generator=generator)
    features[:, 0] += labels
    return features, labels


def learned(domains, batch=16, **options):
    head = RidgeClassifier(8, 3, **options)
    for features, labels in domains:
        head.begin_domain()
        for first in range(0, len(labels), batch):
            part = slice(first, first + batch)
            head.update(features[part], labels[part], first)
        head.end_domain()
    return head


@pytest.mark.parametrize("projection", [None, 20])
@pytest.mark.parametrize("standardize", [False, True])
def test_it_is_the_ridge_regression_on_all_domains_in_any_order(projection, standardize):
    domains = [domain(seed) for seed in range(3)]
    if standardize:
        for features, _ in domains:
            features[:, 2] = 5.0  # constant
            features[:, 3] *= 1e3
    features, labels = (torch.cat(column) for column in zip(*domains, strict=True))
    if projection:
        random = torch.randn(8, 20, generator=torch.Generator().manual_seed(0))
        features = (features @ random).relu()
    ridge = Ridge(alpha=0.3, fit_intercept=standardize, solver="cholesky")
    if standardize:
        ridge = make_pipeline(StandardScaler(), ridge)
    ridge.fit(features.double().numpy(), np.eye(3)[labels.numpy()])
    expected = ridge.predict(features[:60].double().numpy())
    for ordered in (domains, domains[::-1]):
        head = learned(ordered, ridges=[0.3], projection=projection, standardize=standardize)
        np.testing.assert_allclose(head(domains[0][0]).numpy(), expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("projection", [None, 20])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_features_may_have_another_precision(dtype, projection):
    features, labels = domain(0)
    wanted = learned([(features.half().float(), labels)], projection=projection)
    found = learned([(features.half().to(dtype), labels)], projection=projection)
    scores = found(features.half().to(dtype))
    torch.testing.assert_close(scores, wanted(features.half().float()))


def test_mirror_images_are_more_examples_of_the_same_number():
    torch.manual_seed(0)
    images, labels = torch.randn(40, 1, 2, 4), torch.arange(40) % 3
    features = FeatureExtractor(nn.Sequential(nn.Flatten(), nn.Linear(8, 3)))
    model = ClosedFormModel(features, RidgeClassifier(8, 3, ridges=[0.5, 1e9]), flip=True)
    model.learn([(images[:13], labels[:13]), (images[13:], labels[13:])])
    head = model.head
    both = torch.cat([images, images.flip(-1)]).flatten(1).double()
    y = torch.eye(3, dtype=torch.float64)[torch.cat([labels, labels])]
    torch.testing.assert_close(head.gram, both.T @ both)
    torch.testing.assert_close(head.targets, both.T @ y)
    w = torch.linalg.solve(both.T @ both + head.ridge * torch.eye(8), both.T @ y)
    expected = (images.flatten(1).double() + images.flip(-1).flatten(1)) / 2 @ w
    torch.testing.assert_close(model.eval()(images), expected.float(), rtol=1e-4, atol=1e-5)


def test_an_image_and_its_mirror_image_are_held_out_together():
    """Else the ridge would be chosen on images that were learned."""
    head = RidgeClassifier(8, 3)
    features, labels = domain(0)
    head.begin_domain()
    for view in (features, features.flip(1)):
        head.update(view, labels, first_index=3)
    (((held, _), (mirrored, _)),) = head._held_out
    assert torch.equal(held, features[1::5])
    assert torch.equal(mirrored, features.flip(1)[1::5])


@pytest.mark.parametrize("make", [RidgeClassifier, NearestClassMean])
def test_an_interrupted_pass_leaves_nothing(make):
    features, labels = domain(0)
    network = FeatureExtractor(nn.Sequential(nn.Linear(8, 3)))
    models = [ClosedFormModel(network, make(8, 3)) for _ in range(2)]

    def interrupted():
        yield features[:20], labels[:20]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        models[0].learn(interrupted())
    for model in models:
        model.learn([(features, labels)])
    one, other = (model.head.state_dict() for model in models)
    assert all(torch.equal(one[k], other[k]) for k in one if one[k] is not None)


def score(select, alpha, learned, held_out):
    """Of scikit-learn's ridge regression."""
    (x, y), (held_x, held_y) = ((x.double().numpy(), y.numpy()) for x, y in (learned, held_out))
    predicted = Ridge(alpha=alpha, fit_intercept=False).fit(x, np.eye(3)[y]).predict(held_x)
    error = ((predicted - np.eye(3)[held_y]) ** 2).mean()
    return -error if select == "mse" else (predicted.argmax(1) == held_y).mean()


@pytest.mark.parametrize("projection", [None, 200])  # with fewer features than examples, and more
@pytest.mark.parametrize("select", ["mse", "accuracy"])
def test_the_ridge_is_chosen_on_every_fifth_example_of_the_domain_alone(select, projection):
    ridges = [1e-3, 1.0, 100.0, 1e4]
    random = torch.randn(8, projection or 1, generator=torch.Generator().manual_seed(0))
    domains = [domain(seed, examples=103) for seed in (0, 4)]
    chosen = []
    for x, y in domains:
        held_out = torch.arange(len(y)) % 5 == 4
        x = (x @ random).relu() if projection else x
        parts = (x[~held_out], y[~held_out]), (x[held_out], y[held_out])
        scores = [score(select, alpha, *parts) for alpha in ridges]
        chosen.append(max(a for a, s in zip(ridges, scores, strict=True) if s == max(scores)))
    options = {"select": select, "projection": projection}
    heads = [learned(domains[:n], ridges=ridges[::-1], **options) for n in (1, 2)]
    assert [head.ridge for head in heads] == chosen
    assert torch.equal(heads[1].weight, learned(domains, ridges=chosen[-1:], **options).weight)


@pytest.mark.parametrize("select", ["mse", "accuracy"])
def test_folds_fit_on_earlier_domains_too(select):
    """As in LayUP: every fourth example is predicted by the fit to all others of all domains."""
    ridges = [1e-3, 1.0, 30.0, 100.0, 300.0, 1e4]
    (x0, y0), (x1, y1) = (domain(seed, examples=103) for seed in (0, 4))
    folds = [torch.arange(103) % 4 == held_out for held_out in range(4)]
    fits = [(torch.cat([x0, x1[~out]]), torch.cat([y0, y1[~out]])) for out in folds]
    parts = [(fit, (x1[out], y1[out])) for fit, out in zip(fits, folds, strict=True)]
    scores = [np.mean([score(select, alpha, *part) for part in parts]) for alpha in ridges]
    chosen = max(a for a, s in zip(ridges, scores, strict=True) if s >= max(scores) - 1e-12)
    head = learned([(x0, y0)], ridges=ridges, select=select, folds=4)
    head.begin_domain()
    for first in (0, 50):
        head.update(x1[first : first + 50], y1[first : first + 50], first)
    head.update(x1[100:], y1[100:], 100)
    found = head._held_out_scores([head._sums(examples) for examples in head._held_out])
    np.testing.assert_allclose(found, scores, rtol=1e-5)
    head.end_domain()
    assert head.ridge == chosen
    weight = learned([(x0, y0), (x1, y1)], ridges=[chosen]).weight
    torch.testing.assert_close(head.weight, weight)


def test_layups_ridges_are_its_authors():
    ridges = RidgeClassifier(8, 3, folds=4).ridges
    np.testing.assert_allclose(ridges, [1e-8, *np.logspace(-4, 3, 15)])
    own = KINDS["layup"](kind="layup")
    assert (own.folds, own.select, own.blocks) == (4, "accuracy", 6)


def test_the_ridge_of_all_domains_does_not_depend_on_their_order():
    """It has the best sum of the domains' own scores, which alone would choose different ones."""
    ridges = [1e-3, 1.0, 100.0, 1e4]
    domains = [domain(seed, examples=103) for seed in (0, 4, 1)]
    alone = [learned([d], ridges=ridges, ridge_from="all") for d in domains]
    assert len({float(head.ridge) for head in alone}) > 1
    total = sum(head.scores for head in alone)
    for ordered in (domains, domains[::-1]):
        head = learned(ordered, ridges=ridges, ridge_from="all")
        torch.testing.assert_close(head.scores, total)
        assert head.ridge == ridges[total.argmax()]


@pytest.mark.parametrize("ridge_from", ["last", "all"])
def test_a_domain_without_held_out_examples_keeps_the_ridge(ridge_from):
    options = {"ridges": [1.0, 1e8], "ridge_from": ridge_from}
    assert learned([domain(4)], **options).ridge == 1
    assert learned([domain(4), domain(1, examples=4)], **options).ridge == 1
    assert learned([domain(4, examples=4)], ridge_from=ridge_from).ridge == 1  # of 1e-8 to 1e8


@pytest.mark.parametrize("example", [3, 4])
def test_a_domain_with_features_that_are_not_finite_is_not_added(example):
    """Example 3 is learned, example 4 held out."""
    head = learned([domain(0)], ridge_from="all")
    before = copy.deepcopy(head.state_dict())
    features, labels = domain(1)
    features[example, 2] = torch.nan
    head.begin_domain()
    head.update(features, labels)
    with pytest.raises(FloatingPointError, match="features of the network are not finite"):
        head.end_domain()
    state = head.state_dict()
    assert all(torch.equal(before[n], v) for n, v in state.items() if before[n] is not None)


def test_what_it_needs_later_is_in_its_state():
    """A third domain, too small to choose a ridge, gives the same classifier after loading."""
    domains = [domain(0), domain(4), domain(1, examples=4)]
    head = learned(domains[:2], projection=12, seed=4)
    other = RidgeClassifier(8, 3, projection=12, seed=5)
    other.load_state_dict(copy.deepcopy(head.state_dict()))
    for h in (head, other):
        h.begin_domain()
        h.update(*domains[2])
        h.end_domain()
    assert torch.equal(head.weight, other.weight)
    assert not hasattr(head, "_held_out")


def test_a_singular_gram_matrix_gets_a_larger_ridge():
    features, labels = torch.ones(10, 8) * 1e6, torch.arange(10) % 3
    assert learned([(features, labels)], ridges=[1e-12]).weight.isfinite().all()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (dict(projection=0), "projection must be an integer >= 1, got 0"),
        (dict(ridges=[]), "ridges must be positive"),
        (dict(ridges=[1.0, -1.0]), "ridges must be positive"),
        (dict(ridge_from="first"), "ridge_from must be one of 'last', 'all', got 'first'"),
        (dict(select="loss"), "select must be one of 'mse', 'accuracy', got 'loss'"),
        (dict(projection=10**8), "needs 74505806 GiB: choose a smaller projection"),
    ],
)
def test_bad_arguments_are_named(options, says):
    with pytest.raises(ValueError, match=says):
        RidgeClassifier(1, 3, **options)


def test_the_mean_of_a_class_is_over_all_domains():
    head = NearestClassMean(2, 4)
    second = [[0.0, 1.0], [4.0, 0.0], [0.0, -1.0]]
    for features, labels in ([[1.0, 0.0], [0.0, 2.0]], [0, 1]), (second, [0, 1, 3]):
        head.begin_domain()
        head.update(torch.tensor(features), torch.tensor(labels))
        head.end_domain()
    means = torch.tensor([[0.5, 0.5], [2.0, 1.0], [0.0, -1.0]])
    x = torch.tensor([[3.0, 1.0], [-1.0, -7.0]])
    scores = head(x)
    expected = F.cosine_similarity(x[:, None], means[None], dim=2)
    torch.testing.assert_close(scores[:, [0, 1, 3]], expected)
    assert scores[:, 2].tolist() == [-1, -1]  # no examples
    assert scores.argmax(1).tolist() == [1, 3]
    head.begin_domain()
    head.update(torch.tensor([[torch.nan, 1.0]]), torch.tensor([2]))
    with pytest.raises(FloatingPointError, match="features of the network are not finite"):
        head.end_domain()
    assert torch.equal(head(x), scores)
