"""How a node talks to Flower: to the SuperLink, through a SuperNode that it starts, and to that SuperNode's own API.

The only module of the node that knows gRPC and private names of Flower, each with its reason: they have no public
counterpart, because they were made for Flower's own executor, which takes a new process for each message. From Flower
1.35 on the API between the node's processes is HTTP, from 1.40 on the SuperLink's, too: then this module alone is
exchanged.
"""

import hashlib
import json
import logging
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace, TracebackType
from typing import Self

import grpc
from flwr.app import Error, Message

# What the error of a message says and how a task ended, in Flower's codes and words.
from flwr.common.constant import ErrorCode, SubStatus

# Channels with Flower's limits on the size of messages.
from flwr.common.grpc import create_channel

# The questions of the API that a SuperNode gives to executors.
from flwr.proto.appio_pb2 import ClaimTaskRequest, PullPendingTasksRequest

# The API itself.
from flwr.proto.clientappio_pb2_grpc import ClientAppIoStub

# A task without heartbeat is given up by the SuperNode.
from flwr.supercore.heartbeat import HeartbeatSender, make_task_heartbeat_fn_grpc

# How it says that the run of a reply is over.
from flwr.supercore.inflatable.inflatable_utils import ObjectIdNotPreregisteredError

# What the SuperNode wants to see with every call: the task's token, and a version that goes with its own.
from flwr.supercore.interceptors import AppIoTokenClientInterceptor, RuntimeVersionClientInterceptor

# A message travels in parts, some of which the other side has already: Flower's executor puts them together and apart.
from flwr.supernode.runtime.run_clientapp import pull_task_input, push_message, push_task_output

from client_app.node.options import NodeOptions
from common.errors import FloretError

log = logging.getLogger("flwr")

# What a client says first where there is no TLS, HTTP/2 and an empty SETTINGS frame, and what it offers within TLS.
GREETING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\x00\x00\x00\x04\x00\x00\x00\x00\x00"
ALPN = "h2"
# Exit codes of the SuperNode's process: the SuperLink does not take this key; it has a node with this key as connected;
# it runs a version of Flower that does not go with this one. Flower's own ends with 1 whatever its reason is.
TURNED_AWAY, STILL_THERE, WRONG_VERSION = 71, 72, 73
# Seconds that Flower's SuperNode sleeps when no message waits, that ours does at first, and how fast that grows.
IDLE, FIRST, GROWTH = 3.0, 0.2, 1.1
_SETTINGS = 0x04


def is_answer(head: bytes) -> bool:
    """Return whether ``head``, the first 9 bytes that a server answers to ``GREETING``, is a SuperLink's: SETTINGS."""
    return len(head) == 9 and head[3] == _SETTINGS


# The SuperNode's API


class GoneError(FloretError):
    """The SuperNode does not answer any more."""


@dataclass(frozen=True)
class Bundle:
    """The app of a run as the SuperLink sent it; ``name`` has its version, ``key`` tells it from others."""

    name: str
    content: bytes
    key: str


class Tasks:
    """The messages that a SuperNode has for its ClientApp.

    Args:
        address: host and port of its ClientAppIo API.
    """

    def __init__(self, address: str) -> None:
        self._address = address
        self._channel = _channel(address, None)
        self._stub = ClientAppIoStub(self._channel)

    def claim(self) -> str:
        """Take the first message that waits, if there is one, and return what ``task`` wants; else an empty text.

        Raises:
            GoneError: the SuperNode is gone.
        """
        with _talking():
            waiting = self._stub.PullPendingTasks(PullPendingTasksRequest()).tasks
            token = self._stub.ClaimTask(ClaimTaskRequest(task_id=waiting[0].task_id)).token if waiting else ""
        return str(token)

    @contextmanager
    def task(self, token: str) -> "Iterator[Task]":
        """Give the message that was claimed; while it is worked on, the SuperNode is told so.

        Raises:
            GoneError: the SuperNode is gone.
        """
        channel = _channel(self._address, token)
        try:
            stub = ClientAppIoStub(channel)
            heartbeat = HeartbeatSender(make_task_heartbeat_fn_grpc(stub))
            heartbeat.start()
            try:
                yield Task(stub)
            finally:
                heartbeat.stop()
        finally:
            channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._channel.close()


