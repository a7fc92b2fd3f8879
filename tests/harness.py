"""A federation in this process: the real ServerApp and ClientApp, Flower's messages, a grid that delivers at once."""

import itertools
import json
import shutil
import tempfile
import uuid
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from flwr.app import ArrayRecord, Context, Message, RecordDict
from flwr.serverapp import Grid
from torch import Tensor

from client_app.app import Request
from client_app.app import app as client_app
from client_app.state import ClientState, RoundContext
from common.errors import FloretError
from common.run_config import default_config
from common.tensors import NamedArrays
from server_app.app import run
from server_app.checkpoint import Checkpoints
from strategies import METHODS

_run_ids = itertools.count(1)
ROOT = Path(__file__).resolve().parents[1]

# What a method needs on the default model, which has no convolutional stage to distil, and to learn in few rounds.
ON_MLP: dict[str, dict[str, Any]] = {"fedcpd": {"fedcpd__distill": False}, "pfedme": {"pfedme__local_lr": 0.05}}

# Methods that together use all that a method can: an aggregate, what clients remember, messages of peers, a second
# network and prototypes. Tests of every method try these among the first, and the rest among the thorough ones.
FIRST = ("ua-pdfl", "fedcpd")
EVERY_METHOD = [method if method in FIRST else pytest.param(method, marks=pytest.mark.thorough) for method in METHODS]

# Two rounds of two epochs: what comes again is there, and no more.
FEW: dict[str, Any] = {"rounds": 2, "local_epochs": 2}

# Tensors of the model of the default config, and how many values they have.
SHAPES = {
    "extractor.fc1.weight": (128, 64),
    "extractor.fc1.bias": (128,),
    "extractor.fc2.weight": (64, 128),
    "extractor.fc2.bias": (64,),
    "head.weight": (10, 64),
    "head.bias": (10,),
}
EXTRACTOR = (64 * 128 + 128) + (128 * 64 + 64)
HEAD = 64 * 10 + 10
MODEL_SIZE = EXTRACTOR + HEAD

# How a test stands between a client and the server: from the message and the reply to the reply that arrives, or None.
Tamper = Callable[[Message, Message], Message | None]


def copy_app(app: Path) -> Path:
    """Copy the app of this checkout to ``app``, without what lies beside it, and return ``app``.

    ``flwr run`` looks at every file in the app's folder; those of a virtual environment take it five seconds.
    """

    def beside(folder: str, names: list[str]) -> list[str]:
        # A lock of git that another process has just now is gone before it is copied.
        hidden = (name for name in names if name.startswith(".") and name != ".git")
        return [*hidden, *(name for name in names if name == "__pycache__" or name.endswith(".lock"))]

    return Path(shutil.copytree(ROOT, app, ignore=beside))


class DirectGrid(Grid):
    """Delivers each message to the ClientApp of its node when it is pushed, and keeps the replies until pulled.

    Args:
        run_config: what ``context.run_config`` says on every node.
        clients: number of nodes; node ids are 1000, 1001, ...
        states: the ``state-dir`` of all of them.
        backwards: deliver the messages of a push in reverse order.
        tamper: applied to every reply.
    """

    def __init__(
        self,
        run_config: dict[str, Any],
        clients: int,
        states: Path,
        *,
        backwards: bool = False,
        tamper: Tamper | None = None,
    ) -> None:
        self.backwards = backwards
        self.tamper = tamper
        self.messages: list[Message] = []
        self._replies: dict[str, Message] = {}
        self.contexts = {
            1000 + i: Context(
                run_id=1,
                node_id=1000 + i,
                node_config={
                    "partition-id": i,
                    "num-partitions": clients,
                    "state-dir": str(states),
                    **({"data-dir": str(run_config["data-dir"])} if run_config["data-dir"] else {}),
                },
                state=RecordDict(),
                run_config=run_config,
            )
            for i in range(clients)
        }

    def set_run(self, run: Any) -> None:
        raise AssertionError("no app calls this")

    @property
    def run(self) -> Any:
        raise AssertionError("no app calls this")

    def create_message(self, *_: Any, **__: Any) -> Message:
        raise AssertionError("deprecated in Flower")

    def send_and_receive(self, *_: Any, **__: Any) -> Iterable[Message]:
        raise AssertionError("gathers all replies; the app must not use it")

    def get_node_ids(self) -> Iterable[int]:
        return list(self.contexts)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        pushed = list(messages)
        for message in pushed:
            message.metadata.__dict__["_message_id"] = str(uuid.uuid4())
            self.messages.append(message)
        for message in reversed(pushed) if self.backwards else pushed:
            reply: Message | None = client_app(message, self.contexts[message.metadata.dst_node_id])
            if self.tamper and reply is not None:
                reply = self.tamper(message, reply)
            if reply is not None:
                self._replies[message.metadata.message_id] = reply
        return [message.metadata.message_id for message in pushed]

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        return [self._replies.pop(i) for i in message_ids if i in self._replies]


