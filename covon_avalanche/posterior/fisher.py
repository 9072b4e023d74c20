"""Diagonal Fisher information of a classifier, from squared gradients.

Functions return one tensor per parameter that requires a gradient, per example: squared gradients,
in loss²/weight², with the data's labels (the empirical Fisher, Eq. 9 of the paper) unless stated
otherwise. A batch is ``(input, target, *more)``; the model is called as ``model(input, *more)``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge
from torch.func import functional_call, grad, vmap

from covon_avalanche.checks import check_logits
from covon_avalanche.float64 import in_double
from covon_avalanche.module_hooks import module_hooks

Batch = Sequence[Tensor]
Criterion = Callable[[Tensor, Tensor], Tensor]
Sums = dict[str, Tensor]
Add = Callable[[nn.Module, Sums, Batch, Criterion], None]
Size = Callable[[Tensor], Tensor]
"""Elementwise square or absolute value of gradients: that of an outer product is the outer product
of those."""

_MOST_PASSES = 10
_CHUNK = 2**25  # entries of per-example gradients that are in memory at once
_CHUNK_ACCELERATOR = 2**30  # where single examples would mostly launch kernels


def squared_batch_gradients(
    model: nn.Module, batches: Iterable[Batch], criterion: Criterion = F.cross_entropy
) -> dict[str, Tensor]:
    """Squared gradients of mini-batch means, times the batch size (paper, Algorithm 3).

    ``sum_b B_b² g_b² / N`` with ``g_b`` the gradient of the mean loss of batch ``b`` of
    ``B_b`` out of ``N`` examples; for equal batches ``B`` times the average of ``g_b²``. It
    equals the per-example Fisher for ``B = 1``, and on average where gradients have mean 0.

    :param batches: an input that is a mapping is passed to the model by keyword.
    :param criterion: loss, averaged over the batch; called a second time, on a repeated batch.
    :raises ValueError: if there are no examples, or the loss is a sum over the batch.
    """
    return _average(_add_batch_gradients, model, batches, criterion)


def squared_example_gradients(
    model: nn.Module, batches: Iterable[Batch], criterion: Criterion = F.cross_entropy
) -> dict[str, Tensor]:
    """Squared per-example gradients, averaged over the examples: the exact empirical Fisher.

    Computed from inputs and output gradients in one backward pass a batch where all parameters
    belong to ``Linear`` and ``Conv2d`` layers, each called once in a forward pass with one row
    per example; otherwise by ``torch.func``, or example by example where that fails: with ``GRU``,
    ``RNN``, and control flow that depends on the data.

    :param criterion: loss, evaluated on each example as a batch of one. So ``reduction`` does not
        matter, and with ``"mean"`` class weights cancel.
    :raises ValueError: if there are no examples.
    """
    return _average(partial(_add_example_gradients, size=torch.square), model, batches, criterion)


def absolute_example_gradients(
    model: nn.Module, batches: Iterable[Batch], criterion: Criterion
) -> dict[str, Tensor]:
    """Absolute per-example gradients, averaged over the examples, in loss/weight; computed as in
    :func:`squared_example_gradients`.

    :raises ValueError: if there are no examples.
    """
    return _average(partial(_add_example_gradients, size=torch.abs), model, batches, criterion)


def expected_squared_gradients(model: nn.Module, batches: Iterable[Batch]) -> dict[str, Tensor]:
    """Squared per-example gradients of ``log p(y | x)``, expected over the model's own predictions
    ``y``, averaged over the examples: the Fisher information.

    Exact for up to 10 classes, in a backward pass for each; for more classes 10 labels are drawn
    for each example, the same each time.

    :raises ValueError: if there are no examples, or outputs are not logits of shape
        (batch, classes), of at least two classes.
    """
    add = partial(_add_expected, generator=torch.Generator().manual_seed(0))
    return _average(add, model, batches, F.cross_entropy)


def _average(add: Add, model: nn.Module, batches: Iterable[Batch], criterion: Criterion) -> Sums:
    """The average over examples of what ``add`` adds to the sums for each batch, in eval mode."""
    sums = zero_sums(model)
    examples = 0
    with in_mode(model, train=False):
        for batch in checked(batches):
            add(model, sums, batch, criterion)
            examples += len(batch[1])
    if examples == 0:
        raise ValueError("the Fisher needs at least one example, got empty batches")
    return {n: (total / examples).to(model.get_parameter(n).dtype) for n, total in sums.items()}


def checked(batches: Iterable[Batch]) -> Iterator[Batch]:
    """The same batches.

    :raises ValueError: for one in another format, or if there are none.
    """
    batch: Batch | None = None
    for batch in batches:
        if not isinstance(batch, Sequence) or len(batch) < 2:
            kind = type(batch).__name__
            raise ValueError(
                f"a batch must be (input, target, *more), for model(input, *more), got a {kind}"
            )
        yield batch
    if batch is None:
        raise ValueError(
            "a pass over the data needs at least one example, got none: has the loader fewer than "
            "a batch (drop_last=True), or was an iterator used a second time?"
        )


def zero_sums(model: nn.Module) -> Sums:
    """Zeros in the shapes of the parameters that require a gradient; at least in float32, because
    long sums in bfloat16 stop growing."""
    return {
        name: torch.zeros_like(p, dtype=torch.promote_types(p.dtype, torch.float32))
        for name, p in model.named_parameters()
        if p.requires_grad
    }


@contextmanager
def in_mode(model: nn.Module, train: bool) -> Iterator[None]:
    """Eval or train mode inside, with gradients; each module's own flag is restored outside.

    Where the model, without its wrappers, already trains, modules in eval mode stay in it: they
    are frozen.
    """
    inner = model
    while len(children := [*inner.children()]) == 1:  # a wrapper has its own mode
        inner = children[0]
    flags = {module: module.training for module in model.modules()}
    fast = torch.backends.mha.get_fastpath_enabled()  # nested tensors, which hooks do not expect
    try:
        torch.backends.mha.set_fastpath_enabled(False)
        if not (train and inner.training):
            model.train(train)
        with torch.enable_grad():
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
        for module, flag in flags.items():
            module.training = flag


# What a batch adds to the sums -----------------------------------------------------------


def _add_example_gradients(
    model: nn.Module, sums: Sums, batch: Batch, criterion: Criterion, size: Size
) -> None:
    """Add the sizes of the gradients of each example of a batch."""
    try:
        if _supports_hooks(model) and _add_by_hooks(model, sums, batch, criterion, size):
            return
    except RuntimeError as error:
        if not str(error).startswith("vmap"):  # the criterion's control flow depends on the data
            raise
    _add_by_func(model, sums, batch, criterion, size)


def _add_expected(
    model: nn.Module, sums: Sums, batch: Batch, criterion: Criterion, generator: torch.Generator
) -> None:
    """Add the squared gradients of each example of a batch, expected over its predicted labels."""
    x, y, *more = batch
    with torch.no_grad():
        output = model(x, *more)
    check_logits("the Fisher information of predicted labels", output, y)
    p = in_double(output).softmax(1)
    passes = min(p.shape[1], _MOST_PASSES)
    drawn = torch.multinomial(p.cpu(), passes, replacement=True, generator=generator).to(p.device)
    for i in range(passes):
        label = torch.full_like(drawn[:, i], i) if passes == p.shape[1] else drawn[:, i]
        weight = p[:, i] if passes == p.shape[1] else torch.full_like(p[:, i], 1 / passes)
        # Cross-entropy is linear in the target, whose scale is squared with the gradient.
        target = F.one_hot(label, p.shape[1]) * weight.sqrt()[:, None]
        dtype = torch.promote_types(output.dtype, torch.float32)
        rows = [x, target.to(dtype).to(output.device), *more]
        _add_example_gradients(model, sums, rows, criterion, size=torch.square)


def _add_batch_gradients(
    model: nn.Module, sums: Sums, batch: Batch, criterion: Criterion, size: Size = torch.square
) -> None:
    """Add ``(B g)²``, with ``g`` the gradient of the mean loss of a batch of ``B`` examples."""
    x, y, *more = batch
    parameters = [model.get_parameter(name) for name in sums]
    output = model(**x) if isinstance(x, Mapping) else model(x, *more)
    loss = criterion(output, y)
    _check_mean(criterion, output, y, loss)
    gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
    for total, gradient in zip(sums.values(), gradients, strict=True):
        if gradient is not None:
            total += size(len(y) * gradient)


@torch.no_grad()
def _check_mean(criterion: Criterion, output: Any, y: Tensor, loss: Tensor) -> None:
    """Refuse a loss that doubles with the batch."""
    if isinstance(output, Tensor) and output.shape[:1] == y.shape[:1] and y.dim() and len(y) > 1:
        twice = criterion(output.repeat_interleave(2, 0), y.repeat_interleave(2, 0))
        if loss != 0 and torch.allclose(twice, 2 * loss, atol=0):
            raise ValueError("the criterion must average over the batch, got one that sums")


def _supports_hooks(model: nn.Module) -> bool:
    """Whether every trained parameter belongs to one plain Linear or Conv2d layer alone."""
    owners: set[Tensor] = set()
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if not parameter.requires_grad:
                continue
            conv = type(module) is nn.Conv2d and (
                module.padding_mode == "zeros" and not isinstance(module.padding, str)
            )
            plain = (conv or type(module) is nn.Linear) and name in ("weight", "bias")
            if not plain or parameter in owners:  # weight_norm() has others
                return False
            owners.add(parameter)
    return True


def _add_by_hooks(
    model: nn.Module, sums: Sums, batch: Batch, criterion: Criterion, size: Size
) -> bool:
    """Return whether the layers were called as is needed; otherwise nothing is added."""
    x, y, *more = batch
    layers = {
        layer: f"{name}." if name else ""
        for name, layer in model.named_modules()
        if any(p.requires_grad for p in layer.parameters(recurse=False))
    }
    # The input of each call, and the graph edge of its output, which an in-place activation may
    # have changed since.
    calls: list[tuple[nn.Module, Tensor, GradientEdge | None]] = []
    inputs: list[Node] = []

    def keep(
        layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor
    ) -> None:
        x = next(iter((*args, *kwargs.values())))
        edge = get_gradient_edge(output) if output.requires_grad else None  # under no_grad
        calls.append((layer, x.detach(), edge))
        if x.requires_grad:
            inputs.append(get_gradient_edge(x).node)

    with module_hooks() as hooks:
        for layer in layers:  # before other hooks, which may change the output
            hook = layer.register_forward_hook(keep, with_kwargs=True, prepend=True)
            hooks.enter_context(hook)
        alone = None
        if len(y) > 1:
            # Suppressed where the network needs the whole batch, or has other inputs than tensors.
            with suppress(RuntimeError, ValueError, IndexError, TypeError):
                model(x[:1], *(m[:1] for m in more))
                alone = [(layer, len(a)) for layer, a, _ in calls]
            calls.clear()
            inputs.clear()
        output = model(x, *more)
    if not isinstance(output, Tensor) or len(output) != len(y):
        return False
    # The hooks capture exact per-example gradients only if each layer is called once, with a row
    # per example and not with, say, one per class, and weights have no gradient except through
    # these calls.
    if alone is not None and alone != [(layer, 1) for layer, *_ in calls]:
        return False
    edges = [edge for *_, edge in calls if edge is not None]
    if len(edges) < len(calls):
        return False
    called = {layer for layer, *_ in calls}
    if len(called) < len(calls) or not all(_rows_are_examples(c, x, len(y)) for c, x, _ in calls):
        return False
    loss = vmap(lambda o, t: criterion(o[None], t[None]))(output, y).sum()
    weights = {get_gradient_edge(model.get_parameter(name)).node for name in sums}
    if _reaches([loss.grad_fn, *inputs], weights, around={edge.node for edge in edges}):
        return False
    gradients = torch.autograd.grad(loss, edges, allow_unused=True)
    for (layer, a, _), g in zip(calls, gradients, strict=True):
        if g is not None:
            weight, bias = (sums.get(f"{layers[layer]}{name}") for name in ("weight", "bias"))
            _add_layer(layer, a, g, weight, bias, size)
    return True


def _reaches(nodes: list[Node | None], leaves: set[Node], around: set[Node]) -> bool:
    """Whether a path of the autograd graph leads to a leaf, other than through given nodes."""
    seen: set[Node | None] = {None, *around}
    while nodes:
        node = nodes.pop()
        if node in leaves:
            return True
        if node is not None and node not in seen:
            seen.add(node)
            nodes.extend(following for following, _ in node.next_functions)
    return False


def _rows_are_examples(layer: nn.Module, a: Tensor, examples: int) -> bool:
    """Whether the first dimension of the layer's input is unambiguously the batch."""
    doubtful = isinstance(layer, nn.Linear) and a.dim() > 2 and a.shape[1] == examples
    return a.dim() > 1 and len(a) == examples and not doubtful


