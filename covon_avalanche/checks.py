"""Checks of arguments, and the sentence of each error."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral, Real
from typing import Any

from torch import Tensor

from covon_avalanche.did_you_mean import did_you_mean

_LARGEST = 3.4e38  # of float32, in which the weights are


def check_positive(name: str, value: float, *, zero: bool = False) -> None:
    """Raise a ``ValueError`` unless the value is > 0 (or >= 0) and finite in float32."""
    number = isinstance(value, Real | Tensor)  # schedulers may use tensors
    if not (number and (0 < value <= _LARGEST or (zero and value == 0))):
        sign = ">=" if zero else ">"
        raise ValueError(f"{name} must be {sign} 0 and finite in float32, got {value!r}")


def check_fraction(name: str, value: float) -> None:
    """Raise a ``ValueError`` unless the value is in (0, 1]."""
    if not (isinstance(value, Real) and 0 < value <= 1):
        raise ValueError(f"{name} must be in (0, 1], got {value!r}")


def check_whole(name: str, value: Any, least: int = 1) -> None:
    """Raise a ``ValueError`` unless the value is an integer that is large enough."""
    if not isinstance(value, Integral) or int(value) < least:
        raise ValueError(f"{name} must be an integer >= {least}, got {value!r}")


def check_logits(user: str, output: Any, target: Any = None) -> None:
    """Raise a ``ValueError`` unless the outputs are logits of several classes.

    :param user: what needs them, for the message.
    :param target: refused if it is that of a regression or has several labels per example.
    """
    if not isinstance(output, Tensor):
        kind = type(output).__name__
        raise ValueError(f"{user} needs a model that returns a tensor of logits, got a {kind}")
    if output.dim() != 2 or output.shape[1] < 2:
        binary = " (a binary classifier must have two outputs)" if output.shape[1:] == (1,) else ""
        raise ValueError(
            f"{user} needs logits of shape (batch, classes), got {tuple(output.shape)}{binary}"
        )
    several = isinstance(target, Tensor) and target.shape == output.shape
    if several and ((target.sum(1) - 1).abs() > 0.01).any():
        raise ValueError(
            f"{user} is for classifiers, whose targets are class ids, or probabilities that sum "
            f"to 1, got {target.dtype} of shape {tuple(target.shape)}"
        )


def check_class_ids(what: str, target: Tensor) -> None:
    """Raise a ``ValueError`` unless the targets are class ids, one per example."""
    if target.dim() != 1 or target.is_floating_point():
        raise ValueError(
            f"{what} must be class ids of shape (batch,), got {target.dtype} of shape "
            f"{tuple(target.shape)}"
        )


def check_choice(name: str, value: Any, known: Sequence[Any]) -> None:
    """Raise a ``ValueError`` unless the value is one of the known ones."""
    if value not in known:
        raise ValueError(
            f"{name} must be one of {', '.join(map(repr, known))}, got {value!r}"
            f"{did_you_mean(value, known)}"
        )
