"""Replies of clients, read: a Flower ``Message``, in which there may be anything, becomes a typed value or a refusal.

Nothing else on the server reads a reply. Each kind is a dataclass with ``read``, which returns a reply whose figures
are finite and within the bounds below, whose tensors are what was declared, and whose texts are single printable lines;
or raises ``RefusedError`` with one line that says why not. Another kind of reply is another such class: it opens the
message with ``opened``, takes its records with ``record_of`` and their fields with ``whole``, ``number`` and ``texts``,
and does so within ``refusing``.
"""

import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict

from common.accuracies import EXACT, TELLING
from common.config import folder_name
from common.errors import FloretError, printable
from common.flower import UNREADABLE, is_over
from common.privacy.accounting import LARGEST_EPSILON
from common.proof import PROOF, check
from common.tensors import NamedArrays, Specs
from common.wire import Record, empty, find_record, from_record, unpack
from strategies.core.roster import Client

# Notes of one reply that are kept: a client tells a line or two for each of the two versions of its state.
MOST_NOTES = 20
# Characters of the name of a class, which may be that of a folder, and of a client's identity.
LONGEST_NAME = 255
# Samples of a client: all of them are in its memory.
MOST_SAMPLES = 10**9
# Classes, and so rows of the last layer, which every client has to hold. ImageNet-21k has 21,841.
MOST_CLASSES = 2**16
# Sides of a sample (a film has four), and values in it: an image of 4,096 x 4,096 in colour has 2^25.6.
MOST_SIDES, MOST_INPUTS = 8, 2**26
# What one value of a sample may be, and how a model reads it.
INPUT_TYPES = {
    "uint8": "images of uint8, scaled to -1..1",
    "float32": "numbers, used as they are",
    "int32": "ids of words",
}
# Partitions of a simulation.
MOST_PARTITIONS = 10**6
# Beyond it a loss is none of float32; a sum over all clients stays finite.
LARGEST_LOSS = float(np.finfo(np.float32).max)
# Thirty years.
MOST_SECONDS = 1e9
# Values in the answer to a method's question, those in lists included.
MOST_VALUES = 10_000
# What a reply's metrics may be besides num-examples. Others, which a later version may send, are not looked at.
ACCURACIES = {f"{when}.{split}": split for when in ("before", "after") for split in ("test", "validation")}
# The types of tensors that a file of safetensors takes.
_SAVED = {"bool", "float16", "float32", "float64", "uint8", "int8", "int16", "int32", "int64"}


class RefusedError(FloretError):
    """A reply that the round goes on without; the message is the reason, one printable line of bounded length."""

    def __init__(self, reason: str) -> None:
        super().__init__(printable(reason) or "an error without a reason")


class OutdatedError(RefusedError):
    """A reply of a client that has other samples than it said when it joined: it has to be asked again."""


@dataclass(frozen=True)
class TrainReply:
    """A client's part in a round.

    Attributes:
        samples: that it trained on, from 1 to those that it declared when it joined.
        metrics: as of ``EvaluateReply``.
        arrays: what it sent, as ``uplink`` declares it: read-only views that keep the record's bytes alive.
        record: the same as it travelled; to be emptied when it was used (``discard``).
    """

    samples: int
    metrics: dict[str, float]
    arrays: NamedArrays
    record: ArrayRecord

    @classmethod
    def read(cls, message: Message, client: Client, specs: Specs, wire: str, *, finite: bool = True) -> Self:
        """Return the reply of ``client`` to a training message, with finite tensors unless ``finite`` leaves that open.

        Raises:
            RefusedError: the client failed, or its reply is none.
        """
        with refusing():
            content = opened(message)
            metrics = _metrics(content, client, client.train, "training")
            record = record_of(content, "arrays", ArrayRecord)
            arrays = unpack(record, specs, wire, finite=finite)
            return cls(int(metrics["num-examples"]), metrics, arrays, record)


