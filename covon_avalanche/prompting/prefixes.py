"""Learned tokens as prefixes of attention, for the methods that use them."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from covon_avalanche.prompting.prompted_vit import Prefix, PromptedViT


def existing_layers(vit: PromptedViT, layers: Iterable[int]) -> tuple[int, ...]:
    """Those of ``layers``, counted from 0, that the network has, in ascending order.

    :raises ValueError: if it has none of them.
    """
    wanted = sorted(set(layers))
    found = tuple(layer for layer in wanted if 0 <= layer < vit.depth)
    if not found:
        raise ValueError(
            f"prefixes need a network with at least one of the layers {wanted}, got one with "
            f"{vit.depth} layers, counted from 0"
        )
    return found


def check_prefix_length(name: str, length: int) -> None:
    """Raise a ValueError unless half of the tokens can be keys, and half of them values."""
    if length < 2 or length % 2:
        raise ValueError(f"{name} must be even and >= 2, got {length}")


def as_prefix(tokens: Tensor) -> Prefix:
    """The first half of the tokens as keys, the second as values.

    :param tokens: of shape (batch or 1, length, width).
    """
    keys, values = tokens.chunk(2, 1)
    return keys, values
