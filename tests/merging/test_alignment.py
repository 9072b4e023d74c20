"""Classifier alignment against numpy and steps by hand."""

import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from covon_avalanche.merging.alignment import (
    FeatureGaussians,
    align_classifier,
    align_layers,
    fit_gaussians,
)
from covon_avalanche.prompting.tuned_vit import CosineClassifier


def examples(*counts, width=3):
    """Features and shuffled labels, with so many examples of each class; all are correlated."""
    torch.manual_seed(0)
    labels = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    labels = labels[torch.randperm(len(labels))]
    return torch.randn(len(labels), width) @ torch.randn(width, width) + 3 * labels[:, None], labels


def test_means_and_covariance_are_numpys():
    x, y = examples(30, 0, 5, 12)
    found = fit_gaussians(x, y)
    assert found.classes.tolist() == [0, 2, 3]
    groups = [x[y == c].numpy() for c in (0, 2, 3)]
    np.testing.assert_allclose(found.means, [g.mean(0) for g in groups], rtol=1e-5)
    scatter = sum((len(g) - 1) * np.cov(g.T) for g in groups) / (len(x) - 3)
    np.testing.assert_allclose(found.covariance, scatter + 1e-4 * np.eye(3), rtol=1e-5, atol=1e-6)


def test_covariances_of_classes_are_numpys():
    """A class with one image has no deviations."""
    x, y = examples(30, 0, 5, 1)
    found = fit_gaussians(x, y, per_class=True)
    assert found.covariance.shape == (3, 3, 3)
    for own, c in zip(found.covariance[:2], (0, 2), strict=True):
        expected = np.cov(x[y == c].numpy().T) + 1e-4 * np.eye(3)
        np.testing.assert_allclose(own, expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found.covariance[2], 1e-4 * torch.eye(3))


def test_one_class_one_image_of_a_class_and_none():
    x, y = examples(20)
    alone = fit_gaussians(x, y)
    np.testing.assert_allclose(alone.covariance, np.cov(x.T) + 1e-4 * np.eye(3), rtol=1e-5)
    more = fit_gaussians(torch.cat([x, torch.ones(1, 3)]), torch.cat([y, torch.tensor([4])]))
    assert torch.equal(more.means[1], torch.ones(3))
    torch.testing.assert_close(more.covariance, alone.covariance)
    single = fit_gaussians(x[:1], y[:1])
    torch.testing.assert_close(single.covariance, 1e-4 * torch.eye(3))
    with pytest.raises(ValueError, match="a domain has no training examples"):
        fit_gaussians(x[:0], y[:0])


def test_features_that_are_not_finite_are_named():
    x, y = examples(20)
    x[3, 1] = torch.nan
    with pytest.raises(FloatingPointError, match="features of the network are not finite"):
        fit_gaussians(x, y)


@pytest.mark.parametrize("per_class", [False, True])
def test_samples_have_the_moments_of_their_class_and_domain(per_class, monkeypatch):
    """Means of the first of two domains are multiplied by 0.95; one covariance is singular."""
    first = fit_gaussians(*examples(40, 40), per_class=per_class)
    covariances = first.covariance.expand(2, 3, 3)
    assert torch.equal(*covariances) != per_class
    mean, singular = torch.tensor([[1.0, 2.0, 3.0]]), torch.diag(torch.tensor([4.0, 0, 1]))
    second = FeatureGaussians(torch.tensor([2]), mean, singular)
    linear, cross_entropy, drawn = F.linear, F.cross_entropy, ([], [])
    monkeypatch.setattr(F, "linear", lambda *own: drawn[0].append(own[0]) or linear(*own))
    monkeypatch.setattr(F, "cross_entropy", lambda *o: drawn[1].append(o[1]) or cross_entropy(*o))
    align_classifier(nn.Linear(3, 3), [first, second], samples=40_000, epochs=1)
    x, y = (torch.cat(batches) for batches in drawn)
    expected = [(0.95 * first.means[i], covariances[i]) for i in range(2)]
    for label, (mean, covariance) in enumerate([*expected, (second.means[0], second.covariance)]):
        own, size = x[y == label], covariance.abs().max().item()
        assert len(own) == 40_000
        np.testing.assert_allclose(own.mean(0), mean, atol=0.02 * size**0.5)
        np.testing.assert_allclose(np.cov(own.T), covariance, atol=0.02 * size)


