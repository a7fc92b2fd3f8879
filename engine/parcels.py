"""What goes between the server's process and a worker, which are forks of one: pickled, and never from elsewhere."""

import pickle
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, MetricRecord, RecordDict

from common.simulation import KeptState


@dataclass(frozen=True)
class Shared:
    """Stands for arrays that several clients get: their number."""

    number: int


# The records of a message by name. They are pickled as they are: to make them anew, Flower would check them again.
Parts = dict[str, ArrayRecord | ConfigRecord | MetricRecord | Shared]


@dataclass(frozen=True)
class Task:
    """A message to a client.

    Attributes:
        number: of the message.
        client: from 0.
        kind, group: type of the message, and its round.
        ttl: seconds that it is good for.
        parts: its records by name.
        state: what the client kept.
    """

    number: int
    client: int
    kind: str
    group: str
    ttl: float
    parts: Parts
    state: KeptState | None


@dataclass(frozen=True)
class Batch:
    """Tasks for one worker, with the shared arrays that it does not have yet, and those that it needs no more."""

    tasks: list[Task]
    shared: dict[int, ArrayRecord] = field(default_factory=dict)
    forget: tuple[int, ...] = ()


@dataclass(frozen=True)
class Answer:
    """What a client answered to a message; ``state`` if it keeps something else now; ``seconds`` that it took."""

    number: int
    parts: Parts
    state: KeptState | None
    seconds: float


@dataclass(frozen=True)
class Line:
    """A line for the log."""

    level: int
    text: str


def to_bytes(thing: Batch | Answer | Line) -> bytes:
    """Return it as bytes."""
    return pickle.dumps(thing, pickle.HIGHEST_PROTOCOL)


def from_bytes(content: bytes) -> Any:
    """Return what ``to_bytes`` was given, by a fork of this process's parent."""
    return pickle.loads(content)


def content_of(parts: Parts, shared: Mapping[int, ArrayRecord]) -> RecordDict:
    """Return the records of a message, with those that are ``shared`` in their place."""
    return RecordDict({name: shared[part.number] if isinstance(part, Shared) else part for name, part in parts.items()})
