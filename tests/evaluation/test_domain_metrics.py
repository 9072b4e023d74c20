"""The metrics in a run, against Avalanche's own."""

import pytest
import torch
from avalanche.benchmarks import split_online_stream
from avalanche.evaluation.metrics import accuracy_metrics, bwt_metrics, forgetting_metrics
from avalanche.training import Naive
from avalanche.training.plugins import EvaluationPlugin
from avalanche.training.supervised import JointTraining
from toys import QUIET, make_strategy, toy_benchmark, toy_model

from covon_avalanche.evaluation import DomainMetrics


def naive(metrics, **options):
    model = toy_model()
    evaluator = EvaluationPlugin(
        metrics,
        accuracy_metrics(experience=True, stream=True),
        forgetting_metrics(stream=True),
        bwt_metrics(stream=True),
    )
    return Naive(
        model=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=0.02),
        criterion=torch.nn.CrossEntropyLoss(),
        **{**QUIET, "evaluator": evaluator, **options},
    )


def test_a_run_agrees_with_avalanches_metrics():
    benchmark, metrics = toy_benchmark(4), DomainMetrics()
    strategy = naive(metrics)
    for experience in benchmark.train_stream:
        strategy.train(experience)
        found = strategy.eval(benchmark.test_stream)
    for i, name in enumerate(metrics.matrix.last):
        key = f"Top1_Acc_Exp/eval_phase/test_stream/Task000/Exp{i:03d}"
        assert name == pytest.approx(found[key])
    prefix = "/eval_phase/test_stream"
    assert found[f"Forgetting{prefix}"] == pytest.approx(found[f"StreamForgetting{prefix}"])
    assert found[f"BWT{prefix}"] == pytest.approx(found[f"StreamBWT{prefix}"])
    pooled = found[f"Top1_Acc_Stream{prefix}/Task000"]
    assert found[f"ImageWeightedAccuracy{prefix}"] == pytest.approx(pooled)
    assert found[f"DomainMeanAccuracy{prefix}"] == metrics.matrix.average_accuracy()
    assert len(metrics.matrix.rows) == len(metrics.calibration) == 4
    assert metrics.matrix.counts == [48] * 4
    assert f"Plasticity{prefix}" in found


def test_an_evaluation_of_another_stream_before_that_of_the_recorded_one_is_no_row():
    benchmark, metrics = toy_benchmark(2), DomainMetrics()
    strategy = naive(metrics)
    for experience in benchmark.train_stream:
        strategy.train(experience)
        strategy.eval(benchmark.train_stream)
        strategy.eval(benchmark.test_stream)
    assert [len(row) for row in metrics.matrix.rows] == [2, 2]
    assert not metrics.matrix.held_out


def test_only_the_last_evaluation_between_two_experiences_counts():
    benchmark, metrics = toy_benchmark(2), DomainMetrics()
    strategy = naive(metrics, eval_every=1)
    strategy.eval(benchmark.test_stream)  # before any training
    strategy.eval([benchmark.test_stream[0]])
    for experience in benchmark.train_stream:
        strategy.train(experience, eval_streams=[benchmark.test_stream])
        strategy.eval(benchmark.test_stream)
        strategy.eval(benchmark.train_stream)  # another stream
        strategy.eval([benchmark.test_stream[1]])  # not the whole stream
    assert len(metrics.matrix.rows) == 2
    assert metrics.matrix.bwt() is not None


def test_what_is_not_defined_is_not_reported():
    benchmark, metrics = toy_benchmark(2), DomainMetrics(held_out=True)
    strategy = naive(metrics)
    for experience in benchmark.train_stream:
        strategy.train(experience)
        found = strategy.eval(benchmark.test_stream)
    assert "DomainMeanAccuracy/eval_phase/test_stream" in found
    assert not any(key.startswith(("BWT", "Forgetting", "Plasticity")) for key in found)


def reported(train_stream, test_stream) -> tuple[DomainMetrics, dict]:
    metrics = DomainMetrics()
    strategy = naive(metrics)
    for experience in train_stream:
        strategy.train(experience)
        found = strategy.eval(test_stream)
    assert "DomainMeanAccuracy/eval_phase/test_stream" in found
    return metrics, found


def compares(found: dict) -> bool:
    return any(key.startswith(("BWT", "Forgetting", "Plasticity")) for key in found)


@pytest.mark.parametrize(("trained", "tested"), [(3, 1), (2, 3)])
def test_a_test_stream_of_another_length_has_no_before_and_after(trained, tested):
    streams = toy_benchmark(trained).train_stream, toy_benchmark(tested).test_stream
    metrics, found = reported(*streams)
    assert metrics.matrix.held_out
    assert not compares(found)
    assert metrics.matrix.curve()[0] == pytest.approx(sum(metrics.matrix.rows[0]) / tested)


