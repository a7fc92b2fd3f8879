"""The adapter to Flower: each of its private names that Floret needs, with the reason, and what to do when it is gone.

Public are ``flwr.app``, ``flwr.clientapp``, ``flwr.client``, ``flwr.serverapp`` and ``flwr.serverapp.strategy``;
anything else may change with any version. A node's connection to its SuperLink is in ``client_app.node.transport``.
All other modules import only the public ones (``tests/test_adapter.py``). Modules that only a server or the command
line needs are imported within functions, so that an edge client starts fast.
"""

import json
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Event, Lock
from typing import Any

import grpc
from flwr.app import Array, Context, Error, Message, RecordDict

# What the codes of a message's error mean; ``Error.code`` is public, its values are not. Without it: the numbers.
from flwr.common.constant import ErrorCode

# Messages and contexts as bytes between the processes of a node, which must not unpickle what came over the network.
# Without it: records as safetensors and JSON.
from flwr.common.serde import context_from_proto, context_to_proto, message_from_proto, message_to_proto

# As above: the protocol buffers that serde makes and reads.
from flwr.proto.message_pb2 import Context as ProtoContext

# As above.
from flwr.proto.message_pb2 import Message as ProtoMessage
from flwr.serverapp import Grid
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]

from common.config import one_of
from common.errors import ConfigError, FloretError, printable
from common.proxy import DIRECT
from common.simulation import LocalGrid

# What Flower's objects, and those that make them from bytes, raise for what another machine sent: they check little of
# it, so a text that is no JSON, a reference to nothing or a type that does not exist come as they are. An error of the
# connection (``grpc.RpcError``) is none of these.
UNREADABLE = (
    *(ArithmeticError, AssertionError, AttributeError, DecodeError, LookupError),
    *(MemoryError, RecursionError, TypeError, ValueError),
)

# Seconds between attempts to send messages. Flower's grid returns no ids where the SuperLink takes no more.
_PAUSES = (0.5, 1.0, 2.0, 4.0, 8.0)

# Simulation

# Set when Flower stops this process.
_STOPPED = Event()
# The command with which a SuperLink runs a simulation. Without it: see its uses.
SIMULATION = "flwr-simulation"


def is_simulated(grid: Grid) -> bool:
    """Return whether ``grid`` is that of a simulation, where clients run on the user's own machine."""
    if isinstance(grid, LocalGrid):
        return True
    # Of Flower's simulation the class is the only difference that a ServerApp sees. Without it: ``in_simulation``.
    from flwr.superlink.grid import InMemoryGrid

    return isinstance(grid, InMemoryGrid)


def drives_simulation() -> bool:
    """Return whether this process is the one that Flower starts for a simulation, before it starts Ray."""
    # Before Ray starts, only the command's name shows it.
    return Path(sys.argv[0]).name == SIMULATION


def find_by_node(grid: Grid) -> None:
    """Make Flower's simulation engine look for messages only where some are waiting.

    The thread that hands messages to the actors queries Flower's state for each node in turn, and each query scans the
    messages of all nodes: with 1,000 clients that took more time than the clients. Here a node is queried only when it
    has a message that was not handed out.
    """
    # The grid's link state and two of its methods, replaced: the engine has no other place to do this. Without them:
    # drop this function; simulations of many clients are slower.
    state: Any = grid.state  # type: ignore[attr-defined]
    waiting: Counter[int] = Counter()
    store, take = state.store_message_ins, state.get_message_ins

    def stored(message: Message) -> str | None:
        with state.lock:
            message_id: str | None = store(message)
            waiting[message.metadata.dst_node_id] += message_id is not None
        return message_id

    def taken(node_id: int, limit: int | None) -> list[Message]:
        if not waiting[node_id]:
            return []
        with state.lock:
            messages: list[Message] = take(node_id, limit)
            # None although some wait: they have expired.
            waiting[node_id] -= len(messages) or waiting[node_id]
        return messages

    state.store_message_ins, state.get_message_ins = stored, taken


def given_id(message: Message, message_id: str) -> Message:
    """Give a message the id that its reply will refer to, and return it."""
    # Flower has no other way to set it. Without it: no replies in the local engine.
    message.metadata.__dict__["_message_id"] = message_id
    return message


