"""Whatever a client answers, the run goes on without it: hostile replies of every kind, case by case and by chance."""

import json
import logging
import math
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import grpc
import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, MetricRecord, RecordDict
from flwr.app.message import remove_content_from_message
from flwr.common.serde import message_to_proto
from flwr.common.typing import Run
from flwr.proto.appio_pb2 import PullAppMessagesResponse
from flwr.proto.message_pb2 import PullObjectResponse
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree
from flwr.superlink.grid import GrpcGrid
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from common.errors import LONGEST_TEXT, FloretError, printable
from common.flower import TEXTS, Bound, Unpacked, _Begun
from common.flower import Answers as Pulled
from common.tensors import Free, TensorError, TensorSpec, check_free_sides
from common.wire import pack, unpack
from server_app.delivery import Delivery, bound_of
from server_app.federation import LARGEST_MODEL, Federation
from strategies.core import Client, RefusedError, send_and_receive
from strategies.core.replies import (
    MOST_CLASSES,
    MOST_NOTES,
    Description,
    EvaluateReply,
    PlanAnswer,
    TrainReply,
    opened,
)
from strategies.ua_pdfl import PeerRequest
from tests.fuzz_replies import CASES, Answers, _joining, description, metrics, put, reply_of, strategy_of, train_content
from tests.harness import federate

NAME = "extractor.fc2.bias"
Spoil = Callable[[RecordDict], Any]


def metric(name: str, value: Any) -> Spoil:
    return lambda content: put(content["metrics"], name, value)


def header(text: bytes) -> Spoil:
    def spoil(content: RecordDict) -> None:
        content.array_records["arrays"][NAME].data = (
            b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text + bytes(256)
        )

    return spoil


def array(**fields: Any) -> Spoil:
    return lambda content: content["arrays"][NAME].__dict__.update(fields)


def npy(shape: bytes, descr: bytes = b"<f4") -> bytes:
    return b"{'descr': '" + descr + b"', 'fortran_order': False, 'shape': (" + shape + b"), }\n"


def many(content: RecordDict) -> None:
    for i in range(100_000):
        put(content["arrays"], f"x{i}", content["arrays"][NAME])


# What a reply to a training message has in it, and how the reason of its refusal begins.
TRAIN: list[tuple[Spoil, str]] = [
    (metric("after.test", 1e308), "metric after.test is 1e+308, not from 0 to 1"),
    (metric("before.test", 5.0), "metric before.test is 5.0, not from 0 to 1"),
    (metric("before.test", -0.1), "metric before.test is -0.1, not from 0 to 1"),
    (metric("after.validation", math.nan), "metric after.validation is nan, not a finite number"),
    (metric("after.test", [0.5]), "metric after.test is a list of length 1, not a finite number"),
    (metric("loss", 1e308), "metric loss is 1e+308, not from"),
    (metric("loss", 10**400), "metric loss is a number of 1329 bits"),
    (metric("loss", "low"), "metric loss is 'low', not a finite number"),
    (metric("seconds", -1.0), "metric seconds is -1.0, not from 0"),
    (metric("seconds", math.inf), "metric seconds is inf, not a finite number"),
    (metric("num-examples", 2**62), "num-examples is 4611686018427387904, the client declared"),
    (metric("num-examples", 0), "num-examples is 0, not a positive whole number"),
    (metric("num-examples", True), "num-examples is True, not a positive whole number"),
    (lambda c: c.pop("metrics"), "the reply has no metrics"),
    (lambda c: c.pop("arrays"), "the reply has no arrays"),
    (lambda c: c.clear(), "the reply has no metrics"),
    (lambda c: put(c, "arrays", MetricRecord()), "the reply has no arrays: it is of another kind, MetricRecord"),
    (lambda c: put(c, "metrics", ConfigRecord()), "the reply has no metrics: it is of another kind, ConfigRecord"),
    (lambda c: put(c, "error", MetricRecord()), "an error without a reason"),
    (lambda c: put(c, "error", ConfigRecord({"reason": 5})), "an error without a reason"),
    (lambda c: put(c, "error", ConfigRecord({"reason": "\n\x1b[2J all\r\nis well"})), "?[2J all is well"),
    (lambda c: put(c, "error", ConfigRecord({"reason": "a" * 10**6})), "a" * (LONGEST_TEXT - 1) + "…"),
    (header(npy(b"((((64,")), "an array cannot be read"),
    (header(npy(b"---64,")), "an array cannot be read"),
    (header(npy(b"1180591620717411303424,")), "an array cannot be read"),
    (header(npy(b"999999999999, 999999999999")), f"tensor {NAME} is float32 (999999999999, 999999999999)"),
    (header(npy(b"64,", b"|O")), "an array cannot be read"),
    (header(npy(b"64,", b"<x9")), "an array cannot be read"),
    (array(stype="pickle"), f"an array cannot be read: tensor {NAME} is 'pickle'"),
    (array(stype="floret.bits", shape=(2**70,)), "an array cannot be read"),
    (array(shape=(-64,)), "an array cannot be read"),
    (array(shape=(10**5000,)), "an array cannot be read"),
    (array(dtype="object"), "an array cannot be read"),
    (array(data=b""), "an array cannot be read"),
    (lambda c: array(data=c.array_records["arrays"][NAME].data[:-1])(c), "an array cannot be read"),
    (lambda c: put(c["arrays"], "\ud800\n" + "x" * 5000, c["arrays"][NAME]), "tensor ? xxx"),
    (many, "tensor x0 is unknown"),
]


