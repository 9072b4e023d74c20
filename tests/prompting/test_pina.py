"""PINA and SOYO: the first domain's classifier, and features by formula."""

import pytest
import torch
import torch.nn.functional as F
from toy_prompting import explicit_adapters, learn, some_images, trained
from toy_text import toy_clip_with_text
from toy_vits import toy_clip, toy_images, toy_vit

from covon_avalanche.prompting import PINA, SOYO


def by_hand(model, x, domain):
    """Logits with the parameters of a domain, by matrix products."""
    adapters = explicit_adapters(model.adapters[domain - 1]) if domain > 0 else []
    deep = model.adapter == "deep" and domain > 0
    features = model.vit(x, model.prompts[domain], adapters=adapters if deep else None)
    if model.adapter == "shallow":
        for adapter in adapters:
            features = features + adapter(features)
    return features @ model.head.weight.T + model.head.bias


@pytest.mark.parametrize("adapter", ["shallow", "deep"])
def test_logits_are_those_of_the_selected_domains_adapters(adapter):
    torch.manual_seed(0)
    model = trained(PINA(toy_clip(), 3, prompts=4, adapter=adapter, bottleneck=2))
    x = some_images()
    domains = model.selector(model.vit.query(x))
    assert set(domains.tolist()) == {0, 1, 2}
    with torch.no_grad():
        wanted = torch.stack([by_hand(model, x, domain) for domain in range(3)])
        found = model(x)
    torch.testing.assert_close(found, wanted[domains, torch.arange(len(x))], rtol=1e-4, atol=1e-4)
    assert not torch.allclose(wanted[0], wanted[1], atol=0.01)


@pytest.mark.parametrize("method", [PINA, SOYO])
def test_on_a_clip_the_names_of_the_classes_behind_a_learned_context_classify(method):
    """PINA's context is that of the first domain, as its classifier is; SOYO's are the domains'."""
    torch.manual_seed(0)
    model, x = method(toy_clip_with_text(), 2, prompts=4, context=6), toy_images(0)[0]
    learn(model, 0)
    first = model.context if method is PINA else model.contexts[0]
    learned = first.detach().clone()
    learn(model, 1)
    assert torch.equal(first, learned)
    text = model.vit.network.text
    with torch.no_grad():
        features = model.vit(x, model.prompts[1], adapters=list(model.adapters[-1]))
        classes = text(first if method is PINA else model.contexts[1])
        wanted = text.scale * F.cosine_similarity(features[:, None], classes, dim=2)
        torch.testing.assert_close(model.domain_logits(x, 1), wanted, rtol=1e-3, atol=1e-3)
    with pytest.raises(ValueError, match=f"{method.__name__} needs a CLIP with its text tower"):
        method(toy_vit(), 2, context=6)


def test_adapters_begin_with_xaviers_weights_and_zero_biases():
    torch.manual_seed(0)
    model = PINA(toy_vit(), 9, bottleneck=8)
    for name, p in model.adapters.named_parameters():
        if name.endswith("bias"):
            assert not p.any()
        else:
            assert p.abs().max() <= (6 / 24) ** 0.5
    largest = max(p.abs().max().item() for p in model.adapters.parameters())
    assert largest == pytest.approx(0.5, rel=0.01)


@pytest.mark.parametrize("method", [PINA, SOYO])
def test_adapters_of_zeros_change_nothing_at_first(method):
    model, x = method(toy_vit(), 2, adapter_init="zeros"), toy_images(0)[0]
    with torch.no_grad():
        adapted = model.vit(x, model.prompts[1], adapters=list(model.adapters[-1]))
        assert torch.equal(adapted, model.vit(x, model.prompts[1]))
    learn(model, 0)
    learn(model, 1)
    assert all(p.any() for p in model.adapters[-1].parameters())


@pytest.mark.parametrize("method", [PINA, SOYO])
def test_there_may_be_one_domain(method):
    model = method(toy_vit(), 1)
    learn(model, 0)
    assert model(toy_images(0)[0]).shape == (24, 3)


def test_logits_are_those_of_the_selected_domain():
    torch.manual_seed(0)
    model, x = trained(SOYO(toy_clip(), 3, prompts=4, bottleneck=2)), some_images()
    queries = torch.nn.functional.normalize(model.vit.query(x))
    domains = (queries @ model.selector.weight.T + model.selector.bias).argmax(1)
    assert set(domains.tolist()) == {0, 1, 2}
    with torch.no_grad():
        for image, logits, domain in zip(x, model(x), domains.tolist(), strict=True):
            adapters = explicit_adapters(model.adapters[domain])
            feature = model.vit(image[None], model.prompts[domain], adapters=adapters)
            wanted = (feature @ model.heads[domain].weight.T + model.heads[domain].bias)[0]
            torch.testing.assert_close(logits, wanted, rtol=1e-4, atol=1e-4)
