"""Data on the run as a whole that every message carries, and who is told of the messages."""

from dataclasses import dataclass
from typing import Protocol

from common.config import Scalar


@dataclass
class Session:
    """The run as its clients know it.

    Attributes:
        lineage: names the run and all runs that resume it.
        directory: where the clients of a simulation keep their states; empty for real nodes, which use their own
            config.
        checkpointed: the last round that the server can go back to.
        resumed: the rounds after which the run was resumed, in order.
    """

    lineage: str
    directory: str = ""
    checkpointed: int = 0
    resumed: tuple[int, ...] = ()

    def scalars(self) -> dict[str, Scalar | list[int]]:
        """Return the entries of each message's config."""
        return {
            "session.lineage": self.lineage,
            "session.directory": self.directory,
            "session.checkpointed": self.checkpointed,
            "session.resumed": list(self.resumed),
        }


class Watcher(Protocol):
    """Whoever shows what a round waits for."""

    def asked(self, client: str) -> None:
        """Note that ``client`` is sent a message."""

    def answered(self, client: str) -> None:
        """Note that the answer of ``client`` was read."""
