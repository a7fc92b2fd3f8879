"""A client's name belongs to the node key that first used it, or to the identity of its state directory without one."""

import base64
import hashlib
import json
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from flwr.app import ConfigRecord, Error, Message, RecordDict
from flwr.common.constant import ErrorCode

from cli.main import floret
from common.config import RunConfig
from common.durable import read_manifest, write_manifest
from common.errors import FloretError
from common.flower import Answers as Pulled
from common.proof import PROOF, check, load_key, sign
from server_app.checkpoint import Checkpoint, Checkpoints
from server_app.delivery import Delivery
from server_app.federation import Federation
from server_app.rounds import _await_clients
from strategies.core import LEEWAY, Client, Roster, send_and_receive
from tests.conftest import BIN, PATIENCE
from tests.deployment import Deployment
from tests.fuzz_replies import Answers, _joining, description
from tests.harness import federate

# Of a message in a round of a minute.
TTL = 60.0 + LEEWAY


@cache
def key(name: str) -> ec.EllipticCurvePrivateKey:
    assert name
    return ec.generate_private_key(ec.SECP384R1())


def fingerprint(name: str) -> str:
    return check(sign(key(name), "1", 2, "x"), "1", 2, "x")


class Nodes(Answers):
    """Nodes that answer ``describe`` with what they are at that moment; ``told`` counts the questions.

    Each is a name, an identity, the name of its key or nothing, and what else it says.
    """

    def __init__(self, **config: Any) -> None:
        super().__init__({})
        self.there: dict[int, tuple[str, str, str, dict[str, Any]]] = {}
        self.told: list[int] = []
        self.sent: list[tuple[int, str]] = []
        self.mute: set[int] = set()
        self.config: RunConfig = replace(_joining(), **config)
        self.federation = Federation(self, self.config)
        self._asked: dict[str, Message] = {}

    def put(self, node: int, name: str, identity: str = "i" * 32, signer: str = "", **said: int) -> None:
        """Connect a node, or change what it says: ``num_classes=3`` for ``num-classes``."""
        self.there[node] = (name, identity, signer, {key.replace("_", "-"): value for key, value in said.items()})

    def get_node_ids(self) -> Iterable[int]:
        return list(self.there)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        ids = []
        for message in messages:
            ids.append(f"m{len(self.sent)}")
            self.sent.append((message.metadata.dst_node_id, message.metadata.message_type))
            self._asked[ids[-1]] = message
            if message.metadata.message_type == "query.describe":
                self.told.append(message.metadata.dst_node_id)
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        replies = []
        for message_id in message_ids:
            message = self._asked[message_id]
            node = message.metadata.dst_node_id
            if message.metadata.message_type == "query.describe" and node in self.there and node not in self.mute:
                name, identity, signer, said = self.there[node]
                content = RecordDict({"client": ConfigRecord(description(name) | {"identity": identity} | said)})
                if signer:
                    content[PROOF] = sign(key(signer), message_id, node, name)
                replies.append(Message(content, reply_to=message))
        return replies

    def trains(self) -> list[int]:
        """Return the nodes that were sent a training message, in order."""
        return [node for node, kind in self.sent if kind == "train"]

    def refresh(self) -> list[str]:
        """Ask, and take in the answers; return who cannot take part."""
        return [*self.federation.refresh(), *self.federation.refresh()]

    def resumed(self, **config: Any) -> "Nodes":
        """Return the same nodes in a run that goes on from this one's checkpoint, as a file has it."""
        new = Nodes(**config)
        new.there = dict(self.there)
        kept = [Client(**json.loads(json.dumps(vars(client)))) for client in self.federation.roster]
        new.federation.restore(self.federation.about(), kept)
        return new

    @property
    def names(self) -> dict[str, int]:
        """Who is there, and where."""
        return {client.name: client.node_id for client in self.federation.roster.present()}


# Proof


def test_a_proof_is_that_of_the_key_under_one_answer(tmp_path: Path) -> None:
    made = tmp_path / "made"
    floret.main(["certificates", str(made), "--host", "h", "--node", "north"], standalone_mode=False)
    proof = sign(load_key(made / "nodes" / "north"), "m1", 7, "north")
    # As the operator sees it: ssh-keygen -l -f north.pub
    content = (made / "nodes" / "north.pub").read_bytes().split()[1]
    assert check(proof, "m1", 7, "north") == _ssh_fingerprint(content)
    for asked in (("m2", 7, "north"), ("m1", 8, "north"), ("m1", 7, "south")):
        with pytest.raises(FloretError, match="the proof of its node key is none, or is that of another answer"):
            check(proof, *asked)


def _ssh_fingerprint(content: bytes) -> str:
    digest = hashlib.sha256(base64.b64decode(content)).digest()
    return "SHA256:" + base64.b64encode(digest).decode().rstrip("=")


