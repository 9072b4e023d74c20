"""How well predicted probabilities fit: log loss, Brier score, expected calibration error."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass

import torch
from torch import Tensor

from covon_avalanche.evaluation.reliability import ReliabilityBin


@dataclass(frozen=True)
class Calibration:
    """Means over images.

    ``nll``: negative log-likelihood of the true class, in nats. ``brier``: squared distance of
    the probabilities to the one-hot truth, in [0, 2]. ``ece``: expected calibration error,
    the mean distance between confidence and accuracy in bins of confidence, in [0, 1].
    """

    nll: float
    brier: float
    ece: float


def mean_calibration(domains: Sequence[Calibration]) -> Calibration:
    """The mean over domains, each counting alike."""
    columns = zip(*map(astuple, domains), strict=True)
    return Calibration(*(sum(column) / len(domains) for column in columns))


class CalibrationSums:
    """Adds up batches; memory does not grow with the images.

    :param bins: equal bins of the confidence (Guo et al., "On Calibration of Modern Neural
        Networks", ICML 2017, use 15).
    """

    def __init__(self, bins: int = 15) -> None:
        if bins < 1:
            raise ValueError(f"bins must be >= 1, got {bins}")
        self.count = 0
        self._nll = self._brier = 0.0
        self._confidence = torch.zeros(bins, dtype=torch.float64)
        self._hits = torch.zeros(bins, dtype=torch.float64)
        self._counts = torch.zeros(bins, dtype=torch.float64)

    @torch.no_grad()
    def add(self, logits: Tensor, targets: Tensor) -> None:
        """Take in a batch.

        :param logits: of shape (batch, classes); log-probabilities will do.
        :param targets: class ids of shape (batch,).
        """
        log_p = logits.detach().cpu().double().log_softmax(1)  # not every device has doubles
        targets = targets.detach().cpu()
        p = log_p.exp()
        self.count += len(targets)
        self._nll -= log_p.gather(1, targets[:, None]).sum().item()
        truth = torch.nn.functional.one_hot(targets, p.shape[1])
        self._brier += (p - truth).square().sum().item()
        confidence, predicted = p.max(1)
        bins = len(self._hits)
        where = (confidence * bins).ceil().long().sub(1).clamp(0, bins - 1)  # (low, high]
        self._confidence.index_add_(0, where, confidence)
        self._hits.index_add_(0, where, (predicted == targets).double())
        self._counts.index_add_(0, where, torch.ones_like(confidence))

    def result(self) -> Calibration:
        """The means so far.

        :raises ValueError: if there were no images.
        """
        if self.count == 0:
            raise ValueError("calibration needs at least one image, got none")
        apart = (self._confidence - self._hits).abs().sum().item()
        return Calibration(self._nll / self.count, self._brier / self.count, apart / self.count)


def reliability(parts: Sequence[CalibrationSums]) -> list[ReliabilityBin]:
    """A reliability diagram: accuracy against confidence, in bins of confidence.

    :param parts: with the same number of bins; their images are pooled.
    """
    sums = [(p._counts, p._confidence, p._hits) for p in parts]
    counts, confidence, hits = (torch.stack(column).sum(0) for column in zip(*sums, strict=True))
    images = counts.clamp(min=1)
    means = zip(counts, confidence / images, hits / images, strict=True)
    return [ReliabilityBin(int(n), c.item(), a.item()) for n, c, a in means]
