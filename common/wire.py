"""Tensors on the wire: Flower's records to and from dictionaries of NumPy arrays, packed as small as they are declared.

A Flower ``Array`` says by its ``stype`` how its bytes are to be read: ``numpy.ndarray`` (dense, an npy file),
``floret.bits`` (booleans, eight to a byte) or ``floret.sparse`` (a mask as bits, then the values of its elements). A
sparse tensor that lacks nothing travels dense.
"""

import io
import math
import re
import sys
from collections.abc import Mapping
from functools import lru_cache
from typing import Literal, TypeVar

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict

from common.tensors import (
    MASK,
    NamedArrays,
    Specs,
    TensorError,
    TensorSpec,
    check_free_sides,
    check_missing,
    check_tensor,
    spec_of,
)

Record = TypeVar("Record", ArrayRecord, ConfigRecord, MetricRecord)
DENSE, BITS, SPARSE = "numpy.ndarray", "floret.bits", "floret.sparse"
# An npy header as numpy writes it, and nothing else that Python would take for a dictionary.
_HEADER = re.compile(
    rb"\{'descr': '([<|][a-z][0-9]{1,2})', 'fortran_order': (True|False), "
    rb"'shape': \(((?:[0-9]{1,12}, ?)*(?:[0-9]{1,12})?)\), \} *\n"
)
# Bytes of a header, and sides of an array; numpy's own limits.
_LONGEST = 10_000
_MOST_SIDES = 64


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
    """Return a record that holds a dense copy of each array under its name, in the order given."""
    return ArrayRecord({name: _npy(array) for name, array in arrays.items()})


def views(record: ArrayRecord) -> NamedArrays:
    """Return the dense arrays of a record by name, read-only and without a copy: they keep the record's bytes alive.

    Raises:
        TensorError: an array is not NumPy data that can be read without executing anything.
    """
    return {name: _dense(name, array) for name, array in record.items()}


def from_record(record: ArrayRecord) -> NamedArrays:
    """Return copies of the dense arrays of a record by name; errors as of ``views``."""
    return {name: array.copy() for name, array in views(record).items()}


def pack(arrays: Mapping[str, np.ndarray | Array], specs: Specs, wire: str = "float32") -> ArrayRecord:
    """Return a record of tensors as they travel.

    Args:
        arrays: by name; an ``Array`` is packed already and goes as it is.
        specs: what they are.
        wire: in which type those of float32 travel.

    Raises:
        TensorError: a tensor is not what ``specs`` says, or has values that ``wire`` cannot carry.
    """
    packed = {}
    for name, array in arrays.items():
        if isinstance(array, Array):
            packed[name] = array
        elif not _is_mask(name, specs):
            spec = spec_of(name, specs)
            check_tensor(name, spec, array.dtype, array.shape)
            packed[name] = _packed(name, array, arrays.get(MASK + name), spec, wire)
    return ArrayRecord(packed)


def check_sendable(arrays: Mapping[str, np.ndarray], specs: Specs, wire: str) -> None:
    """Check that ``pack`` will take these tensors.

    Raises:
        TensorError: a tensor is missing or not what ``specs`` says, or has values that ``wire`` cannot carry.
    """
    check_missing(arrays, specs)
    for name, array in arrays.items():
        if not _is_mask(name, specs):
            spec = spec_of(name, specs)
            check_tensor(name, spec, array.dtype, array.shape)
            _cast(name, array, _type_on_wire(spec, wire))
    check_free_sides({name: array.shape for name, array in arrays.items() if not _is_mask(name, specs)}, specs)


def packed_again(record: ArrayRecord, arrays: Mapping[str, np.ndarray], specs: Specs, wire: str) -> ArrayRecord:
    """Return what ``pack`` returns of ``arrays``, which are ``views`` of ``record``; it keeps what travels as it is."""
    as_it_is = {name: _type_on_wire(specs[name], wire) == str(a.dtype) for name, a in arrays.items() if name in specs}
    kept = {
        name: record[name]
        for name, same in as_it_is.items()
        if same and not specs[name].sparse and specs[name].dtype != "bool"
    }
    return pack({**arrays, **kept}, specs, wire)


