"""Classifier alignment in Avalanche's training loop."""

import pytest
import torch
from toy_optimizers import same, weights
from toys import Head, Watch, columns, make_naive, make_strategy, sgd, toy_benchmark, toy_model

from covon_avalanche.merging.alignment import align_classifier, fit_gaussians
from covon_avalanche.plugins import ClassifierAlignmentPlugin, EWCPlugin


def test_after_each_domain_the_head_is_retrained_on_gaussians_of_its_inputs():
    model, plugin = toy_model(), ClassifierAlignmentPlugin(samples=8)
    starts, fast, aligned = [], [], []

    def before(strategy):
        fast.append((weights(model), torch.get_rng_state()))

    after = Watch(after_training_exp=lambda strategy: aligned.append(weights(model)))
    start = {"before_training_exp": lambda strategy: starts.append(weights(model))}
    first = Watch(after_training_exp=before, **start)
    make_naive(model, sgd(model), first, plugin, after).train(toy_benchmark().train_stream)
    assert same(starts[1], fast[0][0])  # the retrained layer is for predictions only
    assert same(starts[2], fast[1][0])
    copied = toy_model()
    for t, experience in enumerate(toy_benchmark().train_stream):
        copied.load_state_dict(fast[t][0])
        x, y = columns(experience)
        gaussians = fit_gaussians(copied[:2](x), y)
        for found, expected in zip(plugin.gaussians[t], gaussians, strict=True):
            torch.testing.assert_close(found, expected)
        if t > 0:  # one domain needs no alignment
            torch.set_rng_state(fast[t][1])
            align_classifier(copied, plugin.gaussians[: t + 1], samples=8)
        assert same(aligned[t], weights(copied))
    assert not same(aligned[-1], fast[-1][0])


def test_covon_predicts_with_the_retrained_layer_and_learns_from_its_prior():
    torch.manual_seed(0)
    model, starts, priors, means, ends = toy_model(), [], [], [], []
    first = Watch(before_training_exp=lambda strategy: starts.append(weights(model)))

    def after(strategy):
        priors.append(strategy.optimizer.prior(model.named_parameters()).mean)
        means.append(strategy.optimizer.posterior(model.named_parameters()).mean)
        ends.append(weights(model))

    aligned = ClassifierAlignmentPlugin(samples=8), Watch(after_training_exp=after)
    strategy = make_strategy("covon", model, plugins=[first, *aligned])
    strategy.train(toy_benchmark(3).train_stream)
    for t in (1, 2):
        assert same(means[t], ends[t])
        changed = {name for name, p in ends[t].items() if not torch.equal(p, priors[t][name])}
        assert changed == {"2.weight", "2.bias"}
    assert same(starts[2], priors[1])


def test_covon_continues_a_domain_that_was_interrupted():
    epochs, model = [], toy_model()

    def stop_in_the_third_domain(strategy):
        epochs.append(weights(model)["2.weight"])
        if len(epochs) == 5:
            raise KeyboardInterrupt

    watch = Watch(after_training_epoch=stop_in_the_third_domain)
    strategy = make_strategy("covon", model, plugins=[ClassifierAlignmentPlugin(samples=8), watch])
    *first, last = toy_benchmark(3).train_stream
    strategy.train(first)
    with pytest.raises(KeyboardInterrupt):
        strategy.train(last)
    starts = []
    watch.before_training_epoch = lambda strategy: starts.append(weights(model)["2.weight"])
    strategy.train(last)
    assert torch.equal(starts[0], epochs[4])


def test_a_classifier_that_grows_keeps_its_new_rows():
    torch.manual_seed(0)
    benchmark, model = toy_benchmark(3, classes_per_experience=2), Head()
    strategy, ends = make_naive(model, sgd(model), ClassifierAlignmentPlugin()), []
    for t, experience in enumerate(benchmark.train_stream):
        strategy.train(experience)
        ends.append(strategy.plugins[0]._trained)
        strategy.eval(benchmark.test_stream[min(t + 1, 2)])  # the head grows here
    assert [len(end["weight"]) for end in ends[1:]] == [4, 6]
    assert model.head.classifier.weight.isfinite().all()


def test_plugins_that_read_the_weights_come_earlier():
    model, alignment, ewc = toy_model(), ClassifierAlignmentPlugin(samples=8), EWCPlugin(1.0)
    stream = toy_benchmark(2).train_stream
    with pytest.raises(ValueError, match="AlignmentPlugin must come after EWCPlugin, because"):
        make_naive(model, sgd(model), alignment, ewc).train(stream)
    make_naive(model, sgd(model), ewc, alignment).train(stream)
