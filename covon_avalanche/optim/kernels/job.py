"""What a step kernel is given: one parameter with its state and its settings."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

LARGEST_GRADIENT = 1e9  # beyond it a Hessian estimate in float32 may overflow


@dataclass
class Job:
    """One parameter of a CoVON step. Tensors have the parameter's shape and strides; where
    the state has none yet (see :class:`CoVON`), a number stands for it.

    :param name: for messages.
    :param number: of the parameter in the optimizer; part of the place of its noise.
    :param mean: the parameter, at its mean. Changed in place by a step.
    :param sample: theta; written by ``draw``. Its content is used up by a step.
    :param grad: average gradient over the samples, loss/weight.
    :param averaged: ``sample`` holds the average of ``gradient * (theta - mean)`` over
        several samples instead of theta.
    :param momentum: gradient average. Changed in place.
    :param hess: Hessian average, loss/weight². Changed in place.
    :param correction: ``1 / (1 - beta1**step)``, or 1 without debiasing.
    """

    name: str
    number: int
    mean: Tensor
    sample: Tensor
    hess: Tensor | float
    prior_mean: Tensor | float
    prior_precision: Tensor | float
    ess: float
    grad: Tensor | None = None
    averaged: bool = False
    momentum: Tensor | None = None
    beta1: float = 0.0
    beta2: float = 0.0
    lr: float = 0.0
    clip_radius: float = float("inf")
    correction: float = 1.0
