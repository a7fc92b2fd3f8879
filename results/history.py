"""The history of a run, typed: what each client did in each round, and how accuracies lie over clients.

The ServerApp writes a ``Round`` as a line of ``history.jsonl`` by ``to_json``; whoever reads the file calls
``from_json``. That also takes lines of earlier versions of Floret: what a line lacks counts as not measured.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any, Self

import numpy as np

from common.bounds import at_most

Json = dict[str, Any]
SPLITS = ("test", "validation")
# The largest whole number that a file may have; what is beyond the other one, or not finite, counts as not measured.
MOST, _LARGEST = 2**63, 1e100


@dataclass(frozen=True)
class Spread:
    """Accuracy over clients, each figure in [0, 1]; all None where no client was measured.

    Attributes:
        mean: every client counts the same.
        weighted_mean: weighted by the samples that each accuracy was measured on.
        std: population standard deviation over clients.
        worst_decile: mean over the worst tenth of the clients, rounded up.
    """

    mean: float | None = None
    weighted_mean: float | None = None
    std: float | None = None
    worst_decile: float | None = None

    @classmethod
    def over(cls, accuracies: Sequence[float], samples: Sequence[float]) -> Self:
        """Return the spread of ``accuracies``, one a client, measured on so many ``samples`` each."""
        if not accuracies:
            return cls()
        values = np.array(accuracies)
        worst = np.sort(values)[: math.ceil(len(values) / 10)]
        weighted = np.average(values, weights=samples)
        return cls(float(values.mean()), float(weighted), float(values.std()), float(worst.mean()))

    @classmethod
    def from_json(cls, record: Mapping[str, Any] | None) -> Self:
        """Read what ``to_json`` returned."""
        record = record or {}
        return cls(*(_number(record.get(key)) for key in ("mean", "weighted_mean", "std", "worst_decile")))

    def to_json(self) -> Json | None:
        """Return the figures by name; None if no client was measured."""
        return None if self.mean is None else asdict(self)


@dataclass(frozen=True)
class Scores:
    """One client's accuracy in [0, 1] on its own splits; None where it was not measured."""

    test: float | None = None
    validation: float | None = None

    @classmethod
    def from_json(cls, record: Mapping[str, Any] | None) -> Self:
        """Read what ``to_json`` returned."""
        record = record or {}
        return cls(_number(record.get("test")), _number(record.get("validation")))

    def to_json(self) -> Json | None:
        """Return the accuracies by split; None if neither was measured."""
        return None if self == Scores() else asdict(self)


@dataclass(frozen=True)
class Traffic:
    """Bytes of the tensors that travelled: ``up`` to the server, ``down`` to the client."""

    up: int = 0
    down: int = 0

    @classmethod
    def from_json(cls, record: Mapping[str, Any] | None) -> Self:
        """Read what ``to_json`` returned."""
        record = record or {}
        return cls(whole(record.get("up") or 0), whole(record.get("down") or 0))

    def to_json(self) -> Json:
        """Return both numbers by name."""
        return asdict(self)


@dataclass(frozen=True)
class ClientRound:
    """What one client did in one round: accuracies before and after local training, mean ``loss`` over its steps (None
    if it did not train), bytes, seconds on the client, the names of the clients whose tensors the server sent it, and
    the ``epsilon`` that it says to have spent; None if it says none.
    """

    trained: bool
    before: Scores
    after: Scores
    loss: float | None
    bytes: Traffic
    seconds: float | None
    peers: tuple[str, ...] = ()
    epsilon: float | None = None

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Self:
        """Read what ``to_json`` returned."""
        return cls(
            trained=bool(record.get("trained")),
            before=Scores.from_json(record.get("before")),
            after=Scores.from_json(record.get("after")),
            loss=_number(record.get("loss")),
            bytes=Traffic.from_json(record.get("bytes")),
            seconds=_number(record.get("seconds")),
            peers=_names(record.get("peers")),
            epsilon=_number(record.get("epsilon")),
        )

    def to_json(self) -> Json:
        """Return the client's part of a line of ``history.jsonl``; ``peers`` and ``epsilon`` only if there are any."""
        return {
            "trained": self.trained,
            "before": self.before.to_json(),
            "after": self.after.to_json(),
            "loss": self.loss,
            "bytes": self.bytes.to_json(),
            "seconds": self.seconds,
            **({"peers": list(self.peers)} if self.peers else {}),
            **({} if self.epsilon is None else {"epsilon": self.epsilon}),
        }


