"""Messages to real nodes, sent again when a node was lost before it answered."""

import logging
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from flwr.app import ConfigRecord, Message
from flwr.serverapp import Grid

from common.errors import FloretError
from common.flower import node_is_gone, pull_one, unreadable
from server_app.federation import Federation, question

log = logging.getLogger("flwr")

# Seconds between checks on a client that does not answer.
_LOOK = 2.0


@dataclass
class _Open:
    """A message without an answer.

    Attributes:
        message: as it was sent first.
        name: of the client that it is for.
        message_id, node, sent: as it was sent last.
        deadline: when the answer is no longer waited for.
        probe: the id of the question sent after it, if there is one.
        looked: when the client was looked for last.
        gone: Flower's error that the node is gone, and since when; or None.
    """

    message: Message
    name: str
    message_id: str
    node: int
    sent: float
    deadline: float
    probe: str = ""
    looked: float = 0.0
    gone: tuple[Message, float] | None = None


class Delivery(Grid):
    """Flower's grid for real nodes; messages that a node lost when it was killed are sent again.

    Flower gives a message to a node once. A node that is started again has lost it, and without a registered key its id
    is new. So after ``patience`` seconds without an answer this grid checks whether the client is at another node, and
    sends a question after the message: a node handles messages one at a time and in order, so if the question is
    answered and the message is not, the message is lost. It is then sent again; a client may get a round's message
    twice without harm (see ``client_app.state``). A node that Flower reports as gone has ``return-timeout`` seconds to
    come back.

    Args:
        grid: Flower's.
        federation: has the clients and the run config.
        patience: seconds before the first question.
    """

    def __init__(self, grid: Grid, federation: Federation, *, patience: float = 10.0) -> None:
        self._grid = grid
        self._federation = federation
        self._patience = patience
        self._open: dict[str, _Open] = {}

    def set_run(self, run: Any) -> None:
        """Delegate to Flower's grid."""
        self._grid.set_run(run)

    @property
    def run(self) -> Any:
        """The run of Flower's grid."""
        return self._grid.run

    def create_message(self, *args: Any, **kwargs: Any) -> Message:
        """Delegate to Flower's grid."""
        return self._grid.create_message(*args, **kwargs)

    def get_node_ids(self) -> Iterable[int]:
        """Delegate to Flower's grid."""
        return self._grid.get_node_ids()

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        """Delegate to Flower's grid: nothing is sent again."""
        return self._grid.send_and_receive(messages, timeout=timeout)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Send messages and remember them until they are answered or out of time."""
        sent, now = list(messages), time.monotonic()
        ids = list(self._grid.push_messages(sent))
        self._open = {key: item for key, item in self._open.items() if item.deadline > now}
        for message, message_id in zip(sent, ids, strict=True):
            # A client that is away has no node, so there is nobody to look for.
            if message_id and self._federation.roster.known(message.metadata.dst_node_id):
                node, ttl = message.metadata.dst_node_id, message.metadata.ttl
                name = self._federation.roster.at(node).name
                self._open[message_id] = _Open(message, name, message_id, node, now, now + ttl)
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Return the answers that have arrived; ids are those that ``push_messages`` returned."""
        replies = []
        for key in message_ids:
            item = self._open.get(key)
            reply = self._pull(item) if item else self._late(key)
            if reply is not None:
                self._open.pop(key, None)
                replies.append(reply)
        return replies

    def _pull(self, item: _Open) -> Message | None:
        now = time.monotonic()
        if item.gone is None:
            reply = self._answer(item)
            if reply is not None and not node_is_gone(reply):
                return reply
            if reply is not None:
                item.gone = (reply, now)
        waits = item.gone is not None or now - item.sent >= self._patience
        if not waits or now - item.looked < _LOOK:
            return None
        item.looked = now
        self._federation.refresh()
        roster = self._federation.roster
        client = roster[item.name]
        there = client in roster.present()
        if item.gone is None and client.node_id != item.node and not there:
            item.gone = (unreadable(item.message, "its node goes by another name now, or has other data"), now)
        if item.gone is not None:
            reply, since = item.gone
            late = now - since >= self._federation.config.return_timeout
            # A node that has come back may be another client now; one that is busy does not say it soon.
            if there and (late or client.node_id not in roster.unsure):
                self._resend(item, client.node_id, now)
            elif late:
                return reply
            return None
        if client.node_id != item.node:
            self._resend(item, client.node_id, now)
            return None
        return self._probe(item, now)

    def _late(self, message_id: str) -> Message | None:
        """Return the answer to a message that is out of time, if it is there and can be read."""
        try:
            return pull_one(self._grid, message_id)
        except FloretError:
            return None

    def _answer(self, item: _Open) -> Message | None:
        """Return the answer if it is there; one that cannot be read is an error of the node."""
        try:
            return pull_one(self._grid, item.message_id)
        except FloretError as error:
            return unreadable(item.message, str(error))

    def _probe(self, item: _Open, now: float) -> Message | None:
        """Send a question after the message, or, if it is answered and the message is not, the message again."""
        if not item.probe:
            probe = question(item.node, "describe", ConfigRecord(), max(item.deadline - now, 1.0))
            item.probe = next(iter(self._grid.push_messages([probe]))) or ""
            return None
        try:
            answer = pull_one(self._grid, item.probe)
        except FloretError:
            item.probe = ""
            return None
        if answer is None:
            return None
        item.probe = ""
        if answer.has_error():
            return None
        reply = self._answer(item)
        if reply is None:
            self._resend(item, item.node, now)
        return reply

    def _resend(self, item: _Open, node: int, now: float) -> None:
        old, left = item.message, item.deadline - now
        if left <= 0:
            return
        message = Message(old.content, node, old.metadata.message_type, ttl=left, group_id=old.metadata.group_id)
        item.message_id = next(iter(self._grid.push_messages([message]))) or item.message_id
        item.node, item.sent, item.probe, item.gone = node, now, "", None
        kind = old.metadata.message_type
        log.warning("Client %s was started again: its %s message is sent again", item.name, kind)
