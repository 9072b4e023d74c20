"""The accuracy matrix of a run as an Avalanche metric."""

from __future__ import annotations

import math
from collections.abc import Sized
from dataclasses import astuple
from typing import Any

import torch
from avalanche.distributed import DistributedHelper
from avalanche.evaluation import PluginMetric
from avalanche.evaluation.metric_results import MetricValue
from avalanche.training.supervised import JointTraining
from avalanche.training.templates import SupervisedTemplate
from torch import Tensor

from covon_avalanche.evaluation.accuracy_matrix import AccuracyMatrix
from covon_avalanche.evaluation.calibration import (
    Calibration,
    CalibrationSums,
    class_accuracy,
    mean_calibration,
)


class DomainMetrics(PluginMetric[dict[str, float]]):
    """Records ``matrix.rows[t][i]``, the accuracy on domain i after t + 1 experiences.

    To be passed to an ``EvaluationPlugin``. Each ``strategy.eval`` of a whole stream is a row. Of
    several evaluations between two experiences the last one counts. Periodic evaluations inside
    ``train`` do not, because they precede the merge of posteriors. A missing evaluation is a row
    ``None``. A part of an online stream counts as an experience: evaluate at the stream's end only.

    Reported for the domains learned so far: A_T as domain mean (``DomainMeanAccuracy``) and pooled
    (``ImageWeightedAccuracy``), the mean of the former over time (``IncrementalAccuracy``), BWT
    (the paper's F_T), forgetting as defined by Avalanche and from the best earlier accuracy
    (``MaxForgetting``), plasticity, forward transfer, and calibration. Undefined metrics, such as
    BWT after one domain, are not reported, or are NaN if they were reported before. Comparisons
    with earlier rows are undefined, and A_T is over all test domains, if these differ from the
    trained ones in number, order or ``experience.domain`` (CORe50's test sessions), or if
    experiences were trained in another order than the stream's, or repeatedly: to change the order,
    reorder the benchmark. Task identities are not used. In a distributed run all processes get the
    metrics of all images.

    Avalanche's ``StreamAccuracy`` is another number: it pools all evaluated images, including
    domains that have not been learned yet.
    """

    def __init__(self, stream: str = "test") -> None:
        """
        :param stream: name of the stream to record.
        """
        super().__init__()
        self.stream = stream
        self.matrix = AccuracyMatrix([])
        # Rows of (NLL, Brier score, ECE) by domain: as objects they would fill checkpoints.
        self._calibration: list[Tensor] = []
        self.class_accuracy: dict[int, float] = {}
        """Accuracy by class id of the last row, all domains together."""
        self._inside_train = False
        self._n_domains = 0  # of the recorded stream
        self._row: dict[int, CalibrationSums] = {}  # by domain, during an evaluation
        self._tested: dict[int, str | None] = {}  # names of the test domains
        self._trained: list[tuple[int, str | None]] = []  # indices and names, in order
        self._n_to_train: int | None = None  # length of the training stream, if it has one
        self._reported: list[str] = []

    @property
    def calibration(self) -> list[list[Calibration]]:
        """Calibration on each domain, in rows as in the matrix."""
        return [[Calibration(*each) for each in row.tolist()] for row in self._calibration]

    def reset(self) -> None:
        """Nothing, because the matrix covers the whole run."""

    def result(self) -> dict[str, float]:
        """The metrics of the last row, by name."""
        matrix = self.matrix
        seen = len(matrix.counts) if matrix.held_out else len(matrix.rows)
        calibration = mean_calibration(self.calibration[-1][:seen])
        metrics = {
            "DomainMeanAccuracy": matrix.curve()[-1],
            "ImageWeightedAccuracy": matrix.weighted_accuracy(seen),
            "IncrementalAccuracy": matrix.incremental_accuracy(),
            "BWT": matrix.bwt(),
            "Forgetting": matrix.forgetting(),
            "MaxForgetting": matrix.max_forgetting(),
            "Plasticity": matrix.plasticity(),
            "ForwardTransfer": matrix.forward_transfer(),
            "NLL": calibration.nll,
            "Brier": calibration.brier,
            "ECE": calibration.ece,
        }
        return {name: value for name, value in metrics.items() if value is not None}

    def before_training(self, strategy: SupervisedTemplate) -> None:
        """Ignore evaluations until training ends: they are Avalanche's periodic ones."""
        self._inside_train = True

    def after_training_exp(self, strategy: SupervisedTemplate) -> None:
        """Record which domains were trained."""
        joint = isinstance(strategy, JointTraining)
        for experience in strategy._experiences if joint else [strategy.experience]:
            known = experience.logging()
            self._trained.append((known.current_experience, getattr(known, "domain", None)))
            stream = known.origin_stream
            self._n_to_train = len(stream) if isinstance(stream, Sized) else None

    def after_training(self, strategy: SupervisedTemplate) -> None:
        """Record evaluations again."""
        self._inside_train = False

    def before_eval(self, strategy: SupervisedTemplate) -> None:
        """Begin a row."""
        self._row = {}

    def after_eval_iteration(self, strategy: SupervisedTemplate) -> None:
        """Count a batch."""
        super().after_eval_iteration(strategy)
        experience: Any = strategy.experience
        stream, i = experience.origin_stream, experience.current_experience
        if stream.name != self.stream:
            return
        if isinstance(stream, Sized):
            self._n_domains = len(stream)
        else:  # it is whole only if the stream itself is evaluated
            self._n_domains = i + 1 if strategy.current_eval_stream is stream else 0
        self._tested[i] = getattr(experience, "domain", None)
        sums = self._row.setdefault(i, CalibrationSums())
        # In a distributed run the sampler of a process that has too few images repeats some.
        share = range(DistributedHelper.rank, len(experience.dataset), DistributedHelper.world_size)
        new = len(share) - sums.count
        sums.add(strategy.mb_output[:new], strategy.mb_y[:new])

    def after_eval(self, strategy: SupervisedTemplate) -> list[MetricValue] | None:
        """End a row, if the whole stream was evaluated."""
        # A metric that was added after training counts experiences by the strategy's clock.
        trained = len(self._trained) or strategy.clock.train_exp_counter
        whole = self._n_domains > 0 and len(self._row) == self._n_domains
        if not whole or self._inside_train or trained == 0:
            return None
        if self._is_held_out():
            self.matrix.held_out = True
        sums = [self._row[i] for i in sorted(self._row)]
        if DistributedHelper.is_distributed:
            for domain in sums:
                domain.gather()
        self.matrix.counts = [s.count for s in sums]
        missing = max(0, trained - 1 - len(self.matrix.rows))
        self.matrix.rows[trained - 1 :] = [*[None] * missing, [s.accuracy for s in sums]]
        values = [astuple(s.result()) for s in sums]
        calibration = torch.tensor(values, dtype=torch.float64, device="cpu")
        self._calibration[trained - 1 :] = [*[calibration[:0]] * missing, calibration]
        self.class_accuracy = class_accuracy(sums)
        self._row = {}
        suffix, x = f"/eval_phase/{self.stream}_stream", strategy.clock.train_iterations
        # Avalanche keeps the last value of a metric that is not reported any more.
        reported = dict.fromkeys(self._reported, math.nan) | self.result()
        self._reported = [*reported]
        return [MetricValue(self, name + suffix, value, x) for name, value in reported.items()]

    def _is_held_out(self) -> bool:
        """Whether number, order or names show that the test domains are not the trained ones."""
        if self._n_to_train not in (None, self._n_domains):
            return True
        pairs = [(name, self._tested.get(i)) for i, name in self._trained]
        others = any(None not in pair and pair[0] != pair[1] for pair in pairs)
        return others or [i for i, _ in self._trained] != [*range(len(self._trained))]

    def __str__(self) -> str:
        return "DomainMetrics"
