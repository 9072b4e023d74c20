"""MergePlugin in Avalanche's strategies, with any optimizer."""

import copy

import pytest
import torch
from avalanche.training import Naive
from avalanche.training.plugins import SupervisedPlugin
from avalanche.training.supervised import EWC
from small_recipes import OFTEN, small_recipe
from torch import nn
from toys import (
    Head,
    columns,
    make_covon,
    make_naive,
    make_strategy,
    same,
    toy_benchmark,
    toy_model,
    toy_parts,
    weights,
)

from covon_avalanche import MergePlugin
from covon_avalanche.experiment.run import run_in_folder, run_strategy
from covon_avalanche.merging import EMA, Average, Eq8, FisherMerge, RegMean, Task

RULES = {"regmean": RegMean, "average": Average, "ema": lambda: EMA(0.5), "fisher": FisherMerge}


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def make(rule, model, *, cls=Naive, optimizer=adamw, plugins=(), **options):
    """A strategy of Avalanche's that merges."""
    return make_naive(model, optimizer(model), MergePlugin(rule), *plugins, cls=cls, **options)


class Ends(SupervisedPlugin):
    """Notes the weights before the merge, and after it."""

    def __init__(self):
        super().__init__()
        self.fast, self.merged = [], []

    def after_training_epoch(self, strategy, **kwargs):
        if strategy.clock.train_exp_epochs == strategy.train_epochs - 1:
            self.fast.append(weights(strategy.model))

    def after_training_exp(self, strategy, **kwargs):
        self.merged.append(weights(strategy.model))


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("optimizer", [adamw, sgd])
@pytest.mark.parametrize(("cls", "own"), [(Naive, {}), (EWC, {"ewc_lambda": 0.1})])
def test_each_task_ends_with_the_rules_weights(rule, optimizer, cls, own):
    """Those that the rule computes by hand from the weights before and after each task."""
    benchmark, model, ends, by_hand = toy_benchmark(), toy_model(), Ends(), RULES[rule]()
    before = weights(model)
    strategy = make(RULES[rule](), model, cls=cls, optimizer=optimizer, plugins=[ends], **own)
    copied = copy.deepcopy(model)
    for t, experience in enumerate(benchmark.train_stream):
        strategy.train(experience)
        x, y = columns(experience)
        task = Task(copied, before, lambda x=x, y=y: zip(x.split(64), y.split(64), strict=True))
        copied.load_state_dict(ends.fast[t])
        copied.load_state_dict({**ends.fast[t], **by_hand.merge(task)})
        by_hand.observe(task)
        assert same(ends.merged[t], weights(copied))
        assert same(ends.merged[t], weights(model))
        assert t == 0 or not same(ends.merged[t], ends.fast[t])
        before = ends.merged[t]


def test_without_the_plugin_more_is_forgotten():
    benchmark, accuracies = toy_benchmark(3, n=96), []
    x, y = columns(benchmark.train_stream[0])
    for plugins in ([MergePlugin(RegMean())], []):
        model = toy_model()
        torch.manual_seed(0)
        make_naive(model, adamw(model), *plugins, train_epochs=4).train(benchmark.train_stream)
        accuracies.append((model(x).argmax(1) == y).float().mean().item())
    assert accuracies[0] > accuracies[1] + 0.1


@pytest.mark.parametrize("rule", RULES)
def test_a_growing_classifier_keeps_the_new_weights_of_new_classes(rule):
    benchmark, model, ends = toy_benchmark(3, classes_per_experience=2), Head(), Ends()
    strategy = make(RULES[rule](), model, plugins=[ends])
    for t, experience in enumerate(benchmark.train_stream):
        strategy.eval(benchmark.test_stream[t])  # the head grows here, before it is trained
        strategy.train(experience)
        fast, merged = (w[t]["head.classifier.weight"] for w in (ends.fast, ends.merged))
        assert merged.shape == (2 * t + 2, 10)
        torch.testing.assert_close(merged[2 * t :], fast[2 * t :], rtol=1e-6, atol=1e-7)
        assert t == 0 or not torch.equal(merged[: 2 * t], fast[: 2 * t])


