"""From the SuperNode's tasks to the warm process and back: one message at a time."""

import io
import logging
import time
import zipfile
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

from flwr.app import Context, Message

from client_app.node.transport import Bundle, Tasks
from client_app.node.warm import LostError, Warm
from common.errors import FloretError
from common.flower import pack_context, pack_message, unpack_message

log = logging.getLogger("flwr")

# Seconds between polls for a message: just after one, at most, and the factor from one poll to the next.
_FIRST, _IDLE, _GROWTH = 0.02, 0.5, 1.3
# The folders whose code must be the same on the server and on the node.
_SHARED = ("client_app/", "common/", "data/", "models/", "strategies/")
_HOME = Path(__file__).resolve().parents[2]


def serve(address: str, warm: Warm, go: Callable[[], bool]) -> None:
    """Handle the tasks of the SuperNode whose own API is at ``address``, until ``go`` returns False.

    Raises:
        GoneError: the SuperNode is gone.
    """
    with Tasks(address) as tasks:
        pause = _FIRST
        while go():
            token = tasks.claim()
            if token:
                _handle(tasks, token, warm, go)
                pause = _FIRST
            else:
                time.sleep(pause)
                pause = min(pause * _GROWTH, _IDLE)


def _handle(tasks: Tasks, token: str, warm: Warm, go: Callable[[], bool]) -> None:
    """Pull a task's message, get it answered, push the reply."""
    with tasks.task(token) as task:
        started = time.monotonic()
        try:
            check_same_code(task.bundle)
            reply, wrong = _answer(task.message, task.context, warm, go), ""
        except FloretError as error:
            log.error("%s", error)
            reply, wrong = None, str(error)
        taken = task.answer(reply) if reply else task.fail(wrong)
        if taken:
            kind, seconds = task.message.metadata.message_type, time.monotonic() - started
            log.info("Answered: %s message in %.2f s", kind, seconds)
        else:
            log.warning("Not answered: run %d was stopped", task.run_id)


def _answer(message: Message, context: Context, warm: Warm, go: Callable[[], bool]) -> Message:
    """Return the ClientApp's reply; if the process that worked on it was killed, a second one repeats the work.

    This is safe: work has no effect until it is in the client's state, and if the state has the outcome of a message,
    that message starts from the state before it.

    Raises:
        LostError: there is no reply; the message says why.
    """
    metadata = message.metadata
    parts = [metadata.message_id.encode(), pack_message(message), pack_context(context)]
    deadline = time.monotonic() + metadata.ttl
    for attempt in (1, 2):
        left = deadline - time.monotonic()
        try:
            return unpack_message(warm.call("answer", parts, (), left, go))
        except LostError as error:
            log.error("The client process did not answer: %s", error)
            if attempt == 2 or not go() or deadline <= time.monotonic():
                raise LostError(f"the client process did not answer: {error}") from error
    raise AssertionError("a loop that returns or raises")


def check_same_code(bundle: Bundle) -> None:
    """Compare the run's app with what is installed here: a node runs its own code, never what came over the network.

    Raises:
        FloretError: they differ in what both sides of a message must share; names the first file.
    """
    wrong = _difference(bundle.key, bundle.content)
    if wrong:
        raise FloretError(
            f"this node runs its installed Floret, and the run's app {bundle.name} has another {wrong}; install the "
            "same version on both (or start Flower's own flower-supernode, which runs the app that it is sent)"
        )


@lru_cache(maxsize=8)
def _difference(key: str, content: bytes) -> str | None:
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        for name in sorted(archive.namelist()):
            if name.startswith(_SHARED) and name.endswith(".py"):
                path = _HOME / name
                if not path.is_file() or path.read_bytes() != archive.read(name):
                    return name
    return None
