"""From the SuperNode's tasks to the warm process and back: one message at a time."""

import hashlib
import io
import logging
import time
import zipfile
from collections.abc import Callable
from pathlib import Path, PurePosixPath

from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
from flwr.app import ConfigRecord, Context, Message

from client_app.node.transport import Bundle, NotReceivedError, Task, Tasks
from client_app.node.warm import LostError, Warm
from common.errors import FloretError, printable
from common.flower import UNREADABLE, pack_context, pack_message, unpack_message
from common.proof import PROOF, sign
from common.wire import find_record

log = logging.getLogger("flwr")

# Seconds between polls for a message: just after one, at most, and the factor from one poll to the next.
_FIRST, _IDLE, _GROWTH = 0.02, 0.5, 1.3
# The folders whose code must be the same on the server and on the node.
_SHARED = ("client_app/", "common/", "data/", "models/", "strategies/")
_HOME = Path(__file__).resolve().parents[2]
# Bytes of an app, as `flwr build` and `flwr run` bound it, and files in it; this one has some 300.
_LARGEST_APP, _MOST_FILES = 10 * 2**20, 10_000
# What the directory of a zip archive has before each file.
_ENTRY = b"PK\x01\x02"
# What is wrong with the apps that were looked at last, by their digests; how many are remembered.
_seen: dict[bytes, str] = {}
_REMEMBERED = 64


def serve(
    address: str,
    warm: Warm,
    go: Callable[[], bool],
    key: EllipticCurvePrivateKey | None = None,
    keep_warm: float = float("inf"),
) -> None:
    """Handle the tasks of the SuperNode whose own API is at ``address``, until ``go`` returns False.

    Answers to ``describe`` are signed with ``key``, if there is one. After ``keep_warm`` seconds without a task the
    warm process rests.

    Raises:
        GoneError: the SuperNode is gone.
    """
    with Tasks(address) as tasks:
        pause, last = _FIRST, time.monotonic()
        while go():
            token = tasks.claim()
            if token:
                try:
                    with tasks.task(token, go) as task:
                        _handle(task, warm, go, key)
                except NotReceivedError as error:
                    log.warning("A message was not received: %s", error)
                except UNREADABLE as error:
                    log.error("A message cannot be answered (%s: %s)", type(error).__name__, printable(error))
                pause, last = _FIRST, time.monotonic()
            else:
                if time.monotonic() - last > keep_warm:
                    warm.rest()
                time.sleep(pause)
                pause = min(pause * _GROWTH, _IDLE)


def _handle(task: Task, warm: Warm, go: Callable[[], bool], key: EllipticCurvePrivateKey | None) -> None:
    """Get a task's message answered, and push the reply."""
    started = time.monotonic()
    try:
        check_same_code(task.bundle)
        reply, wrong = _answer(task.message, task.context, warm, go), ""
        if key:
            _prove(key, task.message, reply)
    except FloretError as error:
        log.error("%s", error)
        reply, wrong = None, str(error)
    taken = task.answer(reply) if reply else task.fail(wrong)
    if taken:
        kind, seconds = task.message.metadata.message_type, time.monotonic() - started
        log.info("Answered: %s message in %.2f s", kind, seconds)
    else:
        log.warning("Not answered: run %d was stopped, or this device slept meanwhile", task.run_id)


def _prove(key: EllipticCurvePrivateKey, message: Message, reply: Message) -> None:
    """Sign who this client is, if that is what ``reply`` says."""
    client = find_record(reply.content, "client", ConfigRecord) if reply.has_content() else None
    if message.metadata.message_type == "query.describe" and client is not None:
        asked = message.metadata
        reply.content[PROOF] = sign(key, asked.message_id, asked.dst_node_id, str(client["name"]))


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
        FloretError: they differ in what both sides of a message must share, or it is no app; names what is wrong.
    """
    digest = hashlib.sha256(bundle.content).digest()
    if digest not in _seen:
        if len(_seen) == _REMEMBERED:
            _seen.clear()
        _seen[digest] = _difference(bundle.content)
    wrong = _seen[digest]
    if wrong:
        raise FloretError(
            f"this node runs its installed Floret, and the run's app {printable(bundle.name, 200)} has {wrong}; "
            "install the same version on both (or start Flower's own flower-supernode, which runs the app that it is "
            "sent)"
        )


def _difference(content: bytes) -> str:
    """Return what an app has that differs from what is installed here, or has not; an empty text if nothing.

    Of what it claims to hold nothing is unpacked that is larger than the file here.
    """
    if len(content) > _LARGEST_APP:
        return f"{len(content)} bytes, more than {_LARGEST_APP}"
    # Before the directory is read: each file in it takes memory.
    if content.count(_ENTRY) > _MOST_FILES:
        return f"more than {_MOST_FILES} files"
    missing = set(_SHARED)
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            for info in sorted(archive.infolist(), key=lambda info: info.filename):
                name = info.filename
                if name.startswith(_SHARED) and name.endswith(".py"):
                    if not _is_here(archive, info):
                        return f"another {printable(name, 200)}"
                    missing.discard(f"{name.split('/')[0]}/")
    except Exception as error:  # zipfile raises whatever its parts raise for bytes that are no archive
        return f"no archive that can be read ({type(error).__name__}: {printable(error, 200)})"
    return f"no {min(missing)}" if missing else ""


def _is_here(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> bool:
    """Return whether a file of the app is that of the same name here."""
    path = _HOME / info.filename
    # Python unpacks these two in pieces, and no others: a small piece of them can become gigabytes.
    known = info.compress_type in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
    if not known or ".." in PurePosixPath(info.filename).parts or not path.is_file():
        return False
    own = path.read_bytes()
    if info.file_size != len(own):
        return False
    with archive.open(info) as file:
        return file.read(len(own) + 1) == own
