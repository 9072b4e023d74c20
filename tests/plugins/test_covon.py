"""CoVON's own settings in a strategy: when and how it merges, with which hyperparameters."""

import pytest
import torch
from avalanche.training import Cumulative, JointTraining
from torch import nn
from toys import Watch, columns, make_naive, make_strategy, same, toy_benchmark, toy_model

from covon_avalanche import CoVON, CoVONPlugin
from covon_avalanche.merging import Average
from covon_avalanche.optim.natural_units import ess_of
from covon_avalanche.plugins import SchedulePlugin


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


def of_a_size(model, **options):
    """CoVON in the paper's units, with an ``ess`` of twice the number of examples."""
    named = model.named_parameters()
    return CoVON(named, hess_init=0.03, batch_size=8, ess_per_example=2.0, **options)


def test_ess_follows_the_number_of_examples_of_each_task_and_a_schedule_overrules_it():
    seen, model = [], toy_model()
    watch = Watch(after_training_exp=lambda s: seen.append(ess_of(s.optimizer.param_groups[0])))
    plugins = [SchedulePlugin([{}, {}, {"ess": 7.0}]), watch]
    strategy = make_strategy("covon", model, optimizer=of_a_size(model), plugins=plugins)
    for n in (40, 48, 40, 48):
        strategy.train(toy_benchmark(1, n=n).train_stream)
    assert seen == [80.0, 96.0, 7.0, 7.0]


def test_with_consolidate_every_all_merges_have_the_same_ess():
    """Also where an online stream ends with a smaller part."""
    seen, model = [], toy_model()
    watch = Watch(after_update=lambda s: seen.append(ess_of(s.optimizer.param_groups[0])))
    options = {"optimizer": of_a_size(model), "consolidate_every": 3, "plugins": [watch]}
    strategy = make_strategy("covon", model, **options)
    for n in (16, 16, 4):
        strategy.train(toy_benchmark(1, n=n).train_stream)
    assert seen == [2.0 * 3 * 16] * 6


def test_an_evaluation_before_training_that_sets_ess_is_by_the_mean():
    benchmark, model, outputs = toy_benchmark(1), toy_model(), []
    watch = Watch(after_eval_iteration=lambda s: outputs.append(s.mb_output))
    options = {"eval_samples": 2, "plugins": [watch]}
    strategy = make_strategy("covon", model, optimizer=of_a_size(model), **options)
    strategy.eval(benchmark.test_stream)
    torch.testing.assert_close(outputs, [model(columns(benchmark.test_stream[0])[0]).detach()])


def test_ess_per_example_is_ess_for_tasks_of_one_size():
    def trained(**options):
        model = toy_model()
        optimizer = CoVON(model.named_parameters(), hess_init=0.03, batch_size=8, **options)
        strategy = make_strategy("covon", model, optimizer=optimizer)
        strategy.train(toy_benchmark(2).train_stream)
        return optimizer.posterior()

    assert same(trained(ess_per_example=2.0).mean, trained(ess=96.0).mean)
    alone = of_a_size(toy_model())
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
    strategy.train(stream)
    assert optimizer.param_groups[0]["examples"] == 96
    data = torch.cat([columns(experience)[0] for experience in stream])
    torch.testing.assert_close(model[1].running_mean, model[0](data).mean(0).detach())
