"""Sampling, several samples, interruptions and prediction inside strategies."""

import pytest
import torch
from avalanche.benchmarks import benchmark_from_datasets
from avalanche.benchmarks.utils import AvalancheDataset
from avalanche.training import Naive
from avalanche.training.supervised import ER_ACE
from torch import nn
from torch.utils.data import TensorDataset
from toy_optimizers import make_covon, same, train_step, weights
from toys import MAKE, Watch, columns, make_naive, make_strategy, toy_benchmark, toy_model

from covon_avalanche import CoVONPlugin, CoVONStrategy

both = pytest.mark.parametrize("kind", MAKE)


@both
@pytest.mark.parametrize("mc_samples", [1, 3])
def test_a_strategy_does_exactly_what_the_plain_loop_does(kind, mc_samples):
    """Three experiences, no shuffling: the same weights and posteriors, bit by bit."""
    benchmark, model, plain, calls = toy_benchmark(), toy_model(), toy_model(), []
    watch = Watch(
        before_forward=lambda s: calls.append("forward"),
        before_update=lambda s: calls.append("update"),
    )
    optimizer = MAKE[kind](model.named_parameters(), mc_samples=mc_samples)
    strategy = make_strategy(kind, model, optimizer=optimizer, plugins=[watch])
    strategy.train(benchmark.train_stream, shuffle=False)
    assert calls.count("forward") == mc_samples * calls.count("update")
    own = MAKE[kind](plain.named_parameters(), mc_samples=mc_samples)
    for experience in benchmark.train_stream:
        batches = zip(*(part.split(16) for part in columns(experience)), strict=True)
        for batch in [*batches] * 2:
            train_step(own, plain, batch)
        own.consolidate()
    assert same(weights(model), weights(plain))
    posterior = optimizer.posterior(model.named_parameters())
    assert same(posterior.precision, own.posterior().precision)


@both
@pytest.mark.parametrize("by_method", [False, True])
def test_a_new_optimizer_for_the_next_task_is_refused_unless_it_has_a_prior(kind, by_method):
    benchmark, model = toy_benchmark(2), toy_model()
    strategy = make_strategy(kind, model)
    strategy.train(benchmark.train_stream[0])
    prior = strategy.optimizer.posterior()

    def renew(**options):
        strategy.optimizer = MAKE[kind](model.named_parameters(), **options)

    if by_method:
        strategy.make_optimizer = lambda **kwargs: renew()
    else:
        renew()
    with pytest.raises(ValueError, match="without the posterior of its earlier tasks"):
        strategy.train(benchmark.train_stream[1])
    if not by_method:
        renew(prior=prior)
        strategy.train(benchmark.train_stream[1])


def test_several_samples_in_a_strategy_with_its_own_loop_are_refused():
    model, experience = toy_model(), toy_benchmark(1).train_stream[0]

    def er_ace(mc_samples):
        optimizer = make_covon(model.parameters(), mc_samples=mc_samples)
        options = {"mem_size": 20, "batch_size_mem": 8}
        return make_naive(model, optimizer, CoVONPlugin(), cls=ER_ACE, **options)

    with pytest.raises(ValueError, match=r"mc_samples=2 repeats .* but ER_ACE has its own"):
        er_ace(2).train(experience)
    er_ace(1).train(experience)  # one sample works there


def ctrl_c_after_backward(number):
    passes = []

    def interrupt(strategy):
        passes.append(1)
        if len(passes) == number:
            raise KeyboardInterrupt

    return Watch(after_backward=interrupt)


def test_an_interrupted_ready_made_strategy_has_the_mean_weights():
    """Bit for bit those after the second step of an undisturbed run."""
    experience, model, plain = toy_benchmark(1).train_stream[0], toy_model(), toy_model()
    optimizer = make_covon(model.named_parameters())
    strategy = make_naive(model, optimizer, ctrl_c_after_backward(3), cls=CoVONStrategy)
    with pytest.raises(KeyboardInterrupt):
        strategy.train(experience, shuffle=False)
    optimizer = make_covon(plain.named_parameters())
    x, y = columns(experience)
    for start in (0, 16):
        train_step(optimizer, plain, (x[start : start + 16], y[start : start + 16]))
    assert same(weights(model), weights(plain))


@pytest.mark.parametrize("kind", ["covon", "vcl", "ready-made"])
def test_an_interrupted_evaluation_with_samples(kind):
    """The ready-made strategy restores the mean at once; with a plugin the next training does."""

    def interrupt(strategy):
        raise KeyboardInterrupt

    model, benchmark, watch = toy_model(), toy_benchmark(1), Watch(before_eval_forward=interrupt)
    if kind == "ready-made":
        optimizer, options = make_covon(model.named_parameters()), {"eval_samples": 2}
        strategy = make_naive(model, optimizer, watch, cls=CoVONStrategy, **options)
    else:
        strategy = make_strategy(kind, model, eval_samples=2, plugins=[watch])
    strategy.train(benchmark.train_stream[0])
    before = weights(model)
    with pytest.raises(KeyboardInterrupt):
        strategy.eval(benchmark.test_stream)
    assert same(weights(model), before) == (kind == "ready-made")
    strategy.train(benchmark.train_stream[0])


