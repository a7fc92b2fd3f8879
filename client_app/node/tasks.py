"""From the SuperNode's tasks to the warm process and back: one message at a time."""

import hashlib
import io
import logging
import time
import zipfile
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

import grpc
from flwr.app import Context, Error, Message
from flwr.common.grpc import create_channel
from flwr.common.serde import context_to_proto, message_from_proto, message_to_proto
from flwr.common.typing import Fab, Run
from flwr.proto.appio_pb2 import ClaimTaskRequest, PullPendingTasksRequest
from flwr.proto.clientappio_pb2_grpc import ClientAppIoStub
from flwr.proto.message_pb2 import Message as ProtoMessage
from flwr.supercore.heartbeat import HeartbeatSender, make_task_heartbeat_fn_grpc
from flwr.supercore.inflatable.inflatable_utils import ObjectIdNotPreregisteredError
from flwr.supercore.interceptors import AppIoTokenClientInterceptor, RuntimeVersionClientInterceptor
from flwr.supernode.runtime.run_clientapp import pull_task_input, push_message, push_task_output

from client_app.node.warm import LostError, Warm
from common.errors import FloretError

log = logging.getLogger("flwr")

# Flower's words for how a task ended, and its code for an app that ended without an answer.
_COMPLETED, _FAILED, _CRASHED = "completed", "failed", 8
_FIRST, _IDLE, _GROWTH = 0.02, 0.5, 1.3
# The folders whose code the two sides must share for a message to mean the same on both.
_SHARED = ("client_app/", "common/", "data/", "models/")
_HOME = Path(__file__).resolve().parents[2]


def serve(address: str, warm: Warm, go: Callable[[], bool]) -> None:
    """Handle the tasks of the SuperNode whose ClientAppIo API is at ``address``, until ``go`` returns False.

    Raises:
        grpc.RpcError: the SuperNode is gone.
    """
    channel = _channel(address, None)
    try:
        stub = ClientAppIoStub(channel)
        pause = _FIRST
        while go():
            tasks = stub.PullPendingTasks(PullPendingTasksRequest()).tasks
            token = stub.ClaimTask(ClaimTaskRequest(task_id=tasks[0].task_id)).token if tasks else ""
            if token:
                _handle(address, token, warm, go)
                pause = _FIRST
            else:
                time.sleep(pause)
                pause = min(pause * _GROWTH, _IDLE)
    finally:
        channel.close()


def _channel(address: str, token: str | None) -> grpc.Channel:
    interceptors: list[grpc.UnaryUnaryClientInterceptor] = [
        RuntimeVersionClientInterceptor(component_name="flwr-clientapp")
    ]
    if token:
        interceptors.append(AppIoTokenClientInterceptor(token))
    return create_channel(server_address=address, insecure=True, interceptors=interceptors)


def _handle(address: str, token: str, warm: Warm, go: Callable[[], bool]) -> None:
    """Pull a task's message, get it answered, push the reply."""
    channel = _channel(address, token)
    try:
        stub = ClientAppIoStub(channel)
        heartbeat = HeartbeatSender(make_task_heartbeat_fn_grpc(stub))
        heartbeat.start()
        try:
            message, context, run, fab = pull_task_input(stub)
            started = time.monotonic()
            try:
                check_same_code(run, fab)
                reply, status = _answer(message, context, warm, go), _COMPLETED
            except FloretError as error:
                log.error("%s", error)
                reply, status = Message(Error(_CRASHED, str(error)), reply_to=message), _FAILED
            try:
                push_message(stub, reply, context)
                log.info("Answered: %s message in %.2f s", message.metadata.message_type, time.monotonic() - started)
            except ObjectIdNotPreregisteredError:
                # The SuperNode drops such a reply while it is still being handed over.
                log.warning("Not answered: run %d was stopped", run.run_id)
            push_task_output(stub, context, status, "")
        finally:
            heartbeat.stop()
    finally:
        channel.close()


def _answer(message: Message, context: Context, warm: Warm, go: Callable[[], bool]) -> Message:
    """Return the ClientApp's reply; if the process that worked on it was killed, a second one starts anew.

    That loses nothing: what the first one did counts only once it is in the client's state, and a message that finds
    its own outcome there starts from the state before it.

    Raises:
        LostError: there is no reply; the message says why.
    """
    metadata = message.metadata
    parts = [metadata.message_id.encode(), message_to_proto(message).SerializeToString()]
    parts.append(context_to_proto(context).SerializeToString())
    deadline = time.monotonic() + metadata.ttl
    for attempt in (1, 2):
        left = deadline - time.monotonic()
        try:
            content = warm.call("answer", parts, (), left, go)
            return message_from_proto(ProtoMessage.FromString(content))
        except LostError as error:
            log.error("The client process did not answer: %s", error)
            if attempt == 2 or not go() or deadline <= time.monotonic():
                raise LostError(f"the client process did not answer: {error}") from error
    raise AssertionError("a loop that returns or raises")


def check_same_code(run: Run, fab: Fab) -> None:
    """Compare the run's app with what is installed here: a node runs its own code, never what came over the network.

    Raises:
        FloretError: they differ in what both sides of a message must share; names the first file.
    """
    wrong = _difference(fab.hash_str or hashlib.sha256(fab.content).hexdigest(), fab.content)
    if wrong:
        raise FloretError(
            f"this node runs its installed Floret, and the run's app {run.fab_id} {run.fab_version} has another "
            f"{wrong}; install the same version on both (or start Flower's own flower-supernode, which runs the app "
            "that it is sent)"
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
