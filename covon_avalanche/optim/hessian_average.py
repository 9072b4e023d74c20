"""How fast CoVON's average of Hessian estimates forgets.

What protects a task is the curvature at its end, so the average must be short against the task,
and long enough that its estimates average out. Nobody knows at a step how long the task will
be, but its steps so far are known: a window of a share of them fits any length. After ``t``
steps an estimate made at step ``s`` then counts about in proportion to ``(s / t)^9``
("polynomial-decay averaging", Shamir and Zhang, ICML 2013, section 4).
"""

from __future__ import annotations

from functools import lru_cache

_FIRST_WINDOW = 50  # steps; a reparametrised estimate is hardly worth anything alone
_SHARE = 1 / 10  # of the task's steps so far


def beta2_at(beta2: float | None, step: int) -> float:
    """The average's coefficient at a step.

    :param beta2: the same in all steps (Algorithm 1), or ``None`` for the growing window.
    :param step: steps of the task before this one.
    """
    return 1 - 1 / (_FIRST_WINDOW + _SHARE * step) if beta2 is None else beta2


@lru_cache(maxsize=256)
def what_is_left(beta2: float | None, steps: int) -> tuple[float, float]:
    """What an average consists of after some steps.

    :return: the weight of what it began with, and the sum of the squared weights of the
        estimates, which is its variance if theirs is 1 and they are independent.
    """
    start, squares = 1.0, 0.0
    for step in range(steps):
        beta = beta2_at(beta2, step)
        start *= beta
        squares = beta**2 * squares + (1 - beta) ** 2
    return start, squares
