"""Search over the options of a method, one after the other, each on a grid of powers.

What is tried next follows from the values of what was tried, so a search can be cut off and gone on with, and
what it had found after fewer trials can be read off.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

TRIALS = 8
Point = tuple[float, ...]


class Coordinate(NamedTuple):
    """An option, the value to begin with, and the factor between neighbours."""

    name: str
    default: float
    factor: float


def propose(
    coordinates: Sequence[Coordinate], values: Mapping[Point, float], trials: int = TRIALS
) -> list[Point]:
    """The points to try next, which do not depend on each other; none at the end.

    Each option is moved to the best of three neighbours until the best is in the middle. The first, the rate,
    is followed as far as that takes; others while trials are left.

    Args:
        coordinates: of the points.
        values: of the points that were tried, the less the better; infinite where training failed.
        trials: how many points to try; more only where the best rate would be at an end of those tried.
    """
    point = tuple(c.default for c in coordinates)
    if point not in values:
        return [point]
    for k, coordinate in enumerate(coordinates):
        while True:
            around = [_move(point, k, coordinate.factor), _move(point, k, 1 / coordinate.factor)]
            missing = [p for p in around if p not in values]
            if missing:
                return missing if k == 0 else missing[: max(0, trials - len(values))]
            best = min((point, *around), key=values.__getitem__)
            if best == point:
                break
            point = best
    return []


def _move(point: Point, k: int, factor: float) -> Point:
    # Powers of a factor are found again by their digits.
    return (*point[:k], float(f"{point[k] * factor:.6g}"), *point[k + 1 :])


def order_trials(coordinates: Sequence[Coordinate], values: Mapping[Point, float]) -> list[Point]:
    """The points that were tried, in the order of the search."""
    order: list[Point] = []
    while True:
        known = {point: values[point] for point in order}
        new = [point for point in propose(coordinates, known) if point in values]
        if not new:
            return order
        order += new


def best_after(trials: int, order: Sequence[Point], values: Mapping[Point, float]) -> Point | None:
    """The best of the first so many points; None if training failed at all of them."""
    best = min(order[:trials], key=values.__getitem__, default=None)
    return None if best is None or math.isinf(values[best]) else best