@pytest.mark.parametrize(
    "spoil",
    [
        lambda p: p.pop("key"),
        lambda p: p.pop("signature"),
        lambda p: p.update(key="text"),
        lambda p: p.update(key=b""),
        lambda p: p.update(key=b"\x30\x82" + b"x" * 100),
        lambda p: p.update(key=p["key"] * 1000),
        lambda p: p.update(signature=b"\x00" * 100),
        lambda p: p.update(signature=b"s" * 10**6),
        lambda p: p.update(
            key=Ed25519PrivateKey.generate().public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
        ),
    ],
)
def test_a_proof_that_is_none_is_refused(spoil: Callable[[Any], Any]) -> None:
    nodes = Nodes()
    nodes.put(1, "north", signer="n")
    proof = sign(key("n"), "m0", 1, "north")
    values = dict(proof)
    spoil(values)
    with pytest.raises(FloretError, match="the proof of its node key is none"):
        check(ConfigRecord(values), "m0", 1, "north")


@pytest.mark.parametrize("part", ["key", "signature"])
def test_nothing_is_computed_with_a_proof_that_is_too_long(monkeypatch: pytest.MonkeyPatch, part: str) -> None:
    def computed(*_: object) -> None:
        raise AssertionError("the key of a proof was read")

    monkeypatch.setattr("common.proof.serialization.load_der_public_key", computed)
    proof = {**sign(key("n"), "m0", 1, "north"), part: bytes(2000)}
    with pytest.raises(FloretError, match="the proof of its node key is none"):
        check(ConfigRecord(proof), "m0", 1, "north")


def test_a_key_that_cannot_be_loaded_is_one_line(tmp_path: Path) -> None:
    for content, line in ((None, "cannot be read"), (b"no key", "is not a node's private key")):
        path = tmp_path / "key"
        if content:
            path.write_bytes(content)
        with pytest.raises(FloretError, match=rf"^--key {path}: {line}"):
            load_key(path)


# With keys


def test_another_key_under_a_name_is_refused_while_its_owner_is_away() -> None:
    nodes = Nodes()
    nodes.put(1, "north", signer="n")
    assert nodes.refresh() == []
    del nodes.there[1]
    nodes.refresh()
    nodes.put(2, "north", signer="thief")
    (line,) = nodes.refresh()
    assert line == (
        f"client-name north belongs to the node key {fingerprint('n')}, node 2 has {fingerprint('thief')}: give it the "
        "right --key, or another --client-name; for a new key of the same device, resume the run with "
        "new-owners='north'"
    )
    assert nodes.names == {}
    nodes.put(1, "north", signer="n")
    nodes.refresh()
    assert nodes.names == {"north": 1}


@pytest.mark.parametrize("signer", ["thief", ""])
def test_a_copied_identity_does_not_open_a_name_that_has_a_key(signer: str) -> None:
    nodes = Nodes()
    nodes.put(1, "north", "a" * 32, signer="n")
    nodes.refresh()
    del nodes.there[1]
    nodes.put(2, "north", "a" * 32, signer=signer)
    (line,) = nodes.refresh()
    assert "node 2 has SHA256:" in line if signer else "node 2 shows none" in line
    resumed = nodes.resumed()
    (line,) = resumed.refresh()
    assert line.startswith(f"client-name north belongs to the node key {fingerprint('n')}")
    assert resumed.names == {}


def test_the_owner_is_known_by_its_key_after_a_resume_at_another_node_and_with_a_new_state_directory() -> None:
    nodes = Nodes()
    nodes.put(1, "north", "a" * 32, signer="n")
    nodes.refresh()
    resumed = nodes.resumed()
    resumed.there = {}
    resumed.put(5, "north", "b" * 32, signer="n")
    assert resumed.refresh() == []
    assert resumed.names == {"north": 5}


