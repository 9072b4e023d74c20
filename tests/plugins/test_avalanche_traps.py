"""What Avalanche does to optimizers, and that the plugins' state survives it."""

import copy

import pytest
import torch
from avalanche.training.plugins import LRSchedulerPlugin, SupervisedPlugin
from toys import (
    QUIET,
    Head,
    ToDouble,
    make_covon,
    make_naive,
    make_strategy,
    make_vcl,
    plain_loop,
    same,
    toy_benchmark,
    toy_model,
    weights,
)

from covon_avalanche import CoVONPlugin, CoVONStrategy, DiagGaussian, VCLStrategy


def posterior_strategy(kind, model, optimizer, **options):
    cls = CoVONStrategy if kind == "covon" else VCLStrategy
    return cls(model=model, optimizer=optimizer, **{**QUIET, **options})


MAKE = {"covon": make_covon, "vcl": make_vcl}
both = pytest.mark.parametrize("kind", MAKE)


@both
def test_a_strategy_does_exactly_what_the_plain_loop_does(kind):
    """Three experiences, no shuffling: the same weights and posteriors, bit by bit."""
    benchmark = toy_benchmark()
    model = toy_model()
    strategy = posterior_strategy(kind, model, MAKE[kind](model.named_parameters()))
    for experience in benchmark.train_stream:
        strategy.train(experience, shuffle=False)

    plain = toy_model()
    optimizer = MAKE[kind](plain.named_parameters())
    plain_loop(optimizer, plain, benchmark.train_stream)
    assert same(weights(model), weights(plain))
    assert same(
        strategy.optimizer.posterior(model.named_parameters()).precision,
        optimizer.posterior().precision,
    )


@both
def test_trap_1_state_is_wiped_at_the_first_train(kind):
    """A given prior, and the state of an optimizer that was loaded, are there all the same."""
    benchmark, model = toy_benchmark(1), toy_model()
    prior = DiagGaussian(
        weights(model), {n: torch.full_like(p, 1e9) for n, p in model.named_parameters()}
    )
    before = weights(model)
    optimizer = MAKE[kind](model.named_parameters(), prior=prior, lr=1e-3)
    posterior_strategy(kind, model, optimizer).train(benchmark.train_stream[0])
    precision = optimizer.posterior().precision
    for name, p in model.named_parameters():
        assert (precision[name] > 0.9e9).all()
        if kind == "covon":  # so strong a prior holds the weights
            torch.testing.assert_close(p.detach(), before[name], rtol=0, atol=1e-4)


@both
def test_trap_2_frozen_parameters_are_put_into_group_0(kind):
    model = toy_model()
    model[0].requires_grad_(False)
    seen = []
    model[0].register_forward_hook(lambda layer, *_: seen.append(layer.weight.detach().clone()))
    optimizer = MAKE[kind](model[2].parameters())
    before = weights(model)
    posterior_strategy(kind, model, optimizer).train(toy_benchmark(2).train_stream)
    assert any(model[0].weight is p for p in optimizer.param_groups[0]["params"])  # the trap
    assert seen
    assert all(torch.equal(w, before["0.weight"]) for w in seen)
    assert torch.equal(model[0].weight, before["0.weight"])
    assert not torch.equal(model[2].weight, before["2.weight"])
    assert not optimizer.state.get(model[0].weight)


@both
def test_the_optimizers_names_follow_avalanches_changes(kind):
    """Parameters that it adds or replaces have their names in the posterior."""
    model = Head()
    optimizer = MAKE[kind](model.head.named_parameters())  # the body is added by Avalanche
    strategy = posterior_strategy(kind, model, optimizer)
    strategy.train(toy_benchmark(2, classes_per_experience=2).train_stream)
    assert set(optimizer.posterior().mean) == {n for n, _ in model.named_parameters()}


@both
def test_a_model_that_grows_in_an_evaluation_is_sampled_and_known(kind):
    benchmark, model = toy_benchmark(2, classes_per_experience=2), Head()
    optimizer = MAKE[kind](model.named_parameters())
    strategy = posterior_strategy(kind, model, optimizer, eval_samples=2)
    strategy.train(benchmark.train_stream[0])
    old = optimizer.posterior().precision["head.classifier.weight"]
    strategy.eval(benchmark.test_stream)  # the second experience has new classes
    posterior = optimizer.posterior(model.named_parameters())
    now = posterior.precision["head.classifier.weight"]
    assert now.shape == (4, 10)
    torch.testing.assert_close(now[:2], old)
    with optimizer.sampled_params(train=False):
        moved = model.head.classifier.weight - posterior.mean["head.classifier.weight"]
    assert (moved[:2] != 0).all()
    strategy.train(benchmark.train_stream[1])


@both
def test_a_model_that_grows_in_an_evaluation_before_any_training_keeps_its_prior(kind):
    benchmark, model = toy_benchmark(2, classes_per_experience=2), Head()
    prior = DiagGaussian(
        weights(model), {n: torch.full_like(p, 7.0) for n, p in model.named_parameters()}
    )
    optimizer = MAKE[kind](model.named_parameters(), prior=prior)
    strategy = posterior_strategy(kind, model, optimizer)
    strategy.eval(benchmark.test_stream)
    name = "head.classifier.weight"
    assert optimizer.prior().precision[name].shape == (4, 10)
    assert (optimizer.prior().precision[name][:2] == 7).all()
    strategy.train(benchmark.train_stream[0])
    assert set(optimizer.posterior().mean) == {n for n, _ in model.named_parameters()}


