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

    Only the next reply is fetched; later ones that are there already wait where they are and take no memory here.

    Args:
        grid: Flower's grid.
        messages: what is sent.
        timeout: seconds from now after which no reply is waited for; those that are there by then are still yielded.
    """
    pause = 0.01 if in_simulation(grid) else 0.2
    ids = list(grid.push_messages(messages))
    deadline = time.monotonic() + timeout
    for message_id in ids:
        while True:
            late = time.monotonic() >= deadline
            replies = list(grid.pull_messages([message_id]))
            yield from replies
            if replies or late:
                break
            time.sleep(pause)
