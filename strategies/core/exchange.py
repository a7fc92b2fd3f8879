"""Send messages and yield the replies one at a time, in the order of the messages."""

import time
from collections import deque
from collections.abc import Iterable, Iterator
from itertools import islice

from flwr.app import Message
from flwr.serverapp import Grid

from common.flower import answer_to, check_simulation, is_simulated, push, unreadable
from common.simulation import LocalGrid, all_cpus

# Messages in flight at a time in simulation: at least, and for each CPU. Flower's engine scans all of them for each one
# that it hands out, so few are better; but it does so only every 0.1 s, so they must last that long.
_LEAST, _FOR_A_CPU = 64, 4


def in_flight() -> int:
    """Return how many messages are in flight at a time in a simulation, by the CPUs of its whole Ray cluster."""
    return max(_LEAST, _FOR_A_CPU * all_cpus())


def send_and_receive(grid: Grid, messages: Iterable[Message], timeout: float) -> Iterator[Message]:
    """Send ``messages`` and yield each reply, in the order of the messages, so that folding them is deterministic.

    Only the next reply is fetched; later ones that have arrived stay with Flower until their turn. In simulation a
    message is sent when an earlier one is answered, so that few are in flight. An error that Flower reports for a
    message, such as a node that disconnected, is yielded as a reply of the node. The client of a
    reply follows from the message, not from what the reply claims.

    Args:
        grid: Flower's grid.
        messages: sent as earlier ones are answered, to real nodes all at once.
        timeout: seconds to wait for replies; those that have arrived by then are still yielded.

    Raises:
        FloretError: Flower's simulation has ended, or a part of it.
    """
    simulated = is_simulated(grid)
    pause, ahead = (0.01, in_flight()) if simulated else (0.1, None)
    wait = grid.wait if isinstance(grid, LocalGrid) else time.sleep
    deadline = time.monotonic() + timeout
    unsent = iter(messages)
    sent = _push(grid, islice(unsent, ahead))
    given_up: list[str] = []
    try:
        while sent:
            message, message_id = sent.popleft()
            if not message_id:
                yield unreadable(message, "its node left before it was asked")
            while message_id:
                late = time.monotonic() >= deadline
                reply = next(iter(grid.pull_messages([message_id])), None)
                if simulated and not isinstance(grid, LocalGrid):
                    check_simulation(reply)
                arrived = reply is not None
                if reply is not None:
                    yield answer_to(message, reply)
                del reply
                if arrived:
                    break
                if late:
                    given_up.append(message_id)
                    break
                wait(pause)
            if time.monotonic() < deadline:
                sent += _push(grid, islice(unsent, 1))
    finally:
        if isinstance(grid, LocalGrid):
            # Else clients would go on with them in the next round, and not with its own.
            grid.forget([*given_up, *(message_id for _, message_id in sent)])


def _push(grid: Grid, messages: Iterable[Message]) -> deque[tuple[Message, str]]:
    """Send messages and return each with its id."""
    pushed = list(messages)
    return deque(zip(pushed, push(grid, pushed), strict=True) if pushed else ())
