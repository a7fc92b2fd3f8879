"""A run, typed: its config, its clients' data, its history and its figures; read back from its directory."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self, TypeVar

from common.accuracies import EXACT, not_exact
from common.config import RunConfig
from common.durable import read_plain
from common.errors import FloretError, printable
from common.names import natural_key
from common.versions import versions
from results.history import MOST, Figures, History, Json, Round, Spread, highest, whole
from results.text import MISSING, plain

# Bytes of a file of a run.
_LARGEST = 2**32

T = TypeVar("T")

OWN_DATA = "each client's own data"


@dataclass(frozen=True)
class ClientData:
    """One client's data: samples per split, and samples per class of its training split if labels are known.

    ``samples`` lacks what a client did not tell. ``own``: they are its own, not a partition of the run's dataset.
    ``accuracies``: how it tells them, one of ``common.accuracies.TELLING``.
    """

    samples: Mapping[str, int]
    labels: tuple[int, ...] | None
    own: bool = False
    accuracies: str = EXACT


@dataclass(frozen=True)
class Milestone:
    """A round that the table of accuracies names, and why."""

    name: str
    round: Round


@dataclass(frozen=True)
class Summary:
    """What ``summary.json`` says of a finished run: of so many ``clients``, of which ``own`` have data of their own.

    ``ended_after`` is its last round if that came before the last one planned, because ``privacy.epsilon`` was spent.
    ``telling`` says how many clients tell accuracies in which way, by ``common.accuracies.TELLING``.
    """

    config: RunConfig
    clients: int
    figures: Figures
    own: int = 0
    ended_after: int | None = None
    telling: Mapping[str, int] = field(default_factory=dict)

    def to_json(self) -> Json:
        """Return the content of ``summary.json``."""
        return {
            "method": self.config.method,
            "dataset": _data(self.config.dataset, self.own, self.clients),
            "model": self.config.model,
            "partition": _data(self.config.partition, self.own, self.clients),
            "clients": self.clients,
            "rounds": self.config.rounds,
            **({} if self.ended_after is None else {"ended_after": self.ended_after}),
            "seed": self.config.seed,
            **({"accuracies": dict(self.telling)} if {*self.telling} - {EXACT} else {}),
            **self.figures.to_json(),
            "versions": versions(),
        }


@dataclass(frozen=True)
class Run:
    """A run with its results, finished or not.

    Attributes:
        directory: the run directory.
        run_id: Flower's.
        started: date and time, UTC.
        config: the keys of the run config without those of methods.
        parameters: the method's own keys, without the method's name.
        versions: of Python and packages when the run began.
        digest: of the user's own files that a simulation read, as ``data.digest``; None if it read none, and in the
            files of earlier versions.
        num_classes: None in the files of earlier versions.
        clients: the data of each client, by name.
        history: the rounds.
        figures: of the whole run.
        finished: it wrote its summary.
        planned_rounds: the number of rounds that the config asks for.
        ended_after: the last round of a run that ended before the last one planned, as its summary says; else None.
    """

    directory: Path
    run_id: str
    started: str
    config: Mapping[str, Any]
    parameters: Mapping[str, Any]
    versions: Mapping[str, Any]
    digest: str | None
    num_classes: int | None
    clients: Mapping[str, ClientData]
    history: History
    figures: Figures
    finished: bool
    planned_rounds: int
    ended_after: int | None = None

    @classmethod
    def of(
        cls,
        directory: Path,
        about: Mapping[str, Any],
        rounds: tuple[Round, ...],
        figures: Figures | None = None,
        ended_after: int | None = None,
    ) -> Self:
        """Return a run.

        Args:
            directory: the run directory.
            about: the content of ``config.json``.
            rounds: of its history.
            figures: of its summary; None for a run that did not come to its end, whose history then says them.
            ended_after: of its summary, too.

        Raises:
            ValueError, TypeError, KeyError, AttributeError: ``about`` is something else.
        """
        config = dict(about["config"])
        planned, every = config.get("rounds"), config.get("evaluate-every")
        planned = planned if isinstance(planned, int) and planned <= MOST else len(rounds)
        history = History(
            rounds,
            planned=planned if ended_after is None else ended_after,
            evaluate_every=every if isinstance(every, int) else 0,
        )
        clients = {
            str(name): ClientData(
                samples={
                    split: whole(count) for split, count in (client.get("samples") or {}).items() if count is not None
                },
                labels=None if client.get("labels") is None else tuple(whole(count) for count in client["labels"]),
                own=bool(client.get("own")),
                accuracies=str(client.get("accuracies", EXACT)),
            )
            for name, client in (about.get("clients") or {}).items()
        }
        return cls(
            directory=directory,
            run_id=str(about.get("run_id") or ""),
            started=str(about.get("started") or ""),
            config=config,
            parameters=dict(about.get("parameters") or {}),
            versions=dict(about.get("versions") or {}),
            digest=None if about.get("digest") is None else str(about["digest"]),
            num_classes=about.get("num_classes"),
            clients=clients,
            history=history,
            figures=figures or history.figures(),
            finished=figures is not None,
            planned_rounds=planned,
            ended_after=ended_after,
        )

    @property
    def method(self) -> str:
        """The name of the method."""
        return self.setting("method")

    @property
    def rounds(self) -> tuple[Round, ...]:
        """The rounds of the history."""
        return self.history.rounds

    @property
    def last_round(self) -> int:
        """The number of the last round in the history, 0 if there is none."""
        return self.rounds[-1].round if self.rounds else 0

    @property
    def fewer_rounds(self) -> str | None:
        """Such as ``"unfinished: 7 of 20 rounds"``; None if there are all that were planned."""
        whole = self.finished and not self.cut_short
        if whole and self.last_round >= self.planned_rounds:
            return None
        if self.finished and not whole and self.last_round >= self.history.planned:
            return f"its history lacks rounds: it has {len(self.rounds)} of {self.planned_rounds} rounds"
        why = "unfinished"
        if self.finished:
            why = "ended where privacy.epsilon was spent" if whole else "its history lacks its end"
        return f"{why}: {self.last_round} of {self.planned_rounds} rounds"

    @property
    def cut_short(self) -> bool:
        """Whether the run finished, and its history has not all that it wrote."""
        planned = self.history.planned
        return self.finished and sum(0 < line.round <= planned for line in self.rounds) < planned

    @property
    def nothing_used(self) -> str | None:
        """That no reply of any round was used, and why the first was not; None if one was, or there is no round."""
        if not self.rounds or any(client.trained for line in self.rounds for client in line.clients.values()):
            return None
        refused = [f"client {one.client}: {one.reason}" for line in self.rounds for one in line.refused]
        said = "no reply was used in any round" + (f"; the first is refused: {refused[0]}" if refused else "")
        return printable(said)

    @property
    def dataset(self) -> str:
        """The dataset, or whose own data were used in its place."""
        return _data(self.setting("dataset"), *self._own())

    @property
    def partition(self) -> str:
        """The partition in words, such as ``"pathological, 2 classes per client"``."""
        if self.config.get("dataset") == "npz-clients":
            return OWN_DATA
        name = self.setting("partition")
        classes = f"{self._counted('classes-per-client', 'class', 'classes')} per client"
        words = {
            "iid": "IID",
            "dirichlet": f"Dirichlet, alpha {self.setting('alpha')}",
            "dirichlet-balanced": f"Dirichlet-balanced, alpha {self.setting('alpha')}",
            "pfllib": f"PFLlib's clients, alpha {self.setting('alpha')}",
            "pathological": f"pathological, {classes}",
            "extreme": f"extreme, {classes}, the same or none in common",
            "shards": f"shards, {self._counted('shards-per-client', 'shard', 'shards')} per client",
        }
        return _data(words.get(name, name), *self._own())

    @property
    def has_own_data(self) -> bool:
        """Whether clients had data of their own in the place of a partition of the dataset."""
        return bool(self._own()[0]) or self.config.get("dataset") == "npz-clients"

    @property
    def files(self) -> str:
        """Names the user's own files that a simulation read, by what they have; a dash if it read none."""
        return f"files {self.digest[:8]}" if self.digest else MISSING

    def _own(self) -> tuple[int, int]:
        return sum(data.own for data in self.clients.values()), len(self.clients)

    def _counted(self, key: str, one: str, many: str) -> str:
        return f"{self.setting(key)} {one if self.config.get(key) == 1 else many}"

    def setting(self, key: str) -> str:
        """Return a key of the run config as text, ``"?"`` if the run does not have it."""
        return plain(self.config.get(key, "?"))

    @property
    def before(self) -> Spread:
        """Accuracy before local training as in ``figures``, empty if it is of fewer clients than that after it."""
        last = self._measured_last()
        return Spread() if last and last.fewer_before else self.figures.before

    @property
    def figures_over(self) -> str:
        """What ``over`` says of the round that ``figures`` are of."""
        return self.over(self._measured_last())

    def _measured_last(self) -> Round | None:
        return self.rounds[-1] if self.finished and self.rounds else self.history.last_complete()

    def over(self, line: Round | None) -> str:
        """Return such as ``"1 of 2 clients"`` if a round measured fewer clients than the run has, else nothing."""
        measured, known = line.measured() if line else 0, len(self.client_names())
        return f"{measured} of {known} clients" if 0 < measured < known else ""

    @property
    def not_exact(self) -> str:
        """How many clients do not tell their accuracies as they are, such as ``"2 of 3 clients ..."``; else nothing."""
        return not_exact(data.accuracies for data in self.clients.values())

    @property
    def bytes_sent(self) -> int:
        """Bytes of all rounds so far, up and down together."""
        return sum(line.bytes.up + line.bytes.down for line in self.rounds)

    @property
    def settings(self) -> dict[str, Any]:
        """The run config and the method's own parameters, these with the method's name in front."""
        own = {key if "." in key else f"{self.method}.{key}": value for key, value in self.parameters.items()}
        return {**self.config, **own}

    @property
    def samples(self) -> int:
        """Samples of all clients in all splits; 0 if they are not known."""
        return sum(sum(data.samples.values()) for data in self.clients.values())

    def client_names(self) -> list[str]:
        """Return every client of the run, those that joined later included, numbers in numerical order."""
        names = {*self.clients, *(name for line in self.rounds for name in line.clients)}
        return sorted(names, key=natural_key)

    def milestones(self) -> list[Milestone]:
        """Return the rounds to quote, as far as there are: the last complete one, the best by validation and the best
        on test.
        """
        complete, found = self.history.complete_rounds(), []
        if complete:
            whole = complete[-1] is self.rounds[-1]
            found.append(Milestone("Last round" if whole else "Last complete round", complete[-1]))
        best = self.figures.best_validation
        found += [
            Milestone("Best round by validation", line) for line in self.rounds if best and line.round == best.round
        ]
        top = highest(complete, "test")
        if top:
            found.append(Milestone("Best on test, only to compare with papers that report it", top))
        return found


