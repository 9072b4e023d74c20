"""DUCT against task arithmetic and its own parts."""

import copy

import pytest
import timm
import torch
import torch.nn.functional as F
from torch import nn
from torchvision.models import resnet18, squeezenet1_1
from toys import toy_model, weights

from covon_avalanche.closed_form import FeatureExtractor
from covon_avalanche.merging import DUCT, SLCA


def moved(model):
    """Train a domain, more or less: any other weights of the backbone."""
    model.begin_domain()
    start = weights(model.backbone)
    with torch.no_grad():
        for p in model.backbone.parameters():
            p.add_(torch.randn_like(p))
    return start, weights(model.backbone)


def test_statistics_of_batch_norm_begin_with_the_pretrained_ones():
    model = DUCT(nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 2)), 2, 2)
    before = model.backbone[1].running_mean.clone()
    model.begin_domain()
    model.train()(torch.randn(8, 3) + 4)
    assert not torch.equal(model.backbone[1].running_mean, before)
    model.merge_backbone()
    model.begin_domain()
    assert torch.equal(model.backbone[1].running_mean, before)


def test_logits_are_the_domains_in_training_and_the_largest_of_all_in_evaluation():
    torch.manual_seed(0)
    model = DUCT(toy_model(), 4, 3)
    x = torch.randn(50, 8)
    features = F.relu(F.linear(x, *model.backbone[0].parameters()))
    rows = features[:, None]
    cosines = [2.5 * F.cosine_similarity(rows, block, dim=2) for block in model.head.blocks]
    for t in range(3):
        model.begin_domain()
        assert model.head.scale == 1
        with torch.no_grad():
            model.head.scale.fill_(2.5)
        torch.testing.assert_close(model.train()(x), cosines[t])
        rows = torch.cat(cosines[: t + 1], 1)  # with labels 4 t + y
        logits = model.eval()(x)
        assert torch.equal(logits.argmax(1), rows.argmax(1) % 4)
        torch.testing.assert_close(logits.amax(1), rows.amax(1))
    with torch.autocast("cpu", torch.bfloat16):
        assert model(x).dtype == torch.float32


@pytest.mark.parametrize("method", [DUCT, SLCA])
def test_a_network_in_float64_has_classifiers_in_float64(method):
    model = method(toy_model().double(), 4, 2)
    model.begin_domain()
    model.train()(torch.randn(5, 8).double()).sum().backward()
    assert {p.dtype for p in model.parameters()} == {torch.float64}
    assert model.eval()(torch.randn(5, 8).double()).dtype == torch.float64
    if method is DUCT:
        model.retrain_classifier(lambda: [(torch.randn(5, 8).double(), torch.arange(5) % 4)])


@pytest.mark.parametrize(
    "make",
    [
        lambda: squeezenet1_1(num_classes=7).to(memory_format=torch.channels_last),
        lambda: resnet18(num_classes=7),
        lambda: timm.create_model("vit_tiny_patch16_224", img_size=64, num_classes=7, depth=1),
    ],
)
def test_any_network_with_a_linear_classifier(make):
    torch.manual_seed(0)
    network = make().eval()
    x = torch.randn(2, 3, 64, 64)
    expected = FeatureExtractor(copy.deepcopy(network))(x)
    model = DUCT(network, 7, 2).eval()
    torch.testing.assert_close(model.features(x), expected)
    start, trained = moved(model)
    model.merge_backbone()
    for name, p in model.backbone.named_parameters():
        torch.testing.assert_close(p.detach(), 0.75 * start[name] + 0.25 * trained[name])
    assert model.train()(x).shape == (2, 7)


def test_retraining_is_sgd_at_a_constant_rate_on_the_classifier_and_the_scale():
    """By hand, from batches that differ from epoch to epoch; nothing else changes."""
    torch.manual_seed(0)
    model = DUCT(toy_model(), 4, 3)
    model.begin_domain()
    model.begin_domain()
    before = weights(model)
    epochs = [[(torch.randn(6, 8), torch.randint(4, (6,))) for _ in range(2)] for _ in range(3)]
    w, scale = before["head.blocks.1"].double(), torch.tensor(1.0, dtype=torch.float64)
    speed = [torch.zeros_like(w), torch.zeros_like(scale)]
    for x, y in (batch for epoch in epochs for batch in epoch):
        features = model.features(x).detach().double()
        w.requires_grad_()
        scale.requires_grad_()
        logits = scale * F.cosine_similarity(features[:, None], w, dim=2)
        gradients = torch.autograd.grad(F.cross_entropy(logits, y), [w, scale])
        w, scale = w.detach(), scale.detach()
        for value, v, g in zip((w, scale), speed, gradients, strict=True):
            v.mul_(0.9).add_(g + 5e-4 * value)
            value.sub_(0.1 * v)
    remaining = iter(epochs)
    model.retrain_classifier(lambda: next(remaining), epochs=3)
    changed = {name for name, p in weights(model).items() if not torch.equal(p, before[name])}
    assert changed == {"head.blocks.1", "head.scale"}
    torch.testing.assert_close(model.head.blocks[1].detach(), w.float(), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(model.head.scale.detach(), scale.float(), rtol=1e-4, atol=1e-5)
    once = iter(epochs[0])
    with pytest.raises(ValueError, match="was an iterator used a second time"):
        model.retrain_classifier(lambda: once, epochs=2)


@pytest.mark.parametrize("method", [DUCT, SLCA])
def test_training_before_the_first_domain_is_an_error(method):
    model = method(toy_model(), 4, 2)
    assert model.eval()(torch.randn(2, 8)).shape == (2, 4)
    with pytest.raises(ValueError, match=r"call begin_domain\(\) before training this"):
        model.train()(torch.randn(2, 8))


def test_bad_arguments_are_named():
    for options, says in (
        ({"num_domains": 0}, "num_domains must be an integer >= 1, got 0"),
        ({"num_classes": 0}, "num_classes must be an integer >= 1, got 0"),
        ({"alpha": 0.0}, "alpha must be > 0"),
    ):
        with pytest.raises(ValueError, match=says):
            DUCT(toy_model(), **{"num_classes": 4, "num_domains": 2, **options})
    with pytest.raises(ValueError, match="must be linear or have kernel size 1"):
        DUCT(nn.Sequential(nn.Conv2d(3, 2, 3)), 2, 2)
    model = DUCT(toy_model(), 4, 1)
    model.begin_domain()
    with pytest.raises(ValueError, match="num_domains is 1, but domain 2 begins"):
        model.begin_domain()
