"""A node's connections to Flower: to the SuperLink through a SuperNode that it starts, and to that SuperNode's API.

The only module of the node that uses gRPC and private names of Flower, each with its reason: they have no public
counterpart, because they were made for Flower's own executor, which takes a new process for each message. From Flower
1.35 on the API between the node's processes is HTTP, from 1.40 on the SuperLink's, too: then only this module changes.
"""

import hashlib
import logging
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace, TracebackType
from typing import Any, Self, cast

import grpc
from flwr.app import Error, Message

# Flower's codes for the error of a message and for the end of a task.
from flwr.common.constant import ErrorCode, Status, SubStatus

# Flower's limit on the size of messages.
from flwr.common.grpc import GRPC_MAX_MESSAGE_LENGTH

# What repeats the SuperNode's calls, and sees their errors.
from flwr.common.retry_invoker import RetryInvoker

# Requests of the API that a SuperNode has for executors.
from flwr.proto.appio_pb2 import (
    ClaimTaskRequest,
    PullPendingTasksRequest,
    PushAppMessagesRequest,
    PushAppMessagesResponse,
    SendTaskHeartbeatRequest,
)

# The API itself.
from flwr.proto.clientappio_pb2_grpc import ClientAppIoStub

# Requests of the parts of a message, as above.
from flwr.proto.message_pb2 import (
    ConfirmMessageReceivedRequest,
    ConfirmMessageReceivedResponse,
    PullObjectRequest,
    PullObjectResponse,
)

# A task without heartbeat is given up by the SuperNode.
from flwr.supercore.heartbeat import HeartbeatSender

# The SuperNode's error for a message, and for a reply, whose run is over.
from flwr.supercore.inflatable.inflatable_utils import ObjectIdNotPreregisteredError

# The SuperNode requires with every call the task's token and a version that is compatible with its own.
from flwr.supercore.interceptors import AppIoTokenClientInterceptor, RuntimeVersionClientInterceptor

# What another API of the SuperLink answers who has no token of it. Without it: the text itself.
from flwr.supercore.interceptors.appio_token_interceptor import AUTHENTICATION_FAILED_MESSAGE

# Messages are sent in parts, some of which the other side already has: Flower's executor splits and joins them.
from flwr.supernode.runtime.run_clientapp import pull_task_input, push_message, push_task_output

from client_app.node.options import NodeOptions
from common.errors import FloretError, printable
from common.flower import Unpacked, format_log
from common.proxy import DIRECT, channel_options
from common.run_config import as_pairs

log = logging.getLogger("flwr")

# The first bytes from a client without TLS, HTTP/2's preface and an empty SETTINGS frame; its protocol within TLS.
GREETING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\x00\x00\x00\x04\x00\x00\x00\x00\x00"
ALPN = "h2"
# Exit codes of the SuperNode's process: the SuperLink does not accept this key; it counts a node with this key as
# connected; its version of Flower is not compatible; its clock differs from this node's; a thread of it
# ended, such as that of its heartbeats; what answers is not its Fleet API. Flower's own SuperNode exits with 1 for any
# reason, and with 0 for some of these.
TURNED_AWAY, STILL_THERE, WRONG_VERSION, WRONG_CLOCK, THREAD_ENDED, WRONG_API = 71, 72, 73, 74, 75, 76
# Seconds that Flower's SuperNode sleeps when no message waits, that ours does at first, and the factor of growth.
IDLE, FIRST, GROWTH = 3.0, 0.2, 1.1
# Seconds after which a SuperNode that does not say what waits counts as gone.
HANGS = 10.0
# Seconds between two looks for a part of a message that is still on its way to the SuperNode: first, most.
_PART = (0.02, 0.5)
# Seconds without an acknowledgement after which a connection to the SuperLink counts as broken, where the network drops
# packets without a word; a system gives up after some 15 minutes. On Linux it is TCP_USER_TIMEOUT, which gRPC sets
# where it sends pings. Those come less often than every 300 s: of more the SuperLink complains.
BROKEN, _PING = 60.0, 310.0
# The environment variable with the id of the process that the SuperNode ends with.
PARENT = "FLORET_NODE_PID"
_SETTINGS = 0x04