def quick(clients: int) -> dict[str, Any]:
    """Return the keys of a run that takes little time with many clients."""
    return {"method": "fedper", "rounds": 1, "local_epochs": 1, "max_samples": 20 * clients}


def test_whatever_a_client_sends_after_training_is_refused_with_its_name_and_a_reason(tmp_path: Path) -> None:
    """One run in which the clients are hostile, each in another way, two are not, and one only has too much to say."""
    clients = len(TRAIN) + 3

    def tamper(message: Message, reply: Message) -> Message:
        i = message.metadata.dst_node_id - 1000
        if message.metadata.message_type == "train":
            if i < len(TRAIN):
                TRAIN[i][0](reply.content)
            elif i == len(TRAIN):
                put(reply.content, "notes", ConfigRecord())
                put(reply.content["notes"], "lines", ["all\nWARNING : is \x1b[1mwell\ud800"] * 200_000)
                put(reply.content["metrics"], "own", 1e308)
        return reply

    outcome = federate(tmp_path, clients, report=True, tamper=tamper, **quick(clients))
    (line,) = outcome.history
    reasons = {refusal["client"]: refusal["reason"] for refusal in line["refused"]}
    for i, (_, begins) in enumerate(TRAIN):
        assert reasons[str(i)].startswith(begins), i
        assert reasons[str(i)].isprintable()
        assert len(reasons[str(i)]) <= LONGEST_TEXT
    assert len(reasons) == len(TRAIN)
    assert len([c for c in line["clients"].values() if c["trained"]]) == 3
    notes = [note["note"] for note in line["notes"]]
    assert notes == ["all WARNING : is ?[1mwell?"] * MOST_NOTES + [f"{200_000 - MOST_NOTES} more notes are left out"]
    assert 0 <= outcome.summary["accuracy"]["after"]["mean"] <= 1
    assert (outcome.directory / "report.html").is_file()


def said(key: str, value: Any) -> Spoil:
    return lambda content: put(content["client"], key, value)


