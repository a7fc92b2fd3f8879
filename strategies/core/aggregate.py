"""Aggregation: many replies become one, in bounded memory, and as little as possible by the will of a bad one."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Protocol

import numpy as np

from common.norms import CHUNK, chunks
from common.tensors import NamedArrays
from strategies.core.spool import Spool

# Bytes of what all clients sent that are in memory at a time while a median is taken.
_BLOCK = 1 << 24


class Aggregate(Protocol):
    """Takes replies one at a time, in the order of the roster; a new one is made for every round."""

    def add(self, arrays: Mapping[str, np.ndarray], weight: float) -> None:
        """Take in the tensors of one client, floating point, with ``weight`` > 0."""

    def result(self) -> NamedArrays:
        """Return one tensor for each name that any client sent, in the type that it came in."""


# The values of the key ``aggregation``.
AGGREGATIONS = ("mean", "clipped-mean", "median", "trimmed-mean")
MakeAggregate = Callable[[], Aggregate]


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


class _Spooled(ABC):
    """Keeps what came on the disk, in ``folder`` as of ``Spool``, and reads it block by block; errors as there."""

    def __init__(self, folder: Path | None) -> None:
        self._spool = Spool(folder)
        self._places: dict[str, list[int]] = {}
        self._like: dict[str, np.ndarray] = {}

    def add(self, arrays: Mapping[str, np.ndarray], weight: float) -> None:
        """Write the tensors of one client; all clients weigh the same."""
        for name, array in arrays.items():
            self._places.setdefault(name, []).append(self._spool.write(array))
            self._like.setdefault(name, np.empty(array.shape, array.dtype))

    def result(self) -> NamedArrays:
        """Return one tensor for each name, from blocks of all clients' values."""
        return {name: self._merged(name) for name in self._places}

    def _merged(self, name: str) -> np.ndarray:
        like, places = self._like[name], self._places[name]
        flat = like.reshape(-1)
        length = max(1, _BLOCK // (like.itemsize * len(places)))
        for start in range(0, flat.size, length):
            count = min(length, flat.size - start)
            block = np.empty((len(places), count), like.dtype)
            for row, place in zip(block, places, strict=True):
                row[:] = self._spool.read(place + start * like.itemsize, count, like.dtype)
            flat[start : start + count] = self._merge(block)
        return like

    @abstractmethod
    def _merge(self, block: np.ndarray) -> np.ndarray:
        """Return (elements,) of (clients, elements)."""


class Median(_Spooled):
    """The median of each element over the clients that sent it, who all count the same.

    Replies are written to a file; 16 MB of them are in memory at a time, whatever the number of clients.
    """

    def _merge(self, block: np.ndarray) -> np.ndarray:
        return np.asarray(np.median(block, axis=0))


class TrimmedMean(_Spooled):
    """The mean of each element without the ``trim`` part of the clients at each end; memory as of ``Median``.

    Of n clients floor(trim n) are left out at each end, for each element anew.
    """

    def __init__(self, trim: float, folder: Path | None) -> None:
        super().__init__(folder)
        self._trim = trim

    def _merge(self, block: np.ndarray) -> np.ndarray:
        cut = math.floor(self._trim * len(block) + 1e-9)
        block.sort(axis=0)
        merged: np.ndarray = block[cut : len(block) - cut].mean(axis=0)
        return merged


def aggregate_of(name: str, trim: float, folder: Path | None) -> MakeAggregate:
    """Return what makes the aggregate of the key ``aggregation``; for a clipped mean updates are clipped before.

    Where replies have to wait for each other, they do so in a file in ``folder``, as of ``Spool``.
    """
    kinds: dict[str, MakeAggregate] = {
        "mean": WeightedMean,
        "clipped-mean": WeightedMean,
        "median": partial(Median, folder),
        "trimmed-mean": partial(TrimmedMean, trim, folder),
    }
    return kinds[name]


def _move(mean: np.ndarray, array: np.ndarray, share: float) -> None:
    """Move ``mean`` towards ``array`` by ``share``, in place."""
    factor = mean.dtype.type(share)
    if mean.size <= CHUNK:
        mean += (array - mean) * factor
        return
    for part, other, move in chunks(mean, array):
        np.subtract(other, part, out=move)
        np.multiply(move, factor, out=move)
        np.add(part, move, out=part)