def test_a_proof_for_another_name_or_of_another_node_is_worth_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A node that hands on what the owner signed."""
    nodes = Nodes()
    stolen = sign(key("n"), "m0", 1, "north")
    nodes.put(2, "north")
    nodes.federation.refresh()
    (asked,) = nodes._asked
    content = RecordDict({"client": ConfigRecord(description("north")), PROOF: stolen})
    monkeypatch.setattr(nodes, "pull_messages", lambda _: [Message(content, reply_to=nodes._asked[asked])])
    (line,) = nodes.federation.refresh()
    assert line == "client north: the proof of its node key is none, or is that of another answer"


# Without keys


def test_without_keys_a_name_belongs_to_the_state_directory_also_while_it_is_away_and_after_a_resume() -> None:
    nodes = Nodes()
    nodes.put(1, "north", "a" * 32)
    nodes.refresh()
    nodes.there = {}
    nodes.refresh()
    nodes.put(2, "north", "b" * 32)
    (line,) = nodes.refresh()
    assert line == (
        "client-name north is taken: a node with another state directory has it, and node 2 is not it: give it that "
        "--state-dir, or another --client-name; for a new state directory of the same device, resume the run with "
        "new-owners='north'"
    )
    (line,) = nodes.resumed().refresh()
    assert line.startswith("client-name north is taken")
    nodes.there = {}
    nodes.put(3, "north", "a" * 32)  # the owner, in a new process
    assert nodes.refresh() == []
    assert nodes.names == {"north": 3}


def test_a_node_that_gets_a_key_keeps_its_name_and_from_then_on_the_key_counts() -> None:
    nodes = Nodes()
    nodes.put(1, "north", "a" * 32)
    nodes.refresh()
    nodes.there = {}
    nodes.put(2, "north", "a" * 32, signer="n")
    assert nodes.refresh() == []
    assert nodes.federation.roster["north"].key == fingerprint("n")
    nodes.there = {}
    nodes.put(3, "north", "a" * 32)
    assert "shows none" in nodes.refresh()[0]


# From run to run


def test_new_owners_of_a_resumed_run() -> None:
    nodes = Nodes()
    nodes.put(1, "north", "a" * 32, signer="old")
    nodes.put(2, "south", "b" * 32, signer="s")
    nodes.refresh()
    nodes.there = {}
    nodes.put(3, "north", "c" * 32, signer="new")
    nodes.put(4, "south", "d" * 32, signer="other")
    resumed = nodes.resumed(new_owners="north")
    (line,) = resumed.refresh()
    assert line.startswith("client-name south belongs to")
    assert resumed.names == {"north": 3}
    resumed.put(1, "north", "a" * 32, signer="old")
    assert [line.split(" belongs")[0] for line in resumed.refresh()] == ["client-name north"]
    with pytest.raises(FloretError, match="new-owners = 'north,est': the run to resume has no client 'est'"):
        nodes.resumed(new_owners="north,est")


def test_a_checkpoint_of_before_names_had_keys(tmp_path: Path) -> None:
    """Its clients have an identity: whoever has it gets the name, and the name its key."""
    checkpoints = Checkpoints(tmp_path)
    client = Client("north", 1, 100, 0, 10, "a" * 32)
    empty: dict[str, np.ndarray] = {}
    checkpoints.write(Checkpoint(3, "x", (), empty, empty, {}, [client], {}, 1.0))
    (path,) = tmp_path.glob("*.json")
    _rewrite(path)
    (read, notes) = checkpoints.read()
    assert (read.clients, notes) == ([client], [])
    nodes = Nodes()
    said = description("x")
    nodes.federation.restore({key: said[key] for key in ("input-shape", "num-classes", "class-names")}, read.clients)
    nodes.put(2, "north", "b" * 32, signer="thief")
    nodes.put(3, "north", "a" * 32, signer="n")
    (line,) = nodes.refresh()
    assert line.startswith("client-name north is taken")
    assert nodes.names == {"north": 3}
    assert nodes.federation.roster["north"].key == fingerprint("n")


def _rewrite(path: Path) -> None:
    """Write the manifest as it was before clients had keys."""
    content = read_manifest(path)
    for client in content["clients"]:
        del client["key"]
    write_manifest(path, content)


# One node, two names


def test_a_node_without_a_key_that_comes_back_under_another_name_is_that_client_and_the_first_is_away() -> None:
    nodes = Nodes()
    nodes.put(1, "north", "a" * 32)
    nodes.refresh()
    nodes.there = {}
    nodes.refresh()
    nodes.put(1, "south", "a" * 32)
    assert nodes.refresh() == []
    assert nodes.names == {"south": 1}
    assert [client.name for client in nodes.federation.roster] == ["north", "south"]
    # The name still has its owner, and nobody else gets it.
    nodes.put(2, "north", "b" * 32)
    assert nodes.refresh()[0].startswith("client-name north is taken")
    nodes.there = {}
    nodes.refresh()
    nodes.put(1, "north", "a" * 32)
    nodes.refresh()
    assert nodes.names == {"north": 1}
    assert len(nodes.federation.roster) == 2


@pytest.mark.parametrize("node", [1, 2])
def test_a_key_owns_one_name_of_a_run(node: int) -> None:
    """Else one node could publish under any number of them, one after another."""
    nodes = Nodes()
    nodes.put(1, "north", signer="n")
    nodes.refresh()
    nodes.there = {}
    nodes.refresh()
    nodes.put(node, "south", "b" * 32, signer="n")
    line = (
        f"client-name south: the node key {fingerprint('n')} has the name north in this run: give node {node} that "
        "--client-name; to give the device another name, resume the run with new-owners='north'"
    )
    assert nodes.refresh() == [line]
    assert nodes.resumed().refresh() == [line]
    assert "south" not in nodes.federation.roster
    free = nodes.resumed(new_owners="north")
    assert free.refresh() == []
    assert free.names == {"south": node}
    # A state directory without a key gets none that has a name.
    nodes.there = {}
    nodes.put(3, "west", "c" * 32)
    assert nodes.refresh() == []
    nodes.put(3, "west", "c" * 32, signer="n")
    nodes.federation.roster.doubt("west")
    assert nodes.refresh()[0].startswith(f"client-name west: the node key {fingerprint('n')} has the name north")


@pytest.mark.parametrize("timeout", [0.3, 60.0])
def test_a_start_does_not_wait_for_a_node_that_does_not_answer(monkeypatch: pytest.MonkeyPatch, timeout: float) -> None:
    monkeypatch.setattr("server_app.federation._GRACE", 0.3 if timeout == 60 else 100.0)
    nodes = Nodes(min_clients=1, round_timeout=timeout)
    nodes.put(1, "north")
    nodes.put(2, "south")
    nodes.mute.add(2)
    begun = time.monotonic()
    nodes.federation.gather(lambda *_: None)
    assert 0.3 <= time.monotonic() - begun < 30
    assert nodes.names == {"north": 1}


def test_a_run_that_goes_on_keeps_its_number_of_parts() -> None:
    """A client of another division of the data would train on what others are tested on."""
    nodes = Nodes()
    nodes.put(1, "north", partitions=3)
    assert nodes.refresh() == []
    again = nodes.resumed()
    again.put(1, "north", partitions=5)
    assert again.refresh() == [
        "client north: num-partitions is 5, others of the federation have 3: its samples would be theirs, too"
    ]
    assert again.names == {}


def test_who_goes_away_is_told_once_each_time(caplog: pytest.LogCaptureFixture) -> None:
    nodes = Nodes(min_clients=2)
    nodes.put(1, "north", signer="n")
    nodes.put(2, "south", signer="s")
    nodes.federation.gather(lambda *_: None)
    nodes.refresh()
    assert nodes.federation.departures() == []
    told = ("north", "is away (1 of 2 clients are there)")
    for back in (1, 3):  # under its number, and without a registered key under another one
        nodes.there = {2: nodes.there[2]}
        caplog.clear()
        nodes.refresh()
        assert caplog.messages == ["Client north is away (1 of 2 clients are there)"]
        assert nodes.federation.departures() == [told]
        assert nodes.federation.departures() == []
        nodes.put(back, "north", signer="n")
        nodes.refresh()
        assert nodes.names == {"north": back, "south": 2}
    # In a run that goes on it is told again, after its clients had the time to come.
    nodes.there = {2: nodes.there[2]}
    again = nodes.resumed()
    again.federation.gather(lambda *_: None)
    assert again.federation.departures() == []
    again.refresh()
    assert again.federation.departures() == [told]


def test_a_node_that_comes_back_under_the_name_of_another_is_neither() -> None:
    nodes = Nodes()
    nodes.put(1, "north", signer="n")
    nodes.put(2, "south", signer="s")
    nodes.refresh()
    del nodes.there[1]
    nodes.refresh()
    nodes.put(1, "south", signer="n")
    assert nodes.refresh()[0].startswith("client-name south belongs to")
    assert nodes.names == {"south": 2}


def test_a_message_to_a_node_that_is_another_client_now_is_not_sent_to_it_again() -> None:
    """It waits for its client until ``return-timeout``, and goes where that is."""
    nodes = Nodes(return_timeout=0.3)
    nodes.put(1, "north", "a" * 32)
    nodes.refresh()
    delivery = Delivery(nodes, nodes.federation, patience=0.0)
    (sent,) = delivery.push_messages([Message(RecordDict(), 1, "train", ttl=TTL)])
    nodes.there = {}
    nodes.refresh()
    nodes.put(1, "south", "a" * 32)
    nodes.refresh()
    assert list(delivery.pull_messages([sent])) == []
    delivery._looked = 0.0
    time.sleep(0.4)
    (reply,) = delivery.pull_messages([sent])
    assert reply.has_error()
    assert "another name" in str(reply.error.reason)
    assert [node for node, kind in nodes.sent if kind == "train"] == [1]


class Unregistered(Nodes):
    """Nodes of which Flower knows those alone that are there; ``full`` times it takes no messages at all."""

    full = 0

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        sent = list(messages)
        if self.full:
            self.full -= 1
            return []
        ids = list(super().push_messages(sent))
        there = [message.metadata.dst_node_id in self.there for message in sent]
        # As Flower's grid has it, whatever its types say.
        return [key if here else cast(str, None) for key, here in zip(ids, there, strict=True)]


def test_a_client_that_leaves_before_it_is_asked_is_asked_when_it_is_back() -> None:
    nodes = Unregistered()
    nodes.put(1, "north", signer="n")
    nodes.refresh()
    delivery = Delivery(nodes, nodes.federation, patience=0.0)
    del nodes.there[1]
    (sent,) = delivery.push_messages([Message(RecordDict(), 1, "train", ttl=TTL)])
    assert list(delivery.pull_messages([sent])) == []
    nodes.put(2, "north", signer="n")
    nodes.refresh()
    delivery._looked = 0.0
    assert list(delivery.pull_messages([sent])) == []
    assert nodes.trains() == [1, 2]


def test_a_client_that_leaves_before_it_is_asked_and_stays_away_is_said_to_have() -> None:
    nodes = Unregistered(return_timeout=0.0)
    nodes.put(1, "north", signer="n")
    nodes.refresh()
    del nodes.there[1]
    delivery = Delivery(nodes, nodes.federation, patience=0.0)
    (reply,) = send_and_receive(delivery, [Message(RecordDict(), 1, "train", ttl=TTL)], TTL)
    assert "its node left before it was asked" in str(reply.error.reason)
    # So it is without ``Delivery``.
    (reply,) = send_and_receive(nodes, [Message(RecordDict(), 1, "train", ttl=TTL)], TTL)
    assert "its node left before it was asked" in str(reply.error.reason)


def test_a_superlink_that_takes_no_messages_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("common.flower._PAUSES", (0.0, 0.0))
    nodes = Unregistered()
    nodes.put(1, "north", signer="n")
    nodes.full = 2
    nodes.refresh()
    assert nodes.names == {"north": 1}
    delivery = Delivery(nodes, nodes.federation, patience=0.0)
    nodes.full = 2
    delivery.push_messages([Message(RecordDict(), 1, "train", ttl=TTL)])
    assert nodes.trains() == [1]
    nodes.full = 3
    line = r"the SuperLink takes no messages \(RESOURCE_EXHAUSTED, 3 times\): it has too much to do, or"
    with pytest.raises(FloretError, match=line):
        delivery.push_messages([Message(RecordDict(), 1, "train", ttl=TTL)])


def test_a_question_after_a_message_tells_of_the_run_as_the_first_one_did() -> None:
    """Without it a node whose clients are drawn in secret refuses it, and writes an error into its log."""
    nodes = Nodes()
    nodes.federation.run = {"session.lineage": "a"}
    nodes.put(1, "north", signer="n")
    nodes.refresh()
    delivery = Delivery(nodes, nodes.federation, patience=0.0)
    (sent,) = delivery.push_messages([Message(RecordDict(), 1, "train", ttl=TTL)])
    assert list(delivery.pull_messages([sent])) == []
    asked = [m for m in nodes._asked.values() if m.metadata.message_type == "query.describe"]
    assert len(asked) == 2
    assert [dict(m.content.config_records["config"]) for m in asked] == [{"session.lineage": "a"}] * 2


def test_a_message_waits_until_a_node_that_came_back_has_said_who_it_is() -> None:
    nodes = Nodes()
    nodes.put(1, "north", signer="n")
    nodes.refresh()
    delivery = Delivery(nodes, nodes.federation, patience=0.0)
    (sent,) = delivery.push_messages([Message(RecordDict(), 1, "train", ttl=TTL)])
    gone = Message(Error(ErrorCode.NODE_UNAVAILABLE), reply_to=Message(RecordDict(), 1, "train"))
    delivery._open[sent].gone = (gone, time.monotonic())

    def trains() -> int:
        delivery._looked = 0.0
        assert list(delivery.pull_messages([sent])) == []
        return [kind for _, kind in nodes.sent].count("train")

    there = nodes.there.pop(1)
    assert trains() == 1
    nodes.there[1] = there
    nodes.mute.add(1)
    assert trains() == 1
    nodes.mute.clear()
    assert trains() == 2


def test_a_message_is_sent_again_to_a_node_that_answers_what_came_after_it() -> None:
    """A node with a registered key keeps its id when it is started again, and has lost the message."""
    nodes = Nodes()
    nodes.put(1, "north", signer="n")
    nodes.refresh()
    delivery = Delivery(nodes, nodes.federation, patience=0.0)
    (sent,) = delivery.push_messages([Message(RecordDict(), 1, "train", ttl=TTL)])

    def trains() -> int:
        delivery._looked = 0.0
        assert list(delivery.pull_messages([sent])) == []
        return [kind for _, kind in nodes.sent].count("train")

    nodes.mute.add(1)  # busy: it handles one message at a time, in order
    assert [trains() for _ in range(3)] == [1, 1, 1]
    nodes.mute.clear()
    assert trains() == 2


@pytest.mark.parametrize("comes", [True, False])
def test_the_rest_of_an_answer_is_awaited_though_its_node_was_away_in_between(comes: bool) -> None:
    """Until the node says who it is, which it does after it has sent the rest: or it has lost it, and starts again."""

    class Begun(Pulled):
        rest: Message | None = None

        def pull(self, message_id: str) -> Message | None:
            return self.rest if message_id == sent else super().pull(message_id)

        def begun(self, message_id: str) -> bool:
            return message_id == sent

    nodes = Nodes(return_timeout=0.0)
    nodes.put(1, "north", signer="n")
    nodes.refresh()
    delivery = Delivery(nodes, nodes.federation, patience=0.0)
    (sent,) = delivery.push_messages([Message(RecordDict(), 1, "train", ttl=TTL)])
    delivery._answers = answers = Begun(nodes)

    def pulled() -> list[Message]:
        delivery._looked = 0.0
        return list(delivery.pull_messages([sent]))

    there = nodes.there.pop(1)
    nodes.refresh()
    client = delivery._open[sent]
    client.gone = (Message(Error(ErrorCode.NODE_UNAVAILABLE), reply_to=client.message), time.monotonic())
    nodes.there[1] = there
    nodes.mute.add(1)
    assert [pulled() for _ in range(3)] == [[], [], []]
    assert nodes.trains() == [1]
    if comes:
        answers.rest = Message(RecordDict(), reply_to=client.message)
        assert pulled() == [answers.rest]
        assert nodes.trains() == [1]
    else:
        nodes.mute.clear()
        assert pulled() == []
        assert nodes.trains() == [1, 1]


class Trained(Nodes):
    """Nodes ``there`` of which some have ``trained``; as at Flower, an answer is given out once.

    The first one is busy, and answers no questions. ``pulled`` has the node of each training message whose answer was
    asked for.
    """

    def __init__(self, *names: str) -> None:
        super().__init__()
        self.trained: set[int] = set()
        self.pulled: list[int] = []
        self._given: set[str] = set()
        for node, name in enumerate(names, 1):
            self.put(node, name, name[0] * 32, signer=name)
        assert self.refresh() == []
        self.delivery = Delivery(self, self.federation, patience=0.0)
        self.told.clear()
        self.mute.add(1)

    def train(self, *nodes: int, ttl: float = TTL) -> list[str]:
        return list(self.delivery.push_messages([Message(RecordDict(), node, "train", ttl=ttl) for node in nodes]))

    def wait_for(self, *sent: str) -> list[int]:
        """Let the server look for these answers once; return the nodes of those that it has."""
        self.delivery._looked = 0.0
        return [reply.metadata.src_node_id for reply in self.delivery.pull_messages(sent)]

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        replies: list[Message] = []
        for message_id in message_ids:
            message = self._asked[message_id]
            node = message.metadata.dst_node_id
            if message.metadata.message_type != "train":
                replies += super().pull_messages([message_id])
                continue
            self.pulled.append(node)
            if node in self.trained and message_id not in self._given:
                self._given.add(message_id)
                replies.append(Message(RecordDict(), reply_to=message))
        return replies


def test_a_message_is_sent_again_while_the_server_waits_for_an_earlier_client() -> None:
    """Nothing is asked of the node while it is away: Flower gives up a message whose answer is asked for then."""
    nodes = Trained("east", "north", "south")
    east, north, south = nodes.train(1, 2, 3)
    nodes.trained.add(3)
    there = nodes.there.pop(2)
    assert nodes.wait_for(east) == []
    assert nodes.pulled == [1]
    nodes.there[12] = there
    assert nodes.wait_for(east) == []  # asks the new node who it is
    assert nodes.trains() == [1, 2, 3]
    assert nodes.wait_for(east) == []
    assert nodes.trains() == [1, 2, 3, 12]
    nodes.trained.add(12)
    assert nodes.wait_for(east) == []
    assert not {3, 12} & set(nodes.pulled)
    nodes.trained.add(1)
    assert [nodes.wait_for(sent) for sent in (east, north, south)] == [[1], [12], [3]]
    assert nodes.trains() == [1, 2, 3, 12]


def test_a_node_that_comes_and_goes_while_the_first_answers_are_awaited_is_noticed() -> None:
    """It is not asked for its answer before its time, and then it is sent its message again."""
    nodes = Trained("east", "north")
    nodes.delivery = Delivery(nodes, nodes.federation, patience=60.0)
    east, north = nodes.train(1, 2)
    there = nodes.there.pop(2)
    assert nodes.wait_for(east) == []
    nodes.there[2] = there
    for _ in range(4):
        assert nodes.wait_for(east) == []
    assert set(nodes.pulled) == {1}
    assert nodes.told == [2]
    nodes.delivery._open[north].sent -= 60.0
    for _ in range(2):
        assert nodes.wait_for(east) == []
    assert nodes.trains() == [1, 2, 2]


def test_a_node_that_came_back_with_its_key_is_sent_its_message_before_its_turn() -> None:
    """It is known by its id alone, so it is lost only if the node answers what came after it."""
    nodes = Trained("east", "north", "south")
    east, north, _ = nodes.train(1, 2, 3)
    there = nodes.there.pop(2)
    nodes.wait_for(east)
    nodes.there[2] = there
    for _ in range(4):
        assert nodes.wait_for(east) == []
    assert nodes.trains() == [1, 2, 3, 2]
    assert set(nodes.told) == {1, 2}
    nodes.trained |= {1, 2}
    assert [nodes.wait_for(sent) for sent in (east, north)] == [[1], [2]]


def test_a_node_that_answered_before_it_was_lost_is_not_sent_its_message_again() -> None:
    nodes = Trained("east", "north")
    east, north = nodes.train(1, 2)
    nodes.trained.add(2)
    there = nodes.there.pop(2)
    nodes.wait_for(east)
    nodes.there[12] = there
    for _ in range(4):
        assert nodes.wait_for(east) == []
    assert nodes.pulled.count(2) == 1
    nodes.trained.add(1)
    assert [nodes.wait_for(sent) for sent in (east, north)] == [[1], [2]]
    assert nodes.trains() == [1, 2]


def test_answers_of_nodes_that_were_there_all_the_time_stay_with_flower() -> None:
    """The server's memory may hold no more than one, and a busy node needs no questions."""
    nodes = Trained("east", "north", "south")
    east, north, south = nodes.train(1, 2, 3)
    nodes.trained |= {2, 3}
    for _ in range(5):
        assert nodes.wait_for(east) == []
    assert set(nodes.pulled) == {1}
    assert set(nodes.told) == {1}
    nodes.trained.add(1)
    assert [nodes.wait_for(sent) for sent in (east, north, south)] == [[1], [2], [3]]


