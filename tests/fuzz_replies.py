"""``python -m tests.fuzz_replies [--cases N] [--seed S]``: spoil replies of every kind, and see what the server does.

A case takes valid replies, spoils one of them by chance, gives all to a real strategy or federation, without network
and training. Whatever is in it, the outcome is a valid value or a refusal with one printable line, the other clients
are as they were, and a line of history can be written. A few hundred cases are in ``tests/test_replies.py``.
"""

import argparse
import json
import logging
import math
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from cryptography.hazmat.primitives.asymmetric import ec
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid

from common.config import folder_name
from common.errors import LONGEST_TEXT
from common.proof import PROOF, sign
from common.tensors import Free, NamedArrays
from common.wire import pack, to_record, views
from server_app.federation import LARGEST_MODEL, Federation
from server_app.rounds import log_line, round_of
from server_app.settings import read_config
from server_app.setup import build_strategy
from strategies import METHODS
from strategies.core import Client, ExportReply, FloretStrategy, RefusedError, Roster, Session
from strategies.core.replies import MOST_CLASSES, MOST_INPUTS, MOST_NOTES, MOST_SAMPLES, PlanAnswer
from strategies.ua_pdfl import PeerRequest
from tests.harness import run_config

# Keys with which clients that know nothing of a method send good values.
OWN_KEYS: dict[str, dict[str, Any]] = {
    "fedavg": {"wire": "float16"},
    "fedcpd": {"fedcpd.distill": False},
    "dispfl": {"dispfl.density": 1.0},
    # What it has trained it goes on from, also in a round that is made again.
    "fedpa": {"fedpa.generator-steps": 0},
}
SHAPE, CLASSES, CLIENTS = (8,), 4, 3
SPOILT = "1"

TEXTS = [
    *(
        "",
        "a",
        "x" * 5000,
        "two\nlines",
        "\x1b[31mred\x1b[0m",
        "nul\x00",
        "\ud800 alone",
        "\u202eturned",
        "\u2028",
        "5²",
    ),
    *("../../etc/passwd", "/", ".", "ward-7", "1", "%s %d %n", "{}", "<script>", "\r\nWARNING : all is well", "٣"),
]
NUMBERS = [
    *(0, 1, -1, 2, 100, 101, 2**31, 2**33, 2**62, 2**63, 10**400, -(10**5000), True, False),
    *(0.0, -0.0, 0.5, 1.0, 1.0000001, 5.0, -0.1, 1e200, 1e308, -1e308, 3.5e38, math.nan, math.inf, -math.inf),
]
STYPES = ["numpy.ndarray", "floret.bits", "floret.sparse", "pickle", ""]
DTYPES = ["float32", "float16", "float64", "bool", "object", "O", "|O", "V8", "<U10000", "no type", "int64", "\x00"]
SHAPES: list[Any] = [
    *((), (0,), (1,), (-1,), (2**70,), (2**62, 2**62), (10**5000,), (True,), (1,) * 100, (64, 128), (128, 64), (64,)),
]
HEADERS = [
    *(
        b"",
        b"\x93NUMPY",
        b"\x93NUMPY\x01\x00\xff\xff",
        b"\x93NUMPY\x02\x00\xff\xff\xff\xff",
        b"PK\x03\x04",
        b"\x80\x04N.",
    ),
    *(
        b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text
        for text in (
            b"{'descr': '<f4', 'fortran_order': False, 'shape': (((((((, }\n",
            b"{'descr': '<f4', 'fortran_order': False, 'shape': (------1,), }\n",
            b"{'descr': '<f4', 'fortran_order': False, 'shape': (1180591620717411303424,), }\n",
            b"{'descr': '<f4', 'fortran_order': False, 'shape': (999999999999, 999999999999), }\n",
            b"{'descr': '<f4', 'fortran_order': False, 'shape': (" + b"1, " * 2000 + b"), }\n",
            b"{'descr': '|O', 'fortran_order': False, 'shape': (64,), }\n",
            b"{'descr': '|a0', 'fortran_order': False, 'shape': (64,), }\n",
            b"{'descr': '<x9', 'fortran_order': False, 'shape': (64,), }\n",
            b"\xff" * 60,
        )
    ),
]


