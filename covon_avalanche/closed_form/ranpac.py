"""Ridge regression on features, with or without a random projection: RanPAC and LayUP."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from covon_avalanche.checks import check_choice, check_whole
from covon_avalanche.closed_form.model import ClosedFormHead

RANPAC_RIDGES = tuple(10.0**k for k in range(-8, 9))
STANDARDIZED_RIDGES = tuple(10.0 ** (k / 2) for k in range(2, 11))
_HELD_OUT = 5  # every fifth example chooses the ridge


class RidgeClassifier(ClosedFormHead):
    """Ridge regression of one-hot labels on features, over the examples of all domains.

    With features ``H``, one row per example, and one-hot labels ``Y``, the sums ``G = HᵀH`` and
    ``Q = HᵀY`` over all domains give the weights ``(G + ridge I)⁻¹ Q`` of the joint ridge
    regression, whatever the order of the domains. The ridge is chosen in each domain, by fitting
    on four fifths of that domain's examples and validating on every fifth example; a domain of
    fewer than five keeps the ridge of the one before.

    With ``standardize`` features are centred and divided by their standard deviation over all
    domains, and an intercept is fitted that the ridge leaves alone. Both follow from the sums.

    With ``projection`` the features are ``relu(f P)`` with a fixed random matrix ``P`` of standard
    normals: RanPAC (McDonnell et al., "RanPAC: Random Projections and Pre-trained Models for
    Continual Learning", NeurIPS 2023, without its first-domain adapter). Features of several
    blocks without projection, and the ridge chosen by accuracy, are LayUP (see
    :class:`FeatureExtractor`), whose authors choose the ridge by four-fold cross-validation.

    :param width: of the features.
    :param num_classes: number of classes, shared by all domains.
    :param projection: number ``M`` of random features; ``None`` for the features themselves.
    :param standardize: centre and scale the features.
    :param ridges: candidate values; by default 1e-8 to 1e8, or 10 to 1e5 for standardised
        features.
    :param select: choose the ridge with the least squared error (``"mse"``, RanPAC) or the highest
        ``"accuracy"`` (LayUP); of equal ones the largest.
    :param ridge_from: choose by the scores of the ``"last"`` domain, as in RanPAC and LayUP, or by
        their sum over ``"all"`` domains: then the order of the domains does not matter.
    :param seed: of the projection.
    :raises ValueError: naming the value and the rule, or if ``G`` does not fit into memory.

    Memory: ``G`` has M x M entries in float64, 800 MB for M = 10,000.
    """

    def __init__(
        self,
        width: int,
        num_classes: int,
        *,
        projection: int | None = None,
        standardize: bool = False,
        ridges: Sequence[float] | None = None,
        select: Literal["mse", "accuracy"] = "mse",
        ridge_from: Literal["last", "all"] = "last",
        seed: int = 0,
    ) -> None:
        super().__init__()
        if projection is not None:
            check_whole("projection", projection)
        if ridges is None:
            ridges = STANDARDIZED_RIDGES if standardize else RANPAC_RIDGES
        if not ridges or min(ridges) <= 0:
            raise ValueError(f"ridges must be positive numbers, got {list(ridges)}")
        check_choice("select", select, ("mse", "accuracy"))
        check_choice("ridge_from", ridge_from, ("last", "all"))
        self.num_classes, self.select, self.ridges = num_classes, select, sorted(ridges)
        self.standardize = standardize
        generator = torch.Generator().manual_seed(seed)
        entries = (projection or width) + standardize  # of the intercept, the constant 1
        try:
            gram = torch.zeros(entries, entries, dtype=torch.float64, device="cpu")
        except RuntimeError as error:
            raise ValueError(
                f"the Gram matrix of {entries} features needs {8 * entries**2 / 2**30:.0f} GiB: "
                "choose a smaller projection"
            ) from error
        random = gram.new_empty(width, projection or 0, dtype=torch.float32)
        random.normal_(generator=generator)
        self.register_buffer("random", None if projection is None else random)
        self.register_buffer("gram", gram)
        self.register_buffer("targets", gram.new_zeros(entries, num_classes))
        self.register_buffer("weight", gram.new_zeros(entries, num_classes, dtype=torch.float32))
        sums = gram.new_zeros(len(self.ridges)) if ridge_from == "all" else None
        self.register_buffer("scores", sums)
        self.random: Tensor | None
        self.gram: Tensor
        self.targets: Tensor
        self.weight: Tensor
        self.scores: Tensor | None  # of the ridges, over all domains
        self.register_buffer("ridge", gram.new_tensor(self.ridges[-1]))
        self.ridge: Tensor
        """The ridge of the last domain, a scalar."""
        self._domain: tuple[Tensor, Tensor]  # G and Q of the current domain
        self._held_out: list[tuple[Tensor, Tensor]]

    def _load_from_state_dict(self, state: dict[str, Any], prefix: str, *others: Any) -> None:
        state.setdefault(f"{prefix}ridge", self.ridge)  # saved before it was kept
        super()._load_from_state_dict(state, prefix, *others)

    def begin_domain(self) -> None:
        self._domain = torch.zeros_like(self.gram), torch.zeros_like(self.targets)
        self._held_out = []

    def update(self, features: Tensor, labels: Tensor, first_index: int = 0) -> None:
        numbers = first_index + torch.arange(len(labels), device=labels.device)
        held_out = numbers % _HELD_OUT == _HELD_OUT - 1
        self._held_out.append((features[held_out], labels[held_out]))
        self._add(self._domain, features[~held_out], labels[~held_out])

    def _add(self, sums: tuple[Tensor, Tensor], features: Tensor, labels: Tensor) -> None:
        gram, targets = sums
        h = self._projected(features).double()
        gram.addmm_(h.T, h)
        targets += h.T @ F.one_hot(labels, self.num_classes).double()

    def end_domain(self) -> None:
        """Choose the ridge and solve the regression over all domains.

        :raises FloatingPointError: if features are not finite; the domain is not added then.
        """
        scores = self._held_out_scores(*self._domain)
        if self.scores is not None:
            scores = self.scores if scores is None else self.scores + scores
        if scores is not None:
            best = scores.max()
            ridge = max(r for r, score in zip(self.ridges, scores, strict=True) if score == best)
        else:
            ridge = float(self.ridge)
        gram, targets = self._domain
        gram += self.gram
        targets += self.targets
        for features, labels in self._held_out:
            self._add((gram, targets), features, labels)
        self.weight = self._solve(gram, targets, ridge).to(self.weight.dtype)
        self.gram, self.targets = gram, targets
        if self.scores is not None:
            self.scores = scores
        self.ridge.fill_(ridge)
        del self._domain, self._held_out

    def _held_out_scores(self, gram: Tensor, targets: Tensor) -> Tensor | None:
        """Of each ridge, the higher the better; ``None`` for a domain of fewer than 5 examples."""
        labels = torch.cat([labels for _, labels in self._held_out])
        if not len(labels):
            return None
        h = torch.cat([self._projected(features) for features, _ in self._held_out]).double()
        if not h.isfinite().all():
            raise FloatingPointError("the features of the network are not finite")
        wanted = F.one_hot(labels, self.num_classes).double()
        found = []
        for ridge in self.ridges:
            scores = h @ self._solve(gram, targets, ridge)
            if self.select == "mse":
                found.append(-(scores - wanted).square().mean())
            else:
                found.append((scores.argmax(1) == labels).double().mean())
        return torch.stack(found)

    def _projected(self, features: Tensor) -> Tensor:
        h = features if self.random is None else (features @ self.random).relu()
        return torch.cat([h, torch.ones_like(h[:, :1])], 1) if self.standardize else h

    def _solve(self, gram: Tensor, targets: Tensor, ridge: float) -> Tensor:
        """The weights, of shape (width, classes); those of the intercept come last."""
        solve = _standardized_weight if self.standardize else _weight
        return solve(gram, targets, ridge)

    def forward(self, features: Tensor) -> Tensor:
        """Regressed one-hot labels, of shape (batch, classes)."""
        return self._projected(features) @ self.weight


def _weight(gram: Tensor, targets: Tensor, ridge: float) -> Tensor:
    """``(G + ridge I)⁻¹ Q``; with a larger ridge where that is numerically singular.

    :param gram: ``G``, of shape (width, width).
    :param targets: ``Q``, of shape (width, outputs).
    :raises FloatingPointError: if the features were not finite.
    """
    if not torch.isfinite(gram).all():
        raise FloatingPointError("the features of the network are not finite")
    while True:
        regularised = gram.clone()
        regularised.diagonal().add_(ridge)
        factor, failed = torch.linalg.cholesky_ex(regularised)
        if not failed:
            return torch.cholesky_solve(targets, factor)
        ridge *= 10


def _standardized_weight(gram: Tensor, targets: Tensor, ridge: float) -> Tensor:
    """The weight for features that are centred and divided by their standard deviations, and an
    intercept that the ridge leaves alone, in terms of the features themselves.

    A constant feature is centred, but not scaled.

    :param gram: ``G`` of the features and, as the last, the constant 1.
    :param targets: ``Q`` likewise.
    :return: of shape (width + 1, outputs), with the intercept as the last row.
    """
    n, mean = gram[-1, -1], gram[:-1, -1] / gram[-1, -1]
    covariance = gram[:-1, :-1] / n - mean.outer(mean)
    variance = covariance.diagonal().clone()
    scale = torch.where(variance > 1e-12 * (mean**2 + 1), variance.sqrt(), 1.0)
    right = (targets[:-1] - mean.outer(targets[-1])) / scale[:, None]
    weight = _weight(n * covariance / scale.outer(scale), right, ridge) / scale[:, None]
    return torch.cat([weight, targets[-1:] / n - mean @ weight])
