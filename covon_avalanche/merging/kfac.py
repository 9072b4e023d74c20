"""Merging layers with a Kronecker-factored curvature."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from covon_avalanche.checks import check_logits
from covon_avalanche.float64 import in_double
from covon_avalanche.merging.layers import as_rows, layer_names
from covon_avalanche.merging.linalg import mean_diagonals, with_ridge
from covon_avalanche.merging.regmean import RegMean
from covon_avalanche.merging.rule import Batch, Task
from covon_avalanche.module_hooks import module_hooks
from covon_avalanche.posterior.fisher import in_mode

_TINY = 1e-9  # keeps 0 / 0 at 0
_DAMPING = 1e-3  # outputs without any gradient are merged as by RegMean


class KFACMerge(RegMean):
    """RegMean that also weights the outputs, by the second moments of their gradients.

    With a layer's inputs ``x`` and the gradients ``g`` of an example's loss with respect to its
    outputs, ``A = sum x xᵀ`` and ``G = sum g gᵀ`` over a task's data, the task's
    Kronecker-factored curvature is proportional to ``A ⊗ G`` (Martens and Grosse, "Optimizing
    Neural Networks with Kronecker-factored Approximate Curvature", ICML 2015). The merged weights
    are the mean of the product of the Gaussians with the precisions ``A0 ⊗ G0`` of the earlier
    tasks and ``A ⊗ G`` of the new one, the solution ``V`` of ::

        G0 (V - W0) A0 + G (V - W) A = 0

    which is exact in the bases in which ``A0`` and ``A``, and ``G0`` and ``G``, are diagonal
    together. To ``A0`` a ten-thousandth of the mean diagonal of ``A0 + A`` is added, as in RegMean,
    to ``G0`` the same of ``G0 + G``, and to both ``G0`` and ``G`` 0.001. ``G`` is scaled to a mean
    diagonal of 1: it weights outputs within a task, while the weight of a task comes from its
    inputs, as in RegMean. (Without this scaling, a task that is predicted with confidence has
    little weight; on PACS that was worse in pilot runs.) The sum of two such precisions is then
    replaced by the Kronecker product with the same partial traces, ``A0 + A`` and the mean of
    ``G0`` and ``G`` weighted by the traces of ``A0`` and ``A``. So memory is constant in the number
    of tasks: for each layer, that of RegMean and a matrix of outputs by outputs. Online Laplace
    approximations sum factors likewise, for a penalty in training (Ritter et al., "Online
    Structured Laplace Approximations for Overcoming Catastrophic Forgetting", NeurIPS 2018).

    The labels behind ``g`` are samples of the network's predictions, the same in each pass, which
    makes ``G`` a Fisher information and not an empirical one. For classifiers only. The input
    projection of attention has ``G = 1``, which is RegMean. In addition to each pass of RegMean
    there is one with a backward pass.
    """

    _ridge = 1e-3
    """Of layers that are merged as by RegMean: LayerNorm leaves a direction without variance, in
    which weights would grow, and the other layers' merge gives it variance."""

    def __init__(self) -> None:
        super().__init__()
        self.gradients: dict[str, Tensor] = {}
        """``G0`` by layer name, of shape (groups, outputs, outputs)."""

    def merge(self, task: Task) -> dict[str, Tensor]:
        if self.moments:
            task.measured = _measured(task)
        return super().merge(task)

    def observe(self, task: Task) -> None:
        """Add the curvature of the task's data at the merged weights."""
        past = self.moments
        super().observe(task)
        added = {}
        for name, g in _measured(task).items():
            added[name] = g
            if name in past and name in self.gradients:
                g0 = g.clone()  # outputs without a past have the new curvature
                known = self.gradients[name].shape[-1]
                g0[:, :known, known:] = g0[:, known:, :known] = 0
                g0[:, :known, :known] = self.gradients[name]
                share = mean_diagonals(past[name]) / mean_diagonals(self.moments[name])
                added[name] = torch.lerp(g, g0, share)
        self.gradients = {**self.gradients, **added}

    def _merged_change(
        self, task: Task, layer: str, change: Tensor, a0: Tensor, a: Tensor
    ) -> Tensor:
        if layer not in self.gradients or layer not in task.measured:
            return super()._merged_change(task, layer, change, a0, a)
        known = change.shape[1]
        g0, g = (
            part[layer][:, :known, :known] + _DAMPING * part[layer].new_ones(known).diag()
            for part in (self.gradients, task.measured)
        )
        return merged_change(change, a0, g0, a, g)


def _measured(task: Task) -> dict[str, Tensor]:
    """``G`` by layer name, with a mean diagonal of 1; of layers that have gradients."""
    found = output_gradient_moments(task.model, task.batches())
    sizes = {name: mean_diagonals(g) for name, g in found.items()}
    return {name: g / sizes[name] for name, g in found.items() if (sizes[name] > 0).all()}


def merged_change(change: Tensor, a0: Tensor, g0: Tensor, a: Tensor, g: Tensor) -> Tensor:
    """The solution ``D`` of ``G0 D A0 + G D A = G change A``.

    :param change: of shape (groups, outputs, d), in float64.
    :param a0: and ``a``, of shape (groups, d, d); ``g0`` and ``g``, (groups, outputs, outputs).
    """
    root_a, basis_a, share_a = _common_basis(a0, a)
    root_g, basis_g, share_g = _common_basis(g0, g)
    both = share_g[:, :, None] * share_a[:, None, :]
    neither = (1 - share_g)[:, :, None] * (1 - share_a)[:, None, :]
    inside = basis_g.mT @ root_g.mT @ change @ root_a @ basis_a
    inside = basis_g @ (inside * both / (both + neither + _TINY)) @ basis_a.mT
    left = torch.linalg.solve_triangular(root_g.mT, inside, upper=True)
    return torch.linalg.solve_triangular(root_a, left, upper=False, left=False)


def _common_basis(first: Tensor, second: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The Cholesky factor of the sum of two symmetric matrices, and eigenvectors and eigenvalues,
    between 0 and 1, of the second where the sum is the identity."""
    first, second = in_double(first), in_double(second)
    root = torch.linalg.cholesky(with_ridge(first + second))
    half = torch.linalg.solve_triangular(root, second, upper=False)
    whitened = torch.linalg.solve_triangular(root, half.mT, upper=False)
    values, vectors = torch.linalg.eigh((whitened + whitened.mT) / 2)
    return root, vectors, values.clamp(0, 1)


def output_gradient_moments(model: nn.Module, batches: Iterable[Batch]) -> dict[str, Tensor]:
    """``sum g gᵀ`` over examples, and tokens or positions, in eval mode.

    ``g`` is the gradient of a layer's outputs for the cross-entropy of a label that is sampled from
    the network's prediction.

    :param batches: ``(input, target, *more)``, for ``model(input, *more)``.
    :return: by layer name, of shape (groups, outputs, outputs), in units of loss² over those of
        the output squared. Without attention's input projection, which is not called as a module.
    """
    names = {
        layer: name
        for layer, name in layer_names(model).items()
        if not isinstance(layer, nn.MultiheadAttention)
    }
    edges: list[tuple[nn.Module, GradientEdge]] = []

    def keep(layer: nn.Module, inputs: tuple[Tensor, ...], output: Any) -> None:
        if isinstance(layer, nn.MultiheadAttention):  # does not call its output projection
            layer, output = layer.out_proj, output[0]
        if output.requires_grad:  # not under no_grad
            edges.append((layer, get_gradient_edge(output)))

    sums: dict[str, Tensor] = {}
    torch.clear_autocast_cache()  # of casts of the weights that were made without gradients
    generator = torch.Generator().manual_seed(0)
    attention = [m for m in model.modules() if isinstance(m, nn.MultiheadAttention)]
    with in_mode(model, train=False), module_hooks() as hooks:
        for layer in (*names, *(m for m in attention if m.out_proj in names)):
            hooks.enter_context(layer.register_forward_hook(keep, prepend=True))
        for x, y, *more in batches:
            edges.clear()
            output = model(x, *more)
            check_logits("KFACMerge", output, y)
            output = output.float()
            chances = output.detach().softmax(1).cpu()
            labels = chances.multinomial(1, generator=generator)[:, 0].to(output.device)
            loss = F.cross_entropy(output, labels, reduction="sum")
            outputs = [*edges]  # checkpointing calls hooks again in the backward pass
            found = torch.autograd.grad(loss, [edge for _, edge in outputs], allow_unused=True)
            for (layer, _), gradient in zip(outputs, found, strict=True):
                if gradient is not None:
                    added = _moments(layer, gradient.float())
                    sums[names[layer]] = sums.get(names[layer], 0.0) + added
    return sums


def _moments(layer: nn.Module, gradient: Tensor) -> Tensor:
    """``sum g gᵀ`` by groups of outputs."""
    groups = 1
    if isinstance(layer, nn.Conv2d):
        groups, gradient = layer.groups, gradient.movedim(1, -1)
    rows = gradient.reshape(-1, groups, len(as_rows(layer)) // groups).movedim(0, 1)
    with torch.autocast(rows.device.type, enabled=False):
        return rows.mT @ rows