def test_nothing_is_sent_again_after_the_round() -> None:
    nodes = Trained("east", "north")
    east, north = nodes.train(1, 2, ttl=LEEWAY + 0.5)
    nodes.there = {node + 10: nodes.there[node] for node in (1, 2)}
    nodes.refresh()
    assert nodes.names == {"east": 11, "north": 12}
    time.sleep(0.6)
    for sent in (east, north):
        assert nodes.wait_for(sent) == []
    assert nodes.trains() == [1, 2]
    # The next round.
    (again,) = nodes.train(11)
    assert nodes.wait_for(again) == []
    assert nodes.trains() == [1, 2, 11]
    assert set(nodes.pulled) <= {1, 2, 11}
    assert nodes.pulled.count(2) == 1


# Data that change


def test_a_client_whose_data_grew_is_refused_once(tmp_path: Path) -> None:
    """In the round after, the server has asked it again."""
    seen: list[int] = []

    def tamper(message: Message, reply: Message) -> Message:
        node, kind = message.metadata.dst_node_id, message.metadata.message_type
        if node == 1001 and kind == "train":
            samples: Any = reply.content.metric_records["metrics"]["num-examples"]
            seen.append(samples)
            reply.content.metric_records["metrics"]["num-examples"] = seen[-1] + 1000
        if node == 1001 and kind == "query.describe" and seen:
            client: Any = reply.content.config_records["client"]
            client["train"] += 1000
        return reply

    outcome = federate(tmp_path, 2, method="fedper", rounds=3, local_epochs=1, max_samples=80, tamper=tamper)
    refused = [[(r["client"], r["reason"]) for r in line["refused"]] for line in outcome.history]
    ((name, reason),) = refused[0]
    assert name == "1"
    assert re.fullmatch(r"num-examples is 10\d+, the client declared \d+ training samples when it joined", reason)
    assert refused[1:] == [[], []]
    about = json.loads((outcome.directory / "config.json").read_text())
    assert about["clients"]["1"]["samples"]["train"] > 1000
    assert outcome.history[2]["clients"]["1"]["trained"]