# Whatever can be in a record


def anything(rng: Random) -> Any:
    """Return a value of a record, or one that no record takes."""
    kind = rng.randrange(6)
    if kind == 0:
        return rng.choice(TEXTS)
    if kind <= 2:
        return rng.choice(NUMBERS)
    if kind == 3:
        return [rng.choice([*TEXTS, *NUMBERS]) for _ in range(rng.choice([0, 1, 3, 30, 12_000]))]
    if kind == 4:
        return rng.choice([b"bytes", b"", None, [[1]], {"a": 1}])
    return [rng.choice(TEXTS)] * rng.randrange(40)


def put(record: Any, key: str, value: Any) -> None:
    """Put a value into a record past Flower's checks, which the other end of a wire need not make."""
    record.__dict__["_data"][key] = value


def some_record(rng: Random) -> Any:
    """Return a record of any kind."""
    record = rng.choice([ArrayRecord, ConfigRecord, MetricRecord])()
    for _ in range(rng.randrange(3)):
        value = Array(np.zeros(2, np.float32)) if isinstance(record, ArrayRecord) else anything(rng)
        put(record, rng.choice([*TEXTS, "reason", "lines", "loss", "num-examples"]), value)
    return record


def spoil_array(rng: Random, array: Array) -> None:
    """Spoil an array."""
    what = rng.randrange(7)
    if what == 0:
        array.dtype = rng.choice(DTYPES)
    elif what == 1:
        array.shape = rng.choice(SHAPES)
    elif what == 2:
        array.stype = rng.choice(STYPES)
    elif what == 3:
        array.data = array.data[: rng.randrange(len(array.data) + 1)]
    elif what == 4:
        content = bytearray(array.data + b" ")
        for _ in range(rng.choice([1, 1, 10])):
            content[rng.randrange(min(len(content), rng.choice([100, 10**9])))] = rng.randrange(256)
        array.data = bytes(content[:-1])
    elif what == 5:
        array.data = rng.choice(HEADERS) + rng.choice([b"", b"\x00" * 256, array.data])
    else:
        put_value = rng.choice([math.nan, math.inf, 1e30, 3e38, -1.0])
        # An earlier turn may have left what is no shape, or one that no memory holds.
        small = len(array.shape) < 9 and all(type(n) is int and 0 <= n < 10**4 for n in array.shape)
        shape = tuple(array.shape) if small else (2,)
        values = np.full(shape, put_value, np.float32)
        array.data, array.dtype, array.shape = Array(values).data, "float32", tuple(values.shape)


def spoil_record(rng: Random, record: Any) -> None:
    """Spoil a record."""
    names = list(record)
    if isinstance(record, ArrayRecord):
        what, name = rng.randrange(6), rng.choice(names) if names else ""
        if what == 0 and names:
            del record[name]
        elif what == 1:
            for i in range(rng.choice([1, 3, 300])):
                record[f"{rng.choice(TEXTS)}{i}"] = Array(np.zeros(1, np.float32))
        elif what == 2 and names:
            record[rng.choice(TEXTS)] = record[name]
        elif what == 3 and len(names) > 1:
            other = rng.choice(names)
            record[name], record[other] = record[other], record[name]
        elif names:
            array = record[name]
            record[name] = Array(array.dtype, tuple(array.shape), array.stype, array.data)
            spoil_array(rng, record[name])
        return
    what = rng.randrange(4)
    if what == 0 and names:
        del record[rng.choice(names)]
    elif what == 1:
        put(record, rng.choice(TEXTS), anything(rng))
    elif names:
        put(record, rng.choice(names), anything(rng))


