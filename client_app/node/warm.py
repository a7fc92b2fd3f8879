"""The warm process: it has imported PyTorch and the ClientApp once, and forks for every message."""

import multiprocessing
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext, ForkServerProcess
from typing import Any

from common.errors import FloretError

# Seconds that a killed warm process has to be gone and a new one to be started.
_PATIENCE = 10.0


class LostError(FloretError):
    """The fork ended without an answer; the message says how."""


class Warm:
    """Runs functions of ``client_app.node.work``, each in a fork of the warm process.

    The fork is made by a process without threads and without gRPC (multiprocessing's fork server), which is started
    again by itself if it was killed. What goes in and out are bytes, nothing is unpickled that came from elsewhere.

    Args:
        datasets: import what the readers of named datasets and the partitioners need, too.
    """

    def __init__(self, *, datasets: bool) -> None:
        self._context: ForkServerContext = multiprocessing.get_context("forkserver")
        extra = ["flwr_datasets.partitioner", "torchvision.datasets"] if datasets else []
        self._context.set_forkserver_preload(["client_app.node.work", *extra])

    def call(
        self, name: str, parts: list[bytes], arguments: tuple[Any, ...], seconds: float, go: Callable[[], bool]
    ) -> bytes:
        """Run ``client_app.node.work.<name>`` and return the bytes that it answers.

        Args:
            name: the function; it gets a connection and ``arguments``.
            parts: what is sent to it through the connection.
            arguments: of this program's own making.
            seconds: after which it is killed.
            go: asked now and then; when it returns False the function is killed.

        Raises:
            LostError: it was killed, by this method or from elsewhere, or ended by itself.
        """
        process, here = self._start(name, arguments)
        deadline = time.monotonic() + seconds
        try:
            for part in parts:
                here.send_bytes(part)
            while not here.poll(0.1):
                if not go():
                    raise LostError("the node is stopping")
                if time.monotonic() > deadline:
                    raise LostError(f"it took more than {seconds:g} s, the server's round-timeout")
            return here.recv_bytes()
        except (EOFError, OSError) as error:
            process.join(5)
            raise LostError(_how(process.exitcode)) from error
        finally:
            here.close()
            if process.is_alive():
                process.join(1)
            if process.is_alive():
                process.kill()
                process.join(10)

    def _start(self, name: str, arguments: tuple[Any, ...]) -> tuple[ForkServerProcess, Connection]:
        """Return a fork that waits for what is sent to it, and the connection to it.

        A warm process that was killed refuses or hangs up until the system has put it away and a new one is started.

        Raises:
            LostError: none can be started.
        """
        deadline = time.monotonic() + _PATIENCE
        while True:
            here, there = self._context.Pipe()
            process: ForkServerProcess = self._context.Process(target=_run, args=(name, there, *arguments))
            try:
                process.start()
            except (EOFError, OSError) as error:
                here.close()
                if time.monotonic() > deadline:
                    raise LostError(f"the warm process does not start ({error})") from error
                time.sleep(0.05)
            else:
                return process, here
            finally:
                there.close()


def _run(name: str, *arguments: Any) -> None:
    from client_app.node import work  # where PyTorch is: already imported in the warm process, never in this one

    work.run(name, *arguments)


def _how(code: int | None) -> str:
    if code is not None and code < 0:
        return f"it was killed by signal {-code}{' (out of memory?)' if code == -9 else ''}"
    return f"it ended with code {code}"
