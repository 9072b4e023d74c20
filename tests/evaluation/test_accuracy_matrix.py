"""The accuracy matrix, against hand-computed values."""

import numpy as np
import pytest

from covon_avalanche.evaluation import AccuracyMatrix


def test_a_random_matrix_against_its_definitions():
    """From simulated predictions: pooled accuracies are hits over images."""
    generator = np.random.default_rng(0)
    counts = np.array([7, 40, 200, 13])
    hits = generator.integers(0, counts + 1, (4, 4))  # after each domain, on each
    accuracy = hits / counts
    matrix = AccuracyMatrix(counts.tolist(), accuracy.tolist())
    means = [accuracy[t, : t + 1].mean() for t in range(4)]
    pooled = [hits[t, : t + 1].sum() / counts[: t + 1].sum() for t in range(4)]
    assert matrix.curve() == pytest.approx(means)
    assert matrix.curve(pooled=True) == pytest.approx(pooled)
    assert matrix.average_accuracy() == pytest.approx(means[-1])
    assert matrix.weighted_accuracy() == pytest.approx(pooled[-1])
    assert matrix.weighted_accuracy(2) == pytest.approx(hits[3, :2].sum() / 47)
    assert matrix.incremental_accuracy() == pytest.approx(np.mean(means))
    assert matrix.incremental_accuracy(pooled=True) == pytest.approx(np.mean(pooled))
    final, diagonal = accuracy[3, :3], np.diagonal(accuracy)[:3]
    best = [accuracy[i:3, i].max() for i in range(3)]
    assert matrix.bwt() == -matrix.forgetting() == pytest.approx(np.mean(final - diagonal))
    assert matrix.max_forgetting() == pytest.approx(np.mean(best - final))
    assert matrix.plasticity() == pytest.approx(np.diagonal(accuracy).mean())
    assert matrix.forward_transfer() == pytest.approx(accuracy[np.triu_indices(4, 1)].mean())
    assert len({round(abs(means[-1] - a), 6) for a in (pooled[-1], np.mean(means))}) == 2


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
