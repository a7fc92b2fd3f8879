"""What a client has spent: a file that only grows, in the state directory of its node.

``.privacy/<client>.jsonl`` has a line of JSON for each release, written and flushed to the disk before anything leaves
the device. A line has the SHA-256 sum of the line before it, and ``.privacy/<client>.json`` the number of lines and the
sum of the last one: a ledger that was cut short, put back from a copy or changed is found out, and nothing more is
released on it. Nothing in it depends on a clock.
"""

import fcntl
import json
import math
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

from common.durable import DamagedError, digest, make_folder, open_file, read_manifest, write_manifest
from common.errors import FloretError
from common.privacy.accounting import Release, epsilon_of, epsilon_of_example

FOLDER = ".privacy"
# The folder in it of the clients that answered runs without privacy, a file for each.
UNPROTECTED = "unprotected"
_FIRST = "0" * 64
_BEFORE = "before"


@dataclass(frozen=True)
class Line:
    """What was released in one round, or is paid for in advance.

    Attributes:
        run: the lineage of the run.
        attempt: how often that run was resumed before.
        start: the name of the start of the server that it is paid for, where a run is paid for in advance; empty
            elsewhere, and in lines from before starts had names.
        federation, method, round: of the run.
        unit: whom the releases protect, ``"example"`` or ``"client"``.
        by_server: the noise is the server's, as it says.
        noise, rate, steps: as of ``Release``.
        count: the noised number of examples, if it is what was released.
    """

    run: str
    attempt: int
    federation: str
    method: str
    round: int
    unit: str
    by_server: bool
    noise: float
    rate: float
    steps: int
    count: float | None = None
    start: str = ""

    @property
    def release(self) -> Release:
        """What is composed."""
        return Release(self.noise, self.rate, self.steps)


