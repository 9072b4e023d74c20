"""How long a run takes, from a few batches of a few images."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from copy import copy
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from avalanche.benchmarks import CLScenario
from torch import nn

from covon_avalanche.closed_form import ClosedFormModel, RidgeClassifier
from covon_avalanche.experiment.data_settings import Backbone
from covon_avalanche.experiment.recipe import Recipe, choose
from covon_avalanche.experiment.registry.bayesian import CoVON, Variational
from covon_avalanche.experiment.registry.closed_form import ClosedForm, RanPAC
from covon_avalanche.experiment.run import Run
from covon_avalanche.experiment.run_folder import RunFolder
from covon_avalanche.experiment.run_options import RunOptions

_TIMED = 6  # batches of an estimate
_FEW = 2  # images of its first batches, which decide how many may follow
_BUDGET = 4.0  # seconds for these
_FEATURES = 1000  # of a timed ridge regression, at most


class Estimate(NamedTuple):
    """Seconds of a run's training."""

    steps: float
    after: float
    """After each domain: a merge, and passes over the images, as for Fisher information."""


def estimated_seconds(
    recipe: Recipe, strategy: str, benchmark: CLScenario, dataset_root: Path | None = None
) -> Estimate | None:
    """Training time of a run on one thread, from a few batches of a few images; ``None`` for a
    strategy that trains without batches. Ridge regressions are timed with fewer features. What
    grows from domain to domain is left out. No weights are downloaded: they are random instead.

    :param benchmark: see :func:`checked_benchmark`.
    :raises ValueError: if data and recipe do not fit.
    :raises FloatingPointError: if the first batches diverge.
    """
    if isinstance(recipe.model, Backbone) and recipe.model.weights == "default":
        model = recipe.model.model_copy(update={"weights": ""})
        recipe = recipe.model_copy(update={"model": model})
    one_epoch = choose(recipe, strategy, epochs=1)
    # Nothing is written to this folder.
    folder = RunFolder(Path(), one_epoch, strategy, recipe.seeds[0], dataset_root)

    def timed(size: int, batches: int) -> _Timed | None:
        run = Run(folder, RunOptions(), checked=benchmark)
        run.build()
        return _time_batches(run, size, batches)

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        few = min(_FEW, recipe.train_mb_size)
        first = timed(few, batches=3)
        if first is None:
            return None
        last = first
        size = min(recipe.train_mb_size, int(_BUDGET / (_TIMED * first.per_image)))
        if size > few and not isinstance(recipe.strategies[strategy], ClosedForm):
            last = timed(size, _TIMED) or first
    finally:
        torch.set_num_threads(threads)
    own, more = recipe.strategies[strategy], last.images - first.images
    after = last.after - (first.after if more else last.per_domain)
    passes = max(0.0, after / (more or last.images))
    merge = max(0.0, last.after - passes * last.images)
    domains = 1 if own.kind == "joint" else len(benchmark.train_stream)
    images = sum(len(experience.dataset) for experience in benchmark.train_stream)
    steps = last.per_image * _trained_images(recipe, strategy, benchmark)
    after = domains * merge + images * passes
    if isinstance(own, RanPAC) and own.adapter:  # whose steps have a backward pass, too
        adapted = (own.epochs or recipe.epochs) * len(benchmark.train_stream[0].dataset)
        after += 3 * last.per_image * adapted
    return Estimate(steps, after)


def evaluation_seconds(recipe: Recipe, strategy: str, benchmark: CLScenario, steps: float) -> float:
    """Time of a run's evaluations on all domains after each, from the seconds of its training
    steps: of an image it is a third of a step, which has a backward pass too, or as long in closed
    form."""
    own = recipe.strategies[strategy]
    times = 1 if own.kind == "joint" else recipe.stream.n_experiences
    if isinstance(own, CoVON | Variational):
        times += recipe.posterior_samples
    images = times * sum(len(e.dataset) for e in benchmark.test_stream)
    passes = 1 if isinstance(own, ClosedForm) else 3
    return steps * images / (passes * _trained_images(recipe, strategy, benchmark))


class _Timed(NamedTuple):
    per_image: float
    """Seconds of a training step per image."""
    images: int
    after: float
    """Seconds from the last step to the end of the training."""
    per_domain: float = 0.0
    """Those of them that do not depend on the number of images, if they are known."""


def _time_batches(run: Run, size: int, batches: int) -> _Timed | None:
    """Train on a few random images of the first domain, and take the median over the batches;
    the first, which may compile, does not count. On a CPU it is the process's own time, which
    other programs do not change. ``None`` if there are no batches."""
    ends: list[float] = []
    clock = time.process_time if run.recipe.device == "cpu" else time.perf_counter

    def now() -> float:
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        return clock()

    def note_end(batch: int = 1) -> None:
        if batch:
            ends.append(now())

    images, per_domain = size * batches, 0.0
    if isinstance(run.model, ClosedFormModel):
        x = torch.stack([run.example] * size).to(run.recipe.device)
        for _ in range(1 + batches):
            run.model.features(x)
            note_end()
        stream = run.benchmark.train_stream
        examples = sum(len(e.dataset) for e in stream) / len(stream)
        per_image, per_domain = _ridge_seconds(run.model.head, examples, x.device, now)
        after = images * (1 + run.model.flip) * per_image + per_domain
    else:
        run.log.on_progress = note_end
        domain = run.benchmark.train_stream[0]
        order = np.random.default_rng(0).permutation(len(domain.dataset))
        images = min(images, len(order))
        part = copy(domain)
        part._dataset = domain.dataset.subset(order[:images].tolist())
        run.strategy.train_mb_size = size
        run.strategy.train([part] if run.settings.kind == "joint" else part)
        after = now() - ends[-1] if ends else 0.0
    seconds = np.diff(ends)
    if not len(seconds):
        return None
    return _Timed(float(np.median(seconds)) / size, images, after, per_domain)


def _ridge_seconds(
    head: nn.Module, examples: float, device: torch.device, now: Callable[[], float]
) -> tuple[float, float]:
    """Time of a ridge regression's sums per image, and of its solutions per domain with this number
    of examples, from one with fewer features."""
    if not isinstance(head, RidgeClassifier):
        return 0.0, 0.0
    few = min(len(head.gram), _FEATURES)
    h, start = torch.randn(few, few, dtype=torch.float64, device=device), now()
    gram, summed = h.T @ h, now()
    torch.linalg.cholesky_ex(gram)
    more, solved = len(head.gram) / few, now() - summed
    # without folds a ridge is chosen among the examples that are not held out, if they are fewer
    smaller = more if head.folds or head.standardize else min(more, 0.8 * examples / few)
    solutions = len(head.ridges) * (head.folds or 1) * smaller**3 + more**3
    return (summed - start) / few * more**2, solved * solutions


def _trained_images(recipe: Recipe, strategy: str, benchmark: CLScenario) -> int:
    """Images of all epochs of all domains; a smaller last batch counts as a whole one."""
    own, images, size = recipe.strategies[strategy], 0, recipe.train_mb_size
    if isinstance(own, ClosedForm):
        return (1 + bool(own.flip)) * sum(len(e.dataset) for e in benchmark.train_stream)
    epochs, schedule = own.epochs or recipe.epochs, getattr(own, "schedule", None) or ()
    for i, experience in enumerate(benchmark.train_stream):
        epochs = (schedule[i].epochs if i < len(schedule) else None) or epochs
        images += epochs * size * math.ceil(len(experience.dataset) / size)
    return images
