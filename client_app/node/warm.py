"""The warm process: it has imported PyTorch and the ClientApp once, and forks for every message."""

import multiprocessing
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext, ForkServerProcess
from typing import Any

from common.errors import FloretError

# Seconds for a killed warm process to disappear and a new one to start.
_PATIENCE = 10.0


class LostError(FloretError):
    """The fork ended without an answer; the message says how."""


class Warm:
    """Runs functions of ``client_app.node.work``, each in a fork of the warm process.

    The fork is made by a process without threads and without gRPC (multiprocessing's fork server), which is started
    again by itself if it was killed. Input and output are bytes; nothing from the network is unpickled.

    Args:
        datasets: import what the readers of named datasets and the partitioners need, too.
        privacy: import what differential privacy needs, too; it takes some seconds.
    """

    def __init__(self, *, datasets: bool, privacy: bool = False) -> None:
        self._context: ForkServerContext = multiprocessing.get_context("forkserver")
        extra = ["flwr_datasets.partitioner", "torchvision.datasets"] if datasets else []
        extra += ["client_app.clipping", "scipy.optimize"] if privacy else []
        self._context.set_forkserver_preload(["client_app.node.interrupts", "client_app.node.work", *extra])
        self._running = False

    def call(
        self, name: str, parts: list[bytes], arguments: tuple[Any, ...], seconds: float, go: Callable[[], bool]
    ) -> bytes:
        """Run ``client_app.node.work.<name>`` and return the bytes that it sends back.

        Args:
            name: the function; it gets a connection and ``arguments``.
            parts: what is sent to it through the connection.
            arguments: pickled, so never from the network.
            seconds: after which it is killed.
            go: called every 0.1 s; when it returns False the function is killed.

        Raises:
            LostError: it was killed, by this method or from elsewhere, or ended by itself.
        """
        process, connection = self._start(name, arguments, go)
        deadline = time.monotonic() + seconds
        try:
            for part in parts:
                connection.send_bytes(part)
            while not connection.poll(0.1):
                if not go():
                    raise LostError("the node is stopping")
                if time.monotonic() > deadline:
                    raise LostError(f"it took more than {seconds:.0f} s")
            return connection.recv_bytes()
        except (EOFError, OSError) as error:
            process.join(5)
            raise LostError(_how(process.exitcode)) from error
        finally:
            connection.close()
            if process.is_alive():
                process.join(1)
            if process.is_alive():
                process.kill()
                process.join(10)

    def rest(self) -> None:
        """End the warm process, and give back its memory, until the next call starts another."""
        if self._running:
            # The fork ends the process that it is a fork of, and whatever that leaves is an end.
            with suppress(LostError):
                self.call("end_warm_process", [], (), _PATIENCE, lambda: True)
            self._running = False

    def _start(
        self, name: str, arguments: tuple[Any, ...], go: Callable[[], bool]
    ) -> tuple[ForkServerProcess, Connection]:
        """Return a fork that waits for input, and the connection to it.

        After a warm process was killed, attempts fail until the system has removed it and a new one is started.

        Raises:
            LostError: none can be started, or ``go`` returns False.
        """
        deadline = time.monotonic() + _PATIENCE
        while True:
            connection, remote = self._context.Pipe()
            process: ForkServerProcess = self._context.Process(target=_run, args=(name, remote, *arguments))
            try:
                process.start()
            except (EOFError, OSError) as error:
                connection.close()
                if not go():
                    raise LostError("the node is stopping") from error
                if time.monotonic() > deadline:
                    raise LostError(f"the warm process does not start ({error})") from error
                time.sleep(0.05)
            else:
                self._running = True
                return process, connection
            finally:
                remote.close()


def _run(name: str, *arguments: Any) -> None:
    from client_app.node import work  # imports PyTorch: done before in the warm process, never in the supervisor

    work.run(name, *arguments)


def _how(code: int | None) -> str:
    if code is not None and code < 0:
        return f"it was killed by signal {-code}{' (out of memory?)' if code == -9 else ''}"
    return f"it ended with code {code}"
