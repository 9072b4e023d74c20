"""One run: a strategy of a recipe, with a seed, from data to result."""

from __future__ import annotations

import logging
import os
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from avalanche.benchmarks import CLScenario
from avalanche.logging import BaseLogger

from covon_avalanche.evaluation.calibration import mean_calibration
from covon_avalanche.evaluation.domain_metrics import DomainMetrics
from covon_avalanche.evaluation.memory import MemoryFootprint
from covon_avalanche.experiment.build import build_benchmark, build_model
from covon_avalanche.experiment.data_fingerprint import data_fingerprint
from covon_avalanche.experiment.data_settings import FolderStream
from covon_avalanche.experiment.epoch_log import EpochLog
from covon_avalanche.experiment.evaluator import Evaluator
from covon_avalanche.experiment.machine import (
    free_memory,
    machine,
    peak_memory,
    reset_peak_memory,
    versions,
)
from covon_avalanche.experiment.methods import build_strategy
from covon_avalanche.experiment.recipe import Recipe
from covon_avalanche.experiment.result import Epoch, EvaluatedOn, Result
from covon_avalanche.experiment.resumable import Checkpoints
from covon_avalanche.experiment.run_folder import RunFolder, run_hash, settings_of
from covon_avalanche.experiment.state import StateError, Surroundings
from covon_avalanche.experiment.strategy_settings import Joint
from covon_avalanche.experiment.training_loggers import training_loggers
from covon_avalanche.plugins import CoVONPlugin
from covon_avalanche.plugins.posterior import PosteriorPlugin

Loggers = tuple[Sequence[BaseLogger], Sequence[Any]]
_log = logging.getLogger(__name__)
_PAUSE = 1.0  # seconds between two times that the epochs are written


def run_in_folder(
    recipe: Recipe,
    strategy_name: str,
    seed: int,
    runs: Path,
    *,
    dataset_root: str | os.PathLike[str] | None = None,
    progress: Callable[[int, float], None] = lambda experience, accuracy: None,
    watch: Callable[[Epoch, int], None] = lambda epoch, epochs: None,
    tensorboard: bool = False,
    wandb: str | None = None,
    **checkpoints: Any,
) -> Result:
    """Run, or go on from where an interrupted run was, or give the result of a finished one.

    :param runs: the run gets a folder below, see :class:`RunFolder`.
    :param tensorboard: log for TensorBoard in the run's folder.
    :param wandb: log to this project of W&B.
    :param checkpoints: ``seconds`` and ``share`` of :class:`Checkpoints`.

    See :func:`run_strategy` for the others.
    """
    folder = RunFolder(runs, recipe, strategy_name, seed)
    with folder.opened():
        stored = folder.result()
        if stored is not None:
            named = folder.under_names_of_today(stored)
            if named != stored:
                named.save(folder.result_file)
            return named
        about = {"versions": versions(), "machine": machine(recipe.device)}
        starts = folder.write_start({"seed": seed, **about})
        with training_loggers(
            folder.path,
            tensorboard=tensorboard,
            wandb=wandb,
            name=f"{recipe.name}, {strategy_name}, seed {seed}",
            settings=folder.settings,
        ) as loggers:
            result = run_strategy(
                recipe,
                strategy_name,
                seed,
                dataset_root=dataset_root,
                progress=progress,
                watch=watch,
                folder=folder,
                loggers=loggers,
                checkpoints=checkpoints,
            )
        result.continued = starts - 1
        result.save(folder.result_file)
        for file in folder.checkpoints.glob("*"):
            file.unlink()
        return result


