"""Calibration against definitions and torchmetrics."""

import pytest
import torch
from torchmetrics.functional.classification import multiclass_calibration_error

from covon_avalanche.evaluation import CalibrationSums
from covon_avalanche.evaluation.calibration import class_accuracy


@pytest.fixture
def logits_and_targets():
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(500, 7, generator=generator)
    return logits, torch.randint(7, (500,), generator=generator)


def sums_of(logits, targets, batch_size=64):
    sums = CalibrationSums()
    for x, y in zip(logits.split(batch_size), targets.split(batch_size), strict=True):
        sums.add(x, y)
    return sums


def test_calibration_is_by_definition_whatever_the_batches(logits_and_targets):
    logits, targets = logits_and_targets
    found, p = sums_of(logits, targets).result(), logits.softmax(1)
    assert found.nll == pytest.approx(torch.nn.functional.cross_entropy(logits, targets).item())
    truth = torch.eye(7)[targets]
    assert found.brier == pytest.approx((p - truth).square().sum(1).mean().item(), rel=1e-5)
    peer = multiclass_calibration_error(p, targets, num_classes=7, n_bins=15, norm="l1")
    assert found.ece == pytest.approx(peer.item(), abs=1e-6)


def test_classes_are_pooled_over_parts_and_left_out_without_images(logits_and_targets):
    logits, targets = logits_and_targets
    logits, targets = logits[targets != 4], targets[targets != 4]
    found = class_accuracy([sums_of(logits[:90], targets[:90]), sums_of(logits[90:], targets[90:])])
    hits = logits.argmax(1) == targets
    assert found == {i: hits[targets == i].double().mean().item() for i in (0, 1, 2, 3, 5, 6)}


def test_a_later_part_may_have_more_classes():
    one, two = torch.eye(2)[[0, 1, 1]], torch.eye(3)[[0, 2]]
    parts = sums_of(one, torch.tensor([0, 1, 0])), sums_of(two, torch.tensor([0, 2]))
    found = class_accuracy(parts)
    assert found == {0: pytest.approx(2 / 3), 1: 1.0, 2: 1.0}


def test_no_images_are_refused():
    with pytest.raises(ValueError, match="at least one image"):
        CalibrationSums().result()


@pytest.mark.parametrize(
    ("shape", "targets"),
    [((8, 3), torch.zeros(8)), ((8, 3), torch.zeros(8, 3))]
    + [(shape, torch.zeros(8).long()) for shape in ((8,), (8, 1))],
)
def test_regressions_are_refused(shape, targets):
    with pytest.raises(ValueError, match=r"need logits of shape .*, classes\), of two classes"):
        CalibrationSums().add(torch.zeros(shape), targets)
