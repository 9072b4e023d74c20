"""Sampling, several samples, interruptions and prediction inside strategies."""

import pytest
import torch
from avalanche.evaluation.metrics import accuracy_metrics, loss_metrics
from avalanche.training.plugins import EvaluationPlugin, SupervisedPlugin
from avalanche.training.supervised import ER_ACE
from torch import nn
from toys import (
    QUIET,
    columns,
    make_covon,
    make_naive,
    make_strategy,
    make_vcl,
    plain_loop,
    same,
    toy_benchmark,
    toy_model,
    train_step,
    weights,
)

from covon_avalanche import CoVONPlugin, CoVONStrategy, VCLPlugin, VCLStrategy
from covon_avalanche.plugins.posterior import log_mean_probabilities


class Spy(SupervisedPlugin):
    """Counts forward passes and notes the weights during and after them."""

    def __init__(self):
        super().__init__()
        self.forwards, self.updates, self.inside, self.outside = 0, 0, [], []

    def before_forward(self, strategy, **kwargs):
        self.forwards += 1
        self.inside.append(strategy.model[2].bias.detach().clone())

    def before_update(self, strategy, **kwargs):
        self.updates += 1
        self.outside.append(strategy.model[2].bias.detach().clone())


def test_each_update_sees_its_own_sample_and_then_the_mean():
    spy, model = Spy(), toy_model()
    strategy = make_strategy("covon", model, plugins=[spy])
    before = weights(model)
    strategy.train(toy_benchmark(1).train_stream[0])
    assert torch.equal(spy.outside[0], before["2.bias"])
    assert not torch.equal(spy.inside[0], spy.outside[0])
    assert len({tuple(w.tolist()) for w in spy.inside}) == len(spy.inside)


@pytest.mark.parametrize("make", [make_covon, make_vcl])
def test_several_samples_per_step_equal_the_plain_loop(make):
    benchmark, model, spy = toy_benchmark(2), toy_model(), Spy()
    optimizer = make(model.named_parameters(), mc_samples=3)
    cls = CoVONStrategy if make is make_covon else VCLStrategy
    strategy = cls(model=model, optimizer=optimizer, plugins=[spy], **QUIET)
    strategy.train(benchmark.train_stream, shuffle=False)
    assert spy.forwards == 3 * spy.updates

    plain = toy_model()
    plain_loop(make(plain.named_parameters(), mc_samples=3), plain, benchmark.train_stream)
    assert same(weights(model), weights(plain))


def test_several_samples_in_a_strategy_with_its_own_loop_are_refused():
    model = toy_model()

    def er_ace(mc_samples):
        return ER_ACE(
            model=model,
            optimizer=make_covon(model.parameters(), mc_samples=mc_samples),
            criterion=nn.CrossEntropyLoss(),
            mem_size=20,
            batch_size_mem=8,
            plugins=[CoVONPlugin()],
            **QUIET,
        )

    with pytest.raises(ValueError, match=r"mc_samples=2 repeats .* but ER_ACE has its own"):
        er_ace(2).train(toy_benchmark(1).train_stream[0])
    er_ace(1).train(toy_benchmark(1).train_stream[0])  # one sample works there


@pytest.mark.parametrize(
    ("plugin", "message"),
    [
        (CoVONPlugin, "CoVONPlugin needs a CoVON optimizer, got AdamW"),
        (VCLPlugin, "VCLPlugin needs a BayesByBackprop optimizer, got AdamW"),
    ],
)
def test_the_wrong_optimizer_is_named(plugin, message):
    model = toy_model()
    strategy = make_naive(model, torch.optim.AdamW(model.parameters()), plugin())
    with pytest.raises(ValueError, match=message):
        strategy.train(toy_benchmark(1).train_stream[0])


class Interrupt(SupervisedPlugin):
    """Ctrl-C in the middle of a step."""

    def after_backward(self, strategy, **kwargs):
        if strategy.clock.train_iterations == 2:
            raise KeyboardInterrupt


@pytest.mark.parametrize("kind", ["covon", "vcl"])
def test_an_interrupted_strategy_has_the_mean_weights(kind):
    """Bit for bit those after the second step of an undisturbed run."""
    benchmark, runs = toy_benchmark(1), []
    model = toy_model()
    strategy = make_strategy(kind, model, plugins=[Interrupt()])
    with pytest.raises(KeyboardInterrupt):
        strategy.train(benchmark.train_stream[0], shuffle=False)
    runs.append(weights(model))
    plain = toy_model()
    optimizer = (make_covon if kind == "covon" else make_vcl)(plain.named_parameters())
    x, y = columns(benchmark.train_stream[0])
    for start in (0, 16):
        train_step(optimizer, plain, (x[start : start + 16], y[start : start + 16]))
    assert same(runs[0], weights(plain))