def test_batch_norm_is_re_estimated_at_the_merged_weights():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 10), nn.BatchNorm1d(10), nn.ReLU(), nn.Linear(10, 4))
    benchmark = toy_benchmark(2)
    make(Average(), model).train(benchmark.train_stream)
    x, _ = columns(benchmark.train_stream[1])
    with torch.no_grad():
        mean = model[0](x).mean(0)
    torch.testing.assert_close(model[1].running_mean, mean, rtol=1e-4, atol=1e-5)


def test_parts_of_an_online_stream_are_merged_once_a_task():
    rule, counts = Average(), []
    strategy = make(rule, toy_model(), train_epochs=1)
    for experience in toy_parts(2):
        strategy.train(experience)
        counts.append(rule.tasks["0.bias"].max().item() if rule.tasks else 0)
    assert counts == [0, 0, 1, 1, 1, 2]


class Sampling(SupervisedPlugin):
    """A user's own way to sample weights in a strategy."""

    def before_forward(self, strategy, **kwargs):
        self.sample = strategy.optimizer.sampled_params()
        self.sample.__enter__()

    def before_update(self, strategy, **kwargs):
        self.sample.__exit__(None, None, None)


def test_with_covon_it_consolidates_or_leaves_that_to_covons_plugin():
    model = toy_model()
    optimizer = make_covon(model.named_parameters())
    strategy = make_naive(model, optimizer, Sampling(), MergePlugin(RegMean()))
    strategy.train(toy_benchmark(2).train_stream)
    assert all("hess" not in state for state in strategy.optimizer.state.values())
    assert same(weights(model), dict(strategy.optimizer.prior(model.named_parameters()).mean))
    for kind, name in (("covon", "CoVONPlugin"), ("vcl", "VCLPlugin")):
        strategy = make_strategy(kind, toy_model(), plugins=[MergePlugin(RegMean())])
        with pytest.raises(ValueError, match=f"{name} and MergePlugin would both merge"):
            strategy.train(toy_benchmark(1).train_stream)


def test_a_rule_that_does_not_fit_the_optimizer_is_refused_before_training():
    strategy = make(Eq8(), toy_model())
    before = weights(strategy.model)
    with pytest.raises(ValueError, match=r"Eq8 .* needs a CoVON optimizer, got AdamW"):
        strategy.train(toy_benchmark(1).train_stream)
    assert same(weights(strategy.model), before)


@pytest.mark.parametrize("kind", ["ada-reg", "ewc-star"])
def test_anchors_are_the_merged_weights(kind):
    """The strategies put MergePlugin before their own plugin."""
    strategy = make_strategy(kind, toy_model(), plugins=[MergePlugin(EMA(0.5))])
    strategy.train(toy_benchmark(2).train_stream)
    anchor = next(p.anchor for p in strategy.plugins if hasattr(p, "anchor"))
    assert same(dict(anchor.mean), weights(strategy.model))


class Killed(BaseException):
    """In place of a signal."""


class Merging(Naive):
    """For a recipe: merges, and may be killed in the middle of the second task."""

    killed = True

    def __init__(self, *, rule, plugins=(), **options):
        super().__init__(plugins=[MergePlugin(RULES[rule]()), *plugins], **options)

    def optimizer_step(self):
        super().optimizer_step()
        if Merging.killed and self.clock.train_iterations == 4:
            raise Killed


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("rule", ["regmean", "average", "fisher"])
def test_a_run_killed_in_the_middle_of_a_task_resumes_bit_by_bit(rule, tmp_path, monkeypatch):
    own = {"kind": "custom", "lr": 0.01, "implementation": f"{__name__}:Merging"}
    own["arguments"] = {"rule": rule}
    recipe = small_recipe({"own": own}, epochs=1, train_mb_size=512)  # two tasks of 3 steps
    with pytest.raises(Killed):
        run_in_folder(recipe, "own", 0, tmp_path, OFTEN)
    monkeypatch.setattr(Merging, "killed", False)
    resumed = run_in_folder(recipe, "own", 0, tmp_path)
    assert resumed.resumed == 1
    assert resumed.outcome() == run_strategy(recipe, "own", 0).outcome()