def unpack(
    record: ArrayRecord,
    specs: Specs,
    wire: str = "float32",
    *,
    whole: bool = True,
    peers: bool = False,
    finite: bool = True,
) -> NamedArrays:
    """Return the tensors of a record that came from another process; nothing is allocated before it was checked.

    Dense tensors are read-only views that keep the record's bytes alive.

    Args:
        record: what came.
        specs: what it must be.
        wire: in which type tensors of float32 travel.
        whole: every tensor that is not optional must be there.
        peers: ``<number>.<name>`` is a tensor ``<name>``, too.
        finite: check that all values are; without it the caller does, with whatever else it reads the values for.

    Raises:
        TensorError: a tensor is missing, unknown, of another type or shape, not finite, below zero where it cannot be,
            or cannot be read.
    """
    if whole:
        check_missing(record, specs)
    arrays: NamedArrays = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for name, array in record.items():
        spec = spec_of(name, specs, peers=peers)
        found, mask = _unpacked(name, array, spec, wire)
        if finite:
            check_finite(name, found)
        if not spec.negative and (found < 0).any():
            raise TensorError(f"tensor {name} has values below zero; no variance has")
        arrays[name], shapes[name] = found, found.shape
        if mask is not None:
            arrays[_beside(name)] = mask
    check_free_sides(shapes, specs, peers=peers)
    return arrays


def check_finite(name: str, array: np.ndarray) -> None:
    """Check that every element is finite; a finite sum says so, and takes no memory.

    Raises:
        TensorError: one is not.
    """
    if array.dtype.kind == "f":
        with np.errstate(over="ignore", invalid="ignore"):
            if not (np.isfinite(array.sum()) or np.isfinite(array).all()):
                raise TensorError(f"tensor {name} is not finite")


def payload_bytes(record: ArrayRecord) -> int:
    """Return the bytes of all tensors in a record as they travel, without names and headers."""
    return sum(map(bytes_of, record.values()))


def bytes_of(array: Array) -> int:
    """Return the bytes of a tensor as it travels, without its header; none if that says it is longer than all of it."""
    return max(len(array.data) - (_after_header(array) if array.stype == DENSE else 0), 0)


def unpacked_bytes(record: ArrayRecord) -> int:
    """Return the memory that the tensors of a record from another process will take as methods see them.

    Raises:
        TensorError: one says that it has a shape that no array has.
    """
    return sum(max(len(array.data), 4 * math.prod(_shape_of(name, array))) for name, array in record.items())