def without_the_first_after_two_rounds(grid: DirectGrid) -> list[int]:
    """Return the nodes that are there, in the place of ``DirectGrid.get_node_ids``: a client goes away."""
    rounds = {message.metadata.group_id for message in grid.messages if message.metadata.message_type == "train"}
    return [node for node in grid.contexts if node != 1000 or len(rounds) < 2]


@dataclass(frozen=True)
class Outcome:
    """What a run left behind."""

    directory: Path
    history: list[dict[str, Any]]
    summary: dict[str, Any]
    grid: DirectGrid


def run_config(output: Path, **keys: Any) -> dict[str, Any]:
    """Return the defaults with ``keys`` in place: ``lr_decay`` for ``lr-decay``, ``pfakd__beta`` for ``pfakd.beta``."""
    values = default_config(ROOT)
    for name, value in keys.items():
        key = name.replace("__", ".").replace("_", "-")
        assert key in values, key
        values[key] = value
    return values | {"output-dir": str(output)}


def kept(context: Context, at: RoundContext | None = None) -> ClientState:
    """Return what the client of a node keeps."""
    return ClientState(Request(context).store, at)


def standing(context: Context, message: Message) -> Any:
    """Return the client of a node, with its newest state, as it is when it has taken ``message`` and done nothing."""
    client = Request(context).client()
    client.take("train", *Request(context, message).arguments(client))
    return client


def delivered_again(context: Context, message: Message) -> Any:
    """Return the client of a node, with its state of before the round of ``message``, when it has taken the message."""
    request = Request(context, message)
    client = request.client()
    client.take("train", *request.arguments(client))
    return client


def federate(
    output: Path,
    clients: int = 4,
    *,
    states: Path | None = None,
    backwards: bool = False,
    tamper: Tamper | None = None,
    report: bool = False,
    fails: str = "",
    **keys: Any,
) -> Outcome:
    """Run a whole federation with the default config but for ``keys``, and ``FEW`` unless said otherwise.

    Clients keep their states in ``states``, by default an empty folder of this run's own. The report is drawn only if
    the test looks at it: that takes longer than most runs. With ``fails`` the run must end with an error that this
    pattern matches.
    """
    run_id = next(_run_ids)
    values = run_config(output, **(FEW | keys))
    states = states or Path(tempfile.mkdtemp(prefix="states-", dir=output.parent))
    grid = DirectGrid(values, clients, states, backwards=backwards, tamper=tamper)
    before = folders(output)
    context = Context(run_id=run_id, node_id=0, node_config={}, state=RecordDict(), run_config=values)
    error = pytest.raises(FloretError, match=fails) if fails else nullcontext()
    with nullcontext() if report else patch("server_app.app.write_report"), error:
        run(grid, context)
    new = folders(output) - before
    directory = new.pop() if new else max(before) if keys["resume"] == "latest" else Path(keys["resume"])
    history = [json.loads(line) for line in (directory / "history.jsonl").read_text().splitlines()]
    return Outcome(directory, history, json.loads((directory / "summary.json").read_text()), grid)


def folders(output: Path) -> set[Path]:
    """Return the run directories; a tracker may have left a file beside them."""
    return {path for path in output.glob("*") if path.is_dir()}


def timeless(value: Any) -> Any:
    """Return a history without its times."""
    if isinstance(value, dict):
        return {key: timeless(item) for key, item in value.items() if key != "seconds"}
    return [timeless(item) for item in value] if isinstance(value, list) else value


def uploads(output: Path, clients: int = 4, **keys: Any) -> tuple[Outcome, list[ArrayRecord]]:
    """Return a run, and the record that each client sent in each round."""
    found: list[ArrayRecord] = []

    def tamper(message: Message, reply: Message) -> Message:
        if message.metadata.message_type == "train":
            found.append(ArrayRecord(dict(reply.content.array_records["arrays"])))
        return reply

    return federate(output, clients, tamper=tamper, **keys), found


def checkpointed(outcome: Outcome) -> NamedArrays:
    """Return the global tensors of a run's last checkpoint."""
    return Checkpoints(outcome.directory / "checkpoints").read()[0].arrays


def equal(one: NamedArrays, other: NamedArrays) -> bool:
    """Return whether both have the same tensors, bit for bit."""
    return one.keys() == other.keys() and all(np.array_equal(one[name], other[name]) for name in one)


def personal(outcome: Outcome) -> list[dict[str, Tensor]]:
    """Return what each client keeps after a run."""
    return [kept(context).load() for context in outcome.grid.contexts.values()]