def _examples_at_once(entries: int, device: torch.device) -> int:
    """How many per-example gradients of so many entries are in memory at once."""
    most = _CHUNK if device.type == "cpu" else _CHUNK_ACCELERATOR
    return max(1, most // max(1, entries))


@torch.no_grad()
def _add_layer(
    module: nn.Module, a: Tensor, g: Tensor, weight: Tensor | None, bias: Tensor | None, size: Size
) -> None:
    """Add the sizes of one layer's per-example gradients, from its input and output gradient,
    whose dtypes may differ from the weights' under autocast."""
    dtype = next(module.parameters(recurse=False)).dtype
    a, g = a.to(dtype), g.to(dtype)
    if isinstance(module, nn.Conv2d) and not isinstance(module.padding, str):
        groups = module.groups
        a = F.unfold(a, module.kernel_size, module.dilation, module.padding, module.stride)
        a = a.unflatten(1, (groups, -1)).transpose(2, 3)  # n, groups, positions, in
        g = g.flatten(2).unflatten(1, (groups, -1)).transpose(2, 3)  # n, groups, positions, out
    else:
        a = a.reshape(len(a), 1, -1, a.shape[-1])
        g = g.reshape(len(g), 1, -1, g.shape[-1])
    if bias is not None:
        bias += size(g.sum(2)).sum(0).view_as(bias)
    if weight is None:
        return
    if a.shape[2] == 1:  # an outer product
        product = torch.einsum("ngpo,ngpi->goi", size(g), size(a))
        weight += product.reshape(weight.shape)
        return
    chunk = _examples_at_once(weight.numel(), weight.device)
    for g_rows, a_rows in zip(g.split(chunk), a.split(chunk), strict=True):
        product = torch.einsum("ngpo,ngpi->ngoi", g_rows, a_rows)
        weight += size(product).sum(0).reshape(weight.shape)


def _add_by_func(
    model: nn.Module, sums: Sums, batch: Batch, criterion: Criterion, size: Size
) -> None:
    x, y, *more = batch
    trained = {n: p.detach() for n, p in model.named_parameters() if p.requires_grad}
    names = {p: n for n, p in model.named_parameters()}
    # By module, because functional_call does not restore a module that it finds by two names.
    slots = {
        f"{prefix}.{key}" if prefix else key: names[p]
        for prefix, module in model.named_modules()
        for key, p in module.named_parameters(recurse=False, remove_duplicate=False)
        if p.requires_grad
    }

    def loss(weights: dict[str, Tensor], x: Tensor, y: Tensor, *more: Tensor) -> Tensor:
        arguments = (x[None], *(m[None] for m in more))
        swapped = {slot: weights[name] for slot, name in slots.items()}
        return criterion(functional_call(model, swapped, arguments, tie_weights=False), y[None])

    example_gradients = vmap(
        grad(loss), in_dims=(None, 0, 0, *(0 for _ in more)), randomness="different"
    )
    entries = sum(p.numel() for p in trained.values())
    for rows in torch.arange(len(y), device="cpu").split(_examples_at_once(entries, y.device)):
        try:
            # vmap's layer norm cannot mix dtypes
            with torch.autocast(x.device.type, enabled=False):
                gradients = example_gradients(trained, x[rows], y[rows], *(m[rows] for m in more))
        except RuntimeError:  # control flow that depends on the data, GRU and RNN
            for i in rows.tolist():
                one = [column[i : i + 1] for column in batch]
                _add_batch_gradients(model, sums, one, criterion, size)
            continue
        for name, value in gradients.items():
            sums[name] += size(value).sum(0)
