"""Replies that wait on the disk for the others of their round, so that they need no memory."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import numpy as np

from common.tensors import NamedArrays

# Arrays below so many bytes are not worth a place in a file.
_SMALL = 1 << 16


class SpoolError(Exception):
    """The disk does not take replies, or gives none back: a fault of the server's, of no client."""


class Spool:
    """A file without a name, which is gone with its object, also if the process is killed.

    Args:
        folder: where; None for the system's folder of temporary files, which may be in memory.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder or Path(tempfile.gettempdir())
        self._made: IO[bytes] | None = None

    @property
    def file(self) -> IO[bytes]:
        """The file, made when it is first asked for."""
        if self._made is None:
            self._made = tempfile.TemporaryFile(dir=self._folder)  # noqa: SIM115 - it lives as long as the object
        return self._made

    def write(self, array: np.ndarray) -> int:
        """Add an array; return its place.

        Raises:
            SpoolError: it cannot be written.
        """
        with self._told():
            place = self.file.seek(0, 2)
            self.file.write(np.ascontiguousarray(array).data)
        return place

    def read(self, place: int, count: int, dtype: np.dtype) -> np.ndarray:
        """Return so many elements, (count,), from a place on.

        Raises:
            SpoolError: they cannot be read.
        """
        with self._told():
            self.file.seek(place)
            return np.frombuffer(self.file.read(count * dtype.itemsize), dtype)

    def flush(self) -> None:
        """Return when all that was written can be read from the file by others.

        Raises:
            SpoolError: it cannot be written.
        """
        with self._told():
            self.file.flush()

    @contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise SpoolError(f"{self._folder}: replies cannot wait there ({error.strerror})") from error


def spooled(arrays: NamedArrays, folder: Path | None) -> NamedArrays:
    """Return the same arrays to read, the large ones from a file that goes with them.

    What was read of it counts as memory of this process until the arrays are gone.

    Raises:
        SpoolError: they cannot be written to ``folder``, which is as of ``Spool``.
    """
    spool = Spool(folder)
    result: NamedArrays = {}
    for name, array in arrays.items():
        if array.nbytes < _SMALL:
            result[name] = np.array(array)
            continue
        place = spool.write(array)
        spool.flush()
        try:
            result[name] = np.memmap(spool.file, array.dtype, "r", place, array.shape)
        except OSError:  # a file system that maps no files, as some of a network
            result[name] = np.array(array)
    return result