class Ledger:
    """A ledger; ``path`` ends in ``.jsonl``, and what belongs to it stands beside it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._head = path.with_suffix(".json")

    @classmethod
    def of(cls, state_dir: Path, client: str) -> Self:
        """Return the ledger of a client on a node."""
        return cls(state_dir / FOLDER / f"{client}.jsonl")

    def lines(self) -> list[Line]:
        """Return all lines; none if there is no ledger.

        Raises:
            DamagedError: it is not what was written.
        """
        if not self.path.exists() and not self._head.exists():
            return []
        with self._locked(fcntl.LOCK_SH):
            return [line for line, _ in self._read()]

    @contextmanager
    def open(self) -> Iterator["OpenLedger"]:
        """Give the ledger, to be added to, while no other process can have it.

        Raises:
            FloretError: it cannot be written.
            DamagedError: it is not what was written.
        """
        with self._locked(fcntl.LOCK_EX):
            yield OpenLedger(self.path, self._head, self._read())

    @contextmanager
    def _locked(self, kind: int) -> Iterator[None]:
        try:
            make_folder(self.path.parent, private=True)
            lock = open_file(self.path.with_suffix(".lock"), "ab", private=True)
        except OSError as error:
            raise FloretError(f"{self.path} cannot be written ({error.strerror})") from error
        with lock:
            fcntl.flock(lock, kind)
            yield

    def _read(self) -> list[tuple[Line, str]]:
        """Return the lines, each with its checksum; what a crash left of a line that was never paid with is cut off."""
        try:
            content = self.path.read_bytes() if self.path.exists() else b""
        except OSError as error:
            raise DamagedError(f"{self.path} cannot be read ({error.strerror})") from error
        whole, _, _ = content.rpartition(b"\n")
        found: list[tuple[Line, str]] = []
        for number, text in enumerate(whole.split(b"\n") if whole else [], 1):
            before = found[-1][1] if found else _FIRST
            found.append((self._line(number, text, before), digest(text)))
        self._check_head(found)
        return found

    def _line(self, number: int, text: bytes, before: str) -> Line:
        try:
            said = json.loads(text)
            right = said.pop(_BEFORE) == before
            line = Line(**said)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise self._damaged(f"line {number} cannot be read") from error
        if not right or not _makes_sense(line):
            raise self._damaged(f"line {number} is not what was written")
        return line

    def _check_head(self, found: list[tuple[Line, str]]) -> None:
        if not self._head.exists():
            # The head is written after the first line.
            if len(found) > 1:
                raise self._damaged(f"{self._head.name} beside it is gone")
            return
        head = read_manifest(self._head)
        count, checksum = head.get("lines"), head.get("sha256")
        # The head is written last: a crash leaves it one line behind.
        if type(count) is not int or not len(found) - 1 <= count <= len(found):
            raise self._damaged(f"it has {len(found)} lines, {self._head.name} beside it says {count}")
        if count and found[count - 1][1] != checksum:
            raise self._damaged(f"line {count} is not the one that {self._head.name} beside it says")

    def _damaged(self, why: str) -> DamagedError:
        return DamagedError(
            f"{self.path} is damaged: {why}; what this client has spent is not known, and nothing more is released. "
            "Put back the newest copy of both files"
        )


class OpenLedger:
    """A ledger that only this process can add to; ``lines`` are those that it has."""

    def __init__(self, path: Path, head: Path, found: list[tuple[Line, str]]) -> None:
        self.lines = [line for line, _ in found]
        self._path, self._head = path, head
        self._last = found[-1][1] if found else _FIRST

    def add(self, line: Line) -> None:
        """Add a line; when this returns, the disk has it.

        Raises:
            FloretError: it cannot be written; nothing may be released then.
        """
        if not _makes_sense(line):
            raise FloretError(f"{self._path}: a line with {line} is none; nothing is released")
        text = json.dumps({**asdict(line), _BEFORE: self._last}).encode()
        try:
            # One that a crash, or a full disk, left behind; another line before it would be one too many.
            self._write_head()
            with open_file(self._path, "ab", private=True) as file:
                # A line that a crash cut short was never paid with: nothing left the device after it.
                file.truncate(self._path.read_bytes().rfind(b"\n") + 1)
                file.write(text + b"\n")
                file.flush()
                os.fsync(file.fileno())
            self._last = digest(text)
            self.lines.append(line)
            self._write_head()
        except OSError as error:
            raise FloretError(f"{self._path} cannot be written ({error.strerror}); nothing is released") from error

    def _write_head(self) -> None:
        write_manifest(self._head, {"lines": len(self.lines), "sha256": self._last}, private=True)


def note_unprotected(state_dir: Path, client: str) -> None:
    """Note on the disk that a client answers a run without privacy, if only by a refusal: its data are not protected.

    Raises:
        FloretError: it cannot be written.
    """
    path = state_dir / FOLDER / UNPROTECTED / f"{client}.json"
    if path.exists():
        return
    try:
        make_folder(path.parent, private=True)
        write_manifest(path, {"client": client}, private=True)
    except OSError as error:
        raise FloretError(f"{path} cannot be written ({error.strerror}); nothing leaves without it") from error


def spent_by_example(lines: Iterable[Line], delta: float, beside: Iterable[Release] = ()) -> float:
    """Return the epsilon of one example after all ``lines``, and releases ``beside`` them that protect examples."""
    lines = list(lines)
    examples = [line.release for line in lines if line.unit == "example"]
    return epsilon_of_example([*examples, *beside], [line.release for line in lines if line.unit == "client"], delta)


def spent_by_client(lines: Iterable[Line], delta: float, beside: Iterable[Release] = ()) -> float:
    """Return the epsilon of the client after those ``lines`` that protect it, and releases ``beside`` them that do."""
    return epsilon_of([*(line.release for line in lines if line.unit == "client"), *beside], delta)


def _makes_sense(line: Line) -> bool:
    numbers = (line.noise, line.rate, 0 if line.count is None else line.count)
    counts = (line.attempt, line.round, line.steps)
    return (
        all(isinstance(text, str) for text in (line.run, line.federation, line.method, line.start))
        and line.unit in ("example", "client")
        and isinstance(line.by_server, bool)
        and all(type(number) in (int, float) and math.isfinite(number) for number in numbers)
        and line.noise >= 0
        and 0 < line.rate <= 1
        and all(type(count) is int and count >= 0 for count in counts)
    )
