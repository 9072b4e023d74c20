"""One run: a strategy of a recipe, with a seed, from data to result."""

from __future__ import annotations

import logging
import math
import random
import time
import warnings
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch
from avalanche.benchmarks import CLScenario
from avalanche.evaluation.metrics import accuracy_metrics, loss_metrics
from avalanche.logging import BaseLogger

from covon_avalanche.evaluation.calibration import mean_calibration
from covon_avalanche.evaluation.domain_metrics import DomainMetrics
from covon_avalanche.evaluation.memory import MemoryFootprint
from covon_avalanche.experiment import machine
from covon_avalanche.experiment.build import build_benchmark, build_model, build_strategy
from covon_avalanche.experiment.bundle import BundleInfo, write_bundle
from covon_avalanche.experiment.data_settings import FolderStream
from covon_avalanche.experiment.epoch_log import EpochLog
from covon_avalanche.experiment.evaluator import Evaluator, training_loggers
from covon_avalanche.experiment.precision import used_precision
from covon_avalanche.experiment.recipe import Recipe
from covon_avalanche.experiment.registry.base import Problem
from covon_avalanche.experiment.result import Epoch, EvaluatedOn, Result
from covon_avalanche.experiment.resumable import Checkpointer
from covon_avalanche.experiment.run_folder import RunFolder, Status
from covon_avalanche.experiment.run_options import RunOptions
from covon_avalanche.experiment.state import StateError, benchmark_data
from covon_avalanche.optim import PosteriorOptimizer
from covon_avalanche.plugins import CoVONPlugin
from covon_avalanche.plugins.posterior import PosteriorPlugin

_log = logging.getLogger(__name__)
_WRITE_EVERY = 1.0  # seconds


def run_in_folder(folder: RunFolder, options: RunOptions = RunOptions()) -> Result:
    """Run, resume an interrupted run, or return the result of a finished one.

    The same seed gives the same result on the same machine with the same number of threads.

    :raises RunningElsewhere: if another process is running it.
    :raises ValueError: if data and recipe do not fit, or the device does not exist.
    :raises FloatingPointError: if the training diverges.
    """
    with folder.opened():
        if (stored := folder.result(store=True)) is not None:
            return stored
        about = {"versions": machine.versions(), "machine": machine.machine(folder.recipe.device)}
        starts = folder.write_start({"seed": folder.seed, **about})
        with folder.logged(), training_loggers(folder, options) as loggers:
            run = Run(folder, options, loggers)
            result = run.finish()
            if options.bundle:
                run.write_bundle(folder.path / "bundle", result)
        result.resumed = starts - 1
        folder.write_result(result)
        return result


def checked_benchmark(
    recipe: Recipe, seed: int, dataset_root: Path | None = None, stream: EvaluatedOn = "test"
) -> CLScenario:
    """The data of a seed's runs, if they fit the recipe.

    :param stream: to be evaluated.
    :raises ValueError: if they do not.
    """
    benchmark = build_benchmark(recipe, seed=seed, dataset_root=dataset_root)
    if stream not in benchmark.streams:
        raise ValueError("there are no validation images: stream.validation_size is 0")
    if isinstance(recipe.stream, FolderStream):  # a table may have domains for one of both only
        both = benchmark.train_stream, benchmark.streams[stream]
        trained, tested = ([e.domain for e in experiences] for experiences in both)
        if one_sided := sorted({*trained} ^ {*tested}):
            lacks = "test" if one_sided[0] in trained else "train"
            raise ValueError(
                f"a recipe needs images of each domain to train and to test, but {one_sided[0]!r} "
                f"has none to {lacks}: choose others with stream.domains"
            )
    for experience in benchmark.train_stream:
        images = len(experience.dataset)
        if recipe.train_mb_size > images:
            raise ValueError(
                f"train_mb_size = {recipe.train_mb_size} is more than the {images} training "
                f"images of domain {experience.current_experience + 1}"
            )
    return benchmark


