"""Aggregation: many replies become one, in the memory of one."""

from collections.abc import Mapping
from typing import Protocol

import numpy as np

from common.tensors import NamedArrays

# Elements that are folded at a time, so that what is written in between stays in the cache.
_CHUNK = 1 << 15


class Aggregate(Protocol):
    """Takes replies one at a time, in the order of the roster; a new one is made for every round."""

    def add(self, arrays: Mapping[str, np.ndarray], weight: float) -> None:
        """Take in the tensors of one client, floating point, with ``weight`` > 0."""

    def result(self) -> NamedArrays:
        """Return one tensor for each name that any client sent, in the type that it came in."""


class WeightedMean:
    """The weighted mean of named tensors, folded in one reply at a time.

    Each tensor has a total weight of its own, so that a tensor that only some clients send (a prototype) is the mean
    over those. What is held is the mean of what came up to now, m; a tensor x of weight w moves it by w / W (x - m),
    with W the total weight including w. So it takes the memory of one model, the mean of equal tensors is that tensor
    bit for bit, and the result depends on the order of replies alone, which is the roster's.
    """

    def __init__(self) -> None:
        self._means: NamedArrays = {}
        self._weights: dict[str, float] = {}

    def add(self, arrays: Mapping[str, np.ndarray], weight: float) -> None:
        """Fold in the tensors of one client, floating point, with ``weight`` > 0."""
        for name, array in arrays.items():
            if name not in self._means:
                self._means[name] = np.array(array, order="C")
                self._weights[name] = weight
                continue
            self._weights[name] += weight
            _move(self._means[name].reshape(-1), array.reshape(-1), weight / self._weights[name])

    def result(self) -> NamedArrays:
        """Return the mean of each tensor in the dtype it came in; empty if nothing was added."""
        return dict(self._means)


def _move(mean: np.ndarray, array: np.ndarray, share: float) -> None:
    """Move ``mean`` towards ``array`` by ``share``, in place."""
    factor = mean.dtype.type(share)
    step = np.empty(min(_CHUNK, mean.size), mean.dtype)
    for start in range(0, mean.size, _CHUNK):
        part = mean[start : start + _CHUNK]
        move = step[: part.size]
        np.subtract(array[start : start + _CHUNK], part, out=move)
        np.multiply(move, factor, out=move)
        np.add(part, move, out=part)
