"""RegMean: merging layers with the second moments of their inputs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import ClassVar

import torch
from torch import Tensor

from covon_avalanche.checks import check_fraction
from covon_avalanche.float64 import in_double
from covon_avalanche.merging.layers import as_rows, from_rows, merged_layers, own_parameters
from covon_avalanche.merging.linalg import with_ridge
from covon_avalanche.merging.rule import Batch, MergeRule, Task
from covon_avalanche.merging.second_moments import input_second_moments


class RegMean(MergeRule):
    """Merges Linear, Conv2d, MultiheadAttention and transformers' Conv1D layers with the second
    moments of their inputs.

    Let a layer have the weights ``W0`` before the task and ``W`` after it. With its inputs ``x``
    (1 appended for a bias) and ``A = sum x xᵀ`` over a task's data, replacing ``W`` by other
    weights ``V`` changes the layer's outputs by ``trace((V - W) A (V - W)ᵀ)``, as a sum of squares.
    The weights that minimise the total change over the earlier tasks (``A0``, ``W0``) and the new
    one (``A``, ``W``) are ::

        W0 + (W - W0) A (A0 + A)⁻¹,    A0 ← A0 + A

    To the inverted sum a ten-thousandth of its mean diagonal is added, so that weights change
    little in directions in which the inputs hardly vary.

    This is the mean of a product of Gaussians as in Eq. 8, whose precision is not diagonal but
    ``A ⊗ I``, the input side of a Kronecker-factored curvature. For two networks trained from the
    same weights it is RegMean (Jin et al., "Dataless Knowledge Fusion by Merging Weights of
    Language Models", ICLR 2023; written from the paper). Here it is applied from task to task, and
    keeps one ``A0`` per layer and no data; ``A`` is measured again at the merged weights before it
    is added to ``A0``.

    Takes two forward passes over each task's data, but only one for the first task. Outputs and
    layers that no earlier task has trained keep their new weights: layers that were frozen count as
    new. The parameters of other modules, such as LayerNorm's and position embeddings, and weights
    that are used without calling their layer, such as those of attention in torchvision's Swin, or
    by a layer of a subclass that computes another function, such as a cosine classifier, are
    averaged, as published, over the tasks that have changed them; a task that changes nothing
    counts for all (:func:`~covon_avalanche.merging.layers.merged_layers` lists the layers; with
    CoVON all others are merged by Eq. 8). With CoVON ``A ⊗ I`` is used for the mean alone: the
    precision is that of Eq. 8.
    """

    needs_data = True
    _ridge: ClassVar[float | None] = None

    def __init__(self, *, share: float = 1.0) -> None:
        """
        :param share: fraction of a task's examples, evenly spaced, on which ``A`` is measured, in
            (0, 1]; the time of the passes is proportional to it. ``A`` is scaled to all examples.
        """
        check_fraction("share", share)
        self.share = share
        self.moments: dict[str, Tensor] = {}
        """``A0`` by layer name, as from :func:`input_second_moments`, summed over tasks."""
        self.outputs: dict[str, int] = {}
        """Number of outputs that the layer had in the last task; later ones have no past."""
        self.tasks: dict[str, int] = {}
        """Number of tasks merged that have changed a parameter, by its name."""

    def merge(self, task: Task) -> dict[str, Tensor]:
        """See :class:`MergeRule`.

        :raises ValueError: for a layer whose number of inputs has changed, naming it.
        """
        if not self.tasks:
            return {}
        moments = self._measure(task)
        merged = {} if task.has_prior else self._averaged_others(task, moments)
        for name, a in moments.items():
            if name in self.moments:
                merged |= self._merged_layer(task, name, a)
        return merged

    def _averaged_others(self, task: Task, measured: Iterable[str]) -> dict[str, Tensor]:
        """The mean over the tasks that have trained them of the parameters of all but the measured
        layers, by name."""
        layers = merged_layers(task.model)
        own = {p for name in measured for p in own_parameters(layers[name])}
        before, now = task.before, task.trained()
        names = [n for n in now if n in self.tasks and task.model.get_parameter(n) not in own]
        return {n: before[n] + (now[n] - before[n]) / (self.tasks[n] + 1) for n in names}

    def observe(self, task: Task) -> None:
        """Add the moments of the task's data, at the merged weights."""
        trained = task.trained()
        changed = {n for n, p in trained.items() if (p != task.before[n]).any()} or {*trained}
        self.tasks = {**self.tasks, **{n: self.tasks.get(n, 0) + (n in changed) for n in trained}}
        layers = merged_layers(task.model)
        new = self._measure(task)
        added = {n: a + self.moments[n] if n in self.moments else a for n, a in new.items()}
        self.moments = {**self.moments, **added}
        self.outputs = {**self.outputs, **{n: len(as_rows(layers[n])) for n in new}}

    def _measure(self, task: Task) -> dict[str, Tensor]:
        given = kept = 0

        def some() -> Iterator[Batch]:
            """Evenly spaced examples of each batch, at least one."""
            nonlocal given, kept
            for batch in task.batches():
                n = len(batch[0])
                rows = torch.arange(0, n, 1 / self.share, dtype=torch.float32, device="cpu").long()
                rows = rows[rows < n]  # rounding may add one
                given, kept = given + n, kept + len(rows)
                yield [column[rows] for column in batch] if self.share < 1 else batch

        found = input_second_moments(task.model, some())
        if self.share < 1:
            for a in found.values():
                a.mul_(given / kept)
        return found

    def _merged_layer(self, task: Task, layer_name: str, a: Tensor) -> dict[str, Tensor]:
        """Merged weights of a layer that earlier tasks have used, by parameter name."""
        names: dict[Tensor, str] = {p: name for name, p in task.model.named_parameters()}
        a0 = self.moments[layer_name]
        if a.shape != a0.shape:
            raise ValueError(
                f"layer {layer_name!r} has {a.shape[-1]} inputs (a bias counts as one), "
                f"but had {a0.shape[-1]} in earlier tasks: RegMean cannot merge it"
            )
        layer = merged_layers(task.model)[layer_name]
        own = own_parameters(layer)
        before: dict[Tensor, Tensor] = {p: task.before[names[p]] for p in own}
        w0 = in_double(as_rows(layer, before))
        w = in_double(as_rows(layer, {p: task.mean_of(p) for p in before}))
        # Outputs that earlier tasks have used, and columns that are trained: not a frozen bias.
        used = slice(self.outputs[layer_name]), slice(None if own[-1].requires_grad else -1)
        change = (w - w0)[used].unflatten(0, (len(a), -1))
        a0, a = (in_double(moments)[:, used[1], used[1]] for moments in (a0, a))
        w[used] = w0[used] + self._merged_change(task, layer_name, change, a0, a).flatten(0, 1)
        merged = from_rows(layer, w)
        return {names[p]: v.to(before[p]) for p, v in merged.items() if p.requires_grad}

    def _merged_change(
        self, task: Task, layer: str, change: Tensor, a0: Tensor, a: Tensor
    ) -> Tensor:
        """``(W - W0) A (A0 + A)⁻¹`` by groups, in float64."""
        return torch.linalg.solve(with_ridge(a0 + a, self._ridge), (change @ a).mT).mT