def is_answer(head: bytes) -> bool:
    """Return whether ``head``, the first 9 bytes that a server answers to ``GREETING``, is a SuperLink's: SETTINGS."""
    return len(head) == 9 and head[3] == _SETTINGS


# The SuperNode's API


class GoneError(FloretError):
    """The SuperNode does not answer any more."""


class NotReceivedError(FloretError):
    """A message has not come as a whole, and will not; says why."""


@dataclass(frozen=True)
class Bundle:
    """The app of a run as the SuperLink sent it; ``name`` includes the version, ``key`` identifies the content."""

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
        """Claim the first waiting message and return its token for ``task``; without one an empty text.

        Raises:
            GoneError: the SuperNode is gone, or hangs.
        """
        with _talking():
            waiting = self._stub.PullPendingTasks(PullPendingTasksRequest(), timeout=HANGS).tasks
            if not waiting:
                return ""
            return str(self._stub.ClaimTask(ClaimTaskRequest(task_id=waiting[0].task_id), timeout=HANGS).token)

    @contextmanager
    def task(self, token: str, go: Callable[[], bool]) -> "Iterator[Task]":
        """Yield the claimed message, and send the SuperNode heartbeats until the context ends.

        Args:
            token: what ``claim`` returned.
            go: whether to go on waiting for parts of the message that the SuperNode does not have yet.

        Raises:
            GoneError: the SuperNode is gone.
            NotReceivedError: ``go`` returned False, or the message's run ended.
        """
        channel = _channel(self._address, token)
        try:
            stub = ClientAppIoStub(channel)
            heartbeat = HeartbeatSender(partial(_beat, stub))
            heartbeat.start()
            try:
                yield Task(stub, go)
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
        run_id: its run.
        bundle: the run's app.
    """

    def __init__(self, stub: ClientAppIoStub, go: Callable[[], bool]) -> None:
        self._stub = stub
        with _talking():
            try:
                self.message, self.context, run, fab = pull_task_input(_waiting(stub, go))
            except ObjectIdNotPreregisteredError as error:
                push_task_output(stub, None, SubStatus.FAILED, "")
                raise NotReceivedError("its run ended meanwhile") from error
        self.run_id: int = run.run_id
        key = fab.hash_str or hashlib.sha256(fab.content).hexdigest()
        self.bundle = Bundle(f"{run.fab_id} {run.fab_version}", fab.content, key)

    def answer(self, reply: Message) -> bool:
        """Send the ClientApp's reply; return whether it was accepted.

        It is not if the run was stopped meanwhile, or the SuperNode has given up the message, because it had no
        heartbeat of it: the device was suspended, or its clock was set.

        Raises:
            GoneError: the SuperNode is gone.
        """
        return self._push(reply, SubStatus.COMPLETED)

    def fail(self, reason: str) -> bool:
        """Send an error with ``reason`` in place of a reply; returns and raises as ``answer``."""
        return self._push(Message(Error(ErrorCode.CLIENT_APP_CRASHED, reason), reply_to=self.message), SubStatus.FAILED)

    def _push(self, reply: Message, status: str) -> bool:
        with _talking():
            stored: list[PushAppMessagesResponse] = []

            def store(request: PushAppMessagesRequest) -> PushAppMessagesResponse:
                stored.append(self._stub.PushMessage(request))
                return stored[0]

            calls = SimpleNamespace(PushMessage=store, PushObject=self._stub.PushObject)
            try:
                push_message(cast(ClientAppIoStub, calls), reply, self.context)
                taken = True
            except ObjectIdNotPreregisteredError:
                # The run was stopped: the SuperNode drops the reply while it is being sent.
                taken = False
            except grpc.RpcError as error:
                # Of a reply that it has begun to take the SuperNode awaits the rest: it is ended with that.
                if stored or error.code() != grpc.StatusCode.UNAUTHENTICATED:
                    raise
                return False
            push_task_output(self._stub, self.context, status, "")
        return taken


def _beat(stub: ClientAppIoStub) -> bool:
    """Tell the SuperNode that a task is worked on; return False if that is to be tried again.

    Flower's own raises where the SuperNode has given up the task, which ends the thread that calls it, and may end the
    process. Here that is seen when the reply is sent.
    """
    try:
        stub.SendTaskHeartbeat(SendTaskHeartbeatRequest(), timeout=HANGS)
    except grpc.RpcError as error:
        return bool(error.code() == grpc.StatusCode.UNAUTHENTICATED)
    return True


def _waiting(stub: ClientAppIoStub, go: Callable[[], bool]) -> ClientAppIoStub:
    """Return what ``pull_task_input`` calls, waiting for each part of the message while ``go`` returns True.

    Flower's own wait is up to 10 s from one try to the next, 500 times, and nothing ends it. Once all parts are there,
    and before the message is made of them, it is looked at what it would take.
    """
    unpacked = Unpacked()

    def pull(request: PullObjectRequest) -> PullObjectResponse:
        pause = _PART[0]
        while True:
            response: PullObjectResponse = stub.PullObject(request)
            if response.object_available:
                unpacked.add(request.object_id, response.object_content)
            if response.object_available or not response.object_found:
                return response
            if not go():
                raise NotReceivedError("this node stops")
            time.sleep(pause)
            pause = min(2 * pause, _PART[1])

    def confirm(request: ConfirmMessageReceivedRequest) -> ConfirmMessageReceivedResponse:
        unpacked.check()
        response: ConfirmMessageReceivedResponse = stub.ConfirmMessageReceived(request)
        return response

    calls = SimpleNamespace(
        PullTaskInput=stub.PullTaskInput,
        PullMessage=stub.PullMessage,
        PullObject=pull,
        ConfirmMessageReceived=confirm,
    )
    return cast(ClientAppIoStub, calls)


def _sizes(most: int) -> list[tuple[str, int | str]]:
    return [("grpc.max_send_message_length", most), ("grpc.max_receive_message_length", most)]


def _channel(address: str, token: str | None) -> grpc.Channel:
    interceptors: list[grpc.UnaryUnaryClientInterceptor] = [
        RuntimeVersionClientInterceptor(component_name="flwr-clientapp")
    ]
    if token:
        interceptors.append(AppIoTokenClientInterceptor(token))
    # To this machine, which no proxy can reach.
    return grpc.intercept_channel(
        grpc.insecure_channel(address, [*_sizes(GRPC_MAX_MESSAGE_LENGTH), DIRECT]), *interceptors
    )


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
    arguments += ["--node-config", as_pairs(options.node_config())]
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
    """The SuperNode's replacement for ``time.sleep``.

    The SuperNode sleeps ``IDLE`` seconds when no message waits; a shorter sleep is a wait for the ClientApp's reply.
    """

    def __init__(self) -> None:
        self._idle = FIRST

    def sleep(self, seconds: float) -> None:
        """Sleep at most 0.05 s while a reply is awaited, else from ``FIRST`` up to ``IDLE`` seconds."""
        if seconds < IDLE:
            self._idle = FIRST
            time.sleep(min(seconds, 0.05))
        else:
            time.sleep(self._idle)
            self._idle = min(self._idle * GROWTH, IDLE)


def dropping(pull: Callable[..., int | None]) -> Callable[..., int | None]:
    """Return ``pull``, the SuperNode's function that receives a message, leaving nothing of one that broke off.

    Flower's own leaves a message whose run ended meanwhile to be claimed, and its parts to be waited for. After one
    that failed otherwise it waits for a reply that nobody will write.

    Args:
        pull: called with ``state``, ``object_store``, ``receive``, ``confirm_message_received`` and more by keyword;
            returns the message's run, None without a message.
    """

    def pull_or_drop(**given: Any) -> int | None:
        received: list[Message] = []
        missing = set[str]()
        asked, confirmed = list[str](), list[str]()

        def receive() -> Any:
            found = given["receive"]()
            if found is not None:
                received.append(found[0])
            return found

        def confirm(run_id: int, message_id: str) -> None:
            asked.append(message_id)
            given["confirm_message_received"](run_id, message_id)
            confirmed.append(message_id)

        def pull_object(run_id: int, name: str) -> bytes:
            missing.add(name)
            content: bytes = given["pull_object"](run_id, name)
            missing.discard(name)
            return content

        ours = {"receive": receive, "pull_object": pull_object, "confirm_message_received": confirm}
        run_id = pull(**given | ours)
        if not received or confirmed:
            return run_id
        metadata, state = received[0].metadata, given["state"]
        of_run = {"run_ids": [metadata.run_id]}
        for task in state.get_tasks(**of_run, statuses=[Status.PENDING]):
            state.finish_task(task.task_id, sub_status=SubStatus.FAILED, details="The message was not received.")
        claimed = asked and not missing and state.get_tasks(**of_run, statuses=[Status.STARTING, Status.RUNNING])
        answered = {entry.message.metadata.reply_to_message_id for entry in state.msg_store.values()}
        if claimed or metadata.message_id in answered:
            # It came as a whole: its reply will come, or is there, and must not be taken for that to the next message.
            return int(metadata.run_id)
        state.delete_messages(message_ids=[metadata.message_id])
        # One that was claimed already finds its parts gone, and is ended by who claimed it.
        given["object_store"].delete(metadata.message_id)
        return None

    return pull_or_drop


class Reason(logging.Filter):
    """Finds out why the SuperNode ends: from Flower's log, the errors of its calls and those of its threads.

    Attributes:
        code: one of the exit codes above, or None.
    """

    def __init__(self) -> None:
        super().__init__()
        self.code: int | None = None

    def filter(self, record: logging.LogRecord) -> bool:
        """Set ``code`` if the record gives a reason; return False if the node's own line will say it."""
        # The number of the one error that Flower logs as text alone.
        from flwr.common.exit import ExitCode

        error = record.msg
        if isinstance(error, grpc.Call):
            if error.code() == grpc.StatusCode.FAILED_PRECONDITION:
                # A node that was killed counts as connected until its heartbeat is missed.
                self.code = STILL_THERE if "could not be activated" in (error.details() or "") else TURNED_AWAY
                return False
            if error.code() == grpc.StatusCode.UNIMPLEMENTED:
                self.code = WRONG_API
                return False
            # As text it is several lines, of which only these say something.
            record.msg = f"{error.code().name}: {printable(error.details() or '')}"
        elif str(error).startswith(f"Exit Code: {ExitCode.RUNTIME_VERSION_INCOMPATIBLE}"):
            self.code = WRONG_VERSION
        return True

    def thread_ended(self, said: threading.ExceptHookArgs) -> None:
        """Log a thread's error and send this process SIGTERM: without its heartbeats a node counts as gone for good."""
        self.code = self.code or THREAD_ENDED
        error = said.exc_value
        what = error.details() if isinstance(error, grpc.Call) else error
        log.error("A thread of the SuperNode ended (%s: %s)", said.exc_type.__name__, what)
        os.kill(os.getpid(), signal.SIGTERM)

    def giving_up(self, retrying: Callable[[], RetryInvoker]) -> Callable[[], RetryInvoker]:
        """Return ``retrying``, which makes what repeats the calls to the SuperLink, with an eye on their errors.

        The SuperLink refuses every call of a node whose clock is behind or ahead of its own, and its ServerAppIo API
        every call of a node. Flower's SuperNode then ends in good order.
        """

        def watched() -> RetryInvoker:
            invoker = retrying()
            gives_up = invoker.should_giveup
            assert gives_up

            def look(error: Exception) -> bool:
                if isinstance(error, grpc.Call) and error.code() == grpc.StatusCode.UNAUTHENTICATED:
                    said = error.details() or ""
                    if "Invalid timestamp" in said:
                        self.code = WRONG_CLOCK
                    elif said == AUTHENTICATION_FAILED_MESSAGE:
                        self.code = WRONG_API
                return gives_up(error)

            invoker.should_giveup = look
            return invoker

        return watched


