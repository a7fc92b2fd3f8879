"""Data on the run as a whole, most of which every message carries, and who is told of the messages."""

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from common.config import Scalar
from common.starts import Start


@dataclass
class Session:
    """The run as its clients know it.

    Attributes:
        lineage: names the run and all runs that resume it.
        directory: where the clients of a simulation keep their states; empty for real nodes, which use their own
            config.
        checkpointed: the last round that the server can go back to.
        resumed: the rounds after which the run was resumed, in order; of those that came to this state alone.
        starts: all starts of its server, also those that got no further than to a round that was made again; the
            present one last.
        run_directory: the server's own, which no message carries; None where there is none.
    """

    lineage: str
    directory: str = ""
    checkpointed: int = 0
    resumed: tuple[int, ...] = ()
    starts: tuple[Start, ...] = ()
    run_directory: Path | None = None

    def scalars(self) -> dict[str, Scalar | list[int] | list[str]]:
        """Return the entries of each message's config."""
        return {
            "session.lineage": self.lineage,
            "session.directory": self.directory,
            "session.checkpointed": self.checkpointed,
            "session.resumed": list(self.resumed),
            "session.starts": [start.name for start in self.starts],
            "session.started": [start.after for start in self.starts],
        }


class Watcher(Protocol):
    """Whoever shows what a round waits for."""

    def asked(self, client: str) -> None:
        """Note that ``client`` is sent a message."""

    def answered(self, client: str) -> None:
        """Note that the answer of ``client`` was read."""
