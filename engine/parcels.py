"""What goes between the server's process and a worker, which are forks of one: pickled, and never from elsewhere."""

import pickle
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict

from common.simulation import KeptState

_KINDS = {"arrays": ArrayRecord, "config": ConfigRecord, "metrics": MetricRecord}

# Of a record its kind and content; of arrays that several clients get, the kind "shared" and their number.
Parts = dict[str, tuple[str, Any]]


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
    shared: dict[int, Any] = field(default_factory=dict)
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


def parts_of(content: RecordDict, shared: Mapping[int, int] | None = None) -> Parts:
    """Return the records of a message.

    Args:
        content: of the message.
        shared: numbers of arrays that travel by themselves, by the ``id`` of their record.
    """
    parts: Parts = {}
    for name, record in content.items():
        if isinstance(record, ArrayRecord):
            known = shared.get(id(record)) if shared else None
            parts[name] = ("arrays", arrays_of(record)) if known is None else ("shared", known)
        else:
            parts[name] = ("config" if isinstance(record, ConfigRecord) else "metrics", dict(record))
    return parts


def content_of(parts: Parts, shared: Mapping[int, ArrayRecord]) -> RecordDict:
    """Return the records that ``parts_of`` took apart."""
    content = RecordDict()
    for name, (kind, value) in parts.items():
        if kind == "shared":
            content[name] = shared[value]
        else:
            content[name] = record_of(value) if kind == "arrays" else _KINDS[kind](value)
    return content


def arrays_of(record: ArrayRecord) -> list[tuple[str, str, tuple[int, ...], str, bytes]]:
    """Return the arrays of a record."""
    return [(name, array.dtype, array.shape, array.stype, array.data) for name, array in record.items()]


def record_of(arrays: list[tuple[str, str, tuple[int, ...], str, bytes]]) -> ArrayRecord:
    """Return the record that ``arrays_of`` took apart."""
    return ArrayRecord({name: Array(dtype, shape, stype, data) for name, dtype, shape, stype, data in arrays})