def spoil(rng: Random, message: Message) -> Message:
    """Return a reply that is spoilt in one to three ways."""
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        what = rng.randrange(20)
        if what == 0:
            reason: Any = rng.choice([*TEXTS, None])
            return Message(Error(rng.choice([0, 1, 2, 10**6, -5]), reason), reply_to=asked(message))
        if what == 1:
            message.__dict__["_content"] = rng.choice([None, RecordDict()])
            return message
        content = message.content
        names = list(content)
        if what == 2:
            put(content, "error", rng.choice([some_record(rng), ConfigRecord({"reason": rng.choice(TEXTS)})]))
        elif what == 3 and names:
            del content[rng.choice(names)]
        elif what == 4:
            put(content, rng.choice([*names, *TEXTS]), some_record(rng))
        elif what <= 6:
            put(content, "notes", ConfigRecord())
            put(content["notes"], "lines", anything(rng))
        elif names:
            spoil_record(rng, content[rng.choice(names)])
    return message


def asked(reply: Message) -> Message:
    """Return a message as that which ``reply`` answers."""
    return Message(RecordDict(), reply.metadata.src_node_id, reply.metadata.message_type)


def reply_of(client: str, kind: str, content: RecordDict) -> Message:
    """Return a reply of a client."""
    return Message(content, reply_to=Message(RecordDict(), 1000 + int(client), kind))


# What holds for every outcome


def check_line(text: str) -> None:
    """Check that a text may stand in a log."""
    assert text.isprintable(), ascii(text)
    assert len(text) <= LONGEST_TEXT


def check_strategy(strategy: FloretStrategy) -> str:
    """Check what a strategy has of a round, and return what became of the spoilt reply."""
    assert set(strategy.results) | {name for name, _ in strategy.refused} == {str(i) for i in range(CLIENTS)}
    assert {name for name, _ in strategy.refused} <= {SPOILT}
    for _, reason in strategy.refused:
        assert reason
        check_line(reason)
    for name, note in strategy.notes:
        assert name == SPOILT
        check_line(note)
    assert len(strategy.notes) <= MOST_NOTES + 1
    for result in strategy.results.values():
        for name, value in result.metrics.items():
            assert math.isfinite(value)
            assert name in ("loss", "num-examples") or 0 <= value <= (1 if "." in name else 1e9), name
        assert 1 <= result.metrics["num-examples"] <= 100
    line = round_of(1, strategy, 1.0)
    json.dumps(line.to_json(), allow_nan=False)
    check_line(log_line(line, 2, 1.0))
    return strategy.refused[0][1] if strategy.refused else ""


@cache
def strategy_of(method: str) -> FloretStrategy:
    """Return a strategy with three clients."""
    values = run_config(Path("/nowhere"), method=method, **OWN_KEYS.get(method, {}))
    roster = Roster()
    for i in range(CLIENTS):
        roster.add(Client(str(i), 1000 + i, 100, 0 if i == 1 else 10, 10))
    return build_strategy(*read_config(values), SHAPE, CLASSES, roster=roster, session=Session("fuzz"))


def metrics(samples: int) -> MetricRecord:
    """Return good metrics."""
    return MetricRecord({"num-examples": samples, "loss": 1.5, "before.test": 0.5, "after.test": 1.0, "seconds": 0.1})


def train_content(strategy: FloretStrategy, i: int) -> RecordDict:
    """Return what a good client sends after training."""
    rng, arrays = np.random.default_rng(i), {}
    for name, spec in strategy._uplink.items():
        # FedKD sends a matrix or its two factors.
        whole = name.removesuffix(".left").removesuffix(".right")
        if f"{whole}.left" in strategy._uplink and (name == whole) == bool(i % 2):
            continue
        values = rng.standard_normal([1 if isinstance(side, Free) else side for side in spec.shape])
        if spec.dtype == "bool":
            arrays[name] = values > np.median(values)
        elif name == "energy":  # at least the squares of FedPAC's means
            arrays[name] = np.full(values.shape, 1000.0, np.float32)
        elif name in ("gradient-norm", "counts"):
            arrays[name] = np.ceil(np.abs(values)).astype(spec.dtype)
        else:
            arrays[name] = values.astype(spec.dtype)
    return RecordDict({"arrays": pack(arrays, strategy._uplink, strategy.config.wire), "metrics": metrics(50 + i)})