@both
def test_trap_3_the_model_moves_after_the_optimizer_is_made(kind):
    """No second device here: a change of dtype takes the same path as .to(device). A prior
    given for the old one follows."""
    model = toy_model()
    prior = DiagGaussian(
        weights(model), {n: torch.full_like(p, 5.0) for n, p in model.named_parameters()}
    )
    optimizer = MAKE[kind](model.named_parameters(), prior=prior)
    model.double()
    strategy = posterior_strategy(kind, model, optimizer, plugins=[ToDouble()])
    strategy.train(toy_benchmark(1).train_stream[0])
    for state in optimizer.state.values():
        assert all(v.dtype == torch.float64 for v in state.values() if torch.is_tensor(v))


class Recorder(SupervisedPlugin):
    """Copies the optimizer's state of the head right before each experience is trained."""

    def __init__(self):
        super().__init__()
        self.states = []

    def before_training_exp(self, strategy, **kwargs):
        weight = strategy.model.head.classifier.weight
        self.states.append(copy.deepcopy(strategy.optimizer.state.get(weight, {})))


@both
@pytest.mark.parametrize("evaluate_first", [False, True], ids=["train", "eval-first"])
def test_trap_4_a_growing_classifier_keeps_the_prior_of_its_old_part(kind, evaluate_first):
    """Also if an evaluation on new classes makes it grow before the optimizer hears of it."""
    benchmark, model = toy_benchmark(3, classes_per_experience=2), Head()
    optimizer, recorder = MAKE[kind](model.named_parameters()), Recorder()
    strategy = posterior_strategy(kind, model, optimizer, plugins=[recorder])
    slow = []
    for experience in benchmark.train_stream:
        if evaluate_first:
            strategy.eval(benchmark.test_stream[experience.current_experience])
        strategy.train(experience)
        posterior = optimizer.posterior(model.named_parameters())
        slow.append(
            (
                posterior.mean["head.classifier.weight"],
                posterior.precision["head.classifier.weight"],
            )
        )
    assert not recorder.states[0]
    for (mean, precision), state in zip(slow, recorder.states[1:], strict=False):
        old = len(mean)
        assert state["prior_mean"].shape == (old + 2, 10)
        assert torch.equal(state["prior_mean"][:old], mean)
        torch.testing.assert_close(state["prior_precision"][:old], precision)
        assert (state["prior_mean"][old:] == 0).all()
        torch.testing.assert_close(state["prior_precision"][old:], torch.full((2, 10), 100 * 0.01))
    assert model.head.classifier.weight.shape == (6, 10)


def test_trap_4_also_for_anchors():
    benchmark = toy_benchmark(3, classes_per_experience=2)
    for kind in ("ada-reg", "ewc-star"):
        model = Head()
        strategy = make_strategy(kind, model)
        plugin = strategy.plugins[0]
        for experience in benchmark.train_stream:
            before = plugin.anchor
            strategy.train(experience)
            assert plugin.anchor.mean["head.classifier.weight"].shape == (
                2 * experience.current_experience + 2,
                10,
            )
            if before is not None:  # accumulated, never lost
                old = before.precision["head.classifier.weight"]
                now = plugin.anchor.precision["head.classifier.weight"][: len(old)]
                assert (now >= old).all()


class LearningRates(SupervisedPlugin):
    """Notes the learning rate of each iteration."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def after_update(self, strategy, **kwargs):
        self.seen.append(strategy.optimizer.param_groups[0]["lr"])


@pytest.mark.parametrize("kind", ["covon", "vcl", "ada-reg", "ewc-star"])
def test_trap_5_the_lr_scheduler_is_reset_to_the_lr_it_was_made_with(kind):
    """A schedule's learning rate holds, and the scheduler decays from it in each experience."""
    model, rates = toy_model(), LearningRates()
    strategy = make_strategy(kind, model, schedule=[{"lr": 0.01}, {"lr": 0.004}, {}])
    scheduler = torch.optim.lr_scheduler.LambdaLR(strategy.optimizer, lambda epoch: 0.5**epoch)
    strategy.plugins += [LRSchedulerPlugin(scheduler), rates]
    strategy.train(toy_benchmark(3).train_stream)
    expected = [0.01] * 3 + [0.005] * 3 + ([0.004] * 3 + [0.002] * 3) * 2
    assert rates.seen == pytest.approx(expected)


def test_the_plugin_goes_into_any_avalanche_strategy():
    """Two changed lines: optimizer and plugin. The same as the ready strategy."""
    benchmark, runs = toy_benchmark(), []
    for ready in (True, False):
        model = toy_model()
        optimizer = make_covon(model.parameters())
        if ready:
            strategy = CoVONStrategy(model=model, optimizer=optimizer, **QUIET)
        else:
            strategy = make_naive(model, optimizer, CoVONPlugin())
        strategy.train(benchmark.train_stream, shuffle=False)
        runs.append(weights(model))
    assert same(*runs)