@dataclass(frozen=True)
class Refusal:
    """A reply that the round went on without, and why."""

    client: str
    reason: str


@dataclass(frozen=True)
class Note:
    """What is told of a client besides its figures, such as a damaged file of its state, or that it is away."""

    client: str
    note: str


@dataclass(frozen=True)
class Round:
    """One round, a line of ``history.jsonl``.

    Attributes:
        round: its number, from 1.
        clients: by name, those that trained or were measured.
        before, after: accuracy before and after local training over the clients, by split: ``test``, ``validation``.
        loss: mean over the clients that trained; None if none did.
        bytes: of all clients that were asked, those that were refused included.
        refused, notes: in the order of their arrival.
        seconds: from the first message to the last reply, evaluation included.
        epsilon: what the client that has spent most on privacy has spent in this run; None if nothing is protected.
    """

    round: int
    clients: Mapping[str, ClientRound]
    before: Mapping[str, Spread]
    after: Mapping[str, Spread]
    loss: float | None
    bytes: Traffic
    refused: tuple[Refusal, ...]
    notes: tuple[Note, ...]
    seconds: float
    epsilon: float | None = None

    @classmethod
    def of(
        cls,
        number: int,
        clients: Mapping[str, ClientRound],
        samples: Mapping[str, Mapping[str, int]],
        refused: Sequence[Refusal],
        notes: Sequence[Note],
        seconds: float,
        epsilon: float | None = None,
        others: Sequence[Traffic] = (),
        *,
        bounded: bool = False,
    ) -> Self:
        """Return a round with the figures over its clients.

        Args:
            number: of the round.
            clients: by name.
            samples: size of each split, by the clients' names.
            refused: replies that were not used.
            notes: what clients reported besides.
            seconds: that the round took.
            epsilon: as of the round.
            others: what travelled to and from those that were asked and are not among the clients.
            bounded: samples and losses are what real nodes say: of one, neither counts for more than ``MOST_TIMES`` the
                median.
        """

        def spreads(when: str) -> dict[str, Spread]:
            table = {}
            for split in SPLITS:
                scores = {name: getattr(getattr(client, when), split) for name, client in clients.items()}
                measured = {name: score for name, score in scores.items() if score is not None}
                sizes: list[float] = [samples[name][split] for name in measured]
                table[split] = Spread.over(list(measured.values()), at_most(sizes) if bounded else sizes)
            return table

        losses = [client.loss for client in clients.values() if client.trained and client.loss is not None]
        losses = at_most(losses, least=1.0) if bounded else losses
        return cls(
            round=number,
            clients=clients,
            before=spreads("before"),
            after=spreads("after"),
            loss=sum(losses) / len(losses) if losses else None,
            bytes=_total([*(client.bytes for client in clients.values()), *others]),
            refused=tuple(refused),
            notes=tuple(notes),
            seconds=seconds,
            epsilon=epsilon,
        )

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Self:
        """Read what ``to_json`` returned.

        Raises:
            ValueError, TypeError, KeyError, AttributeError: it is something else.
        """
        accuracy = record.get("accuracy") or {}
        return cls(
            round=whole(record["round"]),
            clients={str(name): ClientRound.from_json(one) for name, one in (record.get("clients") or {}).items()},
            before=_spreads(accuracy.get("before")),
            after=_spreads(accuracy.get("after")),
            loss=_number(record.get("loss")),
            bytes=Traffic.from_json(record.get("bytes")),
            refused=tuple(Refusal(str(one["client"]), str(one["reason"])) for one in record.get("refused") or ()),
            notes=tuple(Note(str(one["client"]), str(one["note"])) for one in record.get("notes") or ()),
            seconds=_number(record.get("seconds")) or 0.0,
            epsilon=_number(record.get("epsilon")),
        )

    def to_json(self) -> Json:
        """Return the line of ``history.jsonl``."""
        accuracy = {"before": self.before, "after": self.after}
        return {
            "round": self.round,
            "clients": {name: client.to_json() for name, client in self.clients.items()},
            "accuracy": {
                when: {split: spread.to_json() for split, spread in spreads.items()}
                for when, spreads in accuracy.items()
            },
            "loss": self.loss,
            "bytes": self.bytes.to_json(),
            "refused": [asdict(refusal) for refusal in self.refused],
            "notes": [asdict(note) for note in self.notes],
            "seconds": self.seconds,
            **({} if self.epsilon is None else {"epsilon": self.epsilon}),
        }

    def accuracy(self, when: str = "after", split: str = "test") -> Spread:
        """Return the spread over clients, ``when`` being ``before`` or ``after`` local training."""
        return (self.before if when == "before" else self.after)[split]

    def measured(self, when: str = "after", split: str = "test") -> int:
        """Return the number of clients whose accuracy ``when`` on ``split`` was measured in this round."""
        if self.accuracy(when, split).mean is None:
            return 0
        return sum(getattr(getattr(client, when), split) is not None for client in self.clients.values())

    @property
    def fewer_before(self) -> bool:
        """Whether fewer clients were measured before local training than after it: the two means are not compared."""
        return self.measured("before") < self.measured()


