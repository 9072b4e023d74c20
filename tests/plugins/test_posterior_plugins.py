"""Sampling, several samples, prediction and task-free use inside strategies."""

import pytest
import torch
from avalanche.benchmarks.scenarios import split_online_stream
from avalanche.evaluation.metrics import accuracy_metrics, loss_metrics
from avalanche.training import Naive
from avalanche.training.plugins import EvaluationPlugin, SupervisedPlugin
from avalanche.training.supervised import ER_ACE
from torch import nn
from toys import (
    QUIET,
    make_covon,
    make_strategy,
    make_vcl,
    same,
    toy_benchmark,
    toy_model,
    train_step,
    weights,
)

from covon_avalanche import CoVONPlugin, CoVONStrategy, LossPlateau, VCLPlugin, VCLStrategy
from covon_avalanche.optim.noise import NoiseSource, fill_normal
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
    other = make(plain.named_parameters(), mc_samples=3)
    for experience in benchmark.train_stream:
        x = torch.stack([row[0] for row in experience.dataset])
        y = torch.tensor([row[1] for row in experience.dataset])
        for _ in range(2):
            for batch in zip(x.split(16), y.split(16), strict=True):
                train_step(other, plain, batch)
        other.consolidate()
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
    strategy = Naive(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters()),
        criterion=nn.CrossEntropyLoss(),
        plugins=[plugin()],
        **QUIET,
    )
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
    data = benchmark.train_stream[0].dataset
    for start in (0, 16):
        rows = [data[i] for i in range(start, start + 16)]
        x, y = torch.stack([r[0] for r in rows]), torch.tensor([r[1] for r in rows])
        train_step(optimizer, plain, (x, y))
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
    strategy = Naive(
        model=model,
        optimizer=make_covon(model.parameters()),
        criterion=nn.CrossEntropyLoss(),
        plugins=[CoVONPlugin(), Interrupt()],
        **QUIET,
    )
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
        """Against the same average computed by hand from the saved posterior."""
        benchmark, model = toy_benchmark(1), toy_model()
        outputs = []

        class Keep(SupervisedPlugin):
            def after_eval_iteration(self, strategy, **kwargs):
                outputs.append((strategy.mb_output, strategy.loss.item()))

        strategy = make_strategy(kind, model, eval_samples=4, plugins=[Keep()])
        strategy.train(benchmark.train_stream[0])
        before = weights(model)
        state = strategy.optimizer.generator.get_state()
        strategy.eval(benchmark.test_stream)
        assert same(weights(model), before)
        posterior = strategy.optimizer.posterior(model.named_parameters())
        strategy.optimizer.generator.set_state(state)
        data = benchmark.test_stream[0].dataset
        x, y = torch.stack([r[0] for r in data]), torch.tensor([r[1] for r in data])
        by_hand, source = 0, NoiseSource(strategy.optimizer.generator)
        for _ in range(4):
            sample, key = {}, source.key()
            for number, (name, mean) in enumerate(posterior.mean.items()):
                noise = torch.empty_like(mean)
                fill_normal(noise, key, number)
                sample[name] = mean + noise * posterior.precision[name].rsqrt()
            by_hand = by_hand + torch.func.functional_call(model, sample, x).softmax(1) / 4
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
        with pytest.raises(ValueError, match="eval_samples must be a whole number >= 0, got -1"):
            CoVONPlugin(eval_samples=-1)


class Consolidations(SupervisedPlugin):
    """Notes after how many updates a consolidation had happened."""

    def __init__(self):
        super().__init__()
        self.at, self.updates = [], 0

    def after_update(self, strategy, **kwargs):
        self.updates += 1
        if all("hess" not in state for state in strategy.optimizer.state.values()):
            self.at.append(self.updates)


