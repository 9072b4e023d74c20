"""Calibration against definitions and torchmetrics."""

import pytest
import torch
from torchmetrics.functional.classification import multiclass_calibration_error

from covon_avalanche.evaluation import CalibrationSums
from covon_avalanche.evaluation.calibration import reliability


def test_calibration_is_by_definition_whatever_the_batches():
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(500, 7, generator=generator)
    targets = torch.randint(7, (500,), generator=generator)
    sums = CalibrationSums(bins=15)
    for rows in torch.arange(500).split(64):
        sums.add(logits[rows], targets[rows])
    found, p = sums.result(), logits.softmax(1)
    assert found.nll == pytest.approx(torch.nn.functional.cross_entropy(logits, targets).item())
    truth = torch.eye(7)[targets]
    assert found.brier == pytest.approx((p - truth).square().sum(1).mean().item(), rel=1e-5)
    peer = multiclass_calibration_error(p, targets, num_classes=7, n_bins=15, norm="l1")
    assert found.ece == pytest.approx(peer.item(), abs=1e-6)


def test_a_reliability_diagram_pools_the_images_of_its_parts():
    generator = torch.Generator().manual_seed(0)
    logits = 2 * torch.randn(300, 4, generator=generator)
    targets = torch.randint(4, (300,), generator=generator)
    parts = [CalibrationSums(bins=10), CalibrationSums(bins=10)]
    for part, rows in zip(parts, torch.arange(300).split(100), strict=False):
        part.add(logits[rows], targets[rows])
    confidence, predicted = logits[:200].softmax(1).max(1)
    right = predicted == targets[:200]
    found = reliability(parts)
    assert sum(b.images for b in found) == 200
    for i, (count, mean, accuracy) in enumerate(found):
        inside = (confidence > i / 10) & (confidence <= (i + 1) / 10)
        assert count == inside.sum()
        if count:
            assert mean == pytest.approx(confidence[inside].mean().item(), rel=1e-5)
            assert accuracy == pytest.approx(right[inside].double().mean().item())
        else:
            assert (mean, accuracy) == (0, 0)


def test_perfect_and_overconfident_predictions():
    sums = CalibrationSums()
    sums.add(torch.tensor([[50.0, 0.0], [0.0, 50.0]]), torch.tensor([0, 1]))
    assert sums.result().ece == pytest.approx(0)
    sums.add(torch.tensor([[50.0, 0.0], [0.0, 50.0]]), torch.tensor([1, 0]))
    assert sums.result().ece == pytest.approx(0.5)
    assert sums.result().brier == pytest.approx(1.0)
    with pytest.raises(ValueError, match="at least one image"):
        CalibrationSums().result()
    with pytest.raises(ValueError, match="bins must be >= 1, got 0"):
        CalibrationSums(bins=0)