@dataclass(frozen=True)
class EvaluateReply:
    """What a client measured.

    Attributes:
        metrics: ``num-examples``; and if they were sent ``loss``, finite; of the ``ACCURACIES``, in [0, 1], those on
            splits of which it has samples; ``seconds``, not negative; ``epsilon``, spent on privacy, and
            ``epsilon-next``, what it would be after another round.
    """

    metrics: dict[str, float]

    @classmethod
    def read(cls, message: Message, client: Client) -> Self:
        """Return the reply of ``client`` to an evaluation message; errors as of ``TrainReply.read``."""
        with refusing():
            return cls(_metrics(opened(message), client, client.test, "test"))


@dataclass(frozen=True)
class Description:
    """What a client says of itself when it joins.

    Attributes:
        name: a name for a folder on every system.
        identity: the random text that stays with its state.
        key: the fingerprint of its node's key if it proves to have one, else empty.
        train, validation, test: numbers of samples; the first and the last are at least 1.
        num_classes: at least as many as there are names of classes.
        input_shape: of one sample.
        class_names: those of its labels from 0, or none.
        partitions: of how many the client is one in a simulation, else 0.
        own: its data are its own, not a partition of the run's dataset; an earlier Floret does not say so.
        accuracies: how it tells them, one of ``common.accuracies.TELLING``; nor this.
        input_type: of the values of a sample, one of ``INPUT_TYPES``; empty if an earlier Floret does not say so.
    """

    name: str
    identity: str
    train: int
    validation: int
    test: int
    num_classes: int
    input_shape: tuple[int, ...]
    class_names: tuple[str, ...]
    partitions: int
    key: str = ""
    own: bool = False
    accuracies: str = EXACT
    input_type: str = ""

    @classmethod
    def read(cls, message: Message, node: int, asked: str) -> Self:
        """Return what the client at ``node`` says of itself, in answer to the message with the id ``asked``.

        Raises:
            RefusedError: it failed, or says something else; names the client as far as it is known.
        """
        who = f"node {node}"
        try:
            with refusing():
                content = opened(message)
                said = record_of(content, "client", ConfigRecord)
                name = said.get("name")
                wrong = folder_name(name) if isinstance(name, str) else "must be a text"
                if wrong or not isinstance(name, str):
                    raise RefusedError(f"client-name {shown(name)}: {wrong}")
                who = f"client {name}"
                shape = said.get("input-shape")
                if not isinstance(shape, list) or not 0 < len(shape) <= MOST_SIDES:
                    raise RefusedError(f"input-shape is {shown(shape)}, not a list of 1 to {MOST_SIDES} sides")
                sides = [whole("a side of input-shape", side, 1, MOST_INPUTS) for side in shape]
                if math.prod(sides) > MOST_INPUTS:
                    raise RefusedError(f"input-shape is {tuple(sides)}, more than {MOST_INPUTS} values in a sample")
                classes = whole("num-classes", said.get("num-classes"), 1, MOST_CLASSES)
                names = texts("class-names", said.get("class-names"), classes, LONGEST_NAME)
                (identity,) = texts("identity", [said.get("identity")], 1, LONGEST_NAME)
                own = said.get("own-data", False)
                if not isinstance(own, bool):
                    raise RefusedError(f"own-data is {shown(own)}, not true or false")
                accuracies = said.get("accuracies", EXACT)
                if accuracies not in TELLING:
                    raise RefusedError(f"accuracies is {shown(accuracies)}, not {', '.join(TELLING)}")
                kind = said.get("input-type", "")
                if kind not in ("", *INPUT_TYPES):
                    raise RefusedError(f"input-type is {shown(kind)}, not {', '.join(INPUT_TYPES)}")
                proof = record_of(content, PROOF, ConfigRecord) if PROOF in content else None
                return cls(
                    name=name,
                    identity=identity,
                    train=whole("train", said.get("train"), 1, MOST_SAMPLES),
                    validation=whole("validation", said.get("validation"), 0, MOST_SAMPLES),
                    test=whole("test", said.get("test"), 1, MOST_SAMPLES),
                    num_classes=classes,
                    input_shape=tuple(sides),
                    class_names=names,
                    partitions=whole("partitions", said.get("partitions"), 0, MOST_PARTITIONS),
                    key="" if proof is None else check(proof, asked, node, name),
                    own=own,
                    accuracies=str(accuracies),
                    input_type=str(kind),
                )
        except RefusedError as reason:
            raise RefusedError(f"{who}: {reason}") from reason