def check_simulation(reply: Message | None) -> None:
    """Check that Flower's simulation still runs, which has, or has not, answered a message with ``reply``.

    Raises:
        FloretError: the user stopped the run, or a process of Ray is lost. What is missing then is no client's fault,
            and a round without it would be another one.
    """
    if _STOPPED.is_set():
        raise FloretError("the run was stopped")
    # What a ClientApp raises has a code of its own; this one is of whatever Ray raises.
    if reply is not None and reply.has_error() and reply.error.code == ErrorCode.UNKNOWN:
        # Flower puts the class before the text, of which the first line says what happened.
        reason = (reply.error.reason or "").strip().splitlines()[:1]
        raise FloretError(
            f"a process of the simulation is lost ({printable(''.join(reason))}); resumed, the run goes on after its "
            "last checkpoint; clients with more client-resources-num-cpus are fewer at a time and need less memory"
        )


def notice_stop() -> None:
    """Let ``check_simulation`` know when the user stops the run: Ray ends before the thread of the ServerApp."""
    at_stop(_STOPPED.set)


# The server


def node_is_gone(message: Message) -> bool:
    """Return whether ``message`` is Flower's error for a node that is no longer connected."""
    return message.has_error() and message.error.code == ErrorCode.NODE_UNAVAILABLE


def is_over(message: Message) -> bool:
    """Return whether ``message`` is Flower's error for one that it holds no longer, since its time is over."""
    gone = (ErrorCode.MESSAGE_UNAVAILABLE, ErrorCode.REPLY_MESSAGE_UNAVAILABLE)
    return message.has_error() and message.error.code in gone


class Unpacked:
    """What a message takes in memory, from its parts, before it is made of them.

    A part may stand in an array many times over, as those of a tensor of zeros do: some megabytes could become
    hundreds of gigabytes.
    """

    # Bytes that any message may take, and how many times what came.
    _FREE, _TIMES = 2**30, 16

    def __init__(self) -> None:
        self._sizes: dict[str, int] = {}
        self._arrays: list[tuple[list[str], list[int]]] = []

    def add(self, name: str, content: bytes) -> None:
        """Note a part that came.

        Raises:
            Exception: one of ``UNREADABLE``: it is none.
        """
        # What a part begins with. Without them: no bound.
        from flwr.supercore.inflatable.inflatable_object import (
            get_object_body,
            get_object_head_values_from_object_content,
        )

        self._sizes[name] = len(content)
        kind, parts, _ = get_object_head_values_from_object_content(content)
        if kind == Array.__qualname__:
            self._arrays.append((parts, list(json.loads(get_object_body(content, Array))["arraychunk_ids"])))

    def check(self) -> None:
        """Check the message of the parts that came.

        Raises:
            ValueError: it would take far more than what came.
            Exception: one of ``UNREADABLE``: the parts do not fit together.
        """
        came = sum(self._sizes.values())
        takes = sum(self._sizes[parts[place]] for parts, places in self._arrays for place in places)
        if takes > self._FREE + self._TIMES * came:
            raise ValueError(f"{came} bytes would become {takes}")


@dataclass(frozen=True)
class Bound:
    """The most that an answer may have: ``size`` bytes in so many ``parts``."""

    size: int
    parts: int

    def check(self, size: int, parts: int) -> None:
        """Check what came of an answer up to now.

        Raises:
            ValueError: it is more.
        """
        if size > self.size or parts > self.parts:
            raise ValueError(
                f"it has {size} bytes or more in {parts} parts, at most {self.size} in {self.parts} are of this run"
            )


# Seconds after which a SuperLink that fails at an answer will not hand it out any more; a database may be locked.
_FAILS_FOR = 10.0
# Of an answer without tensors, such as what a client says of itself.
TEXTS = Bound(2**24, 64)


