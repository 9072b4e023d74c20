"""Coefficients of the running averages of gradient and Hessian, which start anew in each task.

Both averages should be short compared with the task, since gradients and curvature of earlier steps
belong to other weights, and long enough to average out noise. The length of a task is not known at
a step, but the number of its steps so far is: a growing window is a fixed share of them, a tenth,
beyond a minimum. While it grows, what was averaged at step ``s`` has, after ``t`` steps, a weight
about proportional to ``(s / t)^9`` ("polynomial-decay averaging", Shamir and Zhang, ICML 2013,
section 4).
"""

from __future__ import annotations


def beta1_at(beta1: float, step: int) -> float:
    """The averaging coefficient of the gradient in a step, in natural units: that of a window of
    ``1 + t / 10`` steps after ``t`` steps, at most ``beta1``. It is 0 in the first step, so that
    the average needs no bias correction. With the full window from the first step on, the average
    still contains gradients from before a minimum was passed, and the weights overshoot; in a short
    task they do so until its end (``docs/presets.md``).

    :param step: number of the task's steps before this one.
    """
    return min(beta1, 1 - 1 / (1 + 0.1 * step))


def beta2_at(beta2: float | None, step: int) -> float:
    """The averaging coefficient of the Hessian in a step.

    :param beta2: the same in all steps (Algorithm 1), or ``None`` for a window of ``50 + t / 10``
        steps after ``t`` steps.
    :param step: number of the task's steps before this one.
    """
    return 1 - 1 / (50 + 0.1 * step) if beta2 is None else beta2
