"""A node from start to stop: it checks, starts the SuperNode, serves its tasks, and starts it again when it ends."""

import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

from client_app.node import preflight
from client_app.node.options import NodeOptions
from client_app.node.tasks import serve
from client_app.node.transport import (
    PARENT,
    STILL_THERE,
    TURNED_AWAY,
    WRONG_API,
    WRONG_CLOCK,
    WRONG_VERSION,
    GoneError,
    supernode_arguments,
)
from client_app.node.warm import LostError, Warm
from common.errors import FloretError
from common.flower import format_log
from common.proof import load_key

log = logging.getLogger("flwr")

# Seconds: between attempts to reach the SuperLink (first, most), for the import of PyTorch on a slow device, for the
# SuperNode to start, for a SuperLink to turn it away, and for it to stop.
_AGAIN = (1.0, 10.0)
_IMPORT, _START, _AT_ONCE, _STOP = 300.0, 60.0, 10.0, 15.0


class Node:
    """A running ``floret node``; ``run`` returns when it is told to stop."""

    def __init__(self, options: NodeOptions) -> None:
        self.options = options
        self._stop = threading.Event()
        self._warm = Warm(datasets=options.partition is not None, privacy=options.demands_privacy())
        self._key = load_key(options.key) if options.key else None
        self._supernode: subprocess.Popen[bytes] | None = None
        self._joined = float("inf")  # when the last one was up

    def run(self) -> None:
        """Join the federation and stay in it until SIGTERM or SIGINT.

        Raises:
            FloretError: data, device, key, certificate or health address cannot be used, or there was no SuperLink
                for ``max_wait`` seconds.
        """
        format_log(times=True)
        for kind in (signal.SIGTERM, signal.SIGINT):
            signal.signal(kind, self._on_signal)
        _import_from_here_only()
        with self.options.claim():
            if self.options.health_address:
                preflight.check_health_address(self.options.health_address)
            self._check()
            patience = float("inf") if self.options.max_wait is None else self.options.max_wait
            deadline, pause = time.monotonic() + patience, _AGAIN[0]
            while not self._stop.is_set():
                self._joined = float("inf")
                try:
                    preflight.check_connection(self.options)
                    self._join()
                except preflight.UnreachableError as error:
                    # Who is turned away is so at once: this one was in the federation.
                    if time.monotonic() - self._joined > _AT_ONCE:
                        deadline, pause = time.monotonic() + patience, _AGAIN[0]
                    left = deadline - time.monotonic()
                    if left <= 0:
                        raise
                    pause = min(pause, left)
                    log.warning("%s; trying again in %.2g s", error, pause)
                self._stop.wait(pause)
                pause = min(2 * pause, _AGAIN[1])
        log.info("Client %s stopped", self.options.client_name)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._stop.set()

    def _going(self) -> bool:
        return not self._stop.is_set() and self._supernode is not None and self._supernode.poll() is None

    def _check(self) -> None:
        """Import PyTorch into the warm process, and let it check data, device and policy.

        Raises:
            FloretError: one of them cannot be used.
        """
        own = "" if self.options.partition or not self.options.data_dir else str(self.options.data_dir)
        policy = str(self.options.policy or "")
        arguments = (own, self.options.device or "auto", policy)
        try:
            wrong = self._warm.call("check", [], arguments, _IMPORT, lambda: not self._stop.is_set()).decode()
        except LostError as error:
            if self._stop.is_set():
                return
            raise FloretError(f"the client process cannot start: {error}") from error
        if wrong:
            raise FloretError(wrong)
        log.info("Client %s is ready; its state is in %s", self.options.client_name, self.options.state_dir)

    def _join(self) -> None:
        """Start the SuperNode and serve its tasks until it ends, or until this node is to stop.

        Raises:
            UnreachableError: the SuperNode ended, and may not if it is started again: the SuperLink still counts a node
                with this key as connected, the clocks differ, or what answers is no Fleet API.
            FloretError: the SuperLink refused the node.
        """
        port = _free_port()
        with self._started(port) as supernode:
            address = f"127.0.0.1:{port}"
            if self._wait_for(port):
                self._joined = time.monotonic()
                try:
                    serve(address, self._warm, self._going, self._key, 60 * self.options.keep_warm)
                except GoneError:
                    # The SuperNode ends, and its exit code, read below, gives the reason. One that was unregistered
                    # while it ran hangs instead, and is stopped.
                    with suppress(subprocess.TimeoutExpired):
                        supernode.wait(_STOP)
        if self._stop.is_set():
            return
        code = supernode.returncode
        where = f"--superlink {self.options.address}"
        if code == STILL_THERE:
            raise preflight.UnreachableError(
                f"{where}: a node with --key {self.options.key} is connected: another one, or this one before it was "
                "killed, for a minute more"
            )
        if code == WRONG_CLOCK:
            now = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime())
            raise preflight.UnreachableError(
                f"{where}: its clock differs from this device's, which says {now} UTC; set the one that is wrong"
            )
        if code == WRONG_API:
            raise preflight.UnreachableError(
                f"{where}: is not a SuperLink's Fleet API; that is where nodes join, at port 9092 by default, not at "
                "9091 or 9093"
            )
        if code == WRONG_VERSION:
            raise FloretError(f"{where}: the SuperLink runs a version of Flower that does not go with this node's")
        if code == TURNED_AWAY and self.options.key:
            raise FloretError(
                f"{where}: does not know --key {self.options.key}; where flwr is used, register its public key, as "
                "floret certificates DIR made it: flwr supernode register DIR/nodes/NAME.pub CONNECTION"
            )
        if code == TURNED_AWAY:
            raise FloretError(f"{where}: accepts only nodes with a registered key; see --key")
        raise preflight.UnreachableError(f"{where}: the SuperNode ended with code {code}")

    @contextmanager
    def _started(self, port: int) -> Iterator[subprocess.Popen[bytes]]:
        supernode = subprocess.Popen(
            [sys.executable, "-m", "client_app.node.supernode", *supernode_arguments(self.options, port)],
            env=os.environ | {"OMP_NUM_THREADS": "1", PARENT: str(os.getpid())},
            stdin=subprocess.DEVNULL,
            # A session of its own: Ctrl-C reaches this process alone, which then stops the SuperNode.
            start_new_session=True,
        )
        self._supernode = supernode
        try:
            yield supernode
        finally:
            if supernode.poll() is None:
                supernode.terminate()
                try:
                    supernode.wait(_STOP)
                except subprocess.TimeoutExpired:
                    supernode.kill()
                    supernode.wait()

    def _wait_for(self, port: int) -> bool:
        """Return whether the SuperNode's own server accepted a connection in time."""
        deadline = time.monotonic() + _START
        while self._going() and time.monotonic() < deadline:
            with socket.socket() as probe:
                probe.settimeout(1)
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    return True
            time.sleep(0.05)
        return False


def _import_from_here_only() -> None:
    """Let child processes import the same modules as this one, whatever is in the working directory.

    It would be first on their path, and may well have a folder ``data`` or a file ``torch.py``.
    """
    os.environ["PYTHONSAFEPATH"] = "1"
    tree = str(Path(__file__).resolve().parents[2])
    if sys.path[0] == tree:  # python -m cli.main, in a tree that is not installed
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [tree, os.environ.get("PYTHONPATH")]))


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