class Answers:
    """The answers of real nodes, pulled one at a time, without waiting for one that a node is still sending.

    One at a time: Flower gives out none of those that it was asked for if one of them cannot be read, and which is the
    answer to which message is only known for one, because a node may write anything into an answer's metadata.

    Flower says that an answer is there once a node has begun to send it, and says so once. Its own grid then waits for
    the rest, up to two hours, though the node may be gone.

    Args:
        grid: Flower's.
        bound: of each answer.
    """

    def __init__(self, grid: Grid, bound: Bound = TEXTS) -> None:
        self._grid, self._bound = grid, bound
        self._begun: dict[str, _Begun] = {}
        self._failing: dict[str, float] = {}  # since when

    def pull(self, message_id: str) -> Message | None:
        """Return the answer to a message if it is there as a whole.

        Raises:
            FloretError: what came is no message, or a part of it is gone.
        """
        # Of real nodes the class is what can be pulled in parts. Without it: all at once, as from any grid.
        from flwr.superlink.grid import GrpcGrid

        begun = self._begun.pop(message_id, None)
        try:
            if not isinstance(self._grid, GrpcGrid):
                return next(iter(self._grid.pull_messages([message_id])), None)
            begun = begun or _Begun.found(self._grid, message_id, self._bound)
            message = begun.whole() if begun else None
        except UNREADABLE as error:
            raise FloretError(f"the answer cannot be read ({type(error).__name__}: {printable(error)})") from error
        except grpc.RpcError as error:
            # A SuperLink fails at one answer, whenever it is asked for, if the answer's metadata are no numbers or name
            # another run: Flower checks neither.
            if error.code() in (grpc.StatusCode.UNKNOWN, grpc.StatusCode.INTERNAL):
                since = self._failing.setdefault(message_id, time.monotonic())
                if time.monotonic() - since >= _FAILS_FOR:
                    told = printable(error.details())
                    raise FloretError(f"the SuperLink cannot hand out the answer ({told})") from error
            # It has too much to do now, or a part is too large to be sent: then it never comes.
            elif error.code() != grpc.StatusCode.RESOURCE_EXHAUSTED:
                raise
            message = None
        else:
            self._failing.pop(message_id, None)
        if begun and message is None:
            self._begun[message_id] = begun
        return message

    def begun(self, message_id: str) -> bool:
        """Return whether a node had begun to send the answer to a message when it was pulled last."""
        return message_id in self._begun

    def keep(self, message_ids: Iterable[str]) -> None:
        """Forget the parts of the answers to all but these messages."""
        known = {*message_ids}
        self._begun = {key: begun for key, begun in self._begun.items() if key in known}
        self._failing = {key: since for key, since in self._failing.items() if key in known}


class _Begun:
    """An answer that a node has begun to send.

    Args:
        grid: Flower's for real nodes.
        name: of the answer.
        parts: the names of all of its parts, the answer itself among them.
        bound: of it.

    Raises:
        ValueError: it has more parts than it may.
    """

    def __init__(self, grid: Any, name: str, parts: Iterable[str], bound: Bound) -> None:
        self._grid, self._name, self._bound = grid, name, bound
        self._names = list(dict.fromkeys(parts))
        bound.check(0, len(self._names))
        self._parts: dict[str, bytes] = {}
        self._size, self._counting = 0, Lock()
        self._unpacked = Unpacked()

    @classmethod
    def found(cls, grid: Any, message_id: str, bound: Bound) -> "_Begun | None":
        """Return the answer to a message, None if no node has begun to send one; raises what ``_Begun`` does."""
        # What Flower's grid asks the SuperLink. Without them: ``grid.pull_messages``, and its wait.
        from flwr.proto.appio_pb2 import PullAppMessagesRequest

        # As above: the names in a tree of parts.
        from flwr.supercore.inflatable.inflatable_object import iterate_object_tree

        found = grid._stub.PullMessages(PullAppMessagesRequest(message_ids=[message_id]))
        for said, tree in zip(found.messages_list, found.message_object_trees, strict=True):
            return cls(grid, said.metadata.message_id, (part.object_id for part in iterate_object_tree(tree)), bound)
        return None

    def whole(self) -> Message | None:
        """Return the answer if all parts are there by now; the parts that are there are not pulled again.

        Raises:
            FloretError: a part is gone.
            Exception: one of ``UNREADABLE``: the parts make no message.
        """
        # As in ``found``.
        from flwr.proto.message_pb2 import ConfirmMessageReceivedRequest

        # As above.
        from flwr.supercore.inflatable.inflatable_protobuf_utils import make_pull_object_fn_protobuf

        # As above: one try for each part, several at a time; and the message of its parts.
        from flwr.supercore.inflatable.inflatable_utils import (
            ObjectIdNotPreregisteredError,
            ObjectUnavailableError,
            inflate_object_from_contents,
            pull_objects,
        )

        stub, node, run_id = self._grid._stub, self._grid.node, self._grid.run.run_id
        pull = make_pull_object_fn_protobuf(stub.PullObject, node, run_id)

        def take(part: str) -> bytes:
            content = pull(part)
            with self._counting:
                self._size += len(content)
            self._bound.check(self._size, len(self._names))
            self._unpacked.add(part, content)
            self._parts[part] = content
            return b""

        try:
            pull_objects([name for name in self._names if name not in self._parts], take, max_tries_per_object=1)
        except ObjectUnavailableError:
            return None
        except ObjectIdNotPreregisteredError as error:
            raise FloretError("a part of the answer is gone") from error
        stub.ConfirmMessageReceived(
            ConfirmMessageReceivedRequest(node=node, run_id=run_id, message_object_id=self._name)
        )
        self._unpacked.check()
        message = inflate_object_from_contents(self._name, self._parts)
        if not isinstance(message, Message):
            raise TypeError(f"it is a {type(message).__name__}")
        return given_id(message, self._name)


