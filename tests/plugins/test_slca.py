"""SLCA, CoMA and CoFiMA in Avalanche's training loop."""

import copy

import torch
import torch.nn.functional as F
from toy_optimizers import same, weights
from toys import Watch, columns, make_naive, sgd_by_part, toy_benchmark, toy_model

from covon_avalanche.merging import EMA, SLCA, CoFiMA
from covon_avalanche.merging.alignment import align_layers, fit_gaussians
from covon_avalanche.plugins import SLCAPlugin


def test_new_classifiers_are_on_the_networks_device():
    model = SLCA(toy_model().to("meta"), 4, 3)
    assert {p.device.type for p in model.parameters()} == {"meta"}


def train(plugin):
    """The model; weights at each domain's start, copies around its end; torch's generator then."""
    torch.manual_seed(0)
    model, copies = SLCA(toy_model(), 4, 3), ([], [], [])
    states = []

    def before(strategy):
        copies[1].append(copy.deepcopy(model))
        states.append(torch.get_rng_state())

    def start(strategy):
        if strategy.clock.train_exp_epochs == 0:
            copies[0].append(weights(model))

    first = Watch(before_training_epoch=start, after_training_exp=before)
    last = Watch(after_training_exp=lambda s: copies[2].append(copy.deepcopy(model)))
    strategy = make_naive(model, sgd_by_part(model), first, plugin, last)
    strategy.train(toy_benchmark().train_stream)
    return model, copies, states


def heads(named):
    return {name: p for name, p in named.items() if name.startswith("head.")}


def backbone(named):
    return {name: p for name, p in named.items() if name.startswith("backbone.")}


def test_each_domain_trains_its_own_classifier_and_all_are_aligned_for_predictions():
    _, (starts, fast, ends), states = train(SLCAPlugin(samples=8))
    trained, aligned = [weights(m) for m in fast], [weights(m) for m in ends]
    for t in range(3):
        changed = {n for n, p in starts[t].items() if not torch.equal(p, trained[t][n])}
        own = {f"head.blocks.{t}.weight", f"head.blocks.{t}.bias"}
        assert changed == own | set(backbone(starts[t]))
        if t > 0:
            assert same(starts[t], {**aligned[t - 1], **heads(trained[t - 1])})
        by_hand = fast[t]
        gaussians = []
        for u, experience in enumerate(toy_benchmark().train_stream[: t + 1]):
            x, y = columns(experience)
            features = fast[u].features(x).detach()
            gaussians.append(fit_gaussians(features, y, per_class=True))
        layers = by_hand.head.blocks[: t + 1].requires_grad_(True)
        if t > 0:
            torch.set_rng_state(states[t])
            align_layers(layers, gaussians, samples=8)
        assert same(aligned[t], weights(by_hand))


def test_predictions_are_by_the_largest_logit_of_all_domains_classifiers():
    model, *_ = train(SLCAPlugin(samples=8))
    x, _ = columns(toy_benchmark().test_stream[0])
    rows = torch.cat([block(model.features(x)) for block in model.head.blocks], 1)
    assert torch.equal(model.eval()(x).argmax(1), rows.argmax(1) % 4)
    torch.testing.assert_close(model.train()(x), rows[:, 8:])


def test_coma_averages_aligned_weights_and_goes_on_with_unmerged_classifiers(monkeypatch):
    found = []

    def watched(layers, *own, **options):
        found.append([copy.deepcopy(layer) for layer in layers])
        align_layers(layers, *own, **options)

    monkeypatch.setattr("covon_avalanche.plugins.classifier_alignment.align_layers", watched)
    _, (starts, fast, ends), _ = train(SLCAPlugin(EMA(0.4), samples=8))
    trained, aligned = [weights(m) for m in fast], [weights(m) for m in ends]
    for t in (1, 2):
        expected = {n: 0.6 * aligned[t - 1][n] + 0.4 * p for n, p in trained[t].items()}
        for name, p in backbone(aligned[t]).items():
            torch.testing.assert_close(p, expected[name])
        for domain, layer in enumerate(found[t - 1]):
            name = f"head.blocks.{domain}.weight"
            wanted = trained[t][name] if domain == t else expected[name]
            torch.testing.assert_close(layer.weight.detach(), wanted)
    assert same(backbone(starts[2]), backbone(aligned[1]))
    assert same(heads(starts[2]), heads(trained[1]))


def test_cofima_weighs_by_the_fisher_of_the_current_classifier():
    plugin = SLCAPlugin(CoFiMA(0.4), samples=8)
    _, (_, fast, ends), _ = train(plugin)
    fisher = plugin.rule.fisher
    assert not fisher["head.blocks.0.weight"].any()
    x, y = columns(toy_benchmark().train_stream[2])
    loss = F.cross_entropy(fast[2].train()(x), y)
    loss.backward()
    assert fisher["head.blocks.2.weight"].any()
    for name, p in fast[2].backbone.named_parameters():
        assert torch.equal(fisher[f"backbone.{name}"] > 0, p.grad != 0)
        low = torch.minimum(p, ends[1].backbone.get_parameter(name))
        high = torch.maximum(p, ends[1].backbone.get_parameter(name))
        merged = ends[2].backbone.get_parameter(name)
        assert ((low - 1e-6 <= merged) & (merged <= high + 1e-6)).all()
