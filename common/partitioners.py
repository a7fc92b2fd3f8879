"""Draws of flwr-datasets' partitioners, in this process or in one that imports the library meanwhile."""

import importlib.util
import os
import signal
import sys
import warnings
from collections.abc import Mapping
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from types import ModuleType
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from common.errors import FloretError
from common.forks import fork

Indices = npt.NDArray[np.int64]


def draw(
    labels: npt.NDArray[np.int64], partitioner: str, arguments: Mapping[str, Any], num_clients: int, at_least: int
) -> list[Indices]:
    """Return each client's positions in ``labels``, up to the first client with fewer than ``at_least``.

    Args:
        labels: (n,).
        partitioner: name of a class of ``flwr_datasets.partitioner``.
        arguments: of the class.
        num_clients: how many partitions it has.
        at_least: see above; 0 for all clients.

    Raises:
        ValueError: the library cannot draw such a partition.
    """
    if DrawingProcess.running is not None:
        return DrawingProcess.running.draw(labels, partitioner, arguments, num_clients, at_least)
    from datasets import Dataset

    drawer = getattr(_library(), partitioner)(**arguments)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # pathological warns of unused classes, which ``data.partition`` documents
        drawer.dataset = Dataset.from_dict({"label": labels, "index": np.arange(len(labels))})
        parts: list[Indices] = []
        for i in range(num_clients):
            parts.append(np.asarray(drawer.load_partition(i).with_format("numpy")["index"][:], dtype=np.int64))
            if len(parts[-1]) < at_least:
                break
    return parts


class DrawingProcess:
    """A fork that imports the library, which takes a second and more, while this process imports something else.

    While one is entered, ``draw`` asks it. To be entered by a process that has one thread.

    Attributes:
        pid: its process id.
    """

    running: "DrawingProcess | None" = None

    def __enter__(self) -> Self:
        """Start it."""
        self._connection, far = Pipe()
        self.pid = fork(lambda: _answer(far), close=[self._connection])
        far.close()
        type(self).running = self
        return self

    def __exit__(self, *_: object) -> None:
        """End it."""
        type(self).running = None
        self._connection.close()
        os.kill(self.pid, signal.SIGKILL)  # it may still be importing, and has nothing to finish
        os.waitpid(self.pid, 0)

    def draw(self, *arguments: Any) -> list[Indices]:
        """Return what ``draw`` returns for these arguments.

        Raises:
            ValueError: as there.
            FloretError: the process has ended.
        """
        try:
            self._connection.send(arguments)
            answer = self._connection.recv()
        except (EOFError, OSError) as error:
            raise FloretError("the process that draws the partition ended; was memory short?") from error
        if isinstance(answer, Exception):
            raise answer
        parts: list[Indices] = answer
        return parts


def _answer(connection: Connection) -> None:
    """Draw what is asked for until the other end is closed."""
    with suppress(ImportError):  # whoever wants a partition says what is not installed
        import datasets  # noqa: F401

        _library()
    with suppress(EOFError):
        while True:
            arguments = connection.recv()
            try:
                connection.send(draw(*arguments))
            except Exception as error:  # raised where it was asked for
                connection.send(error)


def _library() -> ModuleType:
    """Return ``flwr_datasets.partitioner``, imported without what its package imports besides to plot and to download.

    That takes a second in each process, seaborn and SciPy's statistics most of it.
    """
    if "flwr_datasets" in sys.modules:
        return importlib.import_module("flwr_datasets.partitioner")
    spec = importlib.util.find_spec("flwr_datasets")
    assert spec is not None
    # A package that was not executed: its modules are found in it, and import each other as always.
    sys.modules["flwr_datasets"] = importlib.util.module_from_spec(spec)
    try:
        return importlib.import_module("flwr_datasets.partitioner")
    finally:
        del sys.modules["flwr_datasets"]