def test_a_client_that_goes_on_saying_something_else_is_refused_in_every_round(tmp_path: Path) -> None:
    def tamper(message: Message, reply: Message) -> Message:
        if message.metadata.dst_node_id == 1001 and message.metadata.message_type == "train":
            reply.content.metric_records["metrics"]["num-examples"] = 10**6
        return reply

    outcome = federate(tmp_path, 2, method="fedper", rounds=3, local_epochs=1, max_samples=80, tamper=tamper)
    assert [[r["client"] for r in line["refused"]] for line in outcome.history] == [["1"]] * 3
    asked = [m for m in outcome.grid.messages if m.metadata.message_type == "query.describe"]
    # At its start, and after a round that another follows.
    assert [m.metadata.dst_node_id for m in asked].count(1001) == 3


def test_an_evaluation_on_a_split_that_is_new_has_the_client_asked_again() -> None:
    nodes = Nodes()
    nodes.put(1, "north", signer="n", validation=0)
    nodes.refresh()
    roster = nodes.federation.roster
    roster.doubt("north")
    nodes.put(1, "north", signer="n", validation=7)
    nodes.federation.refresh()
    assert nodes.federation.renewing
    nodes.federation.refresh()
    assert not nodes.federation.renewing
    assert roster["north"].validation == 7
    nodes.refresh()
    assert nodes.told == [1, 1]