@dataclass(frozen=True)
class PlanAnswer:
    """What a client answers to a method's question before a round: scalars and lists of them, ``MOST_VALUES`` in all.

    Numbers are finite and of 64 bits, texts single lines. What they mean, the method has to check.
    """

    values: dict[str, Any]

    @classmethod
    def read(cls, message: Message) -> Self:
        """Return the answer; errors as of ``TrainReply.read``."""
        with refusing():
            record = record_of(opened(message), "plan", ConfigRecord)
            count = sum(1 + (len(value) if isinstance(value, list) else 0) for value in record.values())
            if count > MOST_VALUES:
                raise RefusedError(f"the client's plan has {count} values, more than {MOST_VALUES}")
            return cls({printable(name): _planned(name, value) for name, value in record.items()})


@dataclass(frozen=True)
class ExportReply:
    """A client's personal model; None if it has none, or wrote it to the run directory itself.

    Attributes:
        model: its tensors.
        unwritten: why it could not write them; empty if it could.
    """

    model: NamedArrays | None
    unwritten: str = ""

    @classmethod
    def read(cls, message: Message) -> Self:
        """Return the answer to ``export``; errors as of ``TrainReply.read``."""
        with refusing():
            content = opened(message)
            if "model" not in content:
                why = record_of(content, "client", ConfigRecord).get("unwritten", "")
                return cls(None, printable(why) if isinstance(why, str) else "")
            model = from_record(record_of(content, "model", ArrayRecord))
            for name, array in model.items():
                if str(array.dtype) not in _SAVED:
                    raise RefusedError(f"tensor {name} is {array.dtype}")
            return cls(model)


def notes_in(message: Message) -> list[str]:
    """Return what a client reports besides, such as a damaged file: single lines, ``MOST_NOTES`` at most.

    What is no note is passed over: a reply is not refused for it.
    """
    record = find_record(message.content, "notes", ConfigRecord) if message.has_content() else None
    lines = record.get("lines") if record else None
    found = [line for line in lines if isinstance(line, str)] if isinstance(lines, list) else []
    left = len(found) - MOST_NOTES
    return [printable(line) for line in found[:MOST_NOTES]] + ([f"{left} more notes are left out"] if left > 0 else [])


def discard(message: Message) -> None:
    """Give back the memory of a reply's tensors.

    Flower's records refer to themselves, so the garbage collector would let several replies pile up.
    """
    for record in message.content.values() if message.has_content() else ():
        if isinstance(record, ArrayRecord):
            empty(record)


# What kinds of replies are read with


@contextmanager
def refusing() -> Iterator[None]:
    """Turn whatever goes wrong while a reply is read into a ``RefusedError``.

    Flower checks the types of what is put into a record, not what an object over the network says of itself: an
    ``Array`` may have any text for a type, numbers of thousands of digits for sides, and bytes that are neither. So
    what reading raises on the way is the reply's fault, and a reason like any other.
    """
    try:
        yield
    except RefusedError:
        raise
    except FloretError as error:
        raise RefusedError(str(error)) from error
    except UNREADABLE as error:
        raise RefusedError(f"the reply cannot be read ({type(error).__name__}: {error})") from error


def opened(message: Message) -> RecordDict:
    """Return the records of a reply.

    Raises:
        RefusedError: the client failed, or the message is empty.
    """
    if is_over(message):
        raise RefusedError("no answer in time")
    if message.has_error():
        raise RefusedError(message.error.reason or f"an error, code {message.error.code}, without a reason")
    if not message.has_content():
        raise RefusedError("the reply is empty")
    if "error" in message.content:
        error = find_record(message.content, "error", ConfigRecord)
        reason = error.get("reason") if error else None
        raise RefusedError(reason if isinstance(reason, str) else "")
    return message.content