def run_strategy(
    recipe: Recipe,
    strategy_name: str,
    seed: int,
    *,
    stream: EvaluatedOn = "test",
    validation_size: float | None = None,
    dataset_root: str | os.PathLike[str] | None = None,
    progress: Callable[[int, float], None] = lambda experience, accuracy: None,
    watch: Callable[[Epoch, int], None] = lambda epoch, epochs: None,
    folder: RunFolder | None = None,
    loggers: Loggers = ((), ()),
    checkpoints: Mapping[str, float] | None = None,
) -> Result:
    """Train through the stream, evaluating on all domains after each.

    :param seed: of permutations, initial weights, data order and noise. The same seed gives
        the same result on the same machine with the same number of threads.
    :param stream: what to evaluate on.
    :param validation_size: images to keep away from training for the ``valid`` stream, instead
        of the recipe's.
    :param dataset_root: where image data lies; see the streams.
    :param progress: called with the number of domains learned and the mean accuracy on them.
    :param watch: called after each epoch, with the number of epochs of the experience.
    :param folder: where checkpoints go, and from where an interrupted run goes on.
    :param loggers: of Avalanche, and metrics for them.
    :param checkpoints: ``seconds`` and ``share`` of :class:`Checkpoints`.
    :raises ValueError: if data and recipe do not fit, or the device is not there, naming the value.
    :raises FloatingPointError: if the training diverges.
    """
    _check_device(recipe.device)
    while True:
        free_memory()
        benchmark = build_benchmark(
            recipe, seed=seed, validation_size=validation_size, dataset_root=dataset_root
        )
        _check(recipe, benchmark, stream)
        run = _Run(
            recipe, strategy_name, seed, stream, benchmark, dataset_root, watch, folder, loggers
        )
        if folder is not None:
            folder.check_data(data_fingerprint(recipe, benchmark, dataset_root))
        try:
            return run.finish(progress, checkpoints or {})
        except StateError as error:
            # A run that is half restored is thrown away; its checkpoint is gone already.
            _log.warning("%s; the checkpoint before it is used", error)


def _check_device(name: str) -> None:
    kind, _, index = name.partition(":")
    there = {
        "cpu": 1,
        "cuda": torch.cuda.device_count(),
        "mps": int(torch.backends.mps.is_available()),
    }
    if int(index or 0) >= there[kind]:
        raise ValueError(f'device = "{name}": this machine has {there[kind]} {kind} devices')


def _check(recipe: Recipe, benchmark: CLScenario, stream: str) -> None:
    if stream not in benchmark.streams:
        raise ValueError("there are no validation images: stream.validation_size is 0")
    if isinstance(recipe.stream, FolderStream):  # a table may have domains for one of both only
        both = benchmark.train_stream, benchmark.streams[stream]
        trained, tested = ([e.domain for e in experiences] for experiences in both)
        if trained != tested:
            raise ValueError(
                f"a recipe needs the same domains to train and to test, got {', '.join(trained)} "
                f"and {', '.join(tested)}: choose some with stream.domains"
            )
    for experience in benchmark.train_stream:
        images = len(experience.dataset)
        if recipe.train_mb_size > images:
            raise ValueError(
                f"train_mb_size = {recipe.train_mb_size} is more than the {images} training "
                f"images of domain {experience.current_experience + 1}"
            )


