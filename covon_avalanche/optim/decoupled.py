"""Decoupled quadratic regularisation: pulling weights toward an anchor beside the loss.

As AdamW decouples weight decay from Adam, Algorithms 2 and 3 decouple the pull
``theta - rate * (theta - anchor)``, with ``rate = lr * precision / ess``, from the gradient
step. Where the rate is 1 or more, that step would jump past the anchor and, from 2 on,
diverge; there the implicit (proximal) step ``(theta + rate * anchor) / (1 + rate)`` is
taken instead, after the gradient step, as a proximal method does.
"""

from __future__ import annotations

import torch
from torch import Tensor


def explicit_pull(parameter: Tensor, anchor: Tensor, rate: Tensor) -> Tensor:
    """The pull of the entries with ``rate < 1``, to be made before the gradient step."""
    stable = torch.where(rate < 1, rate, torch.zeros_like(rate))
    return parameter - stable * (parameter - anchor)


def implicit_pull(parameter: Tensor, anchor: Tensor, rate: Tensor) -> Tensor:
    """The pull of the entries with ``rate >= 1``, to be made after the gradient step."""
    return torch.where(rate < 1, parameter, (parameter + rate * anchor) / (1 + rate))