@pytest.mark.parametrize(("mc_samples", "backward"), [(1, 3), (2, 4)])
def test_a_plugin_that_was_interrupted_restores_the_mean_before_anything_else(mc_samples, backward):
    """In any strategy; also between the samples of a step. The next training starts afresh."""
    model, benchmark = toy_model(), toy_benchmark(1)
    optimizer = make_covon(model.parameters(), mc_samples=mc_samples)
    strategy = make_naive(model, optimizer, CoVONPlugin(), ctrl_c_after_backward(backward))
    with pytest.raises(KeyboardInterrupt):
        strategy.train(benchmark.train_stream[0])
    mean = dict(optimizer.posterior(model.named_parameters()).mean)
    assert not same(weights(model), mean)
    strategy.eval(benchmark.test_stream)
    assert same(weights(model), mean)
    seen = []
    strategy.plugins.append(Watch(before_forward=lambda s: seen.append(weights(model))))
    strategy.train(benchmark.train_stream[0])
    assert not same(seen[0], mean)  # the first step is by a sample, too


@both
@pytest.mark.parametrize("size", [48, 16])
def test_eval_uses_the_mean_of_the_samples(kind, size):
    """Against the average over the same samples, drawn by hand; all batches have the same."""
    benchmark, model, outputs = toy_benchmark(1), toy_model(), []
    watch = Watch(after_eval_iteration=lambda s: outputs.append((s.mb_output, s.loss.item())))
    options = {"eval_samples": 4, "eval_mb_size": size, "plugins": [watch]}
    strategy = make_strategy(kind, model, **options)
    strategy.train(benchmark.train_stream[0])
    before, noise = weights(model), strategy.optimizer.param_groups[0]
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
    output = torch.cat([output for output, _ in outputs])
    torch.testing.assert_close(output.exp(), by_hand, rtol=1e-4, atol=1e-6)
    nll = nn.functional.nll_loss(by_hand.log(), y).item()
    assert sum(loss for _, loss in outputs) / len(outputs) == pytest.approx(nll, rel=1e-4)


def train_and_evaluate(model, x, y, criterion, **options):
    """The output for all examples, with samples that are the mean."""
    data, outputs = AvalancheDataset([TensorDataset(x, y, torch.zeros(len(y)).long())]), []
    watch = Watch(after_eval_iteration=lambda s: outputs.append(s.mb_output))
    plugin = CoVONPlugin(eval_samples=2, eval_temperature=1e-12)
    strategy = make_naive(model, make_covon(model.named_parameters()), plugin, watch)
    strategy._criterion = criterion
    stream = benchmark_from_datasets(train=[data]).train_stream
    strategy.train(stream)
    strategy.eval(stream)
    return outputs[0]


def test_samples_of_an_image_segmentation_are_averaged_by_pixel():
    x, model = torch.randn(16, 1, 5, 6), nn.Conv2d(1, 3, 3, padding=1)
    output = train_and_evaluate(model, x, (x[:, 0] > 0).long(), nn.CrossEntropyLoss())
    torch.testing.assert_close(output, model(x).detach().log_softmax(1), rtol=1e-3, atol=1e-3)


def test_samples_of_a_regression_are_refused_and_those_with_soft_labels_averaged():
    x, model = torch.randn(16, 8), toy_model()
    for y in (torch.randn(16, 4), torch.randn(16)):
        with pytest.raises(ValueError, match="averages class probabilities, which outputs"):
            train_and_evaluate(model, x, y, lambda output, y: (output.sum() - y.sum()).square())
    for more in ((), (1,)):  # a binary classifier of a single output
        single, y = nn.Sequential(nn.Linear(8, 1), nn.Flatten()), torch.randint(2, (16, *more))
        with pytest.raises(ValueError, match=r"which outputs of shape \(16, 1\) with"):
            train_and_evaluate(single, x, y, lambda output, y: output.mean())
    soft = torch.rand(16, 4).softmax(1)
    output = train_and_evaluate(model, x, soft, nn.CrossEntropyLoss())
    torch.testing.assert_close(output, model(x).detach().log_softmax(1), rtol=1e-3, atol=1e-3)


@both
def test_a_compiled_model_equals_a_plain_one(kind):
    found = []
    for wrap in (lambda m: m, lambda m: torch.compile(m, backend="eager")):
        model = toy_model()
        torch.manual_seed(0)  # of the order of the data
        make_strategy(kind, wrap(model)).train(toy_benchmark(2).train_stream)
        found.append(weights(model))
    assert same(*found)


class OwnSteps(Naive):
    """Updates the weights itself, past the optimizer, as Avalanche's LaMAML does."""

    def training_epoch(self, **kwargs):
        self._before_training_iteration(**kwargs)
        self._after_training_iteration(**kwargs)


@both
def test_a_training_loop_that_never_samples_is_refused(kind):
    benchmark, strategy = toy_benchmark(2), make_strategy(kind, toy_model(), cls=OwnSteps)
    strategy.eval(benchmark.test_stream)
    for experience in benchmark.train_stream:
        with pytest.raises(ValueError, match=r"training loop of OwnSteps does not use samples of"):
            strategy.train(experience)
