"""A run followed as it goes: what its directory says now, and what is new since the last look.

``Follower`` reads ``history.jsonl`` from where it stopped. It keeps a row for each round and the latest figures of each
client, not the history: 200 clients over 1,000 rounds take some megabytes.
"""

import json
import os
import time
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from common.durable import open_plain, read_plain
from common.errors import printable
from common.names import natural_key
from results.history import ClientRound, Json, Round, Spread, enough_measured
from results.run import Run, ended_after
from results.rundir import in_use
from results.status import Status, read_status

# Bytes of a history that one look reads: the page shows what there is, and asks again at once.
BUDGET = 16_000_000
# Bytes of what a stranger's run may have: its config, and a line of its history.
_LARGEST_CONFIG, _LONGEST_LINE = 2**30, 2**28
# Rounds that the small curve of a client shows.
SPARK = 60
_TAIL = 64
_NOT_IT = (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError)

# The columns of a round and of a client, as ``Follower.news`` returns them.
ROUND = (
    *("round", "before", "beforeStd", "beforeWorst", "beforeCount", "after", "afterStd", "afterWorst", "afterCount"),
    *("validation", "loss", "up", "down", "seconds", "refused", "epsilon"),
)
CLIENT = (
    *("name", "samples", "seen", "trained", "before", "after", "loss", "seconds", "up", "down"),
    *("refusals", "refusal", "note", "points"),
)


@dataclass
class _Client:
    """What is known of a client after the last round; ``changed``: the last round that said anything of it.

    ``refusal`` and ``note`` are the last ones, with their round; ``points`` are rounds and accuracies after training in
    thousandths.
    """

    samples: int | None = None
    seen: int = 0
    trained: int = 0
    before: float | None = None
    after: float | None = None
    loss: float | None = None
    seconds: float | None = None
    up: int = 0
    down: int = 0
    refusals: int = 0
    refusal: tuple[int, str] | None = None
    note: tuple[int, str] | None = None
    changed: int = 0
    points: deque[tuple[int, int]] = field(default_factory=lambda: deque(maxlen=SPARK))

    def add(self, number: int, part: ClientRound) -> None:
        """Take down the client's part in round ``number``."""
        self.seen = self.changed = number
        self.trained += part.trained
        self.before = self.before if part.before.test is None else part.before.test
        self.loss = self.loss if part.loss is None else part.loss
        self.seconds = part.seconds if part.trained and part.seconds is not None else self.seconds
        self.up += part.bytes.up
        self.down += part.bytes.down
        if part.after.test is not None:
            self.after = part.after.test
            self.points.append((number, round(1000 * self.after)))

    def row(self, name: str, since: int) -> list[object]:
        """Return the columns ``CLIENT``; of ``points`` those after round ``since``."""
        figures = [_short(value) for value in (self.before, self.after, self.loss, self.seconds)]
        points = [point for point in self.points if point[0] > since]
        row = [name, self.samples, self.seen, self.trained, *figures, self.up, self.down]
        return [*row, self.refusals, self.refusal, self.note, points]


