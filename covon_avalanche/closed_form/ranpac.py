"""Ridge regression on features, with or without a random projection: RanPAC and LayUP."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from covon_avalanche.checks import check_choice, check_whole
from covon_avalanche.closed_form.model import ClosedFormHead

RANPAC_RIDGES = tuple(10.0**k for k in range(-8, 9))
LAYUP_RIDGES = (1e-8, *(10.0 ** (k / 2) for k in range(-8, 7)))
STANDARDIZED_RIDGES = tuple(10.0 ** (k / 2) for k in range(2, 11))
_HELD_OUT = 5  # without folds every fifth example chooses the ridge


class RidgeClassifier(ClosedFormHead):
    """Ridge regression of one-hot labels on features, over the examples of all domains.

    With features ``H``, one row per example, and one-hot labels ``Y``, the sums ``G = HᵀH`` and
    ``Q = HᵀY`` over all domains give the weights ``(G + ridge I)⁻¹ Q`` of the joint ridge
    regression, whatever the order of the domains. The ridge is chosen in each domain, by fitting
    on four fifths of that domain's examples and validating on every fifth example; or, with
    ``folds``, by cross-validation over that domain's examples, in which each fit has the sums of
    all earlier domains, too. A domain with fewer than five examples, or than ``folds``, keeps the
    ridge of the one before; if it is the first, it has the middle candidate.

    With ``standardize`` features are centred and divided by their standard deviation over all
    domains, and an intercept is fitted that the ridge leaves alone. Both follow from the sums.

    With ``projection`` the features are ``relu(f P)`` with a fixed random matrix ``P`` of standard
    normals: RanPAC (McDonnell et al., "RanPAC: Random Projections and Pre-trained Models for
    Continual Learning", NeurIPS 2023, without its first-domain adapter; the authors validate on the
    last fifth of shuffled examples instead of every fifth). Features of several
    blocks without projection, and the ridge chosen by accuracy in four folds, are LayUP (see
    :class:`FeatureExtractor`). Its authors' folds are of consecutive examples of each class; here
    they are every fourth example, so that mirror images stay together.

    :param width: of the features.
    :param num_classes: number of classes, shared by all domains.
    :param projection: number ``M`` of random features; ``None`` for the features themselves.
    :param standardize: centre and scale the features.
    :param folds: of cross-validation; ``None``: a fifth of the examples is held out.
    :param ridges: candidate values; by default 1e-8 to 1e8, with ``folds`` 1e-4 to 1e3 and 1e-8,
        and for standardised features 10 to 1e5.
    :param select: choose the ridge with the least squared error (``"mse"``, RanPAC) or the highest
        ``"accuracy"`` (LayUP); of equal ones the largest (LayUP's authors take the smallest).
    :param ridge_from: choose by the scores of the ``"last"`` domain, as in RanPAC and LayUP, or by
        their sum over ``"all"`` domains: then the order of the domains does not matter.
    :param seed: of the projection.
    :raises ValueError: naming the value and the rule, or if ``G`` does not fit into memory.

    Memory: ``G`` has M x M entries in float64, 800 MB for M = 10,000; four or, with ``folds``,
    ``folds + 3`` matrices of this size are needed at the end of a domain. Without folds, features
    of the domain's examples are kept until then, and if these are fewer than M, the ridges are
    compared in matrices of their number.
    """

    def __init__(
        self,
        width: int,
        num_classes: int,
        *,
        projection: int | None = None,
        standardize: bool = False,
        folds: int | None = None,
        ridges: Sequence[float] | None = None,
        select: Literal["mse", "accuracy"] = "mse",
        ridge_from: Literal["last", "all"] = "last",
        seed: int = 0,
    ) -> None:
        super().__init__()
        if projection is not None:
            check_whole("projection", projection)
        if ridges is None:
            ridges = LAYUP_RIDGES if folds else RANPAC_RIDGES
            ridges = STANDARDIZED_RIDGES if standardize else ridges
        if not ridges or min(ridges) <= 0:
            raise ValueError(f"ridges must be positive numbers, got {list(ridges)}")
        check_choice("select", select, ("mse", "accuracy"))
        check_choice("ridge_from", ridge_from, ("last", "all"))
        if folds is not None:
            check_whole("folds", folds, least=2)
        self.num_classes, self.select, self.ridges = num_classes, select, sorted(ridges)
        self.folds = folds
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
        self.register_buffer("ridge", gram.new_tensor(self.ridges[len(self.ridges) // 2]))
        self.ridge: Tensor
        """The ridge of the last domain, a scalar."""
        self._domain: tuple[Tensor, Tensor]  # G and Q of what is not held out
        self._fitted: list[tuple[Tensor, Tensor]]  # the same as examples, without folds
        self._held_out: list[list[tuple[Tensor, Tensor]]]  # by fold

    def begin_domain(self) -> None:
        self._domain = torch.zeros_like(self.gram), torch.zeros_like(self.targets)
        self._held_out = [[] for _ in range(self.folds or 1)]
        self._fitted = []

    def update(self, features: Tensor, labels: Tensor, first_index: int = 0) -> None:
        last = (self.folds or _HELD_OUT) - 1
        position = (first_index + torch.arange(len(labels), device=labels.device)) % (last + 1)
        for fold, examples in enumerate(self._held_out):
            own = position == last - fold
            examples.append((features[own], labels[own]))
        rest = position <= last - len(self._held_out)
        self._add(self._domain, features[rest], labels[rest])
        if not (self.folds or self.standardize):
            self._fitted.append((features[rest], labels[rest]))

    def _add(self, sums: tuple[Tensor, Tensor], features: Tensor, labels: Tensor) -> None:
        gram, targets = sums
        h = self._projected(features).double()
        gram.addmm_(h.T, h)
        targets += h.T @ F.one_hot(labels, self.num_classes).double()

    def end_domain(self) -> None:
        """Choose the ridge and solve the regression over all domains.

        :raises FloatingPointError: if features are not finite; the domain is not added then.
        """
        folds = [self._sums(examples) for examples in self._held_out]
        scores = self._held_out_scores(folds)
        if self.scores is not None:
            scores = self.scores if scores is None else self.scores + scores
        if scores is not None and scores.any():
            pairs = zip(self.ridges, scores.tolist(), strict=True)
            best = float(scores.max()) - 1e-12  # folds' means are rounded
            ridge = max(r for r, score in pairs if score >= best)
        else:
            ridge = float(self.ridge)
        gram, targets = _sum([(self.gram, self.targets), self._domain, *folds])
        self.weight = self._solve(gram, targets, ridge).to(self.weight.dtype)
        self.gram, self.targets = gram, targets
        if self.scores is not None:
            self.scores = scores
        self.ridge.fill_(ridge)
        del self._domain, self._held_out, self._fitted

    def _sums(self, examples: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        """``G`` and ``Q`` of held-out examples."""
        sums = torch.zeros_like(self.gram), torch.zeros_like(self.targets)
        for features, labels in examples:
            self._add(sums, features, labels)
        return sums

    def _held_out_scores(self, folds: Sequence[tuple[Tensor, Tensor]]) -> Tensor | None:
        """Scores of shape (ridges,), the higher the better; ``None`` if a fold is empty.

        :param folds: ``G`` and ``Q`` of each fold.
        """
        if not all(sum(len(labels) for _, labels in fold) for fold in self._held_out):
            return None
        fitted = [self._domain, (self.gram, self.targets)] if self.folds else [self._domain]
        found = []
        for i, examples in enumerate(self._held_out):
            others = [sums for j, sums in enumerate(folds) if j != i]
            found.append(self._fold_scores(examples, *_sum([*fitted, *others])))
        return torch.stack(found).mean(0)

    def _fold_scores(
        self, examples: Sequence[tuple[Tensor, Tensor]], gram: Tensor, targets: Tensor
    ) -> Tensor:
        """Scores of shape (ridges,) on the examples, fitted to ``G`` and ``Q``."""
        h, wanted = self._rows(examples)
        labels = wanted.argmax(1)
        if 0 < sum(len(labels) for _, labels in self._fitted) < len(gram):
            # With fewer examples than features: (HᵀH + ridge I)⁻¹ HᵀY = Hᵀ (HHᵀ + ridge I)⁻¹ Y
            fitted, targets = self._rows(self._fitted)
            h, gram = h @ fitted.T, fitted @ fitted.T
        found = []
        for ridge in self.ridges:
            scores = h @ self._solve(gram, targets, ridge)
            if self.select == "mse":
                found.append(-(scores - wanted).square().mean())
            else:
                found.append((scores.argmax(1) == labels).double().mean())
        return torch.stack(found)

    def _rows(self, examples: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        """``H`` and ``Y`` of examples."""
        h = torch.cat([self._projected(features) for features, _ in examples]).double()
        if not h.isfinite().all():
            raise FloatingPointError("the features of the network are not finite")
        labels = torch.cat([labels for _, labels in examples])
        return h, F.one_hot(labels, self.num_classes).double()

    def _projected(self, features: Tensor) -> Tensor:
        h = features
        if self.random is not None:
            h = (features.to(self.random.dtype) @ self.random).relu()
        return torch.cat([h, torch.ones_like(h[:, :1])], 1) if self.standardize else h

    def _solve(self, gram: Tensor, targets: Tensor, ridge: float) -> Tensor:
        """The weights, of shape (width, classes); those of the intercept come last."""
        solve = _standardized_weight if self.standardize else _weight
        return solve(gram, targets, ridge)

    def forward(self, features: Tensor) -> Tensor:
        """Regressed one-hot labels, of shape (batch, classes)."""
        return self._projected(features).to(self.weight.dtype) @ self.weight


def _sum(parts: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Sums of ``G`` and of ``Q`` over the parts; a single part is returned itself."""
    if len(parts) == 1:
        return parts[0]
    gram, targets = (column[0].clone() for column in zip(*parts, strict=True))
    for more_gram, more_targets in parts[1:]:
        gram += more_gram
        targets += more_targets
    return gram, targets


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