DESCRIBE: list[tuple[Spoil, str]] = [
    (lambda c: c.clear(), "node 1000: the reply has no client"),
    (lambda c: put(c, "client", MetricRecord()), "node 1001: the reply has no client: it is of another kind"),
    (lambda c: put(c, "error", ConfigRecord()), "node 1002: an error without a reason"),
    (lambda c: c["client"].__delitem__("name"), "node 1003: client-name None: must be a text"),
    (said("name", "../x"), "node 1004: client-name '../x': must be 1 to 100 letters"),
    (said("name", "5²"), "node 1005: client-name '5²': must be"),
    (said("name", "a\nWARNING: b"), "node 1006: client-name 'a WARNING: b': must be"),
    (said("num-classes", 2**33), "client 7: num-classes is 8589934592, not a whole number from 1 to"),
    (said("num-classes", "ten"), "client 8: num-classes is 'ten', not a whole number"),
    (said("input-shape", [10**9, 10**9]), "client 9: a side of input-shape is 1000000000, not a whole number"),
    (said("input-shape", [2**20, 2**20]), "client 10: input-shape is (1048576, 1048576), more than"),
    (said("input-shape", [2**25]), "client 11: with inputs of (33554432,) and 10 classes the model 'mlp' has "),
    (said("input-shape", []), "client 12: input-shape is a list of length 0"),
    (said("input-shape", [-8]), "client 13: a side of input-shape is -8"),
    (said("train", 0), "client 14: train is 0, not a whole number from 1"),
    (said("test", -300), "client 15: test is -300, not a whole number from 1"),
    (said("validation", 2**62), "client 16: validation is 4611686018427387904, not"),
    (said("class-names", ["a"] * 11), "client 17: class-names has 11 texts, at most 10"),
    (said("class-names", [1, 2]), "client 18: class-names is a list of length 2, not made of texts"),
    (said("identity", b"\xff"), "client 19: identity is a list of length 1, not made of texts"),
    (said("partitions", None), "client 20: partitions is None, not a whole number"),
    (said("own-data", "yes"), "client 21: own-data is 'yes', not true or false"),
    (said("own-data", 1), "client 22: own-data is 1, not true or false"),
    (said("accuracies", "guessed"), "client 23: accuracies is 'guessed', not exact, rounded, none"),
    (said("accuracies", ["exact"]), "client 24: accuracies is a list of length 1, not exact, rounded, none"),
    (said("input-type", "float64"), "client 25: input-type is 'float64', not uint8, float32, int32"),
    (said("input-type", ["uint8"]), "client 26: input-type is a list of length 1, not uint8, float32, int32"),
]


@pytest.mark.parametrize(
    ("code", "line"), [(3, "no answer in time"), (4, "no answer in time"), (5, "Error: gone"), (2, "Error: gone")]
)
def test_a_message_that_flower_holds_no_longer_is_no_answer(code: int, line: str) -> None:
    # 3 and 4: Flower's MESSAGE_UNAVAILABLE and REPLY_MESSAGE_UNAVAILABLE.
    message = Message(Error(code, "Error: gone"), reply_to=Message(RecordDict(), 1, "query.describe"))
    with pytest.raises(RefusedError, match=f"^{line}$"):
        opened(message)


