"""Messages out, replies in: one at a time, in the order of the messages, as they arrive."""

import time
from collections.abc import Iterable, Iterator

from flwr.app import Message
from flwr.serverapp import Grid


def in_simulation(grid: Grid) -> bool:
    """Return whether ``grid`` is that of Flower's simulation, where clients run on the user's own machine."""
    return type(grid).__name__ == "InMemoryGrid"


def exchange(grid: Grid, messages: Iterable[Message], timeout: float) -> Iterator[Message]:
    """Send ``messages`` and yield each reply, in the order of the messages, so that folding them is deterministic.

    Only the next reply is fetched; later ones that are there already wait where they are and take no memory here. An
    error that Flower reports for a message, such as a node that went away, comes as a reply of the node.

    Args:
        grid: Flower's grid.
        messages: what is sent.
        timeout: seconds from now after which no reply is waited for; those that are there by then are still yielded.
    """
    pause = 0.01 if in_simulation(grid) else 0.1
    sent = list(messages)
    ids = list(grid.push_messages(sent))
    deadline = time.monotonic() + timeout
    for message, message_id in zip(sent, ids, strict=True):
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
