"""What a run is doing right now: ``status.json`` in its directory, for whoever watches (``results.watch``).

The server says it while the run goes and takes the file away at the end; a run that was killed leaves it behind.
"""

import json
import logging
import math
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Self

from common.durable import read_plain, write_whole
from common.errors import printable
from results.history import Json, whole

log = logging.getLogger("flwr")

FILE = "status.json"
_LARGEST = 2**24
# Names of clients that are told, of those that have not answered: the file stays small whatever the federation.
MOST_NAMES = 20
# Seconds between two writes.
_PAUSE = 0.5


@dataclass(frozen=True)
class Status:
    """What a run is doing. Times are seconds since 1970 by the server's clock.

    Attributes:
        method, dataset: of the run.
        planned: the number of rounds that the config asks for.
        round: the present one; 0 before the first.
        phase: such as ``training``.
        since: when the phase began.
        began: when the round began.
        clients: how many the phase waits for in all; 0 if nobody, or if that is not known.
        asked: clients that were sent a message in this phase.
        answered: clients whose answers were read in this phase.
        waiting: names of clients that were sent a message whose answer has not been read, ``MOST_NAMES`` at most, in
            the order in which answers are read: the run waits for the first of them, the others may have answered.
        waiting_since: since when the run waits for the first of them; None if there is none.
    """

    method: str
    dataset: str
    planned: int
    round: int
    phase: str
    since: float
    began: float
    clients: int = 0
    asked: int = 0
    answered: int = 0
    waiting: tuple[str, ...] = ()
    waiting_since: float | None = None

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Self:
        """Read what ``to_json`` returned.

        Raises:
            ValueError, TypeError, KeyError, AttributeError: it is something else.
        """
        since = record["waiting_since"]
        return cls(
            method=printable(record["method"]),
            dataset=printable(record["dataset"]),
            planned=whole(record["planned"]),
            round=whole(record["round"]),
            phase=printable(record["phase"]),
            since=_seconds(record["since"]),
            began=_seconds(record["began"]),
            clients=whole(record["clients"]),
            asked=whole(record["asked"]),
            answered=whole(record["answered"]),
            waiting=tuple(printable(name) for name in list(record["waiting"])[:MOST_NAMES]),
            waiting_since=None if since is None else _seconds(since),
        )

    def to_json(self) -> Json:
        """Return the content of ``status.json``."""
        return asdict(self)


def read_status(directory: Path) -> Status | None:
    """Return what the run in ``directory`` said last; None if it says nothing, as runs of earlier versions do."""
    try:
        return Status.from_json(json.loads(read_plain(directory / FILE, _LARGEST)))
    except (OSError, ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
        return None


def _seconds(value: Any) -> float:
    seconds = float(value)
    if not math.isfinite(seconds):
        raise ValueError(f"{value} is no time")
    return seconds


class StatusWriter:
    """Keeps ``status.json`` up to date while it is open, and takes it away when it is closed.

    What changes is written by a thread, at most every ``_PAUSE`` seconds: no call waits for the disk, and a run with
    ten thousand clients or a hundred rounds a second writes no more than any other. A file that cannot be written is
    told once, in the log; the run goes on.

    Args:
        directory: of the run.
        method, dataset: of the run.
        planned: the number of rounds that the config asks for.
    """

    def __init__(self, directory: Path, method: str, dataset: str, planned: int) -> None:
        self._file = directory / FILE
        self._about = (method, dataset, planned)
        self._lock, self._closed = threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._keep_writing, name="status", daemon=True)
        self._dirty = True
        self._round, self._phase, self._began = 0, "starting", time.time()
        self._since, self._clients, self._asked, self._answered = self._began, 0, 0, 0
        self._waiting: dict[str, None] = {}
        self._waiting_since = self._began

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()
        # A disk that hangs does not keep the run from ending.
        self._thread.join(5)

    def round(self, number: int) -> None:
        """Note that round ``number`` begins."""
        with self._lock:
            self._round, self._began = number, time.time()

    def phase(self, name: str, clients: int = 0) -> None:
        """Note that the run begins to do ``name``, for which so many ``clients`` have to answer; 0: not known."""
        with self._lock:
            self._phase, self._since = name, time.time()
            self._clients, self._asked, self._answered = clients, 0, 0
            self._waiting.clear()
            self._dirty = True

    def gathering(self, here: int, wanted: int) -> None:
        """Note that ``here`` of the ``wanted`` clients have joined."""
        with self._lock:
            if (self._answered, self._clients) != (here, wanted):
                self._answered, self._clients, self._dirty = here, wanted, True

    def asked(self, client: str) -> None:
        """Note that ``client`` is sent a message."""
        with self._lock:
            if not self._waiting:
                self._waiting_since = time.time()
            self._waiting[client] = None
            self._asked += 1
            self._dirty = True

    def answered(self, client: str) -> None:
        """Note that the answer of ``client`` was read."""
        with self._lock:
            self._waiting.pop(client, None)
            self._waiting_since = time.time()
            self._answered += 1
            self._dirty = True

    def now(self) -> Status:
        """Return what was noted last."""
        with self._lock:
            return Status(
                *self._about,
                self._round,
                self._phase,
                self._since,
                self._began,
                self._clients,
                self._asked,
                self._answered,
                tuple(islice(self._waiting, MOST_NAMES)),
                self._waiting_since if self._waiting else None,
            )

    def _keep_writing(self) -> None:
        told = False
        while True:
            if self._dirty:
                self._dirty = False
                try:
                    write_whole(self._file, json.dumps(self.now().to_json()).encode(), sync=False)
                except OSError as error:
                    if not told:
                        log.warning("%s cannot be written (%s); the run goes on", self._file, error.strerror)
                    told = True
            if self._closed.wait(_PAUSE):
                break
        try:
            self._file.unlink(missing_ok=True)
        except OSError:
            log.warning("%s cannot be removed", self._file)
