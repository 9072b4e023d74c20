"""Merging weights by what their layers see: the slow step without the diagonal.

Let a layer have the weights ``W0`` after the tasks so far, and ``W`` after one more. With
``x`` its inputs (1 appended for a bias) and ``A = sum x xᵀ`` over a task's data, other weights
``V`` change the outputs by ``trace((V - W) A (V - W)ᵀ)`` in sum of squares. The weights with the
least change over old tasks (``A0``, ``W0``) and the new one (``A``, ``W``) are ::

    W0 + (W - W0) A (A0 + A)⁻¹

the mean of a product of Gaussians as in Eq. 8, whose precision is not diagonal but ``A ⊗ I``, the
input side of a Kronecker-factored curvature. For two networks it is RegMean (Jin et al.,
"Dataless Knowledge Fusion by Merging Weights of Language Models", ICLR 2023); here it goes from
task to task, and remembers one ``A0`` a layer and no data. Written from the paper.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from covon_avalanche.posterior.fisher import in_mode

Batch = Sequence[Tensor]
Layer = nn.Linear | nn.Conv2d

_RIDGE = 1e-6  # of the mean diagonal: directions that no input has keep the old weights


class InputMoments:
    """Second moments of the inputs of each Linear and Conv2d layer, over all tasks so far.

    At the end of a task, before the optimizer forgets the old means::

        old = optimizer.prior(model.named_parameters()).mean
        optimizer.consolidate(means=moments.merged(model, old, batches()))
        moments.add(model, batches())
    """

    def __init__(self) -> None:
        self.sums: dict[str, Tensor] = {}
        """As :func:`input_moments` gives them, summed over tasks."""
        self.outputs: dict[str, int] = {}
        """Outputs that the layer had: those of later classes have no past."""

    def add(self, model: nn.Module, batches: Iterable[Batch]) -> None:
        """Take in a task's data, at the weights as they are: those merged.

        :param batches: see :meth:`merged`.
        """
        layers = _layers(model)
        for name, moment in input_moments(model, batches).items():
            if name in self.sums:
                moment = moment + self.sums[name]
            self.sums[name] = moment
            self.outputs[name] = len(layers[name].weight)

    @torch.no_grad()
    def merged(
        self, model: nn.Module, old: Mapping[str, Tensor], batches: Iterable[Batch]
    ) -> dict[Tensor, Tensor]:
        """Merged means, by parameter, of the layers whose past is known and that the task uses.

        :param model: with the weights that the task has left.
        :param old: weights before the task, by parameter name.
        :param batches: of the task's data, ``(input, target, *more)``, for ``model(input, *more)``.
        :raises ValueError: for a layer with other inputs than before, naming it.
        """
        found: dict[Tensor, Tensor] = {}
        new = input_moments(model, batches)
        for name, layer in _layers(model).items():
            if name not in self.sums or name not in new:
                continue
            if new[name].shape != self.sums[name].shape:
                raise ValueError(
                    f"layer {name!r} has {new[name].shape[-1]} inputs (a bias counts as one), and "
                    f"had {self.sums[name].shape[-1]}: its weights cannot be merged by inputs"
                )
            prefix = f"{name}." if name else ""
            own = {key: f"{prefix}{key}" for key, _ in layer.named_parameters(recurse=False)}
            before = _as_rows([old[full] for full in own.values()])
            after = _as_rows([getattr(layer, key) for key in own])
            known = slice(0, self.outputs[name])
            merged = after.clone()
            merged[known] = _least_change(before[known], after[known], self.sums[name], new[name])
            found[layer.weight] = merged[:, : layer.weight[0].numel()].view_as(layer.weight)
            if layer.bias is not None:
                found[layer.bias] = merged[:, -1]
        return {p: mean.to(p) for p, mean in found.items() if p.requires_grad}


@torch.no_grad()
def input_moments(model: nn.Module, batches: Iterable[Batch]) -> dict[str, Tensor]:
    """Sum over examples, and positions of a convolution, of the products of a layer's inputs.

    In eval mode. Layers that the model does not call as modules (those inside
    ``nn.MultiheadAttention``) are not there, nor convolutions other than ``nn.Conv2d``.

    :param batches: ``(input, target, *more)``, for ``model(input, *more)``. The patches of a
        convolution are in memory for a whole batch.
    :return: by layer, of shape (groups, d, d): ``d`` inputs of an output, a bias being one, last;
        in units of the inputs squared.
    """
    sums: dict[str, Tensor] = {}

    def adds(name: str) -> Callable[[Layer, tuple[Tensor, ...], Tensor], None]:
        def add(layer: Layer, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            rows = _inputs(layer, inputs[0].float())
            square = rows.mT @ rows
            sums[name] = sums[name].add_(square) if name in sums else square

        return add

    handles = [layer.register_forward_hook(adds(name)) for name, layer in _layers(model).items()]
    try:
        with in_mode(model, train=False), torch.no_grad():
            for x, _, *more in batches:
                model(x, *more)
    finally:
        for handle in handles:
            handle.remove()
    return sums


def _layers(model: nn.Module) -> dict[str, Layer]:
    """Those that are trained."""
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | nn.Conv2d)
        and (weight := dict(module.named_parameters(recurse=False)).get("weight")) is not None
        and weight.requires_grad
    }


def _inputs(layer: Layer, x: Tensor) -> Tensor:
    """What each output is made of, of shape (groups, examples and positions, d)."""
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
    """Weight and bias as one matrix, in float64: a row for each output."""
    return torch.cat([_double(p).reshape(len(p), -1) for p in parameters], 1)


def _double(tensor: Tensor) -> Tensor:
    """In float64, which Apple's GPUs do not have."""
    return (tensor.cpu() if tensor.device.type == "mps" else tensor).double()


def _least_change(w0: Tensor, w: Tensor, a0: Tensor, a: Tensor) -> Tensor:
    """The formula above, by groups of outputs.

    :param w0: and ``w``, of shape (outputs, d).
    :param a0: and ``a``, of shape (groups, d, d).
    """
    groups = len(a)
    a0, a = _double(a0), _double(a)
    both = a0 + a
    size = both.diagonal(dim1=-2, dim2=-1).mean(-1).clamp(min=torch.finfo(both.dtype).tiny)
    both = both + _RIDGE * size[:, None, None] * torch.eye(both.shape[-1]).to(both)
    change = (w - w0).unflatten(0, (groups, -1))
    step = torch.linalg.solve(both, (change @ a).mT).mT  # of shape (groups, outputs, d)
    return w0 + step.flatten(0, 1)