def norm_of(array: Array) -> float:
    """Return the Euclidean norm of a tensor that was packed here."""
    if array.stype == BITS:
        return math.sqrt(int(np.unpackbits(np.frombuffer(array.data, np.uint8)).sum()))
    if array.stype == SPARSE:
        values = np.frombuffer(array.data[-(-math.prod(array.shape) // 8) :], array.dtype)
    else:
        values = _dense("", array)
    return float(np.linalg.norm(values if values.dtype == np.float32 else values.astype(np.float64)))


def _is_mask(name: str, specs: Specs) -> bool:
    """Return whether a tensor is the mask of a sparse one, with which it travels."""
    spec = specs.get(name.removeprefix(MASK))
    return name.startswith(MASK) and name not in specs and spec is not None and spec.sparse


def _beside(name: str) -> str:
    """Return the name of a tensor's mask: that of ``3.w`` is ``3.mask.w``."""
    prefix, _, rest = name.partition(".")
    return f"{prefix}.{MASK}{rest}" if prefix.isdecimal() else MASK + name


def _type_on_wire(spec: TensorSpec, wire: str) -> str:
    return wire if spec.dtype == "float32" else spec.dtype


def _packed(name: str, array: np.ndarray, mask: np.ndarray | Array | None, spec: TensorSpec, wire: str) -> Array:
    if spec.dtype == "bool":
        return Array("bool", array.shape, BITS, np.packbits(array).tobytes())
    values = _cast(name, array, _type_on_wire(spec, wire))
    if not spec.sparse:
        return _npy(values)
    there = array != 0 if mask is None else np.asarray(mask)
    check_tensor(MASK + name, TensorSpec(spec.shape, "bool"), there.dtype, there.shape)
    if there.all():
        return _npy(values)
    return Array(str(values.dtype), array.shape, SPARSE, np.packbits(there).tobytes() + values[there].tobytes())


def _npy(array: np.ndarray) -> Array:
    """Return a dense array with the bytes of an npy file."""
    return Array(str(array.dtype), array.shape, DENSE, _new_header(array.dtype, array.shape) + array.tobytes("C"))


# The same few for every client, and slow to make.
@lru_cache(maxsize=4096)
def _new_header(dtype: np.dtype[np.generic], shape: tuple[int, ...]) -> bytes:
    """Return what stands before the values in an npy file."""
    file = io.BytesIO()
    described = np.lib.format.dtype_to_descr(dtype)
    np.lib.format.write_array_header_1_0(file, {"descr": described, "fortran_order": False, "shape": shape})
    return file.getvalue()


def _cast(name: str, array: np.ndarray, dtype: str) -> np.ndarray:
    if array.dtype == dtype:
        return array
    with np.errstate(over="ignore"):
        values = array.astype(dtype)
    if np.isfinite(array).all() and not np.isfinite(values).all():
        most = np.finfo(dtype).max
        raise TensorError(f'tensor {name} has values beyond {most}, which {dtype} cannot carry; use wire="float32"')
    return values


def _unpacked(name: str, array: Array, spec: TensorSpec, wire: str) -> tuple[np.ndarray, np.ndarray | None]:
    """Return a tensor as methods see it, and its mask if it is sparse."""
    dtype = _type_on_wire(spec, wire)
    full = spec.sparse and array.stype == DENSE
    packing = BITS if spec.dtype == "bool" else SPARSE if spec.sparse and not full else DENSE
    if array.stype != packing:
        raise TensorError(f"an array cannot be read: tensor {name} is {str(array.stype)[:40]!r}, not {packing!r}")
    on_wire = spec if dtype == spec.dtype else TensorSpec(spec.shape, dtype)
    if packing == DENSE:
        dense = _dense(name, array, on_wire)
        there = np.ones(dense.shape, bool) if full else None
        return (dense if dtype == spec.dtype else dense.astype(spec.dtype)), there
    shape = _shape_of(name, array)
    check_tensor(name, on_wire, array.dtype, shape)
    size = math.prod(shape)
    bits = -(-size // 8)
    mask = np.unpackbits(np.frombuffer(array.data[:bits], np.uint8), count=size) if len(array.data) >= bits else None
    if mask is None or (packing == BITS and len(array.data) != bits):
        raise TensorError(f"an array cannot be read: tensor {name} has {len(array.data)} bytes for {size} bits")
    there = mask.astype(bool).reshape(shape)
    if packing == BITS:
        return there, None
    values = array.data[bits:]
    if len(values) != int(mask.sum()) * np.dtype(dtype).itemsize:
        raise TensorError(f"an array cannot be read: tensor {name} has {len(values)} bytes for {mask.sum()} values")
    tensor = np.zeros(shape, spec.dtype)
    tensor[there] = np.frombuffer(values, dtype)
    return tensor, there


def _shape_of(name: str, array: Array) -> tuple[int, ...]:
    """Return the shape that an array says it has, before it is compared and printed.

    Raises:
        TensorError: no array has it; a side may be a number of thousands of digits.
    """
    shape = tuple(array.shape)
    if len(shape) > _MOST_SIDES or not all(type(side) is int and 0 <= side <= sys.maxsize for side in shape):
        raise TensorError(f"an array cannot be read: tensor {name} has a shape that no array has")
    return shape


def _dense(name: str, array: Array, spec: TensorSpec | None = None) -> np.ndarray:
    """Return a view of the bytes of a dense array."""
    try:
        length = _after_header(array)
        shape, order, dtype, called = _header(array.data[: min(length, _LONGEST)])
        if spec is not None:
            check_tensor(name, spec, called, shape)
        if array.dtype != called or tuple(array.shape) != shape:
            raise ValueError(f"it is called {array.dtype} {tuple(array.shape)}, its bytes are {dtype} {shape}")
        if len(array.data) != length + math.prod(shape) * dtype.itemsize:
            raise ValueError(f"it has {len(array.data) - length} bytes for {dtype} {shape}")
        return np.frombuffer(array.data, dtype, offset=length).reshape(shape, order=order)
    except ValueError as error:
        raise TensorError(f"an array cannot be read: tensor {name}: {error}") from error


def _width(content: bytes) -> int:
    """Return how many bytes of an npy file say how long its header is; before them stand eight others."""
    return 2 if content[6:7] == b"\x01" else 4


def _after_header(array: Array) -> int:
    """Return where the values of a dense array begin."""
    width = _width(array.data)
    return 8 + width + int.from_bytes(array.data[8 : 8 + width], "little")


# The same few for every client, and slow to read.
@lru_cache(maxsize=4096)
def _header(content: bytes) -> tuple[tuple[int, ...], Literal["C", "F"], np.dtype[np.generic], str]:
    """Return shape, order, type and the name of the type, which NumPy puts together anew each time."""
    match = _HEADER.fullmatch(content[8 + _width(content) :])
    if content[:6] != b"\x93NUMPY" or match is None:
        raise ValueError("it has no header of the npy format")
    try:
        dtype = np.dtype(match[1].decode())
    except TypeError as error:
        raise ValueError(str(error)) from error
    if dtype.hasobject:
        raise ValueError("it is made of Python objects")
    shape = tuple(int(side) for side in match[3].split(b",") if side.strip())
    return shape, "F" if match[2] == b"True" else "C", dtype, str(dtype)