def train_case(rng: Random) -> str:
    """Train, with one spoilt reply: if it is refused, the result is that of the others alone."""
    strategy = strategy_of(rng.choice(list(METHODS)))

    def fold(clients: Iterable[int], *, spoilt: bool) -> NamedArrays:
        strategy.post._kept.clear()
        list(strategy.configure_train(1, to_record(strategy.initial_arrays()), ConfigRecord(), None))  # type: ignore[arg-type]
        replies = [reply_of(str(i), "train", train_content(strategy, i)) for i in clients]
        if spoilt:
            replies[int(SPOILT)] = spoil(rng, replies[int(SPOILT)])
        with np.errstate(over="ignore", invalid="ignore"):
            record, _ = strategy.aggregate_train(1, replies)
        found = {} if record is None else views(record)
        assert all(array.dtype == np.float32 for array in found.values())
        return found

    found = fold(range(CLIENTS), spoilt=True)
    reason = check_strategy(strategy)
    assert (SPOILT in strategy.post) == (strategy.relays and not reason)
    if reason:
        others = fold([i for i in range(CLIENTS) if str(i) != SPOILT], spoilt=False)
        assert found.keys() == others.keys()
        assert all(np.array_equal(found[name], array) for name, array in others.items())
    return reason


def evaluate_case(rng: Random) -> str:
    """Evaluate, with one spoilt reply."""
    strategy = strategy_of("fedper")
    strategy.start_round(to_record(strategy.initial_arrays()))
    list(strategy.configure_evaluate(1, ArrayRecord(), ConfigRecord(), None))  # type: ignore[arg-type]
    replies = [reply_of(str(i), "evaluate", RecordDict({"metrics": metrics(10)})) for i in range(CLIENTS)]
    replies[int(SPOILT)] = spoil(rng, replies[int(SPOILT)])
    strategy.aggregate_evaluate(1, replies)
    if SPOILT not in strategy.results and not strategy.refused:
        return ""  # it has measured nothing
    return check_strategy(strategy)


def description(name: str) -> dict[str, Any]:
    """Return what a good client says of itself."""
    sizes = {"train": 100, "validation": 0, "test": 10, "num-classes": CLASSES, "input-shape": list(SHAPE)}
    return {"name": name, "identity": "ab" * 16, **sizes, "class-names": ["a", "b"], "partitions": 0}


class Answers(Grid):
    """Gives out prepared answers, by node."""

    def __init__(self, answers: dict[int, Message]) -> None:
        self.answers = answers

    def set_run(self, run: Any) -> None:
        raise AssertionError

    @property
    def run(self) -> Any:
        raise AssertionError

    def create_message(self, *_: Any, **__: Any) -> Message:
        raise AssertionError

    def send_and_receive(self, *_: Any, **__: Any) -> Iterable[Message]:
        raise AssertionError

    def get_node_ids(self) -> Iterable[int]:
        return list(self.answers)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        return [str(message.metadata.dst_node_id) for message in messages]

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        return [self.answers[int(i)] for i in message_ids]


@cache
def _joining() -> Any:
    return read_config(run_config(Path("/nowhere"), method="fedper"))[0]


@cache
def _key() -> ec.EllipticCurvePrivateKey:
    return ec.generate_private_key(ec.SECP256R1())


@cache
def _signed(asked: str, node: int, name: str) -> tuple[bytes, bytes]:
    proof = sign(_key(), asked, node, name)
    return bytes(proof["key"]), bytes(proof["signature"])  # type: ignore[arg-type]


