"""Calibration of predictions: log loss, Brier score, expected calibration error."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

_BINS = 15  # of equal width (Guo et al., "On Calibration of Modern Neural Networks", ICML 2017)


@dataclass(frozen=True)
class Calibration:
    """Means over images.

    ``nll``: negative log-likelihood of the true class, in nats. ``brier``: squared distance
    between probabilities and one-hot target, in [0, 2]. ``ece``: expected calibration error, the
    mean difference between confidence and accuracy in bins of confidence, in [0, 1].
    """

    nll: float
    brier: float
    ece: float


def mean_calibration(domains: Sequence[Calibration]) -> Calibration:
    """The mean over domains, each with the same weight."""
    columns = zip(*map(astuple, domains), strict=True)
    return Calibration(*(sum(column) / len(domains) for column in columns))


class CalibrationSums:
    """Accumulates batches in constant memory."""

    def __init__(self) -> None:
        self.count = 0
        self._nll = self._brier = 0.0
        # By bin of confidence: images, sum of confidences, correct predictions.
        self._bins = torch.zeros(_BINS, 3, dtype=torch.float64, device="cpu")
        self._classes = torch.zeros(0, 2, dtype=torch.int64, device="cpu")  # images, hits

    @property
    def accuracy(self) -> float:
        """Over all images so far."""
        return self._bins[:, 2].sum().item() / self.count

    @torch.no_grad()
    def add(self, logits: Tensor, targets: Tensor) -> None:
        """Add a batch.

        :param logits: of shape (batch, classes), or log-probabilities.
        :param targets: class ids of shape (batch,).
        :raises ValueError: for other shapes, and targets that are not whole numbers.
        """
        if (
            logits.dim() != 2
            or logits.shape[1] < 2
            or targets.dim() != 1
            or targets.is_floating_point()
        ):
            raise ValueError(
                "accuracy and calibration need logits of shape (batch, classes), of two classes or "
                f"more, and class ids of shape (batch,), got shapes {tuple(logits.shape)} and "
                f"{tuple(targets.shape)}, and targets of {targets.dtype}"
            )
        logits, targets = logits.detach().cpu(), targets.detach().cpu()  # MPS has no float64
        log_p = logits.double().log_softmax(1)
        p = log_p.exp()
        self.count += len(targets)
        self._nll -= log_p.gather(1, targets[:, None]).sum().item()
        target = torch.nn.functional.one_hot(targets, p.shape[1])
        self._brier += (p - target).square().sum().item()
        confidence, hits = p.amax(1), logits.argmax(1) == targets
        index = (confidence * _BINS).ceil().long().sub(1).clamp(0, _BINS - 1)  # (low, high]
        added = torch.stack([torch.ones_like(confidence), confidence, hits.double()], 1)
        self._bins.index_add_(0, index, added)
        if not len(self._classes):
            self._classes = self._classes.new_zeros(p.shape[1], 2)
        self._classes.index_add_(0, targets, torch.stack([torch.ones_like(hits), hits], 1).long())

    def gather(self) -> None:
        """Add up the images of all processes of a distributed run."""
        own = self._bins.new_tensor([self.count, self._nll, self._brier])
        own = torch.cat([own, self._bins.flatten(), self._classes.flatten()])
        device = "cpu" if dist.get_backend() == "gloo" else "cuda"
        whole = own.to(device)
        dist.all_reduce(whole)
        self.count, self._nll, self._brier = int(whole[0]), whole[1].item(), whole[2].item()
        bins, classes = whole[3:].cpu().split([self._bins.numel(), self._classes.numel()])
        self._bins = bins.view_as(self._bins)
        self._classes = classes.view_as(self._classes).long()

    def result(self) -> Calibration:
        """The means over all images so far.

        :raises ValueError: if there were no images.
        """
        if self.count == 0:
            raise ValueError("calibration needs at least one image, got none")
        gap = (self._bins[:, 1] - self._bins[:, 2]).abs().sum().item()
        return Calibration(self._nll / self.count, self._brier / self.count, gap / self.count)


def class_accuracy(parts: Sequence[CalibrationSums]) -> dict[int, float]:
    """Accuracy by class id, in [0, 1], of all classes with images.

    :param parts: sums whose images are pooled; a classifier that grew has more classes in later
        ones.
    """
    pooled = pad_sequence([part._classes for part in parts]).sum(1).tolist()
    return {i: hits / images for i, (images, hits) in enumerate(pooled) if images}