class Task:
    """A message to answer.

    Attributes:
        message, context: what the ClientApp is called with.
        run_id: the run that it is of.
        bundle: the run's app.
    """

    def __init__(self, stub: ClientAppIoStub) -> None:
        self._stub = stub
        with _talking():
            self.message, self.context, run, fab = pull_task_input(stub)
        self.run_id: int = run.run_id
        key = fab.hash_str or hashlib.sha256(fab.content).hexdigest()
        self.bundle = Bundle(f"{run.fab_id} {run.fab_version}", fab.content, key)

    def answer(self, reply: Message) -> bool:
        """Send the ClientApp's reply; return whether it was taken: not if the run was stopped meanwhile.

        Raises:
            GoneError: the SuperNode is gone.
        """
        return self._push(reply, SubStatus.COMPLETED)

    def fail(self, reason: str) -> bool:
        """Send, as ``answer``, that there is no reply and why."""
        return self._push(Message(Error(ErrorCode.CLIENT_APP_CRASHED, reason), reply_to=self.message), SubStatus.FAILED)

    def _push(self, reply: Message, status: str) -> bool:
        with _talking():
            try:
                push_message(self._stub, reply, self.context)
                taken = True
            except ObjectIdNotPreregisteredError:
                # The SuperNode drops such a reply while it is still being handed over.
                taken = False
            push_task_output(self._stub, self.context, status, "")
        return taken


def _channel(address: str, token: str | None) -> grpc.Channel:
    interceptors: list[grpc.UnaryUnaryClientInterceptor] = [
        RuntimeVersionClientInterceptor(component_name="flwr-clientapp")
    ]
    if token:
        interceptors.append(AppIoTokenClientInterceptor(token))
    return create_channel(server_address=address, insecure=True, interceptors=interceptors)


@contextmanager
def _talking() -> Iterator[None]:
    try:
        yield
    except grpc.RpcError as error:
        raise GoneError("the SuperNode is gone") from error


# The SuperNode


def supernode_arguments(options: NodeOptions, port: int) -> list[str]:
    """Return the arguments of ``client_app.node.supernode`` for ``options``; its own API will be at ``port``."""
    arguments = ["--superlink", options.address, "--isolation", "process"]
    arguments += ["--clientappio-api-address", f"127.0.0.1:{port}"]
    arguments += ["--node-config", " ".join(f"{k}={json.dumps(v)}" for k, v in options.node_config().items())]
    if options.insecure:
        arguments.append("--insecure")
    if options.root_certificates:
        arguments += ["--root-certificates", str(options.root_certificates)]
    if options.key:
        arguments += ["--auth-supernode-private-key", str(options.key)]
    if options.health_address:
        arguments += ["--health-server-address", options.health_address]
    return arguments


class Pace:
    """Sleeps in the place of ``time.sleep``.

    ``IDLE`` seconds are what the SuperNode asks for when no message waits; anything shorter is a wait for the
    ClientApp's answer to a message.
    """

    def __init__(self) -> None:
        self._idle = FIRST

    def sleep(self, seconds: float) -> None:
        """Sleep for as long as makes sense now."""
        if seconds < IDLE:
            self._idle = FIRST
            time.sleep(min(seconds, 0.05))
        else:
            time.sleep(self._idle)
            self._idle = min(self._idle * GROWTH, IDLE)


class Reason(logging.Handler):
    """Learns from what Flower logs why the SuperLink did not accept this node.

    Attributes:
        code: one of the exit codes above, or None.
    """

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.code: int | None = None

    def emit(self, record: logging.LogRecord) -> None:
        """Take down what is logged."""
        # The number of its one error that has nothing else to be told by.
        from flwr.common.exit import ExitCode

        error = record.msg
        if isinstance(error, grpc.Call) and error.code() == grpc.StatusCode.FAILED_PRECONDITION:
            # A node that was killed counts as connected until its heartbeat is missed.
            self.code = STILL_THERE if "could not be activated" in (error.details() or "") else TURNED_AWAY
        elif str(error).startswith(f"Exit Code: {ExitCode.RUNTIME_VERSION_INCOMPATIBLE}"):
            self.code = WRONG_VERSION


def _end_with(parent: int) -> None:
    """Stop this process in good order when ``parent`` is no longer its parent, because it was killed."""
    while os.getppid() == parent:
        time.sleep(0.2)
    os.kill(os.getpid(), signal.SIGTERM)


def run_supernode() -> None:
    """Be Flower's SuperNode, with the arguments of ``flower-supernode``, that ends with its parent.

    Stock, it sleeps 3 s whenever no message waits. Here it asks again after 0.2 s, and less and less often the longer
    nothing comes, down to the 3 s: rounds that follow each other closely do so without a pause, and a node that waits
    for hours asks no more often than a stock one.
    """
    # Its loop sleeps through the module ``time`` and takes no pace from outside.
    from flwr.supernode import start_client_internal

    # The command as a function: our process must be the one that runs it, to change the above.
    from flwr.supernode.cli.flower_supernode import flower_supernode

    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    # The module uses nothing else of ``time``; the tests of real nodes would show it if another version did.
    start_client_internal.time = SimpleNamespace(sleep=Pace().sleep)  # type: ignore[attr-defined, assignment]
    sys.argv[0] = "flower-supernode"
    reason = Reason()
    logging.getLogger("flwr").addHandler(reason)
    code = 0
    try:
        flower_supernode()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        if reason.code is None:
            traceback.print_exc()
        code = 1
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    # At once: now and then an interpreter that ends in the usual way hangs in the threads of gRPC's server.
    os._exit((reason.code or code) if code else 0)