class Run:
    """A run in progress; its parts are there after :meth:`build`.

    :param checked: the data, if they have been read and checked before; then :meth:`build` writes
        nothing.
    """

    def __init__(
        self,
        folder: RunFolder,
        options: RunOptions,
        loggers: Sequence[BaseLogger] = (),
        checked: CLScenario | None = None,
    ) -> None:
        self.folder, self.options, self.loggers, self.checked = folder, options, loggers, checked
        self.recipe, self.name, self.seed = folder.recipe, folder.strategy, folder.seed
        self.settings = self.recipe.strategies[self.name]

    def finish(self) -> Result:
        """Build everything, restore the last checkpoint, if any, and train the rest."""
        machine.check_device(self.recipe.device)
        while True:
            machine.free_memory()
            self.build()
            try:
                self._train()
            except StateError as error:
                # The half-restored run is discarded; its checkpoint is not tried again.
                _log.warning("%s; the checkpoint before it is used", error)
            else:
                return self._result()

    def _read_data(self) -> CLScenario:
        """The data, if they fit the recipe and have not changed since the run was started."""
        with warnings.catch_warnings(record=True) as caught:
            benchmark = checked_benchmark(
                self.recipe, self.seed, self.folder.dataset_root, self.folder.evaluated_on
            )
        for w in caught:  # again, for the log
            warnings.warn_explicit(w.message, w.category, w.filename, w.lineno)
        streams = benchmark.streams.items()
        images = {name: [len(e.dataset) for e in stream] for name, stream in streams}
        said = [str(w.message) for w in caught]
        self.folder.check_data({**images, "classes": benchmark.classes}, said)
        return benchmark

    def build(self) -> None:
        """All objects, from the recipe and the seed."""
        recipe, root = self.recipe, self.folder.dataset_root
        self.benchmark = self.checked or self._read_data()
        domains = self.benchmark.train_stream
        self.experiences = [domains] if self.settings.kind == "joint" else list(domains)
        random.seed(self.seed)
        np.random.seed(self.seed % 2**32)
        torch.manual_seed(self.seed)
        network = build_model(recipe.model, self.benchmark, root, self.settings.needs_text)
        self.example = self.benchmark.test_stream[0].dataset.eval()[0][0]
        problem = Problem(self.benchmark.n_classes, recipe.stream.n_experiences, self.example[None])
        self.model = self.settings.wrap_model(network, problem)
        self.metrics = DomainMetrics(self.folder.evaluated_on)
        self.log = EpochLog(self._write_progress)
        self._written_at = 0.0
        logged = [accuracy_metrics(epoch=True, experience=True), loss_metrics(epoch=True)]
        evaluator = Evaluator(
            self.metrics, *(logged if self.loggers else ()), loggers=list(self.loggers)
        )
        self.strategy = build_strategy(self.settings, recipe, self.model, evaluator, self.log)
        self._note_network()
        self.diagnostics: list[dict[str, float]] = []

    def _note_network(self) -> None:
        """Keep the network that is trained, which a class of the user's may have replaced."""
        if self.options.bundle and self.strategy.model is not self.model:
            raise ValueError(
                f"{self.name} trains a network of its own, which a bundle cannot describe: run it "
                "without --bundle"
            )
        self.model = self.strategy.model

    def _train(self) -> None:
        """Train on the remaining experiences, and evaluate after each."""
        machine.reset_peak_memory(self.recipe.device)
        root = {"model": self.model, "strategy": self.strategy, "diagnostics": self.diagnostics}
        data = benchmark_data(self.benchmark.streams)
        checkpointer = Checkpointer(self.folder, root, data, self.options)
        self.strategy.checkpointer = checkpointer
        workers = {"num_workers": self.recipe.workers}
        done = checkpointer.resume()
        self._note_network()
        together = len(self.benchmark.train_stream) - len(self.experiences)  # of joint training
        for number, experience in enumerate(self.experiences[done:], done + 1):
            self.strategy.train(experience, **workers)
            self._note_network()
            self._note_diagnostics()
            self.strategy.eval(self.benchmark.streams[self.folder.evaluated_on], **workers)
            curve = self.metrics.matrix.curve()
            if len(curve) != together + number:
                raise ValueError(
                    f"{self.name} must train on each domain once and evaluate all at once, with "
                    f"Avalanche's callbacks: after domain {number} there are {len(curve)} rows "
                    "of accuracies"
                )
            if math.isnan(mean_calibration(self.metrics.calibration[-1]).nll):
                raise FloatingPointError(
                    f"predictions after domain {len(curve)} are NaN: the training has diverged"
                )
            self.folder.on_domain(len(curve), curve[-1] or 0.0)
            self._write_progress()
            checkpointer.end_experience()

    def _write_progress(self, batch: int = 0) -> None:
        """Write the status, at the end of a domain, otherwise at most once a second."""
        epochs, each = self.log.epochs, self.strategy.train_epochs
        at_end = batch == 0 and (not epochs or epochs[-1]["epoch"] + 1 == each)
        if not (at_end or time.monotonic() > self._written_at + _WRITE_EVERY):
            return
        domains, trained = len(self.metrics.matrix.curve()), len(self.log.seconds) - 1
        of_domains = len(self.experiences)
        done: float = sum(epoch["experience"] == trained for epoch in epochs)
        of_epochs = max(1, each)  # 0 in closed form
        text = f"domain {trained + 1}/{of_domains}, epoch {max(1, done + (batch > 0))}/{of_epochs}"
        if batch:
            images = len(getattr(self.strategy, "adapted_dataset", ()) or ())
            batches = max(batch, math.ceil(images / self.recipe.train_mb_size))
            text += f", batch {batch}/{batches}"
            done += batch / batches
        if epochs:
            last = Epoch(**epochs[-1])
            text += f", loss {last.loss:.3f}, accuracy {100 * last.accuracy:.1f} %"
            text += f", {last.images / max(1e-9, last.seconds):,.0f} images/s"
        status = Status(
            domains=domains,
            of_domains=of_domains,
            share=min(1.0, max(domains, trained + done / of_epochs) / of_domains),
            text=text,
            accuracy=self.metrics.matrix.curve()[-1] if domains else None,
        )
        self.folder.write_status(status)
        self._written_at = time.monotonic()

    def _note_diagnostics(self) -> None:
        """Keep and log CoVON's diagnostics of the experience just trained."""
        for plugin in self.strategy.plugins:
            if isinstance(plugin, CoVONPlugin) and plugin.diagnostics:
                found = plugin.diagnostics["all"]._asdict()
                self.diagnostics.append(found)
                numbers = ", ".join(f"{key} {value:.3g}" for key, value in found.items())
                _log.info("domain %d: %s", len(self.diagnostics), numbers)

    def _result(self) -> Result:
        device, precision = self.recipe.device, self.recipe.precision
        matrix = self.metrics.matrix
        memory = next(p for p in self.strategy.plugins if isinstance(p, MemoryFootprint))
        names = self.benchmark.classes
        return Result(
            run_hash=self.folder.hash,
            recipe=self.recipe.name,
            strategy=self.name,
            seed=self.seed,
            stream=self.folder.evaluated_on,
            settings=self.folder.settings,
            accuracy=matrix.rows,
            counts=matrix.counts,
            held_out=matrix.held_out,
            average_accuracy=matrix.average_accuracy(),
            weighted_accuracy=matrix.weighted_accuracy(),
            bwt=matrix.bwt(),
            calibration=asdict(mean_calibration(self.metrics.calibration[-1])),
            class_accuracy={names[i]: a for i, a in self.metrics.class_accuracy.items()},
            sampled=self._sampled(),
            epochs=[Epoch(**epoch) for epoch in self.log.epochs],
            train_seconds=self.log.seconds,
            parameters=sum(p.numel() for p in self.model.parameters()),
            memory_ratio=memory.ratio,
            memory_by_domain=memory.ratios,
            peak_memory=machine.peak_memory(device),
            diagnostics=self.diagnostics,
            versions=machine.versions(),
            machine={**machine.machine(device), "precision": used_precision(precision, device)},
        )

    def _sampled(self) -> dict[str, float]:
        """Accuracy and calibration of the last evaluation again, predicting with posterior samples;
        means over domains."""
        plugin = next((p for p in self.strategy.plugins if isinstance(p, PosteriorPlugin)), None)
        if plugin is None or self.recipe.posterior_samples == 0:
            return {}
        plugin.eval_samples = self.recipe.posterior_samples
        stream = self.folder.evaluated_on
        metrics = DomainMetrics(stream)
        self.strategy.evaluator.metrics = [metrics]
        self.strategy.eval(self.benchmark.streams[stream], num_workers=self.recipe.workers)
        accuracy = metrics.matrix.average_accuracy()
        return {"average_accuracy": accuracy, **asdict(mean_calibration(metrics.calibration[-1]))}

    def write_bundle(self, folder: Path, result: Result) -> None:
        """The trained model, for prediction."""
        optimizer = self.strategy.optimizer
        info = BundleInfo(
            class_names=self.benchmark.classes,
            input_shape=list(self.example.shape),
            model=self.recipe.model,
            strategy=self.settings,
            num_domains=self.recipe.stream.n_experiences,
            run={"seed": self.seed, "average_accuracy": result.average_accuracy, **result.settings},
        )
        posterior = optimizer.posterior() if isinstance(optimizer, PosteriorOptimizer) else None
        write_bundle(folder, info, self.model, posterior)
