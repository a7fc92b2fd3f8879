"""Messages to real nodes, sent again when a node was lost before it answered."""

import itertools
import logging
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from flwr.app import ConfigRecord, Message
from flwr.serverapp import Grid

from common.errors import FloretError
from common.flower import TEXTS, Answers, Bound, node_is_gone, push, unreadable
from common.tensors import Specs
from server_app.federation import Federation, question
from strategies.core import LEEWAY

log = logging.getLogger("flwr")

# Seconds between looks at who is connected, while a client does not answer.
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
        gone: Flower's error that the node is gone, and since when; or None.
        changed: the node was away since, or the client is at another one.
        answer: what came, pulled before it was asked for because the node had changed; or None.
    """

    message: Message
    name: str
    message_id: str
    node: int
    sent: float
    deadline: float
    probe: str = ""
    gone: tuple[Message, float] | None = None
    changed: bool = False
    answer: Message | None = None


def bound_of(sent: Specs) -> Bound:
    """Return what an answer may have whose tensors are the ones declared in ``sent``, and what stands beside them."""
    size = 2 * sum(spec.most_bytes for spec in sent.values()) + TEXTS.size
    return Bound(size, TEXTS.parts + 4 * len(sent) + size // 2**20)


class Delivery(Grid):
    """Flower's grid for real nodes; messages that a node lost when it was killed are sent again.

    Flower gives a message to a node once. A node that is started again has lost it, and without a registered key its id
    is new. So after ``patience`` seconds without an answer this grid checks whether the client is at another node, and
    sends a question after the message: a node handles messages one at a time and in order, so if the question is
    answered and the message is not, the message is lost. It is then sent again; a client may get a round's message
    twice without harm (see ``client_app.state``). A node that Flower reports as gone has ``return-timeout`` seconds to
    come back. Nothing is sent again after the round, ``LEEWAY`` seconds before a message expires.

    While it waits for one client, it does the same for every other whose node was away or replaced, and is there now.
    No other client gets a question, and their answers stay with Flower until they are asked for, because all of them
    may not fit into the server's memory.

    Args:
        grid: Flower's.
        federation: has the clients and the run config.
        bound: of each answer.
        patience: seconds before the first question.
    """

    def __init__(self, grid: Grid, federation: Federation, *, bound: Bound = TEXTS, patience: float = 10.0) -> None:
        self._grid = grid
        self._federation = federation
        self._patience = patience
        self._open: dict[str, _Open] = {}
        self._answers = Answers(grid, bound)
        self._looked = 0.0
        self._unsent = itertools.count()

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
        ids = push(self._grid, sent)
        self._open = {key: item for key, item in self._open.items() if item.deadline > now}
        self._answers.keep(key for item in self._open.values() for key in (item.message_id, item.probe))
        for place, message in enumerate(sent):
            node, ttl = message.metadata.dst_node_id, message.metadata.ttl
            # A client that is away has no node, so there is nobody to look for.
            if self._federation.roster.known(node):
                name = self._federation.roster.at(node).name
                item = _Open(message, name, ids[place], node, now, now + ttl)
                if not item.message_id:
                    item.gone = (unreadable(message, "its node left before it was asked"), now)
                    ids[place] = f"not sent, {next(self._unsent)}"
                self._open[ids[place]] = item
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
        reply = self._arrived(item, now)
        if reply is not None or now - self._looked < _LOOK:
            return reply
        self._looked = now
        self._federation.refresh()
        self._look_after_others(item, now)
        return self._look(item, now) if self._waits(item, now) else None

    def _arrived(self, item: _Open, now: float) -> Message | None:
        """Return the answer if it is there, and note whether the node is gone."""
        # The rest of an answer may come though its node was away in between.
        if item.answer is not None or (item.gone is not None and not self._answers.begun(item.message_id)):
            return item.answer
        reply = self._answer(item)
        if reply is None or not node_is_gone(reply):
            return reply
        item.gone = (reply, now)
        return None

    def _waits(self, item: _Open, now: float) -> bool:
        return item.gone is not None or now - item.sent >= self._patience

    def _look_after_others(self, awaited: _Open, now: float) -> None:
        """Look for the clients of other messages whose nodes have changed since, before it is their turn."""
        roster = self._federation.roster
        steady = {client.node_id for client in roster.present()} - roster.unsure
        for item in self._open.values():
            if item is awaited or item.answer is not None or item.deadline - now <= LEEWAY:
                continue
            item.changed |= item.node not in steady
            # Not while it is away: Flower gives up a message whose answer is asked for then.
            if item.changed and roster[item.name].node_id in steady and self._waits(item, now):
                # It may have answered before it was lost.
                item.answer = self._arrived(item, now)
                if item.answer is None:
                    item.answer = self._look(item, now)

    def _look(self, item: _Open, now: float) -> Message | None:
        """Send the message again if it is lost; return the answer if it is there, or why the node is given up."""
        roster = self._federation.roster
        client = roster[item.name]
        there = client in roster.present()
        if item.gone is None and client.node_id != item.node and not there:
            item.gone = (unreadable(item.message, "its node goes by another name now, or has other data"), now)
        if item.gone is None and not there and self._answers.begun(item.message_id):
            # Flower, which says that a node is gone in place of an answer, has said that there is one.
            item.gone = (unreadable(item.message, "its node went away while it sent its answer"), now)
        if item.gone is not None:
            reply, since = item.gone
            late = now - since >= self._federation.config.return_timeout
            begun = self._answers.begun(item.message_id)
            # A node that has come back may be another client now; one that is busy does not say it soon, such as with
            # the rest of its answer. When it has said it, the rest has come, or never will.
            if there and (client.node_id not in roster.unsure or (late and not begun)):
                answer = self._answer(item) if begun else None
                if answer is None:
                    self._resend(item, client.node_id, now)
                return answer
            return reply if late and not there else None
        if client.node_id != item.node:
            self._resend(item, client.node_id, now)
            return None
        return self._probe(item, now)

    def _late(self, message_id: str) -> Message | None:
        """Return the answer to a message that is out of time, if it is there and can be read."""
        try:
            return self._answers.pull(message_id)
        except FloretError:
            return None

    def _answer(self, item: _Open) -> Message | None:
        """Return the answer if it is there; one that cannot be read is an error of the node."""
        try:
            return self._answers.pull(item.message_id)
        except FloretError as error:
            return unreadable(item.message, str(error))

    def _probe(self, item: _Open, now: float) -> Message | None:
        """Send a question after the message, or, if it is answered and the message is not, the message again."""
        if not item.probe:
            config = ConfigRecord({**self._federation.run})
            probe = question(item.node, "describe", config, max(item.deadline - now, 1.0))
            (item.probe,) = push(self._grid, [probe])
            return None
        try:
            answer = self._answers.pull(item.probe)
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
        if left <= LEEWAY:
            return
        message = Message(old.content, node, old.metadata.message_type, ttl=left, group_id=old.metadata.group_id)
        (message_id,) = push(self._grid, [message])
        if not message_id:  # the node has just gone, which is seen next
            return
        item.message_id = message_id
        item.node, item.sent, item.probe, item.gone, item.changed = node, now, "", None, False
        kind = old.metadata.message_type
        log.warning("Client %s was started again: its %s message is sent again", item.name, kind)
