"""Merge rules in Avalanche's strategies: MergePlugin with any optimizer, and CoVONPlugin."""

import pytest
import torch
from avalanche.benchmarks import benchmark_from_datasets
from avalanche.training import plugins as avalanches
from avalanche.training.plugins import SupervisedPlugin
from toy_merging import RULES
from toy_optimizers import make_covon, same, weights
from toys import (
    Head,
    Watch,
    adamw,
    columns,
    make_naive,
    make_strategy,
    sgd,
    toy_benchmark,
    toy_model,
)

from covon_avalanche import CoVONPlugin, MergePlugin
from covon_avalanche.merging import EMA, SLCA, CoFiMA, MagMax, RegMean, Task
from covon_avalanche.plugins import EWCPlugin, ICaRLPlugin, LwFPlugin, SLCAPlugin


def make(kind, rule, model):
    """A strategy that merges; each task's weights by time; torch's generator before each merge."""
    found, states = [], []

    def note_start(strategy):
        if strategy.clock.train_exp_epochs == 0:
            found.append([weights(model)])

    def note_fast(strategy):
        if strategy.clock.train_exp_epochs == strategy.train_epochs - 1:
            found[-1].append(weights(model))
            states.append(torch.get_rng_state())

    watch = Watch(
        before_training_epoch=note_start,
        after_training_epoch=note_fast,
        after_training_exp=lambda strategy: found[-1].append(weights(model)),
    )
    if kind == "covon":
        return make_strategy("covon", model, merge=rule, plugins=[watch]), found, states
    plugins = MergePlugin(rule), watch
    return make_naive(model, adamw(model), *plugins), found, states


