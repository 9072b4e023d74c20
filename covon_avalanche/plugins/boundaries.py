"""Where tasks begin and end, also in online streams that cut a task into many experiences."""

from __future__ import annotations

from typing import Any

from avalanche.benchmarks import OnlineCLExperience


def require_boundaries(experience: Any) -> None:
    """Raise a ``ValueError`` for a part of an online stream that hides its boundaries."""
    if isinstance(experience, OnlineCLExperience) and not experience.access_task_boundaries:
        raise ValueError(
            "this online stream does not tell its task boundaries, so nobody knows when to "
            "consolidate: split it with access_task_boundaries=True; only CoVONPlugin can do "
            "without, by consolidate_every=... or plateau=LossPlateau()"
        )


def task_index(strategy: Any) -> int:
    """Index of the current task, from 0: how many experiences were trained before, or, in an
    online stream that tells its boundaries, the position of the task in the stream."""
    experience = strategy.experience
    if _is_part_of_task(experience):
        return int(experience.origin_experience.current_experience)
    return int(strategy.clock.train_exp_counter)


def task_data(experience: Any) -> Any:
    """The dataset of the whole task, also where the experience is a part of it."""
    if _is_part_of_task(experience):
        return experience.origin_experience.dataset
    return experience.dataset


def _is_part_of_task(experience: Any) -> bool:
    """Whether it is a part of an online stream that tells its task boundaries."""
    return isinstance(experience, OnlineCLExperience) and experience.access_task_boundaries


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
        if not _is_part_of_task(experience):
            return True
        self._parts = 1 if experience.is_first_subexp else self._parts + 1
        return bool(experience.is_first_subexp)

    def ends(self, experience: Any) -> bool:
        """Whether the task is over after this experience."""
        if not _is_part_of_task(experience):
            return True
        return bool(experience.is_last_subexp) or self._parts == experience.sub_stream_length
