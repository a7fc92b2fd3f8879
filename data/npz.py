"""Arrays from the user's own ``.npz`` files: read without pickle, and checked before anything computes with them."""

import math
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from numpy.lib import format as npy
from numpy.lib.npyio import NpzFile

from common.errors import DataError, printable
from common.memory import available_memory
from data.files import is_file, status

# A larger label is probably an identifier, not a class; it would set the size of the head and of all label counts.
MAX_CLASSES = 65536
# Inputs have four; numpy fails on more than 64.
_MOST_DIMENSIONS = 8
# Bytes of an array's header; numpy refuses longer ones, too.
_LONGEST_HEADER = 10_000
# So many classes are counted from labels alone; for more, a run has to say how many it means.
MAX_COUNTED = 4096


class Samples(NamedTuple):
    """Inputs x and labels y, int64 (n,).

    Inputs are uint8 images (n, channels, height, width), float32 images or features (n, ...), or texts as word ids,
    int32 (n, length).
    """

    x: npt.NDArray[Any]
    y: npt.NDArray[np.int64]


def check_arrays(path: Path, names: Sequence[str]) -> None:
    """Check that the file has the arrays ``names``, without reading them.

    Raises:
        DataError: the file is missing or is not an npz file, or an array is missing or there twice.
    """
    with _open(path, names):
        pass


def has_array(path: Path, name: str) -> bool:
    """Return whether the npz file has an array of this name.

    Raises:
        DataError: it is not an npz file.
    """
    with _open(path, []) as file:
        return name in file.files


def read_arrays(path: Path, names: Sequence[str], *, empty: bool = False) -> list[npt.NDArray[Any]]:
    """Return the arrays ``names`` of the file, unchanged; with ``empty`` they may be of no sample.

    Raises:
        DataError: as ``check_arrays``, or an array is truncated, altered, empty, made of Python objects, or more than
            this machine has memory for.
    """
    arrays = []
    for name in names:
        read_shape(path, name, empty=empty)
    with _open(path, names) as file:
        for name in names:
            try:
                array = file[name]
            except Exception as error:  # on corrupt files zipfile, zlib and numpy raise errors of many types
                raise DataError(f"{path}: array {name} cannot be read ({_first_line(error)})") from error
            if not isinstance(array, np.ndarray):
                raise DataError(f"{path}: {name} is not an array")
            if _is_empty(array.shape, empty):
                raise DataError(f"{path}: array {name} is empty, its shape is {array.shape}")
            arrays.append(array)
    return arrays


def _is_empty(shape: tuple[int, ...], empty: bool) -> bool:
    """Return whether an array has nothing in it; with ``empty`` none that is only of no sample."""
    return 0 in (shape[1:] if empty else shape)


def read_shape(path: Path, name: str, *, empty: bool = False) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """Return shape and type of an array of the file, from its header alone.

    Raises:
        DataError: as ``read_arrays``.
    """
    check_arrays(path, [name])
    try:
        with zipfile.ZipFile(path) as file, file.open(f"{name}.npy") as content:
            version = npy.read_magic(content)
            # numpy reads a header of any size before it refuses a long one.
            length = int.from_bytes(content.read(2 if version == (1, 0) else 4), "little")
            if length > _LONGEST_HEADER:
                raise ValueError(f"its header is said to have {length} bytes")
            content.seek(0)
            npy.read_magic(content)
            read = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
            shape, _, dtype = read(content)
            said = printable(shape, 60)  # fails on a number of more digits than Python writes
    except Exception as error:  # as in read_arrays
        raise DataError(f"{path}: array {name} cannot be read ({_first_line(error)})") from error
    if dtype.hasobject:
        raise DataError(f"{path}: array {name} cannot be read (it is made of Python objects)")
    if not dtype.itemsize or dtype.subdtype:
        raise DataError(f"{path}: array {name} has type {dtype}; it must be made of numbers")
    if len(shape) > _MOST_DIMENSIONS or not all(type(n) is int and 0 <= n < 2**63 for n in shape):
        raise DataError(
            f"{path}: array {name} has shape {said}; it must be at most {_MOST_DIMENSIONS} whole numbers, from 0 "
            "to below 2^63"
        )
    if _is_empty(shape, empty):
        raise DataError(f"{path}: array {name} is empty, its shape is {shape}")
    _check_room(f"{path}: array {name}", shape, dtype)
    return shape, dtype