def answer_to(message: Message, reply: Message) -> Message:
    """Return ``reply`` with the metadata of an answer to ``message``, whatever it says of itself."""
    if reply.has_error():
        return Message(reply.error, reply_to=message)
    return Message(reply.content if reply.has_content() else RecordDict(), reply_to=message)


def unreadable(message: Message, reason: str) -> Message:
    """Return the answer to ``message`` of a node whose own cannot be read."""
    return Message(Error(ErrorCode.UNKNOWN, reason), reply_to=message)


def push(grid: Grid, messages: Sequence[Message]) -> list[str]:
    """Send messages and return the id of each, an empty text for one whose node is not there any more.

    A SuperLink that has too much to do is asked again, after ``_PAUSES``.

    Raises:
        FloretError: it took none of them.
    """
    ids = list(grid.push_messages(messages))
    for pause in _PAUSES:
        if len(ids) == len(messages):
            break
        time.sleep(pause)
        # New ones: of the others it may have a part.
        ids = list(grid.push_messages([_copied(message) for message in messages]))
    if len(ids) < len(messages):
        raise FloretError(
            f"the SuperLink takes no messages (RESOURCE_EXHAUSTED, {1 + len(_PAUSES)} times): it has too much to do, "
            "or the messages of a round are larger than gRPC permits"
        )
    return [message_id or "" for message_id in ids]


def _copied(message: Message) -> Message:
    about = message.metadata
    return Message(message.content, about.dst_node_id, about.message_type, ttl=about.ttl, group_id=about.group_id)


def at_stop(handler: Callable[[], None]) -> None:
    """Have ``handler`` called when Flower stops this process, such as when the user stops the run."""
    # The thread of a ServerApp is not notified when Flower ends its simulation. Without it: such a run stays "running"
    # in its trackers.
    from flwr.common.exit import add_exit_handler

    add_exit_handler(handler)


def format_log(*, times: bool = False) -> None:
    """Let Flower's log have colours if standard error is a terminal and ``NO_COLOR`` is not set, else none.

    Args:
        times: whether each line has the time, as the log of a process that runs for weeks needs.
    """
    # It has colours wherever it goes, and no setting. Without it: their codes stand in files and journals.
    from flwr.common.logger import update_console_handler

    update_console_handler(timestamps=times, colored=sys.stderr.isatty() and not os.environ.get("NO_COLOR"))


# Messages between a node's own processes


def pack_message(message: Message) -> bytes:
    """Return a message as bytes, without its id."""
    content: bytes = message_to_proto(message).SerializeToString()
    return content


def unpack_message(content: bytes, message_id: str = "") -> Message:
    """Return the message that ``pack_message`` was given.

    Args:
        content: its bytes.
        message_id: its id, for a message that is answered.
    """
    message = message_from_proto(ProtoMessage.FromString(content))
    return given_id(message, message_id) if message_id else message


def pack_context(context: Context) -> bytes:
    """Return a context as bytes."""
    content: bytes = context_to_proto(context).SerializeToString()
    return content


def unpack_context(content: bytes) -> Context:
    """Return the context that ``pack_context`` was given."""
    return context_from_proto(ProtoContext.FromString(content))


# The command line