class _Run:
    """The objects of a run, built from the recipe and the seed."""

    def __init__(
        self,
        recipe: Recipe,
        name: str,
        seed: int,
        stream: EvaluatedOn,
        benchmark: CLScenario,
        dataset_root: str | os.PathLike[str] | None,
        watch: Callable[[Epoch, int], None],
        folder: RunFolder | None,
        loggers: Loggers,
    ) -> None:
        self.recipe, self.name, self.seed, self.stream = recipe, name, seed, stream
        self.settings = recipe.strategies[name]
        self.benchmark, self.watch, self.folder = benchmark, watch, folder
        random.seed(seed)
        np.random.seed(seed % 2**32)
        torch.manual_seed(seed)
        self.model = build_model(recipe.model, benchmark, dataset_root)
        self.metrics = DomainMetrics(stream)
        self.log = EpochLog(self._tell)
        self._write_again = 0.0
        evaluator = Evaluator(self.metrics, *loggers[1], loggers=list(loggers[0]))
        self.strategy = build_strategy(self.settings, recipe, self.model, evaluator, self.log)
        self.diagnostics: list[dict[str, float]] = []

    def _tell(self, epoch: Epoch, epochs: int) -> None:
        """Write all epochs anew: those after the checkpoint that a run goes on from come again.
        The last of a domain at once; before it short ones together."""
        now = time.monotonic()
        if self.folder is not None and (epoch.epoch + 1 == epochs or now > self._write_again):
            self.folder.write_epochs(self.log.epochs)
            self._write_again = now + _PAUSE
        self.watch(epoch, epochs)

    def finish(
        self, progress: Callable[[int, float], None], options: Mapping[str, float]
    ) -> Result:
        """Train and evaluate what is missing."""
        reset_peak_memory(self.recipe.device)
        joint = isinstance(self.settings, Joint)
        experiences = [self.benchmark.train_stream] if joint else self.benchmark.train_stream
        checkpoints = None if self.folder is None else self._checkpoints(self.folder, options)
        matrix = self.metrics.matrix
        first = 0 if checkpoints is None else checkpoints.resume()
        workers = {"num_workers": self.recipe.workers}
        for experience in list(experiences)[first:]:
            self.strategy.train(experience, **workers)
            self._note_diagnostics()
            self.strategy.eval(self.benchmark.streams[self.stream], **workers)
            progress(len(matrix.rows), matrix.curve()[-1] or 0.0)
            if checkpoints is not None:
                checkpoints.end_experience()
        return self._result()

    def _note_diagnostics(self) -> None:
        """Those of the experience just trained, where there are any: in result and log."""
        for plugin in self.strategy.plugins:
            if isinstance(plugin, CoVONPlugin) and plugin.diagnostics:
                found = plugin.diagnostics["all"]._asdict()
                self.diagnostics.append(found)
                numbers = ", ".join(f"{key} {value:.3g}" for key, value in found.items())
                _log.info("domain %d: %s", len(self.diagnostics), numbers)

    def _checkpoints(self, folder: RunFolder, options: Mapping[str, float]) -> Checkpoints:
        root = {
            "model": self.model,
            "strategy": self.strategy,
            "diagnostics": self.diagnostics,
        }
        surroundings = Surroundings(self.benchmark.streams)
        checkpoints = Checkpoints(
            folder.checkpoints,
            folder.hash,
            root,
            surroundings,
            stored=self.log.leave_out,
            **options,
        )
        self.strategy.checkpoints = checkpoints
        return checkpoints

    def _result(self) -> Result:
        matrix = self.metrics.matrix
        calibration = asdict(mean_calibration(self.metrics.calibration[-1]))
        kept = next(p for p in self.strategy.plugins if isinstance(p, MemoryFootprint))
        return Result(
            run_hash=run_hash(self.recipe, self.name, self.seed),
            recipe=self.recipe.name,
            strategy=self.name,
            seed=self.seed,
            stream=self.stream,
            settings=settings_of(self.recipe, self.name),
            accuracy=matrix.rows,
            counts=matrix.counts,
            held_out=matrix.held_out,
            average_accuracy=matrix.average_accuracy(),
            weighted_accuracy=matrix.weighted_accuracy(),
            bwt=matrix.bwt(),
            calibration=calibration,
            reliability=self.metrics.reliability,
            sampled=self._sampled(),
            epochs=[Epoch(**epoch) for epoch in self.log.epochs],
            train_seconds=self.log.seconds,
            parameters=sum(p.numel() for p in self.model.parameters()),
            parameters_worth=kept.ratio,
            peak_memory=peak_memory(self.recipe.device),
            diagnostics=self.diagnostics,
            versions=versions(),
            machine=machine(self.recipe.device),
        )

    def _sampled(self) -> dict[str, float]:
        """The last evaluation once more, predicting with posterior samples."""
        plugin = next((p for p in self.strategy.plugins if isinstance(p, PosteriorPlugin)), None)
        if plugin is None or self.recipe.posterior_samples == 0:
            return {}
        metrics = DomainMetrics(self.stream)
        plugin.eval_samples = self.recipe.posterior_samples
        self.strategy.evaluator.metrics = [metrics]
        self.strategy.eval(self.benchmark.streams[self.stream], num_workers=self.recipe.workers)
        accuracy = metrics.matrix.average_accuracy()
        return {"average_accuracy": accuracy, **asdict(mean_calibration(metrics.calibration[-1]))}
