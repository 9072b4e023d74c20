"""Per-experience hyperparameters."""

import pytest
from avalanche.training.plugins import SupervisedPlugin
from toys import make_strategy, toy_benchmark, toy_model

from covon_avalanche import AdaRegPlugin, CoVONPlugin, VCLPlugin


class Seen(SupervisedPlugin):
    """Settings in force in each experience."""

    def __init__(self):
        super().__init__()
        self.groups, self.epochs = [], []

    def before_training_exp(self, strategy, **kwargs):
        self.epochs.append(0)

    def before_training_epoch(self, strategy, **kwargs):
        self.epochs[-1] += 1
        if self.epochs[-1] == 1:
            self.groups.append(dict(strategy.optimizer.param_groups[0]))


ENTRIES = [
    {"lr": 0.02, "ess": 50, "hess_init": 0.3, "gamma": 0.9, "epochs": 1},
    {"gamma": 0.5, "epochs": 3},
    {"hess_init": 0.1},
]
FORMS = {
    "list": ENTRIES,
    "dict": dict(enumerate(ENTRIES)),
    "callable": lambda experience: ENTRIES[experience],
}


@pytest.mark.parametrize("form", FORMS)
def test_values_apply_from_their_experience_on(form):
    seen = Seen()
    strategy = make_strategy("covon", toy_model(), schedule=FORMS[form], plugins=[seen])
    strategy.train(toy_benchmark(3).train_stream)
    assert [g["gamma"] for g in seen.groups] == [0.9, 0.5, 0.5]
    assert [g["hess_init"] for g in seen.groups] == [0.3, 0.3, 0.1]
    assert [g["ess"] for g in seen.groups] == [50, 50, 50]
    assert [g["lr"] for g in seen.groups] == [0.02, 0.02, 0.02]
    assert seen.epochs == [1, 3, 3]


def test_the_first_values_are_those_the_first_task_is_trained_and_merged_with():
    """hess_init reaches the state, and each merge uses the ess of its own task."""
    strategy = make_strategy("covon", toy_model(), schedule=[{"ess": 50.0}, {"ess": 200.0}])
    benchmark, precisions = toy_benchmark(2), []
    for experience in benchmark.train_stream:
        strategy.train(experience)
        state = strategy.optimizer.state[strategy.model[0].weight]
        precisions.append(state["prior_precision"].clone())
    first, second = precisions
    assert first.min() >= 50 * 0.01 * 0.5  # from s0 = ess * weight_decay of the first task
    assert (second - first).mean() > 2 * first.mean()


def test_a_scheduled_ess_and_epochs_reach_the_quadratic_anchors():
    strategy = make_strategy(
        "ada-reg", toy_model(), schedule={1: {"ess": 10.0, "epochs": 1, "lr": 0.5}}
    )
    benchmark, plugin = toy_benchmark(2), strategy.plugins[0]
    strategy.train(benchmark.train_stream[0])
    assert plugin._ess_now == 48  # the size of the data
    strategy.train(benchmark.train_stream[1])
    assert plugin._ess_now == 10.0
    assert strategy.train_epochs == 1
    assert strategy.optimizer.param_groups[0]["lr"] == 0.5


def test_unknown_keys_are_named_with_the_known_ones():
    with pytest.raises(ValueError, match=r"may set \['epochs', 'ess', 'lr'\], got \['gamma'\]"):
        VCLPlugin(schedule=[{"gamma": 0.5}])
    with pytest.raises(ValueError, match=r"got \['hes_init'\]"):
        CoVONPlugin(schedule={0: {"hes_init": 1.0}})
    with pytest.raises(ValueError, match=r"got \['gamma'\]"):
        AdaRegPlugin(schedule=[{"gamma": 1.0}])
    strategy = make_strategy("covon", toy_model(), schedule=lambda experience: {"size": 1})
    with pytest.raises(ValueError, match=r"got \['size'\]"):
        strategy.train(toy_benchmark(1).train_stream[0])


@pytest.mark.parametrize("kind", ["covon", "ada-reg"])
@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"ess": -1.0}, r"ess must be > 0 and finite, got -1\.0"),
        ({"lr": -0.1}, r"lr must be >= 0 and finite, got -0\.1"),
        ({"epochs": 0}, "epochs must be an integer >= 1, got 0"),
        ({"lr": 0.5, "epochs": 2.9}, r"epochs must be an integer >= 1, got 2\.9"),
    ],
)
def test_bad_values_are_refused_when_their_experience_comes(kind, bad, message):
    strategy = make_strategy(kind, toy_model(), schedule=[{}, bad])
    benchmark, optimizer = toy_benchmark(2), strategy.optimizer
    strategy.train(benchmark.train_stream[0])
    before = [optimizer.param_groups[0].get(key) for key in ("lr", "ess")], strategy.train_epochs
    with pytest.raises(ValueError, match=message):
        strategy.train(benchmark.train_stream[1])
    after = [optimizer.param_groups[0].get(key) for key in ("lr", "ess")], strategy.train_epochs
    assert after == before  # nothing is set
