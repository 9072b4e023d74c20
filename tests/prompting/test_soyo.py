"""SOYO: logits by matrix products."""

import torch
from toy_prompting import explicit_adapters, some_images, trained
from toy_vits import toy_clip

from covon_avalanche.prompting import SOYO


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