def test_whoever_describes_itself_wrongly_does_not_join(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    clients = len(DESCRIBE) + 2

    def tamper(message: Message, reply: Message) -> Message:
        i = message.metadata.dst_node_id - 1000
        if message.metadata.message_type == "query.describe" and i < len(DESCRIBE):
            DESCRIBE[i][0](reply.content)
        if message.metadata.message_type == "query.describe" and i == len(DESCRIBE):
            return Message(Error(0, "\x1b[31m\nfail"), reply_to=message)
        return reply

    with caplog.at_level(logging.WARNING, "flwr"):
        outcome = federate(tmp_path, clients, tamper=tamper, **quick(clients))
    lines = [text for text in caplog.messages if text.startswith("A client cannot take part: ")]
    for _, begins in DESCRIBE:
        assert any(line.startswith(f"A client cannot take part: {begins}") for line in lines), begins
    assert f"A client cannot take part: node {1000 + len(DESCRIBE)}: ?[31m fail" in lines
    assert len(lines) == len(DESCRIBE) + 1
    assert all(line.isprintable() for line in lines)
    assert list(outcome.history[0]["clients"]) == [str(clients - 1)]
    assert outcome.summary["clients"] == 1


@pytest.mark.parametrize(("simulated", "line"), [(False, "node 1001: wrong data"), (True, "wrong data")])
def test_a_refusal_names_the_node_where_it_is_another_machine(
    simulated: bool, line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("server_app.federation.is_simulated", lambda _: simulated)
    reply = reply_of("1", "query.describe", RecordDict({"error": ConfigRecord({"reason": "wrong data"})}))
    reply.metadata.__dict__["_reply_to_message_id"] = "1001"
    federation = Federation(Answers({1001: reply}), _joining())
    federation.refresh()
    assert federation.refresh() == [line]


def test_a_description_that_cannot_be_read_names_the_node(monkeypatch: pytest.MonkeyPatch) -> None:
    reply = reply_of("1", "query.describe", RecordDict({"client": ConfigRecord(description("1"))}))
    monkeypatch.setattr("strategies.core.replies.record_of", Mock(side_effect=ValueError("odd")))
    with pytest.raises(RefusedError, match=r"^node 1001: the reply cannot be read \(ValueError: odd\)$"):
        Description.read(reply, 1001, "asked")


def test_the_largest_model_is_checked_with_the_classes_of_all(tmp_path: Path) -> None:
    """Each bound of its own holds, and together they would not fit."""
    large = description("1") | {"num-classes": MOST_CLASSES, "input-shape": [8_360_000], "class-names": []}
    reply = reply_of("1", "query.describe", RecordDict({"client": ConfigRecord(large)}))
    federation = Federation(Answers({1001: reply}), _joining())
    federation.refresh()
    (reason,) = federation.refresh()
    assert reason.endswith(f"values, more than {LARGEST_MODEL}")


def test_images_of_two_types_are_not_one_federation(tmp_path: Path) -> None:
    """A model takes bytes as -1..1, and other numbers as they are: what it learns of the one is wrong for the other."""

    def told(**kinds: str) -> tuple[Federation, list[str]]:
        answers = {1000 + i: _described(name, kind) for i, (name, kind) in enumerate(kinds.items())}
        federation = Federation(Answers(answers), _joining())
        return federation, [*federation.refresh(), *federation.refresh()]

    federation, refused = told(north="uint8", south="float32", east="uint8")
    assert refused == [
        "client south: inputs are numbers, used as they are, the federation's are images of uint8, scaled to -1..1; "
        "all must be alike"
    ]
    assert {client.name for client in federation.roster} == {"north", "east"}
    # A node of an earlier Floret does not say, and a run that goes on knows what the others said.
    federation, refused = told(north="", south="float32")
    assert refused == []
    assert federation.about()["input-type"] == "float32"
    resumed = Federation(Answers({1002: _described("east", "uint8")}), _joining())
    resumed.restore(json.loads(json.dumps(federation.about())), [])
    assert [*resumed.refresh(), *resumed.refresh()] == [
        "client east: inputs are images of uint8, scaled to -1..1, the federation's are numbers, used as they are; all "
        "must be alike"
    ]


def test_partitions_of_two_divisions_are_not_one_federation() -> None:
    answers = {
        1000 + i: _described(name, "uint8", partitions)
        for i, (name, partitions) in enumerate({"0": 2, "1": 3, "own": 0}.items())
    }
    federation = Federation(Answers(answers), _joining())
    federation.refresh()
    assert federation.refresh() == [
        "client 1: num-partitions is 3, others of the federation have 2: its samples would be theirs, too"
    ]
    assert [client.name for client in federation.roster] == ["0", "own"]


def _described(name: str, kind: str, partitions: int = 0) -> Message:
    said = description(name) | {"partitions": partitions} | ({"input-type": kind} if kind else {})
    return reply_of("1", "query.describe", RecordDict({"client": ConfigRecord(said)}))


@pytest.mark.parametrize(
    ("values", "begins"),
    [
        ({"extractors": [0], "heads": [0]}, "the client asked for a peer"),
        ({"replace": 0, "extractors": "0", "heads": [0]}, "the client's plan must have the lists"),
        ({"replace": 0, "extractors": 0, "heads": [0]}, "the client's plan must have the lists"),
        ({"replace": 0, "extractors": ["0"], "heads": [0]}, "the client asked for a peer"),
        ({"replace": 0, "extractors": [7], "heads": [0]}, "the client asked for a peer"),
        ({"replace": 0, "extractors": [0] * 5000, "heads": [0]}, "the client asked for a peer"),
        ({"replace": 0, "extractors": [0] * 20_000, "heads": [0]}, "the client's plan has 20004 values, more than"),
        ({"replace": 2**70, "extractors": [0], "heads": [0]}, "replace is 1180591620717411303424, not a whole number"),
        ({"replace": math.nan, "extractors": [0], "heads": [0]}, "replace is nan, not a finite number"),
        ({"replace": b"0", "extractors": [0], "heads": [0]}, "replace is bytes of length 1"),
    ],
)
def test_a_plan_that_is_none_is_refused(values: dict[str, Any], begins: str) -> None:
    record = ConfigRecord()
    for name, value in values.items():
        put(record, name, value)
    with pytest.raises(RefusedError) as refused:
        PeerRequest.read(PlanAnswer.read(reply_of("1", "query.plan", RecordDict({"plan": record}))).values, 2)
    assert str(refused.value).startswith(begins)


def test_a_spoilt_plan_and_a_spoilt_evaluation_do_not_end_a_run(tmp_path: Path) -> None:
    def tamper(message: Message, reply: Message) -> Message:
        kind, node = message.metadata.message_type, message.metadata.dst_node_id
        if kind == "query.plan" and node == 1000:
            reply.content["plan"] = ConfigRecord({"extractors": "all"})
        if kind == "evaluate" and node == 1000:
            put(reply.content["metrics"], "num-examples", 2**62)
        return reply

    outcome = federate(tmp_path, 3, method="ua-pdfl", local_epochs=1, tamper=tamper)
    assert [(refusal["client"], refusal["reason"][:20]) for refusal in outcome.history[1]["refused"]] == [
        ("0", "the client's plan mu"),
        ("0", "num-examples is 4611"),
    ]
    assert sorted(outcome.history[1]["clients"]) == ["1", "2"]


def test_accuracies_on_a_split_that_the_client_does_not_have_are_refused() -> None:
    client = Client("1", 1001, 100, 0, 10)
    content = RecordDict({"metrics": metrics(10)})
    assert EvaluateReply.read(reply_of("1", "evaluate", content), client).metrics["after.test"] == 1.0
    content.metric_records["metrics"]["after.validation"] = 0.5
    with pytest.raises(RefusedError, match="the client declared no validation samples"):
        EvaluateReply.read(reply_of("1", "evaluate", content), client)


def test_an_array_that_is_called_what_it_is_not_is_refused() -> None:
    strategy = strategy_of("fedper")
    content = train_content(strategy, 1)
    content.array_records["arrays"][NAME].dtype = "float64"
    with pytest.raises(RefusedError, match=r"it is called float64 \(64,\), its bytes are float32 \(64,\)"):
        TrainReply.read(reply_of("1", "train", content), strategy.roster["1"], strategy._uplink, "float32")


def test_a_message_with_neither_content_nor_error_is_refused() -> None:
    message = reply_of("1", "evaluate", RecordDict())
    message.__dict__["_content"] = None
    with pytest.raises(RefusedError, match="the reply is empty"):
        EvaluateReply.read(message, Client("1", 1001, 100, 0, 10))


class Unreadable(Answers):
    """Gives out one answer that Flower cannot make a message of."""

    def pull_messages(self, message_ids: Any) -> Any:
        if "1001" in message_ids:
            raise KeyError("arraychunk_ids")
        return super().pull_messages(message_ids)


def test_an_answer_that_flower_cannot_read_does_not_end_the_run() -> None:
    good = {
        node: Message(
            RecordDict({"client": ConfigRecord(description(str(node - 1000)))}),
            reply_to=Message(RecordDict(), node, "query.describe"),
        )
        for node in (1000, 1001, 1002)
    }
    federation = Federation(Unreadable(good), _joining())
    federation.refresh()
    assert federation.refresh() == ["node 1001: the answer cannot be read (KeyError: 'arraychunk_ids')"]
    assert [client.name for client in federation.roster] == ["0", "2"]
    federation.roster.add(Client("1", 1001, 100, 0, 10))
    delivery = Delivery(Unreadable(good), federation)
    messages = [Message(RecordDict(), node, "train", ttl=60.0) for node in good]
    replies = list(send_and_receive(delivery, messages, 5.0))
    assert [reply.has_error() for reply in replies] == [False, True, False]
    assert "cannot be read" in str(replies[1].error.reason)
    with pytest.raises(Exception, match="cannot be read"):
        Pulled(Unreadable(good)).pull("1001")


class Sending(GrpcGrid):
    """Flower's grid for real nodes, with a SuperLink that has a part of an answer only once the node has sent it.

    It says once that there is an answer, as Flower's does.
    """

    def __init__(self, answer: Message) -> None:
        super().__init__(token="token")
        self.set_run(Run.create_empty(7))
        answer.metadata.__dict__["_message_id"] = answer.object_id
        self.parts = {name: part.deflate() for name, part in get_all_nested_objects(answer).items()}
        self.there: dict[str, bytes] = {}
        self.gone, self.pulled, self.confirmed = set[str](), Counter[str](), list[str]()
        self._said = [PullAppMessagesResponse()] * 99
        tree, head = get_object_tree(answer), message_to_proto(remove_content_from_message(answer))
        self._said[0] = PullAppMessagesResponse(messages_list=[head], message_object_trees=[tree])
        self.stub = SimpleNamespace(
            PullMessages=lambda request: self._said.pop(0) if list(request.message_ids) == ["asked"] else None,
            PullObject=self._pull,
            ConfirmMessageReceived=lambda request: self.confirmed.append(request.message_object_id),
        )

    @property
    def _stub(self) -> Any:
        return self.stub

    def _pull(self, request: Any) -> PullObjectResponse:
        self.pulled[request.object_id] += 1
        content = self.there.get(request.object_id, b"")
        found = request.object_id not in self.gone
        return PullObjectResponse(object_found=found, object_available=bool(content), object_content=content)


def _sending() -> Sending:
    asked = Message(RecordDict(), 21, "train")
    asked.metadata.__dict__["_message_id"] = "asked"
    content = RecordDict({"weights": ArrayRecord([np.arange(3.0), np.ones(2)]), "metrics": MetricRecord({"loss": 1.5})})
    return Sending(Message(content, reply_to=asked))


def test_an_answer_that_is_still_being_sent_is_not_waited_for() -> None:
    grid = _sending()
    answers = Pulled(grid)
    assert not answers.begun("asked")
    for name, content in grid.parts.items():
        before = Counter(grid.pulled)
        assert answers.pull("asked") is None
        assert answers.begun("asked")
        # It looks once for what is not there.
        assert max((grid.pulled - before).values()) == 1
        grid.there[name] = content
    assert grid.confirmed == []
    before = Counter(grid.pulled)
    reply = answers.pull("asked")
    assert reply is not None
    weights = reply.content.array_records["weights"].to_numpy_ndarrays()
    assert [array.tolist() for array in weights] == [[0, 1, 2], [1, 1]]
    assert reply.content.metric_records["metrics"]["loss"] == 1.5
    assert grid.confirmed == [reply.metadata.message_id]
    # What was there before was not pulled once more.
    assert sum((grid.pulled - before).values()) <= 2
    assert not answers.begun("asked")


class FailedError(grpc.RpcError):
    """As a SuperLink fails."""

    def __init__(self, code: grpc.StatusCode) -> None:
        self._code = code

    def code(self) -> grpc.StatusCode:
        return self._code

    def details(self) -> str:
        return "Exception calling application: unsupported operand\n"


@pytest.mark.parametrize("call", ["PullMessages", "PullObject", "ConfirmMessageReceived"])
def test_a_superlink_with_too_much_to_do_is_asked_again(call: str) -> None:
    grid = _sending()
    grid.there = dict(grid.parts)
    answers, works = Pulled(grid), getattr(grid.stub, call)
    setattr(grid.stub, call, Mock(side_effect=FailedError(grpc.StatusCode.RESOURCE_EXHAUSTED)))
    assert answers.pull("asked") is None
    setattr(grid.stub, call, works)
    assert answers.pull("asked") is not None


@pytest.mark.parametrize("code", [grpc.StatusCode.UNKNOWN, grpc.StatusCode.INTERNAL])
def test_an_answer_that_the_superlink_fails_at_is_refused_and_ends_no_run(
    monkeypatch: pytest.MonkeyPatch, code: grpc.StatusCode
) -> None:
    """As Flower's does, whenever it is asked, at one whose time to live is no number, or which names another run."""
    grid = _sending()
    grid.there = dict(grid.parts)
    answers, works = Pulled(grid), grid.stub.PullMessages
    grid.stub.PullMessages = Mock(side_effect=FailedError(code))
    # For a while: its database may be locked.
    assert answers.pull("asked") is None
    grid.stub.PullMessages = works
    assert answers.pull("asked") is not None
    grid.stub.PullMessages = Mock(side_effect=FailedError(code))
    assert answers.pull("asked") is None
    monkeypatch.setattr("common.flower._FAILS_FOR", 0.0)
    line = r"^the SuperLink cannot hand out the answer \(Exception calling application: unsupported operand\)$"
    with pytest.raises(FloretError, match=line):
        answers.pull("asked")
    monkeypatch.setattr("common.flower._FAILS_FOR", 10.0)
    answers.keep([])
    assert answers.pull("asked") is None
    grid.stub.PullMessages = Mock(side_effect=FailedError(grpc.StatusCode.UNAVAILABLE))
    with pytest.raises(FailedError):
        answers.pull("asked")


def test_an_answer_whose_parts_are_gone_is_refused() -> None:
    """A node may have the SuperLink forget its answer while the server pulls it."""
    grid = _sending()
    answers = Pulled(grid)
    assert answers.pull("asked") is None
    grid.gone |= set(grid.parts)
    with pytest.raises(FloretError, match=r"^a part of the answer is gone$"):
        answers.pull("asked")
    assert answers.pull("asked") is None


def test_what_is_no_message_is_refused_and_parts_that_nobody_awaits_are_forgotten() -> None:
    grid = _sending()
    answers = Pulled(grid)
    assert answers.pull("asked") is None
    answers.keep(["another"])
    assert not answers.begun("asked")
    grid = _sending()
    grid.there = dict.fromkeys(grid.parts, b"nothing")
    with pytest.raises(FloretError, match="the answer cannot be read"):
        Pulled(grid).pull("asked")


def test_an_answer_that_is_larger_than_any_of_the_run_is_not_kept() -> None:
    """A node may send gigabytes, or a hundred thousand parts, before anything looks at them."""
    specs = {"weights": TensorSpec((300, Free(10))), "extra": TensorSpec((4,), "bool", optional=True)}
    assert bound_of(specs) == Bound(2 * (4 * 3000 + 4) + 2**24, 64 + 8 + 16)
    sizes = [len(content) for content in _sending().parts.values()]
    for size, parts in ((0, -1), (-1, 0), (0, 0)):
        grid = _sending()
        grid.there = dict(grid.parts)
        answers = Pulled(grid, Bound(sum(sizes) + size, len(sizes) + parts))
        if not size + parts:
            assert answers.pull("asked") is not None
            break
        with pytest.raises(FloretError, match=r"^the answer cannot be read \(ValueError: it has \d+ bytes or more in"):
            answers.pull("asked")
        assert bool(grid.pulled) == (not parts)
        assert not answers.begun("asked")


def test_a_mask_has_no_bytes_beyond_its_bits() -> None:
    specs = {"mask": TensorSpec((4,), "bool")}
    record = pack({"mask": np.array([True, False, True, True])}, specs)
    assert unpack(record, specs)["mask"].tolist() == [True, False, True, True]
    record["mask"] = Array("bool", (4,), "floret.bits", record["mask"].data + bytes(1000))
    with pytest.raises(TensorError, match="tensor mask has 1001 bytes for 4 bits"):
        unpack(record, specs)


def test_free_sides_of_different_peers_need_not_be_equal() -> None:
    specs = {name: TensorSpec((3, Free(10, "n"))) for name in ("v", "w")}
    check_free_sides({"0.v": (3, 5), "0.w": (3, 5), "1.w": (3, 7)}, specs, peers=True)
    with pytest.raises(TensorError, match=r"tensor 0\.w has 7 for the side n, 0\.v has 5"):
        check_free_sides({"0.v": (3, 5), "0.w": (3, 7)}, specs, peers=True)


def bomb(times: int) -> dict[str, bytes]:
    """Return the parts of an answer whose array has the one chunk of a megabyte so many times over."""
    asked = Message(RecordDict(), 21, "train")
    asked.metadata.__dict__["_message_id"] = "asked"
    array = Array("uint8", (2**20 * times,), "numpy.ndarray", bytes(range(256)) * 2**12)
    answer = Message(RecordDict({"weights": ArrayRecord({"a": array})}), reply_to=asked)
    parts = {name: part.deflate() for name, part in get_all_nested_objects(answer).items()}
    (name,) = (name for name, content in parts.items() if content.startswith(b"Array "))
    head, _, body = parts[name].partition(b"\x00")
    body = body.replace(b'"arraychunk_ids": [0]', b'"arraychunk_ids": [' + b", ".join([b"0"] * times) + b"]")
    parts[name] = head.rpartition(b" ")[0] + b" %d\x00" % len(body) + body
    return parts


@pytest.mark.parametrize(("times", "fits"), [(16, True), (1000, True), (1100, False), (10**6, False)])
def test_what_a_message_becomes_is_bounded_before_it_is_made(times: int, fits: bool) -> None:
    """A megabyte that its array names again and again, as a tensor of zeros does a few times."""
    parts = bomb(times)
    unpacked = Unpacked()
    for part, content in parts.items():
        unpacked.add(part, content)
    if fits:
        unpacked.check()
        return
    with pytest.raises(ValueError, match=r"^\d+ bytes would become \d+$"):
        unpacked.check()
    grid = _sending()
    grid.parts = grid.there = parts
    answer = Pulled(grid)
    answer._begun["asked"] = _Begun(grid, "answer", parts, TEXTS)
    with pytest.raises(FloretError, match=r"the answer cannot be read \(ValueError: \d+ bytes would become \d+\)"):
        answer.pull("asked")


def test_a_reply_is_that_of_the_client_that_was_asked_whatever_it_says() -> None:
    """A node may write any node's id, and any message's, into the metadata of its answer."""
    forged = reply_of("2", "query.describe", RecordDict({"client": ConfigRecord(description("1"))}))
    forged.metadata.__dict__["_reply_to_message_id"] = "1000"
    federation = Federation(Answers({1001: forged}), _joining())
    federation.refresh()
    federation.refresh()
    assert federation.roster["1"].node_id == 1001
    (reply,) = send_and_receive(Answers({1001: forged}), [Message(RecordDict(), 1001, "train", ttl=60.0)], 5.0)
    assert reply.metadata.src_node_id == 1001


def test_texts_are_one_printable_line() -> None:
    assert printable(" a\n\tb  c ") == "a b c"
    assert printable("\x1b[0m\x00\ud800\u202e") == "?[0m???"
    assert printable("ä - 猫") == "ä - 猫"
    assert printable("x" * 10) == "x" * 10
    assert printable("x" * 10, 5) == "xxxx…"
    assert len(printable("y " * 10**6)) == LONGEST_TEXT


@pytest.mark.parametrize("kind", CASES)
@settings(max_examples=60, suppress_health_check=list(HealthCheck))
@given(chance=st.randoms(use_true_random=False))
def test_by_chance(kind: str, chance: Random) -> None:
    CASES[kind](chance)