@pytest.mark.parametrize(
    ("trained", "tested", "same"),
    [("ab", "ab", True), ("ab", "cd", False), ("ab", "ba", False), (None, "ab", True)],
)
def test_domains_of_other_names_have_no_before_and_after(trained, tested, same):
    benchmark = toy_benchmark(2)
    for stream, names in ((benchmark.train_stream, trained), (benchmark.test_stream, tested)):
        for experience, name in zip(stream, names or (), strict=False):
            experience.domain = name
    metrics, found = reported(benchmark.train_stream, benchmark.test_stream)
    assert metrics.matrix.held_out is not same
    assert compares(found) is same


def last_row_alone(metrics: DomainMetrics, found: dict, domains: int) -> bool:
    """What is reported is of all domains, and nothing is compared."""
    mean = sum(metrics.matrix.last) / domains
    assert metrics.matrix.rows[:-1] == [None] * (domains - 1)
    assert found["DomainMeanAccuracy/eval_phase/test_stream"] == pytest.approx(mean)
    nll = sum(c.nll for c in metrics.calibration[-1]) / domains
    assert found["NLL/eval_phase/test_stream"] == pytest.approx(nll)
    return not compares(found)


def test_one_evaluation_at_the_end_counts_all_domains():
    benchmark, metrics = toy_benchmark(3), DomainMetrics()
    strategy = naive(metrics)
    strategy.train(benchmark.train_stream)
    assert last_row_alone(metrics, strategy.eval(benchmark.test_stream), 3)


def test_evaluations_of_what_is_learned_so_far_leave_the_last_row_alone():
    benchmark, metrics = toy_benchmark(3), DomainMetrics()
    strategy = naive(metrics)
    for t, experience in enumerate(benchmark.train_stream, start=1):
        strategy.train(experience)
        found = strategy.eval(benchmark.test_stream[:t])
    assert last_row_alone(metrics, found, 3)


def test_joint_training_counts_all_domains():
    benchmark, metrics = toy_benchmark(3), DomainMetrics()
    model = toy_model()
    strategy = JointTraining(
        model=model,
        optimizer=torch.optim.Adam(model.parameters()),
        criterion=torch.nn.CrossEntropyLoss(),
        **{**QUIET, "evaluator": EvaluationPlugin(metrics)},
    )
    strategy.train(benchmark.train_stream)
    assert last_row_alone(metrics, strategy.eval(benchmark.test_stream), 3)


def test_an_evaluation_left_out_in_the_middle_keeps_the_others_in_their_rows():
    benchmark, metrics = toy_benchmark(3), DomainMetrics()
    strategy = naive(metrics)
    for t, experience in enumerate(benchmark.train_stream):
        strategy.train(experience)
        if t != 1:
            strategy.eval(benchmark.test_stream)
    assert [row is None for row in metrics.matrix.rows] == [False, True, False]
    assert not compares(metrics.result())


@pytest.mark.parametrize("boundaries", [True, False])
def test_parts_of_an_online_stream_are_one_experience(boundaries):
    benchmark, metrics = toy_benchmark(3), DomainMetrics()
    strategy = naive(metrics, train_epochs=1)
    rows = []
    for part in split_online_stream(
        benchmark.train_stream, experience_size=24, access_task_boundaries=boundaries
    ):
        strategy.train(part)
        found = strategy.eval(benchmark.test_stream)
        rows.append(metrics.matrix.last)
    assert metrics.matrix.rows == rows[1::2]
    assert compares(found)


def test_domains_that_are_trained_twice_are_no_error():
    benchmark = toy_benchmark(2)
    metrics, _ = reported([*benchmark.train_stream] * 2, benchmark.test_stream)
    assert len(metrics.matrix.rows) == 4
    assert metrics.result().keys() & {"BWT", "Forgetting", "Plasticity"} == set()


def test_posterior_samples_are_measured_too():
    """With eval_samples the strategy's output is the mixture's log-probability."""
    benchmark, rows = toy_benchmark(1), []
    for samples in (0, 32):
        metrics = DomainMetrics()
        strategy = make_strategy(
            "covon", toy_model(), evaluator=EvaluationPlugin(metrics), eval_samples=samples
        )
        torch.manual_seed(0)
        strategy.train(benchmark.train_stream[0])
        strategy.eval(benchmark.test_stream)
        rows.append(metrics.calibration[0][0])
    assert rows[0] != rows[1]
    assert all(0 <= c.ece <= 1 and c.nll > 0 for c in rows)