def test_a_client_that_comes_back_with_data_that_do_not_fit_takes_part_no_more() -> None:
    nodes = Nodes()
    nodes.put(1, "north", signer="n")
    nodes.refresh()
    nodes.federation.settled = True
    nodes.there = {}
    nodes.refresh()
    nodes.put(1, "north", signer="n", num_classes=1000)
    (line,) = nodes.refresh()
    assert "1000 classes, the model has" in line
    assert nodes.names == {}
    assert "north" in nodes.federation.roster


def test_a_client_that_does_not_answer_the_second_question_is_not_waited_for_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    nodes = Nodes()
    nodes.put(1, "north", signer="n")
    nodes.refresh()
    nodes.mute.add(1)
    nodes.federation.roster.doubt("north")
    nodes.federation.refresh()
    assert nodes.federation.renewing
    monkeypatch.setattr("server_app.federation.RENEWAL", 0.0)
    assert not nodes.federation.renewing
    nodes.refresh()
    assert nodes.told == [1, 1]
    assert nodes.names == {"north": 1}


def test_nodes_that_come_and_go_in_turn_hold_up_no_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever comes back is asked again what it has: with two of them somebody always is."""

    class Turns(Nodes):
        calls = 0

        def get_node_ids(self) -> Iterable[int]:
            self.calls += 1
            assert self.calls < 100
            return [1 + self.calls % 2] if self.calls > 2 else super().get_node_ids()

    nodes = Turns()
    nodes.put(1, "north", signer="n")
    nodes.put(2, "south", signer="s")
    nodes.refresh()
    nodes.mute |= {1, 2}
    nodes.federation.refresh()
    monkeypatch.setattr("server_app.rounds.RENEWAL", 0.5)
    _await_clients(nodes.federation)
    assert nodes.federation.renewing


def test_a_roster_before_anybody_was_seen() -> None:
    roster = Roster()
    roster.add(Client("a", 1, 1, 1, 1))
    roster.part(1)
    roster.doubt("a")
    roster.part(9)
    assert not roster.unsure
    assert roster.at(1).node_id == 0


# For real


@pytest.mark.slow
def test_a_registered_node_does_not_get_the_name_of_another_that_is_away(tmp_path: Path) -> None:
    """Real nodes with real keys: north joins and is killed; mallory, whose key is registered, too, and who has a copy
    of north's state directory, goes by its name; then north comes back without its state directory.
    """
    made = tmp_path / "made"
    keys = ["--node", "north", "--node", "south", "--node", "mallory"]
    floret.main(["certificates", str(made), "--host", "127.0.0.1", *keys], standalone_mode=False)
    tls: list[str | Path] = [
        *("--ssl-ca-certfile", made / "ca.crt", "--ssl-certfile", made / "superlink.crt"),
        *("--ssl-keyfile", made / "superlink.key", "--enable-supernode-auth"),
    ]
    dep = Deployment(tmp_path / "deployment", tls)

    def node(name: str, *arguments: str | Path) -> Any:
        safe = ("--root-certificates", made / "ca.crt", "--key", made / "nodes" / name)
        return dep.node(name, "--partition", "0/2" if name != "south" else "1/2", *safe, *arguments)

    try:
        for name in ("north", "south", "mallory"):
            subprocess.run(
                [BIN / "flwr", "supernode", "register", made / "nodes" / f"{name}.pub", "dep"],
                env=dep.env,
                check=True,
                timeout=PATIENCE,
                capture_output=True,
            )
        north = node("north")
        node("south")
        run = dep.run(method="fedper", rounds=400, local_epochs=1, min_clients=2, return_timeout=0.5)
        run.wait_for(r"round 2/400")
        stopped = len(run.text())
        north.kill(signal.SIGTERM)
        run.wait_for(r"round \d+/400", since=stopped)
        subprocess.run(["cp", "-r", dep.folder / "state-north", dep.folder / "copy"], check=True)
        mallory = node("mallory", "--client-name", "north", "--state-dir", dep.folder / "copy")
        public = (made / "nodes" / "north.pub").read_bytes()
        owner = re.escape(_ssh_fingerprint(public.split()[1]))
        run.wait_for(rf"client-name north belongs to the node key {owner}, node \d+ has SHA256:")
        assert "Receiving: train" not in mallory.text()
        since = len(run.text())
        node("north", "--state-dir", dep.folder / "new")
        run.wait_for("Client north is back", since=since)
        run.kill()
        assert not [line for line in dep.history() if "mallory" in json.dumps(line)]
    finally:
        dep.end()
