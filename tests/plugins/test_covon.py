"""CoVON's own settings in a strategy: when and how it merges, with which hyperparameters."""

import pytest
import torch
from avalanche.training import Cumulative, JointTraining
from torch import nn
from toys import Watch, columns, make_naive, make_strategy, toy_benchmark, toy_model

from covon_avalanche import CoVON, CoVONPlugin
from covon_avalanche.merging import Average


def test_consolidate_every_so_many_steps_and_not_at_the_end():
    seen = []

    def note(strategy):
        states = strategy.optimizer.state.values()
        seen.append(all("hess" not in state for state in states))

    rule, watch = Average(), Watch(after_update=note)
    options = {"merge": rule, "consolidate_every": 4, "plugins": [watch]}
    make_strategy("covon", toy_model(), **options).train(toy_benchmark(2, n=80).train_stream)
    assert seen == [False, False, False, True] * 5
    assert (rule.tasks["0.bias"] == 5).all()


def test_diagnostics_are_of_the_posterior_before_the_merge():
    strategy = make_strategy("covon", toy_model())
    strategy.train(toy_benchmark(1).train_stream)
    assert "all" in strategy.plugins[0].diagnostics
    assert strategy.optimizer.diagnostics() == {}  # a task has not begun yet


def test_the_optimizer_knows_the_size_of_each_batch():
    """Also of the last, smaller one."""
    seen = []
    watch = Watch(after_update=lambda s: seen.append(s.optimizer.param_groups[0]["batch_size"]))
    strategy = make_strategy("covon", toy_model(), plugins=[watch], train_mb_size=20)
    strategy.train(toy_benchmark(1).train_stream[0])
    assert seen == [20, 20, 8] * 2


def at_the_ends(key, streams, **options):
    """A setting of the optimizer at the end of each experience, after the merge."""
    seen = []
    watch = Watch(after_training_exp=lambda s: seen.append(s.optimizer.param_groups[0][key]))
    strategy = make_strategy("covon", toy_model(), plugins=[watch], **options)
    for stream in streams:
        strategy.train(stream)
    return seen


@pytest.mark.parametrize(
    ("schedule", "expected"), [(None, [0.25] * 3), ([{}, {"gamma": 0.5}], [0.25, 0.5, 0.5])]
)
def test_gamma_of_the_plugin_overrules_the_optimizers_and_the_schedule_both(schedule, expected):
    streams = [toy_benchmark(3).train_stream]
    assert at_the_ends("gamma", streams, gamma=0.25, schedule=schedule) == expected


def test_ess_follows_the_number_of_examples_of_each_task_and_the_schedule_overrules_it():
    streams = [toy_benchmark(1, n=n).train_stream for n in (40, 48, 40, 48)]
    schedule = [{}, {}, {"ess": 7.0}]
    seen = at_the_ends("ess", streams, ess_per_example=3.0, schedule=schedule)
    assert seen == [120.0, 144.0, 7.0, 144.0]


def test_an_evaluation_before_training_that_sets_ess_is_by_the_mean():
    benchmark, model, outputs = toy_benchmark(1), toy_model(), []
    watch = Watch(after_eval_iteration=lambda s: outputs.append(s.mb_output))
    optimizer = CoVON(model.named_parameters(), hess_init=0.03, batch_size=8)
    options = {"ess_per_example": 2.0, "eval_samples": 2, "plugins": [watch]}
    strategy = make_strategy("covon", model, optimizer=optimizer, **options)
    strategy.eval(benchmark.test_stream)
    torch.testing.assert_close(outputs, [model(columns(benchmark.test_stream[0])[0]).detach()])


def test_ess_may_be_left_out_where_the_plugin_sets_it():
    def trained(**options):
        model = toy_model()
        optimizer = CoVON(model.named_parameters(), hess_init=0.03, batch_size=8, **options)
        strategy = make_strategy("covon", model, optimizer=optimizer, ess_per_example=2.0)
        strategy.train(toy_benchmark(2).train_stream)
        return optimizer

    left_out, given = trained(), trained(ess=5.0)
    assert left_out.param_groups[0]["ess"] == 96.0
    for name, mean in given.posterior().mean.items():
        assert left_out.posterior().mean[name].equal(mean)
    alone = CoVON(toy_model().named_parameters(), hess_init=0.03, batch_size=8)
    message = "ess must be set before the posterior is used: give it"
    with pytest.raises(ValueError, match=message), alone.sampled_params():
        pass
    with pytest.raises(ValueError, match=message):
        alone.prior()


@pytest.mark.parametrize("cls", [JointTraining, Cumulative])
def test_a_task_is_all_the_data_that_the_strategy_trains_on(cls):
    """The number of examples, and the pass that re-estimates batch norm after the merge."""
    model = nn.Sequential(nn.Linear(8, 10), nn.BatchNorm1d(10), nn.Linear(10, 4))
    optimizer = CoVON(model.named_parameters())
    stream = toy_benchmark(2).train_stream
    strategy = make_naive(model, optimizer, CoVONPlugin(), cls=cls, train_mb_size=96)
    for task in [stream] if cls is JointTraining else stream:
        strategy.train(task)
    assert optimizer.param_groups[0]["examples"] == 96
    data = torch.cat([columns(experience)[0] for experience in stream])
    torch.testing.assert_close(model[1].running_mean, model[0](data).mean(0).detach())
