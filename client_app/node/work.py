"""Functions that run in forks of the warm process: each fork runs the installed ClientApp with one message.

This module imports PyTorch; the supervisor does not import it and names its functions as text.
"""

import os
import signal
import threading
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from pathlib import Path

from client_app.app import app
from client_app.policy import Policy
from client_app.runtime import device_of
from common.errors import FloretError
from common.flower import format_log, pack_message, unpack_context, unpack_message
from data import check_own


def run(name: str, connection: Connection, *arguments: str) -> None:
    """Call the function ``name`` of this module."""
    format_log(times=True)
    if name == "check":
        check(connection, *arguments)
    elif name == "end_warm_process":
        end_warm_process(connection)
    else:
        answer(connection)


def end_warm_process(connection: Connection) -> None:
    """End the process that this one is a fork of, and say so."""
    os.kill(os.getppid(), signal.SIGKILL)
    _send(connection, b"")


def answer(connection: Connection) -> None:
    """Take a message and its context from ``connection``, packed, and send back the ClientApp's reply.

    The process ends at once when the other end is closed: a killed node must not leave a process behind that goes on
    training and writes the state of a client that has a new node.
    """
    message_id = connection.recv_bytes().decode()
    message = unpack_message(connection.recv_bytes(), message_id)
    context = unpack_context(connection.recv_bytes())
    answered = threading.Event()

    def end_with_the_node() -> None:
        # Nothing more comes, so the connection is readable only when its other end is closed.
        wait([connection])
        if not answered.is_set():
            os._exit(1)

    threading.Thread(target=end_with_the_node, daemon=True).start()
    reply = pack_message(app(message, context))
    answered.set()
    _send(connection, reply)


def check(connection: Connection, data_dir: str, device: str, policy: str) -> None:
    """Send one line that says what is wrong with the node's own data, device or policy, or an empty one.

    Args:
        connection: where the line goes.
        data_dir: the client's own data; empty if it has a partition of the run's dataset.
        device: as in the run config.
        policy: its file; empty without one.
    """
    wrong = ""
    try:
        option = "--data-dir"
        if data_dir:
            check_own(Path(data_dir))
        option = "--device"
        device_of(device)
        option = "--policy"
        if policy:
            Policy.read(Path(policy)).check_installed()
    except FloretError as error:
        wrong = f"{option}: {error}"
    _send(connection, wrong.encode())


def _send(connection: Connection, content: bytes) -> None:
    """Send to the node, unless it has stopped meanwhile."""
    with suppress(ConnectionError):
        connection.send_bytes(content)
