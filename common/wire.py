"""Named tensors on the wire: Flower's records to and from dictionaries of NumPy arrays."""

import math
from collections.abc import Mapping
from functools import lru_cache
from io import BytesIO
from typing import Literal, TypeVar

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from numpy.lib import format as npy

NamedArrays = dict[str, np.ndarray]
Record = TypeVar("Record", ArrayRecord, ConfigRecord, MetricRecord)

# Bytes of a header; numpy's own limit.
_LONGEST = 10_000
_READERS = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}


def find_record(content: RecordDict, name: str, kind: type[Record]) -> Record | None:
    """Return the record ``name`` of a message if there is one of that kind.

    Flower's ``array_records`` and its like copy all of them at each use, into an object that refers to itself and so
    keeps them until the garbage collector runs.
    """
    record = content[name] if name in content else None  # noqa: SIM401 - Flower's get raises and catches
    return record if isinstance(record, kind) else None


def empty(record: ArrayRecord) -> None:
    """Remove all arrays of a record."""
    for name in list(record):
        del record[name]


def to_record(arrays: Mapping[str, np.ndarray]) -> ArrayRecord:
    """Return a record that holds a copy of each array under its name, in the order given."""
    return ArrayRecord({name: Array(np.asarray(array, order="C")) for name, array in arrays.items()})


def from_record(record: ArrayRecord) -> NamedArrays:
    """Return the arrays of a record by name.

    Raises:
        ValueError: an array is not NumPy data that can be read without executing anything.
    """
    return {name: array.numpy() for name, array in record.items()}


def views(record: ArrayRecord) -> NamedArrays:
    """Return the arrays of a record by name, read-only and without a copy: they keep the record's bytes alive.

    Raises:
        ValueError: an array is not NumPy data that can be read without executing anything, or has too few bytes.
        TypeError: it is data of another kind.
    """
    return {name: _view(array) for name, array in record.items()}


def _view(array: Array) -> np.ndarray:
    if array.stype != "numpy.ndarray":
        raise TypeError(f"{array.stype} is not numpy.ndarray")
    # Magic and version take 8 bytes, the length of the rest of the header 2 or 4.
    width = 2 if array.data[6:7] == b"\x01" else 4
    length = 8 + width + int.from_bytes(array.data[8 : 8 + width], "little")
    shape, order, dtype = _header(array.data[: min(length, _LONGEST)])
    return np.frombuffer(array.data, dtype, count=math.prod(shape), offset=length).reshape(shape, order=order)


# The same few for every client, and slow to read.
@lru_cache(maxsize=4096)
def _header(content: bytes) -> tuple[tuple[int, ...], Literal["C", "F"], np.dtype[np.generic]]:
    file = BytesIO(content)
    version = npy.read_magic(file)
    if version not in _READERS:
        raise ValueError(f"version {version} of the npy format")
    shape, fortran, dtype = _READERS[version](file)
    if dtype.hasobject:
        raise ValueError("it is made of Python objects")
    return shape, "F" if fortran else "C", dtype


def payload_bytes(record: ArrayRecord) -> int:
    """Return the bytes of all tensors in a record: elements times item size, without names and headers."""
    return sum(math.prod(array.shape) * np.dtype(array.dtype).itemsize for array in record.values())
