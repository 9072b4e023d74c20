"""Where tasks begin and end, also in online streams that cut a task into many experiences."""

from __future__ import annotations

from typing import Any

from avalanche.benchmarks import OnlineCLExperience


def tells_boundaries(experience: Any) -> bool:
    """Whether the experience says where its task begins and ends."""
    return not isinstance(experience, OnlineCLExperience) or experience.access_task_boundaries


def task_index(strategy: Any) -> int:
    """Index of the current task, from 0, in the order of training."""
    experience = strategy.experience
    if isinstance(experience, OnlineCLExperience) and experience.access_task_boundaries:
        return int(experience.origin_experience.current_experience)
    return int(strategy.clock.train_exp_counter)


class TaskBoundaries:
    """Follows a stream of experiences and tells which of them begin or end a task.

    Whole experiences do both. The parts of an online stream that tells its boundaries are
    counted, because Avalanche 0.6 forgets to mark the last one where the size of the parts
    divides that of the task. Without boundaries every part counts as a task.
    """

    def __init__(self) -> None:
        self._parts = 0

    def begins(self, experience: Any) -> bool:
        """To be called once before each experience."""
        if not (isinstance(experience, OnlineCLExperience) and experience.access_task_boundaries):
            return True
        self._parts = 1 if experience.is_first_subexp else self._parts + 1
        return bool(experience.is_first_subexp)

    def ends(self, experience: Any) -> bool:
        """Whether the task is over after this experience."""
        if not (isinstance(experience, OnlineCLExperience) and experience.access_task_boundaries):
            return True
        return bool(experience.is_last_subexp) or self._parts == experience.sub_stream_length