@dataclass(frozen=True)
class Best:
    """The best round by validation accuracy, and the mean test accuracy in it."""

    round: int
    test_mean: float | None


@dataclass(frozen=True)
class Figures:
    """A run in figures, those of ``summary.json``.

    Attributes:
        before, after: accuracy on the test split in the last round; in a run that did not come to its end, in the last
            complete round.
        best_validation: None without a validation split.
        bytes: of all rounds.
        seconds, seconds_per_round: of the whole run; median over rounds.
        refused: number of replies.
        epsilon: as of the last round.
        measured: number of clients that ``after`` is over; None in the files of earlier versions.
    """

    before: Spread
    after: Spread
    best_validation: Best | None
    bytes: Traffic
    seconds: float | None
    seconds_per_round: float | None
    refused: int
    epsilon: float | None = None
    measured: int | None = None

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Self:
        """Read ``summary.json``.

        Raises:
            ValueError, TypeError, KeyError, AttributeError: it is something else.
        """
        accuracy = record.get("accuracy") or {}
        seconds = record.get("seconds") or {}
        best = record.get("best_validation")
        return cls(
            before=Spread.from_json(accuracy.get("before")),
            after=Spread.from_json(accuracy.get("after")),
            best_validation=Best(whole(best["round"]), _number(best.get("test_mean"))) if best else None,
            bytes=Traffic.from_json(record.get("bytes")),
            seconds=_number(seconds.get("total")),
            seconds_per_round=_number(seconds.get("per_round_median")),
            refused=whole(record.get("refused") or 0),
            epsilon=_number(record.get("epsilon")),
            measured=None if record.get("measured") is None else whole(record["measured"]),
        )

    def to_json(self) -> Json:
        """Return the part of ``summary.json`` that was measured."""
        return {
            "accuracy": {"after": self.after.to_json(), "before": self.before.to_json()},
            "best_validation": asdict(self.best_validation) if self.best_validation else None,
            "bytes": self.bytes.to_json(),
            "seconds": {"total": self.seconds, "per_round_median": self.seconds_per_round},
            "refused": self.refused,
            **({} if self.epsilon is None else {"epsilon": self.epsilon}),
            **({} if self.measured is None else {"measured": self.measured}),
        }


