"""Where tasks begin and end, also in online streams that cut a task into many experiences."""

from __future__ import annotations

from typing import Any

from avalanche.benchmarks import OnlineCLExperience


def tells_boundaries(experience: Any) -> bool:
    """Whether the experience says where its task begins and ends."""
    return not isinstance(experience, OnlineCLExperience) or experience.access_task_boundaries


def starts_task(experience: Any) -> bool:
    """Whether a task starts with this experience; unknown counts as yes."""
    if isinstance(experience, OnlineCLExperience) and experience.access_task_boundaries:
        return bool(experience.is_first_subexp)
    return True


def ends_task(experience: Any) -> bool:
    """Whether a task ends with this experience; unknown counts as yes."""
    if isinstance(experience, OnlineCLExperience) and experience.access_task_boundaries:
        return bool(experience.is_last_subexp)
    return True


def task_index(strategy: Any) -> int:
    """Index of the current task, from 0, in the order of training."""
    experience = strategy.experience
    if isinstance(experience, OnlineCLExperience) and experience.access_task_boundaries:
        return int(experience.origin_experience.current_experience)
    return int(strategy.clock.train_exp_counter)