def _proof(asked: str, node: int, name: str) -> ConfigRecord:
    key, signature = _signed(asked, node, name)
    return ConfigRecord({"key": key, "signature": signature})


def describe_case(rng: Random) -> str:
    """Join, with one spoilt description among good ones."""
    replies = {
        1000 + i: reply_of(
            *(str(i), "query.describe"),
            RecordDict({"client": ConfigRecord(description(str(i))), PROOF: _proof(str(1000 + i), 1000 + i, str(i))}),
        )
        for i in range(CLIENTS)
    }
    replies[1001] = spoil(rng, replies[1001])
    federation = Federation(Answers(replies), _joining())
    federation.refresh()
    refused = federation.refresh()
    assert "0" in federation.roster
    assert sum(math.prod(federation.input_shape) for _ in [0]) <= MOST_INPUTS
    assert 1 <= federation.num_classes <= MOST_CLASSES
    for client in federation.roster:
        assert folder_name(client.name) is None
        assert 1 <= client.train <= MOST_SAMPLES
        assert 0 <= client.validation <= MOST_SAMPLES
        assert 1 <= client.test <= MOST_SAMPLES
        check_line(client.identity)
        check_line(client.key)
    for name in federation.class_names or ():
        check_line(name)
    json.dumps(federation.about(), allow_nan=False)
    for reason in refused:
        check_line(reason)
    assert len(federation.roster) + len(refused) >= CLIENTS - 1
    assert LARGEST_MODEL
    return refused[0] if refused else ""


def plan_case(rng: Random) -> str:
    """Answer what UA-PDFL asks."""
    plan = ConfigRecord({"replace": -1, "extractors": [0, 1], "heads": [1]})
    try:
        answer = PlanAnswer.read(spoil(rng, reply_of("1", "query.plan", RecordDict({"plan": plan}))))
        request = PeerRequest.read(answer.values, 2)
    except RefusedError as reason:
        check_line(str(reason))
        return str(reason)
    assert all(-1 <= i < 2 for i in (request.replace, *request.extractors, *request.heads))
    assert len(request.extractors) <= 2
    return ""


def export_case(rng: Random) -> str:
    """Send a personal model."""
    content = RecordDict(
        {"client": ConfigRecord({"file": "1.safetensors"}), "model": to_record({"w": np.zeros((2, 3), np.float32)})}
    )
    try:
        model = ExportReply.read(spoil(rng, reply_of("1", "query.export", content))).model
    except RefusedError as reason:
        check_line(str(reason))
        return str(reason)
    assert model is None or all(array.dtype.kind in "fiub" for array in model.values())
    return ""


CASES: dict[str, Callable[[Random], str]] = {
    "train": train_case,
    "evaluate": evaluate_case,
    "describe": describe_case,
    "plan": plan_case,
    "export": export_case,
}


def main() -> None:
    """Run as many cases as asked for, and print what became of them."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz_replies", description=__doc__)
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    logging.getLogger("flwr").setLevel(logging.CRITICAL)
    started, outcomes, weights = time.time(), Counter[str](), ["train", "train", "describe", *CASES]
    for i in range(arguments.seed, arguments.seed + arguments.cases):
        rng = Random(i)
        kind = rng.choice(weights)
        try:
            outcomes[f"{kind}: {'refused' if CASES[kind](rng) else 'taken'}"] += 1
        except Exception:
            sys.exit(f"{kind} with seed {i} fails: python -m tests.fuzz_replies --cases 1 --seed {i}\n{_trace()}")
    for outcome, count in sorted(outcomes.items()):
        print(f"{count:7d} {outcome}")
    print(f"{arguments.cases} cases in {time.time() - started:.0f} s, none failed")


def _trace() -> str:
    import traceback

    return traceback.format_exc()


if __name__ == "__main__":
    main()