@dataclass(frozen=True)
class Connection:
    """How ``flwr run`` reaches a SuperLink.

    Attributes:
        address: host and port of its Control API.
        managed: ``flwr run`` starts it itself where nothing listens.
        supernodes: the clients of a simulation that the connection itself asks for, or None.
    """

    address: str
    managed: bool
    supernodes: int | None

    @property
    def port(self) -> int:
        """The Control API's port; 0 if the address has none."""
        port = self.address.rpartition(":")[2]
        return int(port) if port.isdecimal() else 0

    @property
    def loopback(self) -> bool:
        """Whether the address is a loopback address of this machine."""
        return self.address.rpartition(":")[0] in ("127.0.0.1", "localhost", "[::1]")


def find_connection(name: str) -> Connection | None:
    """Return the SuperLink connection ``name`` of Flower's ``config.toml``, the default one for an empty name.

    None if there is no such connection, or the file cannot be read: ``flwr run`` says what is wrong with it.
    """
    # Where the local SuperLink listens, and which addresses mean it, as `flwr run` takes them. Without
    # them: what Flower's documentation says.
    from flwr.cli import constant as known

    # As above: the reader of the file, which writes one if there is none.
    from flwr.cli.flower_config import read_superlink_connection

    if not name and not _config_file().is_file():
        return Connection(known.LOCAL_CONTROL_API_ADDRESS, managed=True, supernodes=None)
    try:
        found = read_superlink_connection(name or None)
    except Exception:
        return None
    managed = found.address in (
        None,
        known.LOCAL_SUPERLINK_ADDRESS_MAGIC_VALUE,
        known.LOCAL_SUPERLINK_ADDRESS_MAGIC_VALUE_IN_MEMORY,
    )
    supernodes = found.options.num_supernodes if found.options else None
    return Connection(known.LOCAL_CONTROL_API_ADDRESS if managed else str(found.address), managed, supernodes)


def _config_file() -> Path:
    """Return where Flower's ``config.toml`` is, or would be."""
    # Its name. Without it and its folder: ``~/.flwr/config.toml``.
    from flwr.cli import constant as known

    # As above: FLWR_HOME, or its default.
    from flwr.supercore.utils import get_flwr_home

    return Path(get_flwr_home() / known.FLOWER_CONFIG_FILE)


def check_connection(name: str) -> None:
    """Check that Flower's ``config.toml`` has a SuperLink connection ``name``; an empty name is not looked for.

    Raises:
        ConfigError: it has others; names them.
    """
    # The reader of the file, which writes one if there is none. Without it: `flwr run` says that there is no such
    # connection, but not which there are.
    from flwr.cli.flower_config import read_flower_config

    if not name:
        return
    if not _config_file().is_file():
        raise ConfigError(f"SuperLink connection {name!r}: there is no {_config_file()} that says where it is")
    try:
        content, file = read_flower_config()
    except Exception:
        return  # `flwr run` says what is wrong with it
    names = [key for key, value in content.get("superlink", {}).items() if isinstance(value, dict)]
    wrong = one_of(name, names)
    if wrong:
        raise ConfigError(f"SuperLink connection {name!r}: {wrong}, those in {file}")


def default_supernodes(connection: Connection) -> int:
    """Return how many clients a simulation has whose ``--federation-config`` does not say it.

    That is the number of the connection, or else the one set at the SuperLink by ``flwr federation simulation-config``,
    or else, such as without a SuperLink, Flower's default.
    """
    # Its default number. Without it: 10.
    from flwr.supercore.constant import DEFAULT_SIMULATION_CONFIG

    if connection.supernodes is not None:
        return connection.supernodes
    configured = _configured_supernodes(connection.address) if connection.loopback else None
    return configured or int(DEFAULT_SIMULATION_CONFIG.num_supernodes)


def _configured_supernodes(address: str) -> int | None:
    import grpc

    # As `flwr federation show` asks the Control API: the request. Without this and the two below the default is known.
    from flwr.proto.control_pb2 import ShowFederationRequest

    # As above: the client of the API.
    from flwr.proto.control_pb2_grpc import ControlStub

    # As above: the name of the one federation that a SuperLink without accounts has.
    from flwr.supercore.constant import NOOP_FEDERATION

    # On this machine, which no proxy can reach.
    channel = grpc.insecure_channel(address, [DIRECT])
    try:
        request = ShowFederationRequest(federation_name=NOOP_FEDERATION)
        config = ControlStub(channel).ShowFederation(request, timeout=1.0).federation.config
        return config.num_supernodes if config.HasField("num_supernodes") else None
    except grpc.RpcError:
        return None
    finally:
        channel.close()