def _data(words: str, own: int, clients: int) -> str:
    """Return what the run config says of the data, ``words``, as it holds where so many ``clients`` have their own."""
    if not own:
        return words
    return OWN_DATA if own == clients else f"{words}, and own data of {own} of {clients} clients"


def read_run(directory: Path) -> Run:
    """Read a run directory; a killed run has no summary and may end in half a line.

    Raises:
        FloretError: it is not a run directory, or one of its files cannot be read; one line that names the file.
    """
    config, summary = directory / "config.json", directory / "summary.json"
    if not directory.exists():
        raise FloretError(f"{directory} is not there; it must be a run directory")
    if not config.is_file():
        raise FloretError(f"{directory} is not a run directory: it has no config.json")
    rounds = _read_rounds(directory / "history.jsonl")
    figures, ended = None, None
    if summary.is_file():
        figures, ended = _parse(summary, "a run's summary", lambda: _summed_up(json.loads(_read(summary))))
    return _parse(
        config, "a run's config", lambda: Run.of(directory, json.loads(_read(config)), rounds, figures, ended)
    )


def ended_after(summary: Path) -> int | None:
    """Return the last round of a run that ended before the one planned, by its summary; None if it tells of none."""
    try:
        return _summed_up(json.loads(_read(summary)))[1]
    except (FloretError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        return None  # said by who reads all of it


def _summed_up(summary: Mapping[str, Any]) -> tuple[Figures, int | None]:
    ended = summary.get("ended_after")
    return Figures.from_json(summary), None if ended is None else whole(ended)


def _read_rounds(file: Path) -> tuple[Round, ...]:
    if not file.is_file():
        return ()
    rounds: list[Round] = []
    lines = [line for line in _read(file).split("\n") if line.strip()]
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line)
        except RecursionError as error:
            raise FloretError(f"{file}, line {number}: not a line of a history: it is nested too deeply") from error
        except ValueError as error:
            if number == len(lines):  # The run was killed while it wrote this line.
                break
            raise FloretError(f"{file}, line {number}: not a line of a history: {printable(str(error))}") from error
        new = _parse(file, f"a history (line {number})", lambda record=record: Round.from_json(record))  # type: ignore[misc]
        # A run that resumed from an older checkpoint writes its rounds again; the later line is the one that counts.
        while rounds and rounds[-1].round >= new.round:
            rounds.pop()
        rounds.append(new)
    return tuple(rounds)


def _read(file: Path) -> str:
    try:
        return read_plain(file, _LARGEST).decode(errors="replace")
    except OSError as error:
        raise FloretError(f"cannot read {file}: {error.strerror}") from error


def _parse(file: Path, what: str, build: Callable[[], T]) -> T:
    try:
        return build()
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError) as error:
        reason = str(error)
        if isinstance(error, KeyError):
            reason = f"{error.args[0]!r} is missing"
        elif isinstance(error, AttributeError | TypeError):
            reason = "a value in it is of the wrong type"
        raise FloretError(f"{file} is not {what}: {printable(reason)}") from error
    except RecursionError as error:
        raise FloretError(f"{file} is not {what}: it is nested too deeply") from error
