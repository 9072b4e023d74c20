"""The accuracy matrix, against hand-computed values and Avalanche's own metrics."""

import math

import pytest
import torch
from avalanche.evaluation.metrics import accuracy_metrics, forgetting_metrics
from avalanche.training import Naive
from avalanche.training.plugins import EvaluationPlugin
from toys import QUIET, toy_benchmark, toy_model

from covon_avalanche.evaluation import AccuracyMatrix, mean_and_std


def test_a_matrix_by_hand():
    matrix = AccuracyMatrix([100, 300], [[0.9, 0.1], [0.6, 0.8]])
    assert matrix.average_accuracy() == pytest.approx(0.7)
    assert matrix.weighted_accuracy() == pytest.approx((60 + 240) / 400)
    assert matrix.curve() == pytest.approx([0.9, 0.7])
    assert matrix.bwt() == pytest.approx(-0.3)
    assert matrix.forgetting() == pytest.approx(0.3)


def test_what_is_not_defined_is_none():
    assert AccuracyMatrix([10], [[0.9]]).bwt() is None
    joint = AccuracyMatrix([10, 10, 10], [None, None, [0.9, 0.8, 0.7]])
    assert joint.bwt() is None
    assert joint.forgetting() is None
    assert joint.curve() == [None, None, pytest.approx(0.8)]
    assert joint.average_accuracy() == pytest.approx(0.8)
    with pytest.raises(ValueError, match="no last row"):
        AccuracyMatrix([10]).average_accuracy()


def test_rows_come_from_avalanche_and_agree_with_its_metrics():
    benchmark, model = toy_benchmark(4), toy_model()
    strategy = Naive(
        model=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=0.02),
        criterion=torch.nn.CrossEntropyLoss(),
        **{
            **QUIET,
            "evaluator": EvaluationPlugin(
                accuracy_metrics(experience=True, stream=True), forgetting_metrics(stream=True)
            ),
        },
    )
    matrix = AccuracyMatrix([len(e.dataset) for e in benchmark.test_stream])
    for experience in benchmark.train_stream:
        strategy.train(experience)
        metrics = strategy.eval(benchmark.test_stream)
        matrix.add_row(metrics)
    pooled = metrics["Top1_Acc_Stream/eval_phase/test_stream/Task000"]
    assert matrix.weighted_accuracy() == pytest.approx(pooled)
    forgetting = metrics["StreamForgetting/eval_phase/test_stream"]
    assert forgetting > 0
    assert matrix.forgetting() == pytest.approx(forgetting)
    with pytest.raises(ValueError, match="no accuracy of experience 0 of the 'valid' stream"):
        matrix.add_row(metrics, "valid")


def test_mean_and_sample_standard_deviation():
    assert mean_and_std([1.0, 2.0, 3.0]) == pytest.approx((2.0, 1.0))
    mean, std = mean_and_std([5.0])
    assert mean == 5.0
    assert math.isnan(std)