class TestTaskFree:
    def test_consolidate_every_so_many_steps_and_not_at_the_end(self):
        spy = Consolidations()
        strategy = make_strategy("covon", toy_model(), consolidate_every=4, plugins=[spy])
        strategy.train(toy_benchmark(2, n=80).train_stream)  # 20 updates
        assert spy.at == [4, 8, 12, 16, 20]

    @pytest.mark.parametrize("size", [16, 20])
    def test_an_online_stream_that_tells_its_boundaries_merges_at_them(self, size):
        """Also where the parts divide the task and Avalanche marks no last one; diagnostics are
        noted there too."""
        stream = split_online_stream(
            toy_benchmark(2).train_stream, experience_size=size, access_task_boundaries=True
        )
        strategy = make_strategy("covon", toy_model(), train_epochs=1)
        plugin = next(p for p in strategy.plugins if isinstance(p, CoVONPlugin))
        merged, noted = [], []
        for experience in stream:
            plugin.diagnostics = {}
            strategy.train(experience)
            merged.append(all("hess" not in s for s in strategy.optimizer.state.values()))
            noted.append("all" in plugin.diagnostics)
        assert merged == noted == [False, False, True, False, False, True]

    def test_an_online_stream_that_does_not_needs_another_trigger(self):
        benchmark = toy_benchmark(1)
        stream = list(split_online_stream(benchmark.train_stream, experience_size=16))
        with pytest.raises(ValueError, match="does not give access to its task boundaries"):
            make_strategy("covon", toy_model()).train(stream[0])
        strategy = make_strategy("covon", toy_model(), consolidate_every=1, train_epochs=1)
        strategy.train(stream)
        assert strategy.optimizer.state[strategy.model[0].weight]["prior_precision"].min() > 1.0

    def test_a_plateau_of_the_loss_merges_once_per_task(self):
        """Two tasks, no boundaries told: two merges, the second after the second began."""
        spy = Consolidations()
        strategy = make_strategy(
            "covon",
            toy_model(),
            plateau=LossPlateau(window=10, tolerance=0.1, rise=0.5),
            train_epochs=40,
            plugins=[spy],
        )
        strategy.train(toy_benchmark(2).train_stream)
        assert spy.updates == 240
        assert len(spy.at) == 2
        assert spy.at[0] < 120 < spy.at[1]

    def test_bad_arguments(self):
        with pytest.raises(ValueError, match="consolidate_every must be a whole number"):
            CoVONPlugin(consolidate_every=0)
        with pytest.raises(ValueError, match="not both"):
            CoVONPlugin(consolidate_every=5, plateau=LossPlateau())
        for option, value in (("window", 0), ("tolerance", 1.0), ("rise", 0.0)):
            with pytest.raises(ValueError, match=f"{option} must be"):
                LossPlateau(**{option: value})


class TestLossPlateau:
    def test_a_loss_of_zero_is_a_plateau_too_and_ripples_near_it_are_no_rise(self):
        plateau = LossPlateau(window=5)
        losses = [0.0] * 20 + [0.01] * 20 + [0.0] * 20
        assert sum(plateau.update(loss) for loss in losses) == 1

    def test_speaks_when_the_fall_ends_and_again_only_after_a_rise(self):
        falling = [2.0 * 0.9**i + 0.1 for i in range(100)]
        plateau = LossPlateau(window=5, tolerance=0.02, rise=0.5)
        said = [i for i, loss in enumerate(falling * 2) if plateau.update(loss)]
        assert len(said) == 2
        assert 50 < said[0] < 100 < said[1] - 50

    def test_stays_silent_while_the_loss_falls_and_on_an_endless_plateau(self):
        plateau = LossPlateau(window=5, tolerance=0.02)
        assert not any(plateau.update(0.8**i) for i in range(50))
        assert not any(plateau.update(1.1**i) for i in range(50))  # rising is no plateau either
        plateau = LossPlateau(window=5)
        assert sum(plateau.update(1.0) for _ in range(500)) == 1


class Groups(SupervisedPlugin):
    """Notes a setting of the optimizer at the end of each experience, after the merge."""

    def __init__(self, key):
        super().__init__()
        self.key, self.seen = key, []

    def after_training_exp(self, strategy, **kwargs):
        self.seen.append(strategy.optimizer.param_groups[0][self.key])


def test_gamma_of_the_plugin_overrules_the_optimizers_and_the_schedule_both():
    for schedule, expected in ((None, [0.25] * 3), ([{}, {"gamma": 0.5}], [0.25, 0.5, 0.5])):
        spy = Groups("gamma")
        strategy = make_strategy("covon", toy_model(), gamma=0.25, schedule=schedule, plugins=[spy])
        strategy.train(toy_benchmark(3).train_stream)
        assert spy.seen == expected


def test_in_an_online_stream_a_schedule_counts_tasks_not_parts():
    spy = Groups("gamma")
    stream = split_online_stream(
        toy_benchmark(2).train_stream, experience_size=24, access_task_boundaries=True
    )
    schedule = [{"gamma": 0.5}, {"gamma": 0.3}]
    strategy = make_strategy("covon", toy_model(), gamma=0.8, schedule=schedule, plugins=[spy])
    strategy.train(stream)
    assert spy.seen == [0.5, 0.5, 0.3, 0.3]


def test_ess_follows_the_number_of_examples_of_each_task():
    """Also where a task comes in parts; the schedule may overrule it."""
    streams = [toy_benchmark(1, n=n).train_stream for n in (40, 48)]
    spy = Groups("ess")
    strategy = make_strategy(
        "covon",
        toy_model(),
        ess_per_example=3.0,
        schedule=[{}, {}, {"ess": 7.0}],
        plugins=[spy],
    )
    for stream in (*streams, *streams):
        strategy.train(stream)
    assert spy.seen == [120.0, 144.0, 7.0, 144.0]
    spy.seen = []
    parts = split_online_stream(streams[1], experience_size=24, access_task_boundaries=True)
    strategy = make_strategy("covon", toy_model(), ess_per_example=3.0, plugins=[spy])
    strategy.train(parts)
    assert spy.seen == [144.0, 144.0]
    with pytest.raises(ValueError, match="ess_per_example must be > 0 and finite, got -1"):
        CoVONPlugin(ess_per_example=-1)
    with pytest.raises(ValueError, match="ess_per_example follows the sizes of tasks"):
        CoVONPlugin(ess_per_example=1.0, consolidate_every=10)


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
