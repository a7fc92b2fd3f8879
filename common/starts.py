"""The starts of a run's server: the first one, and one for each time that the run was resumed."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from common.errors import FloretError

# What the name of a start of the server may be, and how many starts a message may have.
_START, _STARTS = re.compile(r"[!-~]{0,100}"), 10_000


@dataclass(frozen=True)
class Start:
    """One start of the server of a run.

    Attributes:
        name: a random one, that no other start has; empty for one from before starts had names.
        after: the round of the checkpoint that it began with, 0 for a new run.
    """

    name: str
    after: int = 0


def starts_of(message: Mapping[str, Any]) -> tuple[Start, ...]:
    """Return the starts of the server that a message tells of, the present one last.

    Raises:
        FloretError: they are not what a server of Floret sends, or not what the message says beside them.
    """
    names, after, resumed = (message.get(f"session.{key}") for key in ("starts", "started", "resumed"))
    if not isinstance(names, list | tuple) or not all(isinstance(n, str) and _START.fullmatch(n) for n in names):
        raise FloretError(f"session.starts = {names!r:.60}: must be a list of names, without spaces")
    last = resumed[-1] if resumed else 0
    if (
        not isinstance(after, list | tuple)
        or not all(type(number) is int and number >= 0 for number in after)
        or not 1 <= len(names) == len(after) <= _STARTS
        or (after[0], after[-1]) != (0, last)
    ):
        raise FloretError(
            f"session.started = {after!r:.60}: must be a round for each of session.starts, from 0 to {last}, the round "
            "after which the server was resumed last"
        )
    return tuple(map(Start, names, after))
