"""The accuracy matrix by hand, and the metrics in a run against Avalanche's own."""

import io
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from avalanche.benchmarks import CLStream
from avalanche.evaluation.metrics import accuracy_metrics, bwt_metrics, forgetting_metrics
from avalanche.training import Naive
from avalanche.training.plugins import EvaluationPlugin
from avalanche.training.supervised import JointTraining
from toys import make_naive, toy_benchmark, toy_model

from covon_avalanche.evaluation import AccuracyMatrix, DomainMetrics
from covon_avalanche.evaluation.calibration import CalibrationSums
from covon_avalanche.experiment.state import capture

PREFIX = "/eval_phase/test_stream"


def recorded(cls=Naive, **options):
    """A strategy and its metrics, among Avalanche's."""
    model, metrics = toy_model(), DomainMetrics()
    evaluator = EvaluationPlugin(
        metrics,
        accuracy_metrics(experience=True, stream=True),
        forgetting_metrics(stream=True),
        bwt_metrics(stream=True),
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    return make_naive(model, optimizer, cls=cls, evaluator=evaluator, **options), metrics


def reported(train_stream, test_stream, **options):
    """The metrics of a run with an evaluation after each experience."""
    strategy, metrics = recorded(**options)
    for experience in train_stream:
        strategy.train(experience)
        found = strategy.eval(test_stream)
    assert f"DomainMeanAccuracy{PREFIX}" in found
    return metrics, found


def compares(found) -> bool:
    found = {key for key, value in found.items() if not math.isnan(value)}
    return any(key.startswith(("BWT", "Forgetting", "Plasticity")) for key in found)


def test_evaluations_of_single_domains_make_no_row_and_the_error_says_what_does():
    benchmark, (strategy, metrics) = toy_benchmark(2), recorded()
    for experience in benchmark.train_stream:
        strategy.train(experience)
        for tested in benchmark.test_stream:
            strategy.eval(tested)
    with pytest.raises(ValueError, match=r"evaluate the whole stream after training, as strategy"):
        metrics.matrix.average_accuracy()


def test_a_run_agrees_with_avalanches_metrics():
    benchmark = toy_benchmark(4)
    metrics, found = reported(benchmark.train_stream, benchmark.test_stream)
    for i, accuracy in enumerate(metrics.matrix.last):
        assert accuracy == pytest.approx(found[f"Top1_Acc_Exp{PREFIX}/Task000/Exp{i:03d}"])
    assert found[f"Forgetting{PREFIX}"] == pytest.approx(found[f"StreamForgetting{PREFIX}"])
    assert found[f"BWT{PREFIX}"] == pytest.approx(found[f"StreamBWT{PREFIX}"])
    pooled = found[f"Top1_Acc_Stream{PREFIX}/Task000"]
    assert found[f"ImageWeightedAccuracy{PREFIX}"] == pytest.approx(pooled)
    assert found[f"DomainMeanAccuracy{PREFIX}"] == metrics.matrix.average_accuracy()
    assert len(metrics.matrix.rows) == len(metrics.calibration) == 4
    assert metrics.matrix.counts == [48] * 4
    for name, value in (
        ("IncrementalAccuracy", metrics.matrix.incremental_accuracy()),
        ("MaxForgetting", metrics.matrix.max_forgetting()),
        ("Plasticity", metrics.matrix.plasticity()),
        ("ForwardTransfer", metrics.matrix.forward_transfer()),
    ):
        assert found[name + PREFIX] == value


def test_only_the_last_evaluation_of_the_whole_stream_between_two_experiences_counts():
    benchmark, (strategy, metrics) = toy_benchmark(2), recorded(eval_every=1)
    strategy.eval(benchmark.test_stream)  # before any training
    strategy.eval([benchmark.test_stream[0]])
    for experience in benchmark.train_stream:
        strategy.train(experience, eval_streams=[benchmark.test_stream])
        strategy.eval(benchmark.train_stream)  # another stream
        strategy.eval(benchmark.test_stream)
        strategy.eval(benchmark.train_stream)
        strategy.eval([benchmark.test_stream[1]])  # not the whole stream
    assert [len(row) for row in metrics.matrix.rows] == [2, 2]
    assert not metrics.matrix.held_out
    assert metrics.matrix.bwt() is not None


@pytest.mark.parametrize(("trained", "tested"), [(3, 1), (2, 3)])
def test_a_test_stream_of_another_length_does_not_compare(trained, tested):
    streams = toy_benchmark(trained).train_stream, toy_benchmark(tested).test_stream
    metrics, found = reported(*streams)
    assert metrics.matrix.held_out
    assert not compares(found)
    assert metrics.matrix.curve()[0] == pytest.approx(sum(metrics.matrix.rows[0]) / tested)


@pytest.mark.parametrize(
    ("trained", "tested", "same"),
    [("ab", "ab", True), ("ab", "cd", False), ("ab", "ba", False), (None, "ab", True)],
)
def test_domains_of_other_names_do_not_compare(trained, tested, same):
    benchmark = toy_benchmark(2)
    for stream, names in ((benchmark.train_stream, trained), (benchmark.test_stream, tested)):
        for experience, name in zip(stream, names or (), strict=False):
            experience.domain = name
    metrics, found = reported(benchmark.train_stream, benchmark.test_stream)
    assert metrics.matrix.held_out is not same
    assert compares(found) is same


@pytest.mark.parametrize("case", ["at the end", "of learned domains", "joint", "added late"])
def test_one_evaluation_of_the_whole_stream_counts_all_domains_and_compares_nothing(case):
    benchmark = toy_benchmark(3)
    strategy, metrics = recorded(JointTraining if case == "joint" else Naive)
    if case == "of learned domains":
        for t, experience in enumerate(benchmark.train_stream, start=1):
            strategy.train(experience)
            found = strategy.eval(benchmark.test_stream[:t])
    else:
        strategy.train(benchmark.train_stream)
        if case == "added late":
            strategy.evaluator.metrics = [metrics := DomainMetrics()]
        found = strategy.eval(benchmark.test_stream)
    assert metrics.matrix.rows[:-1] == [None, None]
    mean = sum(metrics.matrix.last) / 3
    assert found[f"DomainMeanAccuracy{PREFIX}"] == pytest.approx(mean)
    nll = sum(c.nll for c in metrics.calibration[-1]) / 3
    assert found[f"NLL{PREFIX}"] == pytest.approx(nll)
    assert not compares(found)


def test_an_evaluation_left_out_in_the_middle_keeps_the_others_in_their_rows():
    benchmark, (strategy, metrics) = toy_benchmark(3), recorded()
    for t, experience in enumerate(benchmark.train_stream):
        strategy.train(experience)
        if t != 1:
            strategy.eval(benchmark.test_stream)
    assert [row is None for row in metrics.matrix.rows] == [False, True, False]
    assert not compares(metrics.result())


def test_streams_without_a_length_are_recorded_as_a_whole():
    """Those of ``new_instances_benchmark``, and generators."""
    benchmark = toy_benchmark(3)
    expected, _ = reported(benchmark.train_stream, benchmark.test_stream)
    strategy, metrics = recorded()
    train = CLStream("train", list(benchmark.train_stream))
    test = CLStream("test", (each for each in list(benchmark.test_stream)))
    for experience in train:
        strategy.train(experience)
        strategy.eval(test)
        with torch.random.fork_rng():
            strategy.eval([next(iter(test))])
    assert metrics.matrix == expected.matrix


@pytest.mark.parametrize("order", [[0, 1, 0, 1], [0, 0], [2, 1, 0], [0, 2]])
def test_another_order_than_the_streams_compares_nothing(order):
    """Rows are then not those right after training on the domain of the same number."""
    benchmark = toy_benchmark(max(order) + 1)
    metrics, found = reported([benchmark.train_stream[i] for i in order], benchmark.test_stream)
    assert len(metrics.matrix.rows) == len(order)
    assert not compares(found)


def test_few_numbers_are_kept_of_each_domain():
    """Bytes of a checkpoint: accuracy, NLL, Brier score and ECE of 90 domains take 8 each."""
    metrics, sizes = DomainMetrics(), []
    strategy = SimpleNamespace(clock=SimpleNamespace(train_iterations=1))
    metrics._n_domains = 90
    for _ in range(4):
        metrics._trained.append((len(metrics._trained), None))
        for i in range(90):
            metrics._row[i] = CalibrationSums()
            metrics._row[i].add(torch.randn(2, 3), torch.tensor([0, 1]))
        metrics.after_eval(strategy)
        file = io.BytesIO()
        torch.save(capture(metrics, {}), file)
        sizes.append(len(file.getvalue()))
    assert max(sizes[i + 1] - sizes[i] for i in range(3)) < 1.5 * 4 * 8 * 90
    assert sizes[0] < 15_000
    assert [len(row) for row in metrics.calibration] == [90] * 4


def test_a_random_matrix_against_its_definitions():
    """From simulated predictions: pooled accuracies are hits over images."""
    generator = np.random.default_rng(0)
    counts = np.array([7, 40, 200, 13])
    hits = generator.integers(0, counts + 1, (4, 4))  # after each domain, on each
    accuracy = hits / counts
    matrix = AccuracyMatrix(counts.tolist(), accuracy.tolist())
    means = [accuracy[t, : t + 1].mean() for t in range(4)]
    pooled = hits[3].sum() / counts.sum()
    assert matrix.curve() == pytest.approx(means)
    assert matrix.average_accuracy() == pytest.approx(means[-1])
    assert matrix.weighted_accuracy() == pytest.approx(pooled)
    assert matrix.weighted_accuracy(2) == pytest.approx(hits[3, :2].sum() / 47)
    assert matrix.incremental_accuracy() == pytest.approx(np.mean(means))
    final, diagonal = accuracy[3, :3], np.diagonal(accuracy)[:3]
    best = [accuracy[i:3, i].max() for i in range(3)]
    assert matrix.bwt() == -matrix.forgetting() == pytest.approx(np.mean(final - diagonal))
    assert matrix.max_forgetting() == pytest.approx(np.mean(best - final))
    assert matrix.plasticity() == pytest.approx(np.diagonal(accuracy).mean())
    assert matrix.forward_transfer() == pytest.approx(accuracy[np.triu_indices(4, 1)].mean())
    assert len({round(abs(means[-1] - a), 6) for a in (pooled, np.mean(means))}) == 2


@pytest.mark.parametrize(
    ("matrix", "curve"),
    [
        (AccuracyMatrix([10] * 3, [None, None, [0.9, 0.8, 0.7]]), [None, None, 0.8]),  # joint
        (AccuracyMatrix([10], [[0.2], [0.4], [0.6]]), [0.2, 0.4, 0.6]),  # more rows than domains
        (AccuracyMatrix([10, 30], [[0.2, 0.4], [0.6, 0.8]], held_out=True), [0.3, 0.7]),
    ],
)
def test_only_averages_are_defined_where_earlier_rows_do_not_compare(matrix, curve):
    assert matrix.curve() == [None if a is None else pytest.approx(a) for a in curve]
    assert matrix.average_accuracy() == pytest.approx(curve[-1])
    assert matrix.bwt() is matrix.forgetting() is None
    assert matrix.max_forgetting() is matrix.plasticity() is matrix.forward_transfer() is None
    over_time = None if None in curve else pytest.approx(sum(curve) / len(curve))
    assert matrix.incremental_accuracy() == over_time


def test_one_domain_has_no_transfer_and_a_matrix_without_rows_nothing():
    assert AccuracyMatrix([10], [[0.9]]).bwt() is None
    with pytest.raises(ValueError, match="no last row"):
        AccuracyMatrix([10]).average_accuracy()