def read_input_shape(path: Path, name: str = "x", *, empty: bool = False) -> tuple[int, ...]:
    """Return the shape of one sample of the array ``name`` after ``to_inputs``, from the header alone.

    Raises:
        DataError: as ``read_shape``, and as ``to_inputs`` for a shape or a type.
    """
    return _blank_input(path, name, empty=empty).shape[1:]


def check_header(path: Path) -> npt.NDArray[Any]:
    """Check what the headers of a file of samples x and labels y tell; there may be no sample.

    Returns:
        A blank input, (1, ...), as ``to_inputs`` makes them.

    Raises:
        DataError: as ``read_samples``, but for errors in the values.
    """
    check_arrays(path, ("x", "y"))
    blank = _blank_input(path, "x", empty=True)
    (n, *_), _ = read_shape(path, "x", empty=True)
    labels = _check_labels(path, "y", empty=True)
    if n != labels:
        raise DataError(f"{path}: x has {n} samples, y has {labels} labels")
    return blank


def _blank_input(path: Path, name: str, *, empty: bool) -> npt.NDArray[Any]:
    shape, dtype = read_shape(path, name, empty=empty)
    where = f"{path}: array {name}"
    try:
        blank = to_inputs(np.zeros((1, *shape[1:]), dtype), where)
    except DataError:
        # Again with the true shape, for the message; a broadcast array takes no memory and is refused before a copy.
        return to_inputs(np.broadcast_to(np.zeros((), dtype), shape), where)
    _check_room(f"{where} as {blank.dtype}", shape, blank.dtype)
    return blank


def _check_labels(path: Path, name: str, *, empty: bool) -> int:
    """Return how many labels there are, after a look at the header."""
    shape, dtype = read_shape(path, name, empty=empty)
    if len(shape) != 1 or dtype.kind not in "iu":
        to_labels(np.broadcast_to(np.zeros((), dtype), shape), f"{path}: array {name}")
    return shape[0]


