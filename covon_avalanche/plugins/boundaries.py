"""Where tasks begin and end, also in online streams that split a task into experiences."""

from __future__ import annotations

from typing import Any

from avalanche.benchmarks import OnlineCLExperience


def require_boundaries(experience: Any) -> None:
    """Raise a ``ValueError`` for an online stream without access to its task boundaries."""
    if isinstance(experience, OnlineCLExperience) and not experience.access_task_boundaries:
        raise ValueError(
            "this online stream does not give access to its task boundaries, where weights are "
            "consolidated: split it with access_task_boundaries=True, or use CoVONPlugin with "
            "consolidate_every=... or plateau=LossPlateau()"
        )


def task_index(strategy: Any) -> int:
    """Index of the current task, from 0: the number of experiences trained before or, in an
    online stream with task boundaries, the position of the task in the stream."""
    experience = strategy.experience
    if _is_part_of_task(experience):
        return int(experience.origin_experience.current_experience)
    return int(strategy.clock.train_exp_counter)


def task_data(experience: Any) -> Any:
    """The dataset of the whole task, also if the experience is only a part of it."""
    if _is_part_of_task(experience):
        return experience.origin_experience.dataset
    return experience.dataset


def _is_part_of_task(experience: Any) -> bool:
    """Whether it is a part of a task in an online stream with task boundaries."""
    return isinstance(experience, OnlineCLExperience) and experience.access_task_boundaries


class TaskBoundaries:
    """Tracks which experiences of a stream begin or end a task.

    Ordinary experiences do both. The parts of a task in an online stream are counted, because
    Avalanche 0.6 does not mark the last one if the size of the parts divides that of the task.
    Without access to task boundaries every part counts as a task.
    """

    def __init__(self) -> None:
        self._parts = 0

    def begins(self, experience: Any) -> bool:
        """Whether a task begins; call it once before each experience."""
        if not _is_part_of_task(experience):
            return True
        self._parts = 1 if experience.is_first_subexp else self._parts + 1
        return bool(experience.is_first_subexp)

    def ends(self, experience: Any) -> bool:
        """Whether the task ends with this experience."""
        if not _is_part_of_task(experience):
            return True
        return bool(experience.is_last_subexp) or self._parts == experience.sub_stream_length