@pytest.mark.parametrize("kind", ["covon", "vcl"])
def test_an_interrupted_evaluation_leaves_the_mean_weights(kind):
    class Stop(SupervisedPlugin):
        def before_eval_forward(self, strategy, **kwargs):
            raise KeyboardInterrupt

    model, benchmark = toy_model(), toy_benchmark(1)
    strategy = make_strategy(kind, model, eval_samples=2, plugins=[Stop()])
    strategy.train(benchmark.train_stream[0])
    before = weights(model)
    with pytest.raises(KeyboardInterrupt):
        strategy.eval(benchmark.test_stream)
    assert same(weights(model), before)


def test_a_plugin_that_was_interrupted_restores_the_mean_before_anything_else():
    model = toy_model()
    strategy = make_naive(model, make_covon(model.parameters()), CoVONPlugin(), Interrupt())
    benchmark = toy_benchmark(1)
    with pytest.raises(KeyboardInterrupt):
        strategy.train(benchmark.train_stream[0])
    mean = strategy.optimizer.posterior(model.named_parameters()).mean
    strategy.eval(benchmark.test_stream)
    assert same(weights(model), dict(mean))


class TestPrediction:
    def test_log_mean_probabilities(self):
        outputs = [torch.randn(5, 3), torch.randn(5, 3)]
        expected = ((outputs[0].softmax(1) + outputs[1].softmax(1)) / 2).log()
        torch.testing.assert_close(log_mean_probabilities(outputs), expected)

    @pytest.mark.parametrize("kind", ["covon", "vcl"])
    def test_eval_uses_the_mean_of_the_samples(self, kind):
        """Against the average over the same samples, drawn by hand."""
        benchmark, model = toy_benchmark(1), toy_model()
        outputs = []

        class Keep(SupervisedPlugin):
            def after_eval_iteration(self, strategy, **kwargs):
                outputs.append((strategy.mb_output, strategy.loss.item()))

        strategy = make_strategy(kind, model, eval_samples=4, plugins=[Keep()])
        strategy.train(benchmark.train_stream[0])
        before = weights(model)
        noise = strategy.optimizer.param_groups[0]
        draws = noise["noise_draws"]
        strategy.eval(benchmark.test_stream)
        assert same(weights(model), before)
        noise["noise_draws"] = draws
        x, y = columns(benchmark.test_stream[0])
        by_hand = 0
        for _ in range(4):
            with strategy.optimizer.sampled_params(train=False):
                assert not same(weights(model), before)
                by_hand = by_hand + model(x).softmax(1).detach() / 4
        torch.testing.assert_close(outputs[0][0].exp(), by_hand, rtol=1e-4, atol=1e-6)
        nll = nn.functional.nll_loss(by_hand.log(), y).item()
        assert outputs[0][1] == pytest.approx(nll, rel=1e-4)

    def test_after_the_merge_samples_come_from_the_slow_posterior(self):
        strategy = make_strategy("covon", toy_model())
        strategy.train(toy_benchmark(1).train_stream[0])
        optimizer, p = strategy.optimizer, strategy.model[0].weight
        slow = optimizer.state[p]["prior_precision"]
        posterior = optimizer.posterior(strategy.model.named_parameters())
        assert torch.equal(posterior.precision["0.weight"], slow)

    def test_metrics_work_and_bad_numbers_are_refused(self):
        evaluator = EvaluationPlugin(accuracy_metrics(stream=True), loss_metrics(stream=True))
        strategy = make_strategy("covon", toy_model(), eval_samples=2, evaluator=evaluator)
        benchmark = toy_benchmark(1)
        strategy.train(benchmark.train_stream[0])
        metrics = strategy.eval(benchmark.test_stream)
        assert 0 <= metrics["Top1_Acc_Stream/eval_phase/test_stream/Task000"] <= 1
        with pytest.raises(ValueError, match="eval_samples must be an integer >= 0, got -1"):
            CoVONPlugin(eval_samples=-1)


def test_a_sample_abandoned_between_samples_is_forgotten():
    """With several samples a step; the next training starts afresh."""

    class Once(SupervisedPlugin):
        done = False

        def after_backward(self, strategy, **kwargs):
            if not Once.done:
                Once.done = True
                raise KeyboardInterrupt

    model = toy_model()
    optimizer = make_covon(model.named_parameters(), mc_samples=2)
    strategy = CoVONStrategy(model=model, optimizer=optimizer, plugins=[Once()], **QUIET)
    with optimizer.sampled_params():
        model(torch.randn(4, 8)).sum().backward()
    with pytest.raises(KeyboardInterrupt):
        strategy.train(toy_benchmark(1).train_stream[0])
    strategy.train(toy_benchmark(1).train_stream[0])
