"""Filters: what a client sends, what it receives and what the server aggregates passes them in a row."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from common.tensors import NamedArrays


@dataclass(frozen=True)
class Payload:
    """The content of one message or reply.

    Attributes:
        kind: ``"train"``, ``"evaluate"`` or ``"plan"``.
        client: the name of the client that sends or receives it.
        round: the message's round.
        tensors: by name, before they are packed.
        samples: how many the client trained or tested on; 0 in what it receives.
        scalars: what else is in it: of a reply the metrics, or the answer to a question; of a message its config.
    """

    kind: str
    client: str
    round: int
    tensors: NamedArrays
    samples: int
    scalars: dict[str, Any]


# Returns what goes on, the same or another one; raises FloretError to refuse it, with the reason.
Filter = Callable[[Payload], Payload]


@dataclass(frozen=True)
class ClientFilters:
    """The filters of a client, in order.

    Attributes:
        sends: what leaves passes them after ``upload`` and before the state is committed: a refusal changes nothing.
        receives: what came passes them before ``receive``.
    """

    sends: tuple[Filter, ...] = ()
    receives: tuple[Filter, ...] = ()


def filtered(payload: Payload, filters: Iterable[Filter]) -> Payload:
    """Return what comes out of the last filter.

    Raises:
        FloretError: a filter refuses it.
    """
    for step in filters:
        payload = step(payload)
    return payload
