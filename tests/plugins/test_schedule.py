"""Per-experience hyperparameters."""

import pytest
from toys import Head, Watch, make_covon, make_naive, make_strategy, toy_benchmark, toy_model

from covon_avalanche.plugins import CoVONPlugin, SchedulePlugin


def test_values_apply_from_their_experience_on():
    groups, epochs = [], []
    watch = Watch(
        before_training_exp=lambda s: groups.append(dict(s.optimizer.param_groups[0])),
        after_training_exp=lambda s: epochs.append(s.clock.train_exp_epochs),
    )
    schedule = [
        {"lr": 0.02, "ess": 50, "hess_init": 0.3, "gamma": 0.9, "epochs": 1},
        {"gamma": 0.5, "epochs": 3},
        {"hess_init": 0.1},
    ]
    strategy = make_strategy("covon", toy_model(), plugins=[SchedulePlugin(schedule), watch])
    strategy.train(toy_benchmark(3).train_stream)
    assert [g["gamma"] for g in groups] == [0.9, 0.5, 0.5]
    assert [g["hess_init"] for g in groups] == [0.3, 0.3, 0.1]
    assert [g["ess"] for g in groups] == [50, 50, 50]
    assert [g["lr"] for g in groups] == [0.02, 0.02, 0.02]
    assert epochs == [1, 3, 3]


@pytest.mark.parametrize(
    ("kind", "bad", "message"),
    [
        ("covon", {"ess": -1.0}, r"ess must be > 0 and finite in float32, got -1\.0"),
        ("ada-reg", {"lr": -0.1}, r"lr must be >= 0 and finite in float32, got -0\.1"),
        ("ada-reg", {"lr": 0.5, "weight_decay": -0.1}, r"weight_decay must be >= 0 .* got -0\.1"),
        ("covon", {"lr": 0.5, "epochs": 2.9}, r"epochs must be an integer >= 1, got 2\.9"),
        ("ada-reg", {"lr": 0.5, "epochs": 2.9}, r"epochs must be an integer >= 1, got 2\.9"),
    ],
)
def test_bad_values_are_refused_when_their_experience_comes(kind, bad, message):
    strategy = make_strategy(kind, toy_model(), plugins=[SchedulePlugin([{}, bad])])
    benchmark, group = toy_benchmark(2), strategy.optimizer.param_groups[0]
    strategy.train(benchmark.train_stream[0])
    before = group["lr"], group.get("ess"), strategy.train_epochs
    with pytest.raises(ValueError, match=message):
        strategy.train(benchmark.train_stream[1])
    assert before == (group["lr"], group.get("ess"), strategy.train_epochs)  # nothing is set


@pytest.mark.parametrize("first", [True, False])
def test_the_prior_of_new_classes_has_the_settings_of_their_task_in_any_order_of_plugins(first):
    schedule = SchedulePlugin([{"weight_decay": 0.01}, {"weight_decay": 0.1}])
    model = Head()
    optimizer = make_covon(model.named_parameters(), ess=10.0)
    plugins = [schedule, CoVONPlugin()] if first else [CoVONPlugin(), schedule]
    strategy = make_naive(model, optimizer, *plugins, train_epochs=1)
    seen = []
    precision = Watch(
        before_training_epoch=lambda s: seen.append(
            s.optimizer.prior(model.named_parameters()).precision["head.classifier.bias"].clone()
        )
    )
    strategy.plugins.append(precision)
    strategy.train(toy_benchmark(2, classes_per_experience=2).train_stream)
    assert seen[0].tolist() == pytest.approx([0.1, 0.1])
    assert seen[1][2:].tolist() == pytest.approx([1.0, 1.0])


@pytest.mark.parametrize(
    ("kind", "unknown"), [("covon", "hes_init"), ("ada-reg", "ess"), ("vcl", "gamma")]
)
def test_unknown_names_are_refused_before_the_first_experience(kind, unknown):
    strategy = make_strategy(kind, toy_model(), plugins=[SchedulePlugin([{}, {unknown: 1.0}])])
    with pytest.raises(ValueError, match=rf"a schedule may set .*'epochs'.*got \['{unknown}'\]"):
        strategy.train(toy_benchmark(1).train_stream)
    assert strategy.clock.train_iterations == 0
