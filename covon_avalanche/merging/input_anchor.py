"""Anchoring layers during training with the second moments of their inputs."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from covon_avalanche.checks import check_positive
from covon_avalanche.merging.layers import as_rows, from_rows, merged_layers, own_parameters
from covon_avalanche.merging.regmean import RegMean
from covon_avalanche.merging.rule import Batch
from covon_avalanche.merging.second_moments import input_second_moments


class InputAnchor:
    """Pulls layers toward the weights after the last task, along the inputs of earlier tasks only.

    With ``A0 = sum x xᵀ`` over the inputs of a layer in earlier tasks and its weights ``W0`` after
    the last one, ``trace((W - W0) A0 (W - W0)ᵀ)`` is the change of the layer's outputs in earlier
    tasks, in sum of squares. As a penalty it is the prior ``N(W0, (strength A0 ⊗ I)⁻¹)``, the
    input side of a Kronecker-factored Laplace approximation (Ritter et al., "Online Structured
    Laplace Approximations", NeurIPS 2018; TAK, arXiv 2602.17385, also has the output side).
    Directions without input in earlier tasks stay free, as in OWM and Adam-NSCL, which project
    gradients on them.

    The pull is decoupled from the loss as AdamW's weight decay is, and implicit (proximal), so
    that it is stable with any strength: after each step of an optimizer, ::

        W ← W0 + (W - W0) (I + lr strength / examples A0)⁻¹

    For any optimizer, and the layers that :class:`RegMean` merges. In a plain PyTorch loop::

        anchor = InputAnchor(strength=0.01)
        for loader in tasks:
            for x, y in loader:
                ...
                optimizer.step()
                anchor.pull_(model, optimizer, len(loader.dataset))
            merge_into(...)  # if the weights are merged
            anchor.observe(model, lambda: loader)

    Keeps a copy of the weights and, for each layer with ``d`` inputs, two matrices of size
    ``d x d``. A pull multiplies each layer's weights by a ``d x d`` matrix twice.
    """

    def __init__(self, strength: float, rule: RegMean | None = None) -> None:
        """
        :param strength: of the pull, per squared unit of the layers' inputs; 0 switches it off.
        :param rule: the rule that merges the same model's weights, whose second moments are used
            instead of measuring them a second time.
        """
        check_positive("strength", strength, zero=True)
        if rule is not None and rule.reduction != "sum":
            raise ValueError("the anchor counts examples: it needs RegMean(reduction='sum')")
        self.strength = strength
        self.rule = rule
        self.moments: dict[str, Tensor] = {}
        """``A0`` by layer name, of shape (groups, d, d); empty with a ``rule``."""
        self.weights: dict[str, Tensor] = {}
        """``W0`` by layer name, of shape (outputs, d), with the bias as the last column."""
        self._eigen: dict[str, tuple[Tensor, Tensor]] = {}  # of A0: (groups, d), (groups, d, d)

    @torch.no_grad()
    def pull_(self, model: nn.Module, optimizer: Optimizer, examples: int) -> None:
        """Pull the layers that the optimizer has stepped, in place.

        :param examples: number of examples of the present task.
        :raises ValueError: for a layer whose number of inputs has changed, naming it.
        """
        lr = {p: group["lr"] for group in optimizer.param_groups for p in group["params"]}
        layers = merged_layers(model) if self.weights else {}
        for name, layer in layers.items():
            weight = own_parameters(layer)[0]
            if name not in self.weights or weight not in lr or weight.grad is None:
                continue
            rows, w0 = as_rows(layer), self.weights[name]
            if rows.shape[1] != w0.shape[1]:
                raise ValueError(
                    f"layer {name!r} has {rows.shape[1]} inputs (a bias counts as one), but had "
                    f"{w0.shape[1]} in earlier tasks"
                )
            values, vectors = self._eigen[name]
            shrunk = 1 / (1 + lr[weight] * self.strength / examples * values)
            change = (rows[: len(w0)] - w0).unflatten(0, (len(values), -1))
            change = ((change @ vectors) * shrunk[:, None]) @ vectors.mT
            rows[: len(w0)] = w0 + change.flatten(0, 1)
            for p, value in from_rows(layer, rows).items():
                if p in lr:
                    p.data.copy_(value)  # part of the step: CoVON's notices other changes

    @torch.no_grad()
    def observe(self, model: nn.Module, batches: Callable[[], Iterable[Batch]]) -> None:
        """Add a finished task, after its weights have been merged.

        :param batches: starts a pass over the task's data, ``(input, target, *more)``, for
            ``model(input, *more)``.
        """
        if not self.strength:
            return
        if self.rule is None:
            new = input_second_moments(model, batches())
            added = {n: a + self.moments[n] if n in self.moments else a for n, a in new.items()}
            self.moments = {**self.moments, **added}
        moments = self.moments if self.rule is None else self.rule.moments
        layers = merged_layers(model)
        self.weights = {n: as_rows(layers[n]) for n in moments if n in layers}
        self._eigen = {n: _eigen(moments[n], self.weights[n]) for n in self.weights}


def _eigen(a0: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues, at least 0, and eigenvectors of symmetric matrices, in the type of ``like``."""
    values, vectors = torch.linalg.eigh(a0.double().cpu())
    return values.clamp(min=0).to(like), vectors.to(like)