class Follower:
    """A run directory that is looked at again and again; it need not have any file yet.

    Attributes:
        directory: of the run.
        generation: another number whenever what was told before is void: the history was cut by a resumed run, or
            ``config.json`` changed.
        run: the config, without rounds; None before the run has written it.
        status: what the run says it is doing, or was doing when it was killed.
        going: a process is writing the directory.
        finished: the run came to its end.
        more: there is more of the history to be read at once.
    """

    _names: list[str]  # of the clients, in order

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.generation = 0
        self.run: Run | None = None
        self.status: Status | None = None
        self.going = self.finished = self.more = False
        self._ended: int | None = None
        self._resumed: list[object] = []
        self._config: tuple[int, ...] = ()
        self._config_problem = ""
        self._void: set[int] = set()
        self._start_over()

    @property
    def planned(self) -> int:
        """The number of rounds that the run is to have; 0 if that is not known."""
        if self.run:
            return self.run.planned_rounds
        return self.status.planned if self.status else 0

    @property
    def _last_planned(self) -> int:
        return self.planned if self._ended is None else self._ended

    @property
    def last(self) -> int:
        """The number of the last round that was read."""
        return self._rounds[-1].round if self._rounds else 0

    @property
    def problems(self) -> list[str]:
        """What cannot be read."""
        return [problem for problem in (self._config_problem, *self._damaged) if problem]

    def look(self, budget: int = BUDGET) -> int:
        """Read what is new, at most ``budget`` bytes of the history and the line that they end in; return how many."""
        before = self._offset
        self._read_config()
        # In this order: a run that ends in between is told as finished, not as killed.
        going = in_use(self.directory)
        self.status = read_status(self.directory)
        done = (self.directory / "summary.json").is_file()
        self._read_history(budget)
        self.going = going
        # The summary of a run that was resumed for more rounds is still there when it goes on.
        self._ended = ended_after(self.directory / "summary.json") if done else None
        self.finished = not going and done and (self.more or self.last >= self._last_planned)
        return max(0, self._offset - before)

    def left(self) -> float | None:
        """Return how many seconds the rest of a run that is going will take; None if that is not known."""
        if not self.going or not self._rounds or not self.planned:
            return None
        spent = 0.0
        if self.status and self.status.round == self.last + 1:
            spent = max(0.0, time.time() - self.status.began)
        usual = median(line.seconds for line in self._rounds)
        return max(0.0, usual - spent) + usual * max(0, self.planned - self.last - 1) if self.planned > self.last else 0

    def news(self, generation: int, since: int) -> Json:
        """Return what a page does not have that has seen the rounds up to ``since`` of ``generation``.

        A page of another generation gets all: ``full`` says that it must forget what it has.
        """
        full = generation != self.generation
        since = 0 if full else since
        state = "going" if self.going else "finished" if self.finished else "stopped"
        return {
            "generation": self.generation,
            "full": full,
            "about": self._about() if full else None,
            "state": state,
            "more": self.more,
            "planned": self.planned,
            "ended": self._ended if self.finished else None,
            "now": self._now(),
            "left": self.left(),
            "spent": sum(line.seconds for line in self._rounds),
            "last": self.last,
            "enough": {when: self._enough(when) for when in ("before", "after")},
            "rounds": [line.row for line in self._rounds if line.round > since],
            "clients": [client.row(name, since) for name, client in self._ordered() if full or client.changed > since],
            "problems": self.problems[:5],
        }

    def _about(self) -> Json:
        run, status = self.run, self.status
        about: Json = {"name": self.directory.resolve().name}
        if run:
            resumed = [one for one in self._resumed if isinstance(one, dict)]
            about |= {
                "method": run.method,
                "dataset": run.dataset,
                "words": [
                    *(run.setting("model"), run.partition, f"seed {run.setting('seed')}"),
                    *filter(None, [run.not_exact]),
                ],
                "privacy": f"per {run.setting('privacy.unit')}, \u03b4 = {run.setting('privacy.delta')}; ",
                "started": run.started,
                "resumed": [_whole(one.get("round")) for one in resumed],
            }
        else:
            about |= {
                "method": status.method if status else "run",
                "dataset": status.dataset if status else "?",
                "words": [],
                "privacy": "",
                "started": "",
                "resumed": [],
            }
        return about

    def _now(self) -> Json | None:
        """Return what the run is doing, or was doing when it was killed, with ages in seconds."""
        status = self.status
        if status is None or self.finished:
            return None
        # The history is written at once, the status a moment later.
        if 0 < status.round <= self.last and status.phase != "writing":
            return None
        now = time.time()
        since = status.waiting_since
        return {
            "round": status.round,
            "phase": status.phase,
            "seconds": max(0.0, now - status.since),
            "clients": status.clients,
            "asked": status.asked,
            "answered": status.answered,
            "waiting": list(status.waiting),
            "waitingSeconds": None if since is None else max(0.0, now - since),
        }

    def _ordered(self) -> Iterator[tuple[str, _Client]]:
        if len(self._names) != len(self._clients):
            self._names = sorted(self._clients, key=natural_key)
        return ((name, self._clients[name]) for name in self._names)

    def _enough(self, when: str) -> int:
        """Return of how many clients a round must have measured the accuracy to be complete."""
        measured = ((line.round, line.measured[when]) for line in self._rounds)
        return enough_measured(measured, self._last_planned, self.run.history.evaluate_every if self.run else 0)

    # Files

    def _start_over(self) -> None:
        self.generation += 1
        self._file: tuple[int, int] | None = None  # device and inode
        self._offset, self._tail, self._line = 0, b"", 0
        self._rounds: list[_Line] = []
        self._damaged: list[str] = []
        self._clients: dict[str, _Client] = {}
        self._names = []
        self._take_samples()

    def _take_samples(self) -> None:
        for name, data in self.run.clients.items() if self.run else ():
            self._clients.setdefault(name, _Client()).samples = data.samples.get("train")

    def _read_config(self) -> None:
        path = self.directory / "config.json"
        try:
            found = path.stat()
            version = (found.st_ino, found.st_mtime_ns, found.st_size)
            if version == self._config:
                return
            about = json.loads(read_plain(path, _LARGEST_CONFIG))
            self.run, self._config_problem = Run.of(self.directory, about, ()), ""
            self._resumed = list(about.get("resumed") or [])
        except FileNotFoundError:
            return
        except (OSError, *_NOT_IT) as error:
            self._config_problem = f"config.json cannot be read ({type(error).__name__})"
            return
        self._config = version
        self.generation += 1
        self._take_samples()

    def _read_history(self, budget: int) -> None:
        self.more = False
        try:
            with open_plain(self.directory / "history.jsonl") as file:
                found = os.fstat(file.fileno())
                same = (found.st_dev, found.st_ino)
                file.seek(self._offset - len(self._tail))
                # A run that is resumed writes the file anew, without the rounds that it runs again.
                if self._file not in (None, same) or file.read(len(self._tail)) != self._tail:
                    self._void = set()
                    self._start_over()
                self._file = same
                file.seek(self._offset)
                while budget > 0:
                    line = file.readline(_LONGEST_LINE)
                    if len(line) == _LONGEST_LINE:
                        self._damaged = [f"history.jsonl, line {self._line + 1}: is longer than {_LONGEST_LINE} bytes"]
                        return
                    if not line.endswith(b"\n"):  # nothing, or half a line that is being written
                        return
                    budget -= len(line)
                    self._offset, self._line, self._tail = self._offset + len(line), self._line + 1, line[-_TAIL:]
                    if line.strip() and self._offset not in self._void and not self._take(line):
                        self._file = same
                        file.seek(0)
                self.more = True
        except FileNotFoundError:
            if self._offset:
                self._start_over()
        except OSError as error:
            self._damaged = [f"history.jsonl cannot be read ({error.strerror})"]

    def _take(self, text: bytes) -> bool:
        """Take in a line; return False if it says that earlier ones are void, and all must be read again."""
        try:
            new = Round.from_json(json.loads(text))
        except _NOT_IT as error:
            self._damaged.append(f"history.jsonl, line {self._line}: cannot be read ({type(error).__name__})")
            return True
        if new.round <= self.last:
            # As old versions wrote it: a run that resumed from an older checkpoint wrote its rounds again.
            self._void |= {line.end for line in self._rounds if line.round >= new.round}
            self._start_over()
            return False
        measured = {when: new.measured(when) for when in ("before", "after")}
        self._rounds.append(_Line(new.round, self._offset, new.seconds, measured, _row(new)))
        for name, part in new.clients.items():
            self._client(name).add(new.round, part)
        for refusal in new.refused:
            client = self._client(refusal.client)
            client.changed = new.round
            client.refusals += 1
            client.refusal = (new.round, printable(refusal.reason))
        for note in new.notes:
            client = self._client(note.client)
            client.changed = new.round
            client.note = (new.round, printable(note.note))
        return True

    def _client(self, name: str) -> _Client:
        return self._clients.setdefault(name, _Client())


@dataclass(frozen=True)
class _Line:
    """A round that was read: where its line ends, how many clients it measured, its columns ``ROUND``."""

    round: int
    end: int
    seconds: float
    measured: Mapping[str, int]
    row: list[float | None]


def _row(line: Round) -> list[float | None]:
    """Return the columns ``ROUND``."""

    def columns(when: str) -> list[float | None]:
        spread: Spread = line.accuracy(when)
        return [_short(spread.mean), _short(spread.std), _short(spread.worst_decile), line.measured(when)]

    validation = _short(line.accuracy("after", "validation").mean)
    figures = [validation, _short(line.loss), line.bytes.up, line.bytes.down, _short(line.seconds)]
    return [line.round, *columns("before"), *columns("after"), *figures, len(line.refused), _short(line.epsilon)]


def _short(value: float | None) -> float | None:
    """Return a figure with five digits: it is sent for each client."""
    return None if value is None else float(f"{value:.5g}")


def _whole(value: object) -> int | None:
    return value if isinstance(value, int) else None
