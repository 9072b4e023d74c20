"""SOYO: prompts, adapters and a head of one domain at a time."""

import pytest
import torch
from toy_domains import changed_by, learn, make_optimizer, some_images
from toy_vits import toy_clip, toy_vit

from covon_avalanche.prompting import SOYO


@pytest.mark.parametrize("make", [toy_vit, toy_clip])
def test_logits_are_those_of_the_selected_domain(make):
    torch.manual_seed(0)
    model, x = SOYO(make(), 3, prompts=4, bottleneck=2), some_images()
    optimizer = make_optimizer(model)
    for domain in range(3):
        learn(model, domain, optimizer)
    queries = torch.nn.functional.normalize(model.vit.query(x))
    domains = (queries @ model.selector.weight.T + model.selector.bias).argmax(1)
    assert set(domains.tolist()) == {0, 1, 2}
    with torch.no_grad():
        for image, logits, domain in zip(x, model(x), domains.tolist(), strict=True):
            adapters = [
                lambda t, a=a: (t @ a[0].weight.T + a[0].bias) @ a[1].weight.T + a[1].bias
                for a in model.adapters[domain]
            ]
            feature = model.vit(image[None], model.prompts[domain], adapters=adapters)
            wanted = (feature @ model.heads[domain].weight.T + model.heads[domain].bias)[0]
            torch.testing.assert_close(logits, wanted, rtol=1e-4, atol=1e-4)


def test_a_domain_changes_its_own_parameters_only():
    model = SOYO(toy_vit(depth=2), 3)
    for domain in range(3):
        places = f"adapters.{domain}.", f"heads.{domain}."
        own = {name for name in model.state_dict() if name.startswith(places)}
        changed = changed_by(model, domain)
        assert {n for n in changed if not n.startswith("selector.")} == (
            own | {f"prompts.{domain}", "domains"}
        )
        trained = {name for name, p in model.named_parameters() if p.requires_grad}
        assert trained == own | {f"prompts.{domain}"}
