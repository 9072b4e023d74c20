"""RegMean: merging layers with the second moments of their inputs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from covon_avalanche.merging.rule import Batch, MergeRule, Task
from covon_avalanche.posterior.fisher import in_mode

Layer = nn.Linear | nn.Conv2d

_RIDGE = 1e-6  # of the mean diagonal: directions without any input keep the old weights


class RegMean(MergeRule):
    """Merges Linear and Conv2d layers with the second moments of their inputs.

    Let a layer have the weights ``W0`` before the task and ``W`` after it. With its inputs ``x``
    (1 appended for a bias) and ``A = sum x xᵀ`` over a task's data, other weights ``V`` change
    the layer's outputs by ``trace((V - W) A (V - W)ᵀ)`` in sum of squares. The weights with the
    least change over the earlier tasks (``A0``, ``W0``) and the new one (``A``, ``W``) are ::

        W0 + (W - W0) A (A0 + A)⁻¹,    A0 ← A0 + A

    This is the mean of a product of Gaussians as in Eq. 8, whose precision is not diagonal but
    ``A ⊗ I``, the input side of a Kronecker-factored curvature. For two networks trained from
    the same weights it is RegMean (Jin et al., "Dataless Knowledge Fusion by Merging Weights of
    Language Models", ICLR 2023; written from the paper). Here it is applied from task to task, and
    keeps one ``A0`` per layer and no data; ``A`` is added as measured at the merged weights.

    Takes two forward passes over the task's data. Outputs and layers that no earlier task has
    used keep their new weights, as do the parameters of other modules (with CoVON those are
    merged by Eq. 8).
    """

    needs_data = True

    def __init__(self) -> None:
        self.moments: dict[str, Tensor] = {}
        """``A0`` by layer name, as from :func:`input_moments`, summed over tasks."""
        self.outputs: dict[str, int] = {}
        """Number of outputs that the layer had in the last task; later ones have no past."""

    def merge(self, task: Task) -> dict[str, Tensor]:
        """See :class:`MergeRule`.

        :raises ValueError: for a layer whose number of inputs has changed, naming it.
        """
        merged: dict[str, Tensor] = {}
        names: dict[Tensor, str] = {p: name for name, p in task.model.named_parameters()}
        new = input_moments(task.model, task.batches())
        for layer_name, layer in _trained_layers(task.model).items():
            if layer_name not in self.moments or layer_name not in new:
                continue
            a0, a = self.moments[layer_name], new[layer_name]
            if a.shape != a0.shape:
                raise ValueError(
                    f"layer {layer_name!r} has {a.shape[-1]} inputs (a bias counts as one), "
                    f"but had {a0.shape[-1]} in earlier tasks: RegMean cannot merge it"
                )
            parameters = list(layer.parameters(recurse=False))
            w0 = _as_rows([task.before[names[p]] for p in parameters])
            w = _as_rows([p.detach() for p in parameters])
            known = slice(0, self.outputs[layer_name])
            rows = w.clone()
            rows[known] = _least_change(w0[known], w[known], a0, a)
            values = {layer.weight: rows[:, : layer.weight[0].numel()].view_as(layer.weight)}
            if layer.bias is not None:
                values[layer.bias] = rows[:, -1]
            merged |= {names[p]: value.to(p) for p, value in values.items() if p.requires_grad}
        return merged

    def observe(self, task: Task) -> None:
        """Add the moments of the task's data, at the merged weights."""
        layers = _trained_layers(task.model)
        new = input_moments(task.model, task.batches())
        added = {n: a + self.moments[n] if n in self.moments else a for n, a in new.items()}
        self.moments = {**self.moments, **added}
        self.outputs = {**self.outputs, **{name: len(layers[name].weight) for name in new}}


@torch.no_grad()
def input_moments(model: nn.Module, batches: Iterable[Batch]) -> dict[str, Tensor]:
    """Sums of ``x xᵀ`` over a layer's inputs: over examples, and positions of a convolution.

    In eval mode. Only layers that are called as modules take part (not those inside
    ``nn.MultiheadAttention``), and no convolutions other than ``nn.Conv2d``.

    :param batches: ``(input, target, *more)``, for ``model(input, *more)``. All patches that a
        convolution takes from a batch are in memory at once.
    :return: by layer name, of shape (groups, d, d), in units of the input squared; ``d`` is the
        number of inputs of an output, with the constant 1 of a bias as the last.
    """
    sums: dict[str, Tensor] = {}
    names = {layer: name for name, layer in _trained_layers(model).items()}

    def add(layer: Layer, inputs: tuple[Tensor, ...]) -> None:
        rows, name = _input_rows(layer, inputs[0].float()), names[layer]
        moment = rows.mT @ rows
        sums[name] = sums[name].add_(moment) if name in sums else moment

    handles = [layer.register_forward_pre_hook(add) for layer in names]
    try:
        with in_mode(model, train=False), torch.no_grad():
            for x, _, *more in batches:
                model(x, *more)
    finally:
        for handle in handles:
            handle.remove()
    return sums


def _trained_layers(model: nn.Module) -> dict[str, Layer]:
    """Linear and Conv2d layers whose weight is a parameter that is not frozen."""
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | nn.Conv2d)
        and (weight := dict(module.named_parameters(recurse=False)).get("weight")) is not None
        and weight.requires_grad
    }


def _input_rows(layer: Layer, x: Tensor) -> Tensor:
    """The inputs of single outputs, of shape (groups, examples and positions, d)."""
    if isinstance(layer, nn.Linear):
        rows = x.reshape(1, -1, layer.in_features)
    else:
        mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
        x = F.pad(x, layer._reversed_padding_repeated_twice, mode=mode)
        patches = F.unfold(x, layer.kernel_size, layer.dilation, stride=layer.stride)
        patches = patches.unflatten(1, (layer.groups, -1))
        rows = patches.permute(1, 0, 3, 2).flatten(1, 2)
    if layer.bias is not None:
        rows = torch.cat([rows, rows.new_ones(*rows.shape[:2], 1)], -1)
    return rows


def _as_rows(parameters: Sequence[Tensor]) -> Tensor:
    """Weight and bias as one matrix with a row for each output, in float64."""
    return torch.cat([_double(p).reshape(len(p), -1) for p in parameters], 1)


def _double(tensor: Tensor) -> Tensor:
    """In float64; on the CPU instead of Apple's GPUs, which lack it."""
    return (tensor.cpu() if tensor.device.type == "mps" else tensor).double()


def _least_change(w0: Tensor, w: Tensor, a0: Tensor, a: Tensor) -> Tensor:
    """``W0 + (W - W0) A (A0 + A)⁻¹``, by groups of outputs.

    :param w0: and ``w``, of shape (outputs, d).
    :param a0: and ``a``, of shape (groups, d, d).
    """
    a0, a = _double(a0), _double(a)
    both = a0 + a
    size = both.diagonal(dim1=-2, dim2=-1).mean(-1).clamp(min=torch.finfo(both.dtype).tiny)
    both = both + _RIDGE * size[:, None, None] * torch.eye(both.shape[-1]).to(both)
    change = (w - w0).unflatten(0, (len(a), -1))
    step = torch.linalg.solve(both, (change @ a).mT).mT  # of shape (groups, outputs, d)
    return w0 + step.flatten(0, 1)
