"""Named tensors on the wire: Flower's records to and from dictionaries of NumPy arrays."""

import math
from collections.abc import Mapping

import numpy as np
from flwr.app import Array, ArrayRecord

NamedArrays = dict[str, np.ndarray]


def to_record(arrays: Mapping[str, np.ndarray]) -> ArrayRecord:
    """Return a record that holds a copy of each array under its name, in the order given."""
    return ArrayRecord({name: Array(np.asarray(array, order="C")) for name, array in arrays.items()})


def from_record(record: ArrayRecord) -> NamedArrays:
    """Return the arrays of a record by name.

    Raises:
        ValueError: an array is not NumPy data that can be read without executing anything.
    """
    return {name: array.numpy() for name, array in record.items()}


def payload_bytes(record: ArrayRecord) -> int:
    """Return the bytes of all tensors in a record: elements times item size, without names and headers."""
    return sum(math.prod(array.shape) * np.dtype(array.dtype).itemsize for array in record.values())
