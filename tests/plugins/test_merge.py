"""MergePlugin in Avalanche's strategies, with any optimizer."""

import pytest
import torch
from avalanche.training import Naive
from avalanche.training.plugins import SupervisedPlugin
from avalanche.training.supervised import EWC
from interrupted_runs import run_with_stops
from small_recipes import OFTEN, small_recipe
from toy_merging import RULES, TASK_VECTORS
from toys import (
    Head,
    Watch,
    adamw,
    columns,
    make_covon,
    make_naive,
    make_strategy,
    same,
    sgd,
    toy_benchmark,
    toy_model,
    weights,
)

from covon_avalanche import MergePlugin
from covon_avalanche.experiment.run import run_strategy
from covon_avalanche.merging import EMA, MagMax, RegMean, Task


def make(rule, model, *, cls=Naive, optimizer=adamw, **options):
    """A strategy of Avalanche's that merges, and a list with each task's weights before and after
    the merge."""
    ends = []

    def note_fast(strategy):
        if strategy.clock.train_exp_epochs == strategy.train_epochs - 1:
            ends.append([weights(model)])

    watch = Watch(
        after_training_epoch=note_fast,
        after_training_exp=lambda strategy: ends[-1].append(weights(model)),
    )
    return make_naive(model, optimizer(model), MergePlugin(rule), watch, cls=cls, **options), ends


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(
    ("optimizer", "cls", "own"), [(adamw, Naive, {}), (sgd, EWC, {"ewc_lambda": 0.1})]
)
def test_each_task_ends_with_the_rules_weights(rule, optimizer, cls, own):
    """Those that the rule computes by hand from the weights before and after each task."""
    model, copied, by_hand = toy_model(), toy_model(), RULES[rule]()
    before = weights(model)
    strategy, ends = make(RULES[rule](), model, cls=cls, optimizer=optimizer, **own)
    for t, experience in enumerate(toy_benchmark().train_stream):
        strategy.train(experience)
        by_hand.begin_task(copied)
        fast, merged = ends[t]
        x, y = columns(experience)
        if by_hand.shuffled:
            order = torch.randperm(len(y), generator=torch.Generator().manual_seed(0))
            x, y = x[order], y[order]
        task = Task(copied, before, lambda x=x, y=y: zip(x.split(64), y.split(64), strict=True))
        copied.load_state_dict(fast)
        copied.load_state_dict({**fast, **by_hand.merge(task)})
        by_hand.observe(task)
        assert same(merged, weights(copied))
        assert same(merged, weights(model))
        assert t == 0 or not same(merged, fast)
        before = merged


@pytest.mark.parametrize("rule", [rule for rule in RULES if rule not in TASK_VECTORS])
def test_a_growing_classifier_keeps_the_new_weights_of_new_classes(rule):
    benchmark = toy_benchmark(3, classes_per_experience=2)
    strategy, ends = make(RULES[rule](), Head())
    for t, experience in enumerate(benchmark.train_stream):
        strategy.eval(benchmark.test_stream[t])  # the head grows here, before it is trained
        strategy.train(experience)
        fast, merged = (end["head.classifier.weight"] for end in ends[t])
        assert merged.shape == (2 * t + 2, 10)
        torch.testing.assert_close(merged[2 * t :], fast[2 * t :], rtol=1e-6, atol=1e-7)
        assert t == 0 or not torch.equal(merged[: 2 * t], fast[: 2 * t])


@pytest.mark.parametrize("start", ["pretrained", "last"])
def test_task_vectors_restart_training_where_they_say(start):
    """From the pretrained weights with a new optimizer state, from the last ones with the old."""
    model, rule, starts, first = toy_model(), MagMax(start=start), [], weights(toy_model())
    watch = Watch(
        before_training_epoch=lambda strategy: starts.append(
            (weights(model), len(strategy.optimizer.state))
        )
    )
    strategy = make_naive(model, adamw(model), MergePlugin(rule), watch, train_epochs=1)
    one, two = toy_benchmark(2).train_stream
    strategy.train(one)
    merged, last = weights(model), dict(rule.last)
    strategy.train(two)
    assert same(starts[0][0], first)
    assert same(starts[1][0], first if start == "pretrained" else last)
    assert not same(starts[1][0], merged)
    assert bool(starts[1][1]) == (start == "last")


class Sampling(SupervisedPlugin):
    """A user's own way to sample weights in a strategy."""

    def before_forward(self, strategy, **kwargs):
        self.sample = strategy.optimizer.sampled_params()
        self.sample.__enter__()

    def before_update(self, strategy, **kwargs):
        self.sample.__exit__(None, None, None)


def test_with_covon_it_consolidates_or_leaves_that_to_covons_plugin(model):
    optimizer = make_covon(model.named_parameters())
    make_naive(model, optimizer, Sampling(), MergePlugin(RegMean())).train(
        toy_benchmark(2).train_stream
    )
    assert all("hess" not in state for state in optimizer.state.values())
    assert same(weights(model), dict(optimizer.prior(model.named_parameters()).mean))
    for kind, name in (("covon", "CoVONPlugin"), ("vcl", "VCLPlugin")):
        strategy = make_strategy(kind, toy_model(), plugins=[MergePlugin(RegMean())])
        with pytest.raises(ValueError, match=f"{name} and MergePlugin would both merge"):
            strategy.train(toy_benchmark(1).train_stream)


@pytest.mark.parametrize("kind", ["ada-reg", "ewc-star"])
def test_anchors_are_the_merged_weights(kind):
    """The strategies put MergePlugin before their own plugin."""
    strategy = make_strategy(kind, toy_model(), plugins=[MergePlugin(EMA(0.5))])
    strategy.train(toy_benchmark(2).train_stream)
    anchor = next(p.anchor for p in strategy.plugins if hasattr(p, "anchor"))
    assert same(dict(anchor.mean), weights(strategy.model))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("rule", ["average", "fisher", *TASK_VECTORS])  # others: test_resumable
def test_a_run_stopped_within_tasks_resumes_bit_exactly(rule, tmp_path):
    own = {"kind": "finetune", "lr": 0.01, "merge": rule}
    recipe = small_recipe({"own": own}, epochs=1, train_mb_size=512)  # two tasks of 3 steps
    resumed = run_with_stops(recipe, "own", tmp_path, [1, 4], OFTEN)  # one stop in each
    assert resumed.resumed == 2
    assert resumed.outcome() == run_strategy(recipe, "own", 0).outcome()