@dataclass(frozen=True)
class History:
    """The rounds of a run so far, in order.

    Attributes:
        rounds: from round 1.
        planned: the number of rounds that the config asks for.
        evaluate_every: after so many rounds the server asks every client for its accuracy; 0 if that is not known.
    """

    rounds: tuple[Round, ...]
    planned: int
    evaluate_every: int

    def complete_rounds(self, when: str = "after", split: str = "test") -> list[Round]:
        """Return the rounds in which all clients were measured: a mean over some of them is not compared with others.

        See ``enough_measured``.

        Args:
            when: ``before`` or ``after`` local training.
            split: ``test`` or ``validation``.
        """
        measured = [(line, line.measured(when, split)) for line in self.rounds]
        enough = enough_measured(((line.round, count) for line, count in measured), self.planned, self.evaluate_every)
        return [line for line, count in measured if count and count >= enough]

    def last_complete(self, when: str = "after", split: str = "test") -> Round | None:
        """Return the last complete round, if there is one."""
        return next(reversed(self.complete_rounds(when, split)), None)

    def best_by_validation(self) -> Round | None:
        """Return the complete round with the highest mean validation accuracy after training, the first of equals."""
        return highest(self.complete_rounds("after", "validation"), "validation")

    def figures(self, seconds: float | None = None) -> Figures:
        """Return the run in figures, as far as its history goes.

        Args:
            seconds: that the whole run took; by default its rounds alone.
        """
        ended = bool(self.rounds) and self.rounds[-1].round >= self.planned
        last = self.rounds[-1] if ended else self.last_complete()
        best = self.best_by_validation()
        times = [line.seconds for line in self.rounds]
        return Figures(
            before=last.accuracy("before") if last else Spread(),
            after=last.accuracy("after") if last else Spread(),
            best_validation=Best(best.round, best.accuracy().mean) if best else None,
            bytes=_total(line.bytes for line in self.rounds),
            seconds=sum(times) if seconds is None and times else seconds,
            seconds_per_round=median(times) if times else None,
            refused=sum(len(line.refused) for line in self.rounds),
            epsilon=self.rounds[-1].epsilon if self.rounds else None,
            measured=last.measured() if last else 0,
        )


def enough_measured(measured: Iterable[tuple[int, int]], planned: int, evaluate_every: int) -> int:
    """Return of how many clients a round must have measured the accuracy to be complete.

    A client is measured in the rounds in which it trains. In every ``evaluate_every``-th round and in the last one
    planned, the server asks all the others, too. The last of these rounds that measured any client says how many
    clients there are to measure, and a round is complete if it measured at least as many. A run that was killed
    before its first such round goes by the round that measured most.

    Neither the number of known clients nor the most that were ever measured would do: a client that has never
    trained may have no model to measure, and after a client has left no round would be complete.

    Args:
        measured: number of each round, and how many clients it measured.
        planned, evaluate_every: as in ``History``.
    """
    counts = [(number, count) for number, count in measured if count]
    asked = [count for number, count in counts if evaluates_all(number, planned, evaluate_every)]
    return asked[-1] if asked else max((count for _, count in counts), default=0)


def evaluates_all(number: int, planned: int, evaluate_every: int) -> bool:
    """Return whether the server asks the clients that do not train in round ``number`` for their accuracy, too."""
    return number == planned or (evaluate_every > 0 and number % evaluate_every == 0)


def highest(rounds: Sequence[Round], split: str) -> Round | None:
    """Return the round with the highest mean accuracy after training on ``split``, the first of equals."""
    return max(rounds, key=lambda line: line.accuracy("after", split).mean or 0.0, default=None)


def _number(value: Any) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{value!r} is not a number")
    return float(value) if abs(value) < _LARGEST else None


def is_number(value: object) -> bool:
    """Return whether a value of JSON is a number that can be calculated with: neither NaN nor endless."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < _LARGEST


def whole(value: Any) -> int:
    """Return a whole number of a file.

    Raises:
        ValueError, TypeError, OverflowError: it is none, or so large that nothing can be calculated with it.
    """
    number = int(value)
    if abs(number) > MOST:
        raise ValueError(f"a number is beyond {MOST}")
    return number


def _names(value: Any) -> tuple[str, ...]:
    if value is None:
        return ()
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise TypeError(f"{value!r:.100} is not a list of names")
    return tuple(value)


def _spreads(record: Mapping[str, Any] | None) -> dict[str, Spread]:
    return {split: Spread.from_json((record or {}).get(split)) for split in SPLITS}


def _total(parts: Iterable[Traffic]) -> Traffic:
    listed = list(parts)
    return Traffic(sum(part.up for part in listed), sum(part.down for part in listed))