def record_of(content: RecordDict, name: str, kind: type[Record]) -> Record:
    """Return the record ``name`` of a reply.

    Raises:
        RefusedError: there is none, or it is of another kind.
    """
    record = find_record(content, name, kind)
    if record is None:
        other = f": it is of another kind, {type(content[name]).__name__}" if name in content else ""
        raise RefusedError(f"the reply has no {name}{other}")
    return record


def whole(what: str, value: object, least: int, most: int) -> int:
    """Return ``value`` if it is a whole number from ``least`` to ``most``.

    Raises:
        RefusedError: it is not; names ``what`` it should be.
    """
    if type(value) is not int or not least <= value <= most:
        raise RefusedError(f"{what} is {shown(value)}, not a whole number from {least} to {most}")
    return value


def number(what: str, value: object, least: float, most: float) -> float:
    """Return ``value`` if it is a number from ``least`` to ``most``; errors as of ``whole``."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise RefusedError(f"{what} is {shown(value)}, not a finite number")
    if not least <= value <= most:
        finite = isinstance(value, int) or math.isfinite(value)
        raise RefusedError(
            f"{what} is {shown(value)}, not {f'from {least:g} to {most:g}' if finite else 'a finite number'}"
        )
    return float(value)


def texts(what: str, value: object, most: int, longest: int) -> tuple[str, ...]:
    """Return the texts of a list, each as one printable line of at most ``longest`` characters.

    Raises:
        RefusedError: it is no list of texts, or of more than ``most``.
    """
    if not isinstance(value, list) or not all(isinstance(text, str) for text in value):
        raise RefusedError(f"{what} is {shown(value)}, not made of texts")
    if len(value) > most:
        raise RefusedError(f"{what} has {len(value)} texts, at most {most} can be")
    return tuple(printable(text, longest) for text in value)


def shown(value: object) -> str:
    """Return a value that a client sent, as a reason quotes it: not the whole of a long one."""
    if isinstance(value, int) and value.bit_length() > 128:
        return f"a number of {value.bit_length()} bits"
    if isinstance(value, list | bytes):
        return f"{'a list' if isinstance(value, list) else 'bytes'} of length {len(value)}"
    return repr(printable(value, 80)) if isinstance(value, str) else str(value)


def _metrics(content: RecordDict, client: Client, declared: int, split: str) -> dict[str, float]:
    record = record_of(content, "metrics", MetricRecord)
    samples = record.get("num-examples")
    if type(samples) is not int or samples < 1:
        raise RefusedError(f"num-examples is {shown(samples)}, not a positive whole number")
    if samples > declared:
        raise OutdatedError(
            f"num-examples is {shown(samples)}, the client declared {declared} {split} samples when it joined"
        )
    metrics: dict[str, float] = {}
    for name, of in ACCURACIES.items():
        if name in record:
            metrics[name] = number(f"metric {name}", record[name], 0, 1)
            if not getattr(client, of):
                raise OutdatedError(f"metric {name} is there, the client declared no {of} samples when it joined")
    if "loss" in record:
        metrics["loss"] = number("metric loss", record["loss"], -LARGEST_LOSS, LARGEST_LOSS)
    for name in ("epsilon", "epsilon-next"):
        if name in record:
            metrics[name] = number(f"metric {name}", record[name], 0, LARGEST_EPSILON)
    if "seconds" in record:
        metrics["seconds"] = number("metric seconds", record["seconds"], 0, MOST_SECONDS)
    metrics["num-examples"] = samples
    return metrics


def _planned(name: str, value: object) -> Any:
    if isinstance(value, list):
        return [_planned(name, item) for item in value]
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, bool):
        return value
    if isinstance(value, int):
        return whole(name, value, -sys.maxsize - 1, sys.maxsize)
    return number(name, value, -sys.float_info.max, sys.float_info.max)