def open_channel(
    server_address: str,
    insecure: bool,
    root_certificates: bytes | None = None,
    max_message_length: int = GRPC_MAX_MESSAGE_LENGTH,
    interceptors: Sequence[grpc.UnaryUnaryClientInterceptor] | None = None,
) -> grpc.Channel:
    """Return a channel to the SuperLink as Flower's ``create_channel`` does, which notices that the network is gone."""
    options = [
        *_sizes(max_message_length),
        *channel_options(server_address.rpartition(":")[0].strip("[]")),
        ("grpc.keepalive_time_ms", int(1000 * _PING)),
        ("grpc.keepalive_timeout_ms", int(1000 * BROKEN)),
    ]
    if insecure:
        channel = grpc.insecure_channel(server_address, options)
    else:
        channel = grpc.secure_channel(server_address, grpc.ssl_channel_credentials(root_certificates), options)
    return grpc.intercept_channel(channel, *(interceptors or ()))


def _end_with(parent: int) -> None:
    """Send this process SIGTERM when ``parent`` is no longer its parent, because it was killed."""
    while os.getppid() == parent:
        time.sleep(0.2)
    os.kill(os.getpid(), signal.SIGTERM)


def run_supernode() -> None:
    """Run Flower's SuperNode, with the arguments of ``flower-supernode``, until it or the parent, ``PARENT``, ends.

    Flower's own sleeps 3 s whenever no message waits. This one polls after 0.2 s, then ever less often, down to every
    3 s: there is no pause between rounds, and an idle node polls no more often than a stock one.
    """
    # Before Flower is imported, which takes seconds in which the parent may be killed.
    threading.Thread(target=_end_with, args=(int(os.environ[PARENT]),), daemon=True).start()
    # It opens the channel, and has no parameter for its options.
    from flwr.client.grpc_rere_client import connection

    # Its loop calls ``time.sleep``, and has no parameter for the interval, nor for what it does with a message that
    # breaks off, nor for who repeats its calls.
    from flwr.supernode import start_client_internal

    # The command as a function: it must run in this process, where its ``time`` is replaced.
    from flwr.supernode.cli.flower_supernode import flower_supernode

    # The module uses nothing else of ``time``; the tests of real nodes would show it if another version did.
    start_client_internal.time = SimpleNamespace(sleep=Pace().sleep)  # type: ignore[attr-defined, assignment]
    start_client_internal._pull_and_store_message = dropping(start_client_internal._pull_and_store_message)
    connection.create_channel = open_channel  # type: ignore[attr-defined]
    sys.argv[0] = "flower-supernode"
    format_log(times=True)
    reason = Reason()
    watched = reason.giving_up(start_client_internal.make_simple_grpc_retry_invoker)  # type: ignore[attr-defined]
    start_client_internal.make_simple_grpc_retry_invoker = watched  # type: ignore[attr-defined]
    threading.excepthook = reason.thread_ended
    logging.getLogger("flwr").addFilter(reason)
    code = 0
    try:
        flower_supernode()
    except SystemExit as end:
        if isinstance(end.code, str):
            log.error("The SuperNode ended: %s", end.code)
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        if reason.code is None:
            traceback.print_exc()
        code = 1
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    # Not sys.exit: an interpreter that shuts down sometimes hangs in the threads of gRPC's server.
    os._exit((reason.code or code) if code or reason.code in (WRONG_CLOCK, THREAD_ENDED, WRONG_API) else 0)
