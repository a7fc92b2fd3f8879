"""Messages out, replies in: one at a time, in the order of the messages, as they arrive."""

import time
from collections import deque
from collections.abc import Iterable, Iterator
from itertools import islice

from flwr.app import Message
from flwr.serverapp import Grid

from common.flower import answer_to, in_simulation, is_simulated

# Messages on their way at a time in simulation: at least, and for each CPU. Flower's engine looks through all of them
# for each one that it hands out, so few are better; but it looks every 0.1 s only, so they must last that long.
_LEAST, _FOR_A_CPU = 64, 4


def in_flight() -> int:
    """Return how many messages are on their way at a time in a simulation, enough for all machines of its Ray."""
    if not in_simulation():
        return _LEAST
    import ray

    return max(_LEAST, _FOR_A_CPU * int(ray.cluster_resources().get("CPU", 0)))


def send_and_receive(grid: Grid, messages: Iterable[Message], timeout: float) -> Iterator[Message]:
    """Send ``messages`` and yield each reply, in the order of the messages, so that folding them is deterministic.

    Only the next reply is fetched; later ones that are there already wait where they are and take no memory here. In
    simulation a message is sent when one of those before it is answered, so that only some are on their way. An error
    that Flower reports for a message, such as a node that went away, comes as a reply of the node. Whose reply it is
    follows from the message, not from what the reply says.

    Args:
        grid: Flower's grid.
        messages: what is sent; taken when there is room on the way, on real nodes all at once.
        timeout: seconds from now after which no reply is waited for; those that are there by then are still yielded.
    """
    simulated = is_simulated(grid)
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
                yield answer_to(message, reply)
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