def _check_room(what: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
    # Of no sample the room for one is asked for: its shape is tried.
    size, room = math.prod(max(n, 1) for n in shape) * dtype.itemsize, available_memory()
    if size > room:
        raise DataError(
            f"{what} has {size / 1e9:.1f} GB when it is unpacked, its shape is {shape}; "
            f"this machine has {room / 1e9:.1f} GB left"
        )


def _open(path: Path, names: Sequence[str]) -> NpzFile:
    if status(path) and not is_file(path):
        raise DataError(f"{path} is not a file; it must be an npz file with the arrays {', '.join(names)}")
    try:
        with path.open("rb") as content:
            # Checked first, because for any other file numpy's error message advises to unpickle it.
            is_zip = zipfile.is_zipfile(content)
        file = np.load(path, allow_pickle=False) if is_zip else None
    except FileNotFoundError as error:
        raise DataError(f"{path} is not there; it must be an npz file with the arrays {', '.join(names)}") from error
    except Exception as error:
        raise DataError(f"{path}: cannot be read as an npz file ({_first_line(error)})") from error
    if not isinstance(file, NpzFile):
        raise DataError(f"{path}: is not a complete npz file (a zip of arrays, as numpy.savez writes it)")
    for name in names:
        if name not in file.files:
            file.close()
            raise DataError(f"{path}: array {name} is missing; the file has {', '.join(file.files) or 'no arrays'}")
        if file.files.count(name) > 1:
            file.close()
            raise DataError(f"{path}: array {name} is there twice, as {name} or {name}.npy; there must be one")
    return file


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def read_samples(
    path: Path, x_name: str = "x", y_name: str = "y", *, empty: bool = False, strays: bool = False
) -> Samples:
    """Return one checked pair of inputs and labels; with ``empty`` there may be none, with ``strays`` as ``to_labels``.

    Raises:
        DataError: as ``read_arrays``, ``to_inputs`` and ``to_labels``, or the two arrays differ in length.
    """
    check_arrays(path, [x_name, y_name])
    # What the headers tell first: a small file may be of many gigabytes when it is unpacked.
    read_input_shape(path, x_name, empty=empty)
    (n, *_), _ = read_shape(path, x_name, empty=empty)
    y = read_labels(path, y_name, empty=empty, strays=strays)
    if n != len(y):
        raise DataError(f"{path}: {x_name} has {n} samples, {y_name} has {len(y)} labels")
    return Samples(to_inputs(read_arrays(path, [x_name], empty=empty)[0], f"{path}: array {x_name}"), y)


def read_labels(path: Path, name: str = "y", *, empty: bool = False, strays: bool = False) -> npt.NDArray[np.int64]:
    """Return the checked labels of the file without reading its inputs.

    Raises:
        DataError: as ``read_arrays`` and ``to_labels``.
    """
    _check_labels(path, name, empty=empty)
    return to_labels(read_arrays(path, [name], empty=empty)[0], f"{path}: array {name}", strays=strays)


def to_inputs(x: npt.NDArray[Any], where: str) -> npt.NDArray[Any]:
    """Convert inputs to Floret's layout.

    (n, features) of any real type becomes float32. Images (n, height, width), (n, height, width, 1 | 3 | 4) or
    (n, 1 | 3 | 4, height, width) become channels first; where the last two both fit, the last dimension is taken for
    the channels. uint8 images stay uint8; floating images become float32, their values unchanged.

    Raises:
        DataError: starts with ``where``; the shape or the type fits none of these, or a value is not finite.
    """
    if x.ndim == 3:
        x = x[:, None]
    elif x.ndim == 4 and x.shape[3] in (1, 3, 4):
        x = x.transpose(0, 3, 1, 2)
    elif x.ndim != 2 and not (x.ndim == 4 and x.shape[1] in (1, 3, 4)):
        raise DataError(
            f"{where} has shape {x.shape}; it must be (n, features), (n, height, width), or, with 1, 3 or 4 channels, "
            "(n, height, width, channels) or (n, channels, height, width)"
        )
    if x.ndim == 4 and x.dtype == np.uint8:
        return np.ascontiguousarray(x)
    if x.dtype.kind != "f" and not (x.ndim == 2 and x.dtype.kind in "iub"):
        needs = "features must be real numbers" if x.ndim == 2 else "images must be uint8 (0 to 255) or floating point"
        raise DataError(f"{where} has type {x.dtype}; {needs}")
    with np.errstate(over="ignore"):
        x = np.ascontiguousarray(x, dtype=np.float32)
    if not np.isfinite(x).all():
        raise DataError(f"{where} has values that are not finite as float32")
    return x


def to_labels(y: npt.NDArray[Any], where: str, *, strays: bool = False) -> npt.NDArray[np.int64]:
    """Convert labels to int64; with ``strays`` also those that no class has, and such beyond int64 become negative.

    Raises:
        DataError: starts with ``where``; not one-dimensional, not integers, or not all in [0, ``MAX_CLASSES``).
    """
    if y.ndim != 1:
        raise DataError(f"{where} has shape {y.shape}; labels must have one dimension")
    if y.dtype.kind not in "iu":
        raise DataError(f"{where} has type {y.dtype}; labels must be integers")
    if len(y) == 0 or strays:
        return y.astype(np.int64)
    if y.min() < 0 or y.max() >= MAX_CLASSES:
        most = MAX_CLASSES - 1
        raise DataError(
            f"{where} goes from {y.min()} to {y.max()}; labels must be class numbers, 0 to classes - 1, at most {most}"
        )
    return y.astype(np.int64)


def class_count(largest: int, num_classes: int, where: str, names: Sequence[str] = ()) -> int:
    """Return ``num_classes``, or if it is 0 the number of ``names``, or without any ``largest + 1``.

    Raises:
        DataError: starts with ``where``; a label does not fit into ``num_classes`` or the names, or asks for more than
            ``MAX_COUNTED`` classes that nobody has named.
    """
    if names and not num_classes:
        if largest >= len(names):
            raise DataError(
                f"{where} has label {largest}; class-names or classes.txt has {len(names)} classes, whose labels are "
                f"0 to {len(names) - 1}"
            )
        return len(names)
    if num_classes and largest >= num_classes:
        raise DataError(f"{where} has label {largest}; num-classes = {num_classes} allows 0 to {num_classes - 1}")
    if not num_classes and largest >= MAX_COUNTED:
        raise DataError(
            f"{where} has label {largest}, which would make {largest + 1} classes; labels are class numbers from 0; if "
            "there are so many, set num-classes"
        )
    return num_classes or largest + 1


def check_alike(first: npt.NDArray[Any], second: npt.NDArray[Any], names: tuple[str, str]) -> None:
    """Check that one model can read two input arrays.

    Raises:
        DataError: their shape per sample or their types differ; names both.
    """
    if first.shape[1:] != second.shape[1:] or first.dtype != second.dtype:
        raise DataError(
            f"{names[0]} has samples of shape {first.shape[1:]} and type {first.dtype}, "
            f"{names[1]} of shape {second.shape[1:]} and type {second.dtype}; they must be alike"
        )
