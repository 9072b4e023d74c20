"""When CoVONPlugin merges, and the settings of a task."""

import pytest
from avalanche.training.plugins import SupervisedPlugin
from toys import make_strategy, toy_benchmark, toy_model, toy_parts

from covon_avalanche import CoVONPlugin, LossPlateau
from covon_avalanche.merging import Average, RegMean


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
        strategy = make_strategy("covon", toy_model(), train_epochs=1)
        plugin = next(p for p in strategy.plugins if isinstance(p, CoVONPlugin))
        merged, noted = [], []
        for experience in toy_parts(2, size):
            plugin.diagnostics = {}
            strategy.train(experience)
            merged.append(all("hess" not in s for s in strategy.optimizer.state.values()))
            noted.append("all" in plugin.diagnostics)
        assert merged == noted == [False, False, True, False, False, True]

    def test_a_rule_without_data_merges_there_too(self):
        rule = Average()
        strategy = make_strategy("covon", toy_model(), merge=rule, consolidate_every=3)
        strategy.train(toy_benchmark(1).train_stream)  # 6 updates
        assert (rule.tasks["0.bias"] == 2).all()

    def test_an_online_stream_that_does_not_needs_another_trigger(self):
        strategy = make_strategy("covon", toy_model(), consolidate_every=1, train_epochs=1)
        strategy.train(toy_parts(1, boundaries=False))
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
        with pytest.raises(ValueError, match="consolidate_every must be an integer"):
            CoVONPlugin(consolidate_every=0)
        with pytest.raises(ValueError, match="not both"):
            CoVONPlugin(consolidate_every=5, plateau=LossPlateau())
        with pytest.raises(ValueError, match="RegMean needs the data of a task, and so a stream"):
            CoVONPlugin(merge=RegMean(), consolidate_every=5)


def test_the_optimizer_knows_the_size_of_each_batch():
    """Also of the last, smaller one."""
    seen = []

    class Watch(SupervisedPlugin):
        def after_update(self, strategy, **kwargs):
            seen.append((strategy.optimizer.param_groups[0]["batch_size"], len(strategy.mb_y)))

    strategy = make_strategy("covon", toy_model(), plugins=[Watch()], train_mb_size=20)
    strategy.train(toy_benchmark(1).train_stream[0])
    assert seen == [(20, 20), (20, 20), (8, 8)] * 2


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
    schedule = [{"gamma": 0.5}, {"gamma": 0.3}]
    strategy = make_strategy("covon", toy_model(), gamma=0.8, schedule=schedule, plugins=[spy])
    strategy.train(toy_parts(2, 24))
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
    strategy = make_strategy("covon", toy_model(), ess_per_example=3.0, plugins=[spy])
    strategy.train(toy_parts(1, 24))
    assert spy.seen == [144.0, 144.0]
    with pytest.raises(ValueError, match="ess_per_example must be > 0 and finite, got -1"):
        CoVONPlugin(ess_per_example=-1)
    with pytest.raises(ValueError, match="ess_per_example follows the sizes of tasks"):
        CoVONPlugin(ess_per_example=1.0, consolidate_every=10)
