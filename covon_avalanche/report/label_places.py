"""Places for the names beside the points of a scatter plot, so that they do not overlap."""

from __future__ import annotations

import math
from collections.abc import Sequence

Box = tuple[float, float, float, float]
"""Left, bottom, right, top."""


def place_labels(
    points: Sequence[tuple[float, float]],
    sizes: Sequence[tuple[float, float]],
    inside: Box,
    radius: float = 5.0,
) -> list[tuple[float, float]]:
    """Centres of the labels, in the units of the points (pixels, or points of a page).

    Each takes the place nearest to its point that hides the least: of other points, of labels
    placed before it, and beyond the box they should stay inside.

    :param sizes: width and height of each label.
    :param radius: of the drawn points.
    """
    taken = [_around(x, y, 2 * radius, 2 * radius) for x, y in points]
    centres = []
    for (x, y), (width, height) in zip(points, sizes, strict=True):
        candidates = [
            _around(x + side * (ring + width / 2), y + lift, width, height)
            for ring, lifts in _rings(height, radius)
            for lift in lifts
            for side in (1, -1)
        ]
        costs = [
            sum(_overlap(box, other) for other in taken)
            + 2 * (width * height - _overlap(box, inside))
            for box in candidates
        ]
        # Overlaps of less than a thousandth of the label come from rounding.
        chosen = candidates[min(range(len(costs)), key=lambda i: (round(costs[i], 3), i))]
        taken.append(chosen)
        centres.append(((chosen[0] + chosen[2]) / 2, (chosen[1] + chosen[3]) / 2))
    return centres


def _rings(height: float, radius: float) -> list[tuple[float, list[float]]]:
    """Distances from the point: first sideways, then also up and down."""
    rings = [(1.4 * radius, [0.0])]
    for step in range(1, 9):
        lift = step * 0.8 * height
        rings.append((max(0.0, 1.4 * radius - 2 * step) + step, [lift, -lift]))
    return rings


def _around(x: float, y: float, width: float, height: float) -> Box:
    return (x - width / 2, y - height / 2, x + width / 2, y + height / 2)


def _overlap(first: Box, second: Box) -> float:
    width = min(first[2], second[2]) - max(first[0], second[0])
    height = min(first[3], second[3]) - max(first[1], second[1])
    return width * height if width > 0 and height > 0 else 0.0


def is_far(point: tuple[float, float], centre: tuple[float, float], size: float) -> bool:
    """Whether a label needs a line to its point: it is more than so high above or below."""
    return math.fabs(point[1] - centre[1]) > size