def augmented_order(n):
    seed = int(torch.randint(2**31, ()))
    return torch.randperm(n, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("kind", ["adamw", "covon"])
def test_each_task_starts_and_ends_with_the_rules_weights(rule, kind):
    """Those that the rule computes by hand from the weights before and after each task."""
    model, copied, by_hand = toy_model(), toy_model(), RULES[rule]()
    strategy, found, states = make(kind, RULES[rule](), model)
    covon = kind == "covon"
    before = strategy.optimizer.prior().mean if covon else weights(model)
    for t, experience in enumerate(toy_benchmark().train_stream):
        strategy.train(experience)
        start, fast, merged = found[t]
        by_hand.begin_task(copied)
        assert same(start, weights(copied))
        x, y = columns(experience)
        size = 64
        if by_hand.augmented:  # training's own batches
            torch.set_rng_state(states[t])
            order, size = augmented_order(len(y)), 16
            x, y = x[order], y[order]
        batches = list(zip(x.split(size), y.split(size), strict=True))
        task = Task(copied, before, lambda batches=batches: batches, has_prior=covon)
        copied.load_state_dict(fast)
        own = by_hand.merge(task)
        left_out = merged if covon else fast  # by Eq. 8
        copied.load_state_dict({**left_out, **own})
        by_hand.observe(task)
        assert same(merged, weights(copied))
        assert same(merged, weights(model))
        assert t == 0 or not same(merged, fast)
        before = merged
    assert own.keys() == merged.keys()


@pytest.mark.parametrize("augmented", [False, True])
def test_a_rules_passes_have_the_transform_that_it_asks_for(augmented, monkeypatch):
    data, seen = toy_benchmark(1).train_stream[0].dataset, []
    shifted = data.replace_current_transform_group((lambda x: x + 100, None))
    monkeypatch.setattr(CoFiMA, "augmented", augmented)
    monkeypatch.setattr(CoFiMA, "merge", lambda self, task: seen.extend(task.batches()) or {})
    monkeypatch.setattr(CoFiMA, "observe", lambda self, task: None)
    model = toy_model()
    strategy = make_naive(model, adamw(model), MergePlugin(CoFiMA()))
    strategy.train(benchmark_from_datasets(train=[shifted]).train_stream)
    (x, *_), *_ = seen
    assert len(x) == (16 if augmented else 48)
    assert (x.mean() > 50) == augmented


@pytest.mark.parametrize("rule", [rule for rule in RULES if rule != "magmax"])
def test_a_growing_classifier_keeps_the_new_weights_of_new_classes(rule):
    benchmark = toy_benchmark(3, classes_per_experience=2)
    strategy, found, _ = make("adamw", RULES[rule](), Head())
    for t, experience in enumerate(benchmark.train_stream):
        strategy.eval(benchmark.test_stream[t])  # the head grows here, before it is trained
        strategy.train(experience)
        _, fast, merged = (end["head.classifier.weight"] for end in found[t])
        assert merged.shape == (2 * t + 2, 10)
        torch.testing.assert_close(merged[2 * t :], fast[2 * t :], rtol=1e-6, atol=1e-7)
        assert t == 0 or not torch.equal(merged[: 2 * t], fast[: 2 * t])


class Sampling(SupervisedPlugin):
    """A user's own way to sample weights in a strategy."""

    def before_forward(self, strategy, **kwargs):
        self.sample = strategy.optimizer.sampled_params()
        self.sample.__enter__()

    def before_update(self, strategy, **kwargs):
        self.sample.__exit__(None, None, None)


def test_with_covon_it_consolidates_or_leaves_that_to_covons_plugin(model):
    optimizer = make_covon(model.named_parameters())
    strategy = make_naive(model, optimizer, Sampling(), MergePlugin(RegMean()))
    strategy.train(toy_benchmark(2).train_stream)
    assert all("hess" not in state for state in optimizer.state.values())
    assert same(weights(model), dict(optimizer.prior(model.named_parameters()).mean))
    for kind, name in (("covon", "CoVONPlugin"), ("vcl", "VCLPlugin")):
        strategy = make_strategy(kind, toy_model(), plugins=[MergePlugin(RegMean())])
        with pytest.raises(ValueError, match=f"{name} and MergePlugin would both merge"):
            strategy.train(toy_benchmark(1).train_stream)


def test_with_covon_the_prior_stays_at_the_merged_weights():
    model, priors = toy_model(), []
    watch = Watch(before_training_epoch=lambda s: priors.append(dict(s.optimizer.prior().mean)))
    strategy = make_strategy("covon", model, merge=MagMax(), plugins=[watch], train_epochs=1)
    one, two = toy_benchmark(2).train_stream
    strategy.train(one)
    merged = weights(model)
    strategy.train(two)
    assert same(priors[1], merged)


@pytest.mark.parametrize("kind", ["ada-reg", "ewc-star"])
def test_anchors_are_the_merged_weights(kind):
    """Where MergePlugin comes first."""
    strategy = make_strategy(kind, toy_model())
    strategy.plugins.insert(0, MergePlugin(EMA(0.5)))
    strategy.train(toy_benchmark(2).train_stream)
    anchor = next(p.anchor for p in strategy.plugins if hasattr(p, "anchor"))
    assert same(dict(anchor.mean), weights(strategy.model))
    other = make_strategy(kind, toy_model(), plugins=[MergePlugin(EMA(0.5))])
    with pytest.raises(ValueError, match=r"MergePlugin must come before .*Plugin, which uses"):
        other.train(toy_benchmark(1).train_stream)


@pytest.mark.parametrize("merging", [lambda: MergePlugin(EMA(0.5)), CoVONPlugin])
@pytest.mark.parametrize(
    "plugin",
    [
        *(lambda: EWCPlugin(1.0), LwFPlugin, lambda: ICaRLPlugin(8)),
        *(lambda: avalanches.EWCPlugin(1.0), avalanches.LwFPlugin),
    ],
)
def test_plugins_that_read_the_merged_weights_come_later(merging, plugin):
    model = toy_model()
    optimizer = make_covon(model.named_parameters()) if merging is CoVONPlugin else sgd(model)
    stream = toy_benchmark(1).train_stream
    with pytest.raises(ValueError, match=r"Plugin must come before .*Plugin, which uses"):
        make_naive(model, optimizer, plugin(), merging()).train(stream)
    make_naive(model, optimizer, merging(), plugin()).train(stream)


def test_an_interrupted_task_continues():
    found, model = [], toy_model()

    def note(strategy):
        found.append((weights(model), len(strategy.optimizer.state.get(model[0].weight, {}))))
        if len(found) == 2:
            raise KeyboardInterrupt

    watch = Watch(before_training_epoch=note, after_training_epoch=note)
    strategy = make_strategy("covon", model, merge=MagMax(), plugins=[watch], train_epochs=1)
    (experience,) = toy_benchmark(1).train_stream
    with pytest.raises(KeyboardInterrupt):
        strategy.train(experience)
    strategy.train(experience)
    (ended, keys), (continued, same_keys) = found[1:3]
    assert same(continued, ended)
    assert same_keys == keys > 0


@pytest.mark.parametrize("plugin", [MergePlugin, SLCAPlugin])
def test_an_interrupted_task_is_merged_with_the_weights_before_it(plugin):
    model = SLCA(toy_model(), 4, 2) if plugin is SLCAPlugin else toy_model()
    name = next(name for name, _ in model.named_parameters())
    ends = []

    def stop_in_the_second_task(strategy):
        ends.append(weights(model)[name])
        if len(ends) == 3:
            raise KeyboardInterrupt

    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    watch = Watch(after_training_epoch=stop_in_the_second_task)
    strategy = make_naive(model, optimizer, plugin(EMA(0.4)), watch)
    first, second = toy_benchmark(2).train_stream
    start = weights(model)[name]
    strategy.train(first)
    before = weights(model)[name]
    rows = (before != start).any(1)  # EMA merges only those that were trained before
    with pytest.raises(KeyboardInterrupt):
        strategy.train(second)
    strategy.train(second)
    assert rows.sum() > 5
    torch.testing.assert_close(weights(model)[name][rows], before.lerp(ends[-1], 0.4)[rows])
