"""The accuracy matrix of a run as an Avalanche metric, and what is computed from it."""

from __future__ import annotations

from collections.abc import Sized
from typing import Any

from avalanche.benchmarks import OnlineCLExperience
from avalanche.evaluation import PluginMetric
from avalanche.evaluation.metric_results import MetricValue
from avalanche.training.supervised import JointTraining
from avalanche.training.templates import SupervisedTemplate

from covon_avalanche.evaluation.accuracy_matrix import AccuracyMatrix
from covon_avalanche.evaluation.calibration import (
    Calibration,
    CalibrationSums,
    mean_calibration,
    reliability,
)
from covon_avalanche.evaluation.reliability import ReliabilityBin


class DomainMetrics(PluginMetric[dict[str, float]]):
    """Records ``matrix.rows[t][i]``, the accuracy on domain i after t + 1 experiences.

    For an ``EvaluationPlugin``. Each ``strategy.eval`` of a whole stream is a row; of several
    evaluations between two experiences the last counts, and those inside ``train``, which come
    before posteriors are merged, do not. Where an evaluation is left out, its row is ``None``, and
    what compares with it is not defined; the parts of an online stream are one experience.

    It reports, for the domains learned so far, A_T as domain mean and image-weighted, BWT (the
    paper's F_T), forgetting as Avalanche defines it and from the best accuracy ever, plasticity,
    and calibration; what is not defined, such as BWT after one domain, is not reported; nor is
    any comparison with the past where the stream's domains are not those trained, by number or
    by ``experience.domain``, in the same order (CORe50's test sessions). Task identities are not
    used.

    Avalanche's metrics of similar names are other numbers: its ``StreamAccuracy`` pools all
    images of what is evaluated, domains not learned yet included.
    """

    def __init__(self, stream: str = "test", *, held_out: bool = False, bins: int = 15) -> None:
        """
        :param stream: name of the stream to record.
        :param held_out: its domains are not those that are trained, though neither their number
            nor ``experience.domain`` tells.
        :param bins: of the expected calibration error.
        """
        super().__init__()
        self.stream = stream
        self.bins = bins
        self.matrix = AccuracyMatrix([], held_out=held_out)
        self.calibration: list[list[Calibration]] = []
        """Of each domain, by rows as in the matrix."""
        self.reliability: list[ReliabilityBin] = []
        """Of the last row, all domains together."""
        self._inside_train = False
        self._domains = 0  # in the whole stream
        self._row: dict[int, tuple[int, CalibrationSums]] = {}  # hits and sums by domain
        self._tested: dict[int, str | None] = {}  # their names
        self._trained: list[str | None] = []  # names in the order of training
        self._part_of: int | None = None  # the task of the last part of an online stream
        self._to_train: int | None = None  # domains in the training stream, where it has an end

    def reset(self) -> None:
        """Nothing: the matrix is of the whole run."""

    def result(self) -> dict[str, float]:
        """The metrics of the last row, by name."""
        matrix = self.matrix
        seen = len(matrix.counts) if matrix.held_out else len(matrix.rows)
        found = {
            "DomainMeanAccuracy": matrix.curve()[-1],
            "ImageWeightedAccuracy": matrix.weighted_accuracy(seen),
            "BWT": matrix.bwt(),
            "Forgetting": matrix.forgetting(),
            "MaxForgetting": matrix.max_forgetting(),
            "Plasticity": matrix.plasticity(),
        }
        row = self.calibration[-1][:seen]
        mean = mean_calibration(row)
        found |= {"NLL": mean.nll, "Brier": mean.brier, "ECE": mean.ece}
        return {name: value for name, value in found.items() if value is not None}

    def before_training(self, strategy: SupervisedTemplate) -> None:
        """From here on evaluations are Avalanche's periodic ones."""
        self._inside_train = True

    def after_training_exp(self, strategy: SupervisedTemplate) -> None:
        """Note what was trained."""
        joint = isinstance(strategy, JointTraining)
        for experience in strategy._experiences if joint else [strategy.experience]:
            self._note(experience.logging())

    def _note(self, experience: Any) -> None:
        """One more; all parts of an online stream's task are one."""
        whole, part_of = experience, None
        if isinstance(experience, OnlineCLExperience):
            whole = experience.origin_experience.logging()
            part_of = whole.current_experience
        stream = whole.origin_stream
        self._to_train = len(stream) if isinstance(stream, Sized) else None
        if part_of is None or part_of != self._part_of:
            self._trained.append(getattr(whole, "domain", None))
        self._part_of = part_of

    def after_training(self, strategy: SupervisedTemplate) -> None:
        """Until here."""
        self._inside_train = False

    def before_eval(self, strategy: SupervisedTemplate) -> None:
        """Begin a row."""
        self._row = {}

    def after_eval_iteration(self, strategy: SupervisedTemplate) -> None:
        """Count a batch."""
        super().after_eval_iteration(strategy)
        if not self._is_recorded(strategy):
            return
        self._domains = len(strategy.experience.origin_stream)
        domain = strategy.experience.current_experience
        self._tested[domain] = getattr(strategy.experience, "domain", None)
        hits, sums = self._row.setdefault(domain, (0, CalibrationSums(self.bins)))
        sums.add(strategy.mb_output, strategy.mb_y)
        right = (strategy.mb_output.argmax(1) == strategy.mb_y).sum().item()
        self._row[domain] = (hits + int(right), sums)

    def after_eval(self, strategy: SupervisedTemplate) -> list[MetricValue] | None:
        """End a row, if the whole stream was evaluated."""
        domains = sorted(self._row)
        # Metrics that were not there in training know from the clock how much there was.
        trained = len(self._trained) or strategy.clock.train_exp_counter
        whole = domains == list(range(self._domains))
        if not domains or not whole or self._inside_train or trained == 0:
            return None
        if self._tests_others():
            self.matrix.held_out = True
        counts = self.matrix.counts = [self._row[i][1].count for i in domains]
        missing = max(0, trained - 1 - len(self.matrix.rows))
        row = [self._row[i][0] / counts[i] for i in domains]
        self.matrix.rows[trained - 1 :] = [*[None] * missing, row]
        calibration = [self._row[i][1].result() for i in domains]
        self.calibration[trained - 1 :] = [*[[] for _ in range(missing)], calibration]
        self.reliability = reliability([self._row[i][1] for i in domains])
        return [
            MetricValue(
                self,
                f"{name}/eval_phase/{self.stream}_stream",
                value,
                strategy.clock.train_iterations,
            )
            for name, value in self.result().items()
        ]

    def _tests_others(self) -> bool:
        """Whether the domains are known not to be those trained, in the same order."""
        if self._to_train not in (None, self._domains):
            return True
        pairs = [(name, self._tested.get(i)) for i, name in enumerate(self._trained)]
        return any(None not in pair and pair[0] != pair[1] for pair in pairs)

    def _is_recorded(self, strategy: Any) -> bool:
        return bool(strategy.experience.origin_stream.name == self.stream)

    def __str__(self) -> str:
        return "DomainMetrics"
