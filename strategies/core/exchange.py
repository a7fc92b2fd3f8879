"""Messages out, replies in: one at a time, in the order of the messages, as they arrive."""

import sys
import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

from flwr.app import Message
from flwr.serverapp import Grid

# Messages on their way at a time in simulation: at least, and for each CPU. Flower's engine looks through all of them
# for each one that it hands out, so few are better; but it looks every 0.1 s only, so they must last that long.
_LEAST, _FOR_A_CPU = 64, 4


def in_simulation(grid: Grid) -> bool:
    """Return whether ``grid`` is that of Flower's simulation, where clients run on the user's own machine."""
    return type(grid).__name__ == "InMemoryGrid"


def find_by_node(grid: Grid) -> None:
    """Make the simulation engine look for messages only where some are waiting.

    The thread that hands messages to the actors asks Flower's state for each node in turn, which goes through all
    messages of all nodes each time: with 1,000 clients that took more time than the clients. Here a node is only asked
    for when it has a message that was not handed out.
    """
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


def in_flight() -> int:
    """Return how many messages are on their way at a time in a simulation, enough for all machines of its Ray."""
    ray: Any = sys.modules.get("ray")
    cpus = ray.cluster_resources().get("CPU", 0) if ray and ray.is_initialized() else 0
    return max(_LEAST, _FOR_A_CPU * int(cpus))


def send_and_receive(grid: Grid, messages: Iterable[Message], timeout: float) -> Iterator[Message]:
    """Send ``messages`` and yield each reply, in the order of the messages, so that folding them is deterministic.

    Only the next reply is fetched; later ones that are there already wait where they are and take no memory here. In
    simulation a message is sent when one of those before it is answered, so that only some are on their way. An error
    that Flower reports for a message, such as a node that went away, comes as a reply of the node.

    Args:
        grid: Flower's grid.
        messages: what is sent; taken when there is room on the way, on real nodes all at once.
        timeout: seconds from now after which no reply is waited for; those that are there by then are still yielded.
    """
    simulated = in_simulation(grid)
    pause, ahead = (0.01, in_flight()) if simulated else (0.1, None)
    deadline = time.monotonic() + timeout
    unsent = iter(messages)
    sent = _push(grid, islice(unsent, ahead))
    while sent:
        message, message_id = sent.popleft()
        while message_id:
            late = time.monotonic() >= deadline
            reply = next(iter(grid.pull_messages([message_id])), None)
            there = reply is not None
            if reply is not None:
                yield Message(reply.error, reply_to=message) if reply.has_error() else reply
            del reply
            if there or late:
                break
            time.sleep(pause)
        if time.monotonic() < deadline:
            sent += _push(grid, islice(unsent, 1))


def _push(grid: Grid, messages: Iterable[Message]) -> deque[tuple[Message, str]]:
    """Send messages and return each with its id."""
    pushed = list(messages)
    return deque(zip(pushed, grid.push_messages(pushed), strict=True) if pushed else ())
