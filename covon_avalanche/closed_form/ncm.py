"""Nearest class mean."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from covon_avalanche.closed_form.model import ClosedFormHead


class NearestClassMean(ClosedFormHead):
    """Classifies by the cosine similarity of features to the class means over all domains.

    Also known as SimpleCIL (Zhou et al., "Revisiting Class-Incremental Learning with Pre-Trained
    Models", IJCV 2024), here with one mean per class for all domains. Classes without examples have
    the lowest similarity, -1.

    :param width: of the features.
    :param num_classes: number of classes, shared by all domains.
    """

    def __init__(self, width: int, num_classes: int) -> None:
        super().__init__()
        self.num_classes = num_classes
        sums = torch.zeros(num_classes, width, dtype=torch.float64, device="cpu")
        self.register_buffer("sums", sums)
        self.sums: Tensor
        self._domain: Tensor  # sums of the current domain

    def begin_domain(self) -> None:
        self._domain = torch.zeros_like(self.sums)

    def update(self, features: Tensor, labels: Tensor, first_index: int = 0) -> None:
        self._domain.index_add_(0, labels, features.to(self.sums.dtype))

    def end_domain(self) -> None:
        """Add the domain's sums, whose direction is that of the means.

        :raises FloatingPointError: if features are not finite; the domain is not added then.
        """
        if not self._domain.isfinite().all():
            raise FloatingPointError("the features of the network are not finite")
        self.sums += self._domain
        del self._domain

    def forward(self, features: Tensor) -> Tensor:
        """Cosine similarities of shape (batch, classes)."""
        means = F.normalize(self.sums, dim=1).to(features.dtype)
        similarities = F.normalize(features, dim=1) @ means.T
        return similarities.masked_fill(~self.sums.any(1), -1.0)