@pytest.mark.parametrize("n", [1, 2])
def test_two_steps_by_hand(n):
    """Without covariance all samples are scaled means; the second classifier's classes follow."""
    torch.manual_seed(0)
    means = torch.randn(2, 5), torch.randn(3, 5)
    classes = torch.tensor([0, 1]), torch.arange(3)
    pairs = zip(classes, means, strict=True)
    domains = [FeatureGaussians(c, m, torch.zeros(5, 5)) for c, m in pairs]
    layers = [nn.Linear(5, 3) for _ in range(n)]
    w = torch.cat([torch.cat([o.weight, o.bias[:, None]], 1) for o in layers]).detach().double()
    x = torch.cat([0.95 * means[0], means[1]]).double()
    x, y = torch.cat([x, torch.ones(5, 1)], 1), torch.cat([classes[0], classes[1] + 3 * (n - 1)])
    align, what = (align_classifier, layers[0]) if n == 1 else (align_layers, layers)
    align(what, domains, samples=7, epochs=2, lr=0.5, weight_decay=0.1)
    momentum = torch.zeros_like(w)
    for lr in (0.5, 0.25):  # half a cosine
        w.requires_grad_()
        z = x @ w.T
        norms = sum(part.square().sum(1).sqrt() for part in z.split(3, 1)) / n
        loss = -(10 * z / norms[:, None]).log_softmax(1)[torch.arange(5), y].mean()
        (gradient,) = torch.autograd.grad(loss, w)
        w = w.detach()
        momentum = 0.9 * momentum + gradient + 0.1 * w
        w = w - lr * momentum
    found = torch.cat([torch.cat([o.weight, o.bias[:, None]], 1) for o in layers]).detach()
    torch.testing.assert_close(found, w.float(), rtol=1e-4, atol=1e-5)
    assert layers[0].weight.grad is None


def test_a_head_of_kernel_size_one_is_a_linear_one():
    gaussians = [fit_gaussians(*examples(20, 20, 20))] * 2
    linear, conv = nn.Linear(3, 3), nn.Conv2d(3, 3, 1)
    with torch.no_grad():
        conv.weight.copy_(linear.weight[:, :, None, None])
        conv.bias.copy_(linear.bias)
    for layer in (linear, conv):
        torch.manual_seed(1)
        align_classifier(layer, gaussians)
    torch.testing.assert_close(conv.weight.flatten(1), linear.weight)


def test_a_cosine_classifier_is_aligned_by_its_own_outputs():
    torch.manual_seed(0)
    means = torch.randn(3, 5)
    head = CosineClassifier(5, 3)
    own = copy.deepcopy(head)
    domain = FeatureGaussians(torch.arange(3), means, torch.zeros(5, 5))
    align_classifier(head, [domain], samples=8, epochs=1)  # one step
    z = own(means)
    F.cross_entropy(10 * z / z.norm(dim=1, keepdim=True), torch.arange(3)).backward()
    torch.optim.SGD(own.parameters(), lr=0.01, weight_decay=5e-4).step()
    torch.testing.assert_close(head.weight, own.weight)


def test_what_cannot_be_aligned_is_named():
    gaussians = [fit_gaussians(*examples(5, 5))]
    with pytest.raises(ValueError, match=r"'0', must be linear or have kernel .* \[2, 3, 3, 3\]"):
        align_classifier(nn.Sequential(nn.Conv2d(3, 2, 3)), gaussians)
    with pytest.raises(ValueError, match="the last layer is frozen"):
        align_classifier(nn.Linear(3, 2).requires_grad_(False), gaussians)
    with pytest.raises(ValueError, match="Flatten has no linear or convolutional layer"):
        align_classifier(nn.Flatten(), gaussians)
