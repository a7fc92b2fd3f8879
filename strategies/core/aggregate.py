"""Aggregation that holds one sum, however many replies there are."""

from collections.abc import Mapping

import numpy as np

from common.wire import NamedArrays


class WeightedMean:
    """The weighted mean of named tensors, folded in one reply at a time.

    Each tensor has a total weight of its own, so that a tensor that only some clients send (a prototype) is the mean
    over those. Sums are float64: the mean of equal tensors is that tensor, bit for bit, and results depend on the order
    of replies alone, which is the roster's.
    """

    def __init__(self) -> None:
        self._sums: NamedArrays = {}
        self._weights: dict[str, float] = {}
        self._dtypes: dict[str, np.dtype[np.generic]] = {}

    def add(self, arrays: Mapping[str, np.ndarray], weight: float) -> None:
        """Fold in the tensors of one client with ``weight`` > 0."""
        for name, array in arrays.items():
            if name not in self._sums:
                self._sums[name] = np.zeros(array.shape, np.float64)
                self._weights[name] = 0.0
                self._dtypes[name] = array.dtype
            self._sums[name] += np.multiply(array, weight, dtype=np.float64)
            self._weights[name] += weight

    def result(self) -> NamedArrays:
        """Return the mean of each tensor in the dtype it came in; empty if nothing was added."""
        return {name: (total / self._weights[name]).astype(self._dtypes[name]) for name, total in self._sums.items()}
