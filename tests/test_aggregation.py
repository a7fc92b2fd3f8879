"""Aggregation with bad members: formulas by hand, and what one hostile reply does to the others."""

import errno
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import ConfigRecord, Message, MetricRecord, RecordDict
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.attacks import ATTACKS, attacked
from client_app.app import Request, app
from common.errors import ConfigError, FloretError
from common.norms import root_mean_squares
from common.tensors import NamedArrays
from common.wire import from_record, payload_bytes, to_record
from server_app.checkpoint import Checkpoints
from strategies.core import Client, Median, Roster, TrimmedMean, UpdateNorms
from strategies.core.spool import spooled
from strategies.core.update_norms import ABSURD, clipped
from tests.harness import Outcome, federate, kept, timeless


def arrays(*values: float) -> NamedArrays:
    return {"w": np.array(values, np.float32)}


def test_median_and_trimmed_mean_by_hand() -> None:
    middle, trimmed = Median(None), TrimmedMean(0.25, None)
    for values in ((1, 50), (2, 10), (3, 20), (400, 30)):
        for aggregate in (middle, trimmed):
            aggregate.add(arrays(*values), 7.0)
    assert middle.result()["w"].tolist() == [2.5, 25.0]
    assert trimmed.result()["w"].tolist() == [2.5, 25.0]  # of four, one is left out at each end


def test_tensors_that_only_some_send_are_merged_over_those() -> None:
    aggregate = Median(None)
    aggregate.add({"a": np.ones(2, np.float32)}, 1.0)
    aggregate.add({"a": np.full(2, 3, np.float32), "b": np.full((1, 2), 5, np.float32)}, 1.0)
    result = aggregate.result()
    assert result["a"].tolist() == [2, 2]
    assert result["b"].tolist() == [[5, 5]]


@settings(max_examples=30)
@given(st.integers(1, 9), st.integers(0, 70_000), st.integers(0, 2**31))
def test_blocks_make_no_difference(clients: int, size: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    sent = [rng.normal(size=size).astype(np.float32) for _ in range(clients)]
    middle = Median(None)
    for array in sent:
        middle.add({"w": array}, 1.0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("strategies.core.aggregate._BLOCK", 4096)
        assert np.array_equal(middle.result()["w"], np.median(sent, axis=0).astype(np.float32))


def test_clipping_by_hand() -> None:
    known = arrays(1.0, 1.0)
    sent = {**arrays(4.0, 5.0), "new.x": np.array([3.0], np.float32)}
    sizes = root_mean_squares(sent, known)
    assert sizes["w"] == pytest.approx(np.sqrt((9 + 16) / 2))
    assert sizes["new"] == 3.0
    short = clipped(sent, known, sizes, {"w": sizes["w"] / 5, "new": 1.5})
    assert short["w"].tolist() == pytest.approx([1.6, 1.8])
    assert short["new.x"].tolist() == [1.5]  # nothing is known that it would be an update of: its size is its own
    assert clipped(sent, known, sizes, {"w": 100.0, "new": 100.0})["w"] is sent["w"]


def test_prototypes_are_clipped(tmp_path: Path) -> None:
    """In FedProto nothing else travels."""

    def large(message: Message, reply: Message) -> Message:
        if message.metadata.message_type == "train" and message.metadata.dst_node_id == 1000:
            sent = from_record(reply.content.array_records["arrays"])
            reply.content["arrays"] = to_record({name: np.float32(10) * array for name, array in sent.items()})
        return reply

    # All clients have the same classes and the same number of samples.
    for client in range(4):
        for part in ("train", "test"):
            (tmp_path / "data" / part).mkdir(parents=True, exist_ok=True)
            x = np.random.default_rng(client).normal(size=(20, 4)).astype(np.float32)
            np.savez(tmp_path / "data" / part / f"{client}.npz", x=x, y=np.arange(20) % 2)
    keys: dict[str, Any] = {"dataset": "npz-clients", "data_dir": str(tmp_path / "data"), "validation_fraction": 0.0}
    keys |= {"method": "fedproto", "rounds": 1, "local_epochs": 1}
    sizes = {}
    for aggregation in ("mean", "clipped-mean"):
        for tamper in (None, large):
            directory = tmp_path / f"{aggregation}-{tamper}"
            outcome = federate(directory, 4, tamper=tamper, aggregation=aggregation, **keys)
            assert outcome.summary["refused"] == 0
            checkpoint, _ = Checkpoints(outcome.directory / "checkpoints").read()
            sizes[aggregation, tamper] = root_mean_squares(checkpoint.arrays, {})["prototype"]
    assert sizes["mean", large] > 2.5 * sizes["mean", None]
    assert sizes["clipped-mean", large] < 1.1 * sizes["clipped-mean", None]


def small_images(folder: Path, clients: int) -> dict[str, Any]:
    """Write eight images of two classes for each client, and return the keys of a run on them."""
    for part in ("train", "test"):
        (folder / part).mkdir(parents=True)
        for client in range(clients):
            x = np.random.default_rng(client).random((8, 1, 16, 16), dtype=np.float32)
            np.savez(folder / part / f"{client}.npz", x=x, y=np.arange(8) % 2)
    return {"dataset": "npz-clients", "data_dir": str(folder), "validation_fraction": 0.0}


def test_a_variance_below_zero_is_refused_on_both_sides(tmp_path: Path) -> None:
    """It is finite and of a usual size, and makes all that a client predicts NaN."""

    def tamper(message: Message, reply: Message) -> Message:
        if message.metadata.message_type == "train" and message.metadata.dst_node_id == 1000:
            sent = from_record(reply.content.array_records["arrays"])
            (name,) = (name for name in sent if name.endswith("bn1.running_var"))
            sent[name][0] = -0.01
            reply.content["arrays"] = to_record(sent)
        return reply

    keys: dict[str, Any] = {"method": "fedper", "model": "cnn5-bn", "rounds": 1, "local_epochs": 1}
    keys |= small_images(tmp_path / "data", 2)
    outcome = federate(tmp_path / "runs", 2, tamper=tamper, **keys)
    (refused,) = outcome.history[0]["refused"]
    line = "tensor extractor.bn1.running_var has values below zero; no variance has"
    assert (refused["client"], refused["reason"]) == ("0", line)
    # A server that sends it is refused, too, before the client keeps anything.
    message = next(m for m in outcome.grid.messages if m.metadata.message_type == "train")
    context = outcome.grid.contexts[message.metadata.dst_node_id]
    sent = from_record(message.content.array_records["arrays"])
    sent["extractor.bn1.running_var"][0] = -0.01
    message.content["arrays"] = to_record(sent)
    message.content.config_records["config"]["round"] = 2
    assert app(message, context).content.config_records["error"]["reason"] == line
    assert kept(context).round == 1


def round_of(norms: UpdateNorms, sizes: dict[str, float], whole: tuple[str, ...] = ()) -> list[str]:
    """Judge a round as the strategy does; return who was refused."""
    held, refused = not norms.known, []
    for client, size in sizes.items():
        if held:
            norms.note(client, {"w": size}, whole)
    for client, size in sizes.items():
        if not held:
            norms.note(client, {"w": size}, whole)
        try:
            norms.check({"w": size}, {})
            norms.accept(client)
        except FloretError:
            norms.refuse(client)
            refused.append(client)
    norms.end_round(changed=len(refused) < len(sizes))
    return refused


def test_what_is_usual_and_what_is_absurd() -> None:
    norms = UpdateNorms()
    # The first round is judged by itself, and judges no other.
    for client in "ab":
        norms.note(client, {"w": 0.01})
    assert norms.usual("w") == 0.01
    norms.end_round()
    assert (norms.known, norms.usual("w")) == (False, None)
    for sizes in ({"a": 1.0, "b": 2.0, "c": 7.0}, {"a": 9.0}, {"a": 4.0, "c": 5.0}):
        assert round_of(norms, sizes) == []
    assert (norms.known, norms.usual("w")) == (True, 4.0)  # the median of 4 of a, 2 of b and 6 of c
    norms.check({"w": ABSURD * 4.0}, {})
    for absurd in (ABSURD * 4.001, float("inf"), float("nan")):
        with pytest.raises(FloretError, match="its update of w is"):
            norms.check({"w": absurd}, {})
    # 20 times half a percent of the size of the weights themselves, a tenth of it, is never absurd
    norms.check({"w": 1000.0}, {"w": 10_000.0})
    with pytest.raises(FloretError, match="its update of w is 20 times as large as usual"):
        norms.check({"w": 1001.0}, {"w": 10_000.0})
    again = UpdateNorms()
    again.load_state_dict(norms.state_dict())
    assert (again.known, again.usual("w")) == (True, 4.0)
    # Only the last five rounds count: of what is here, one with a is left.
    for _ in range(4):
        assert round_of(again, {"b": 1.0, "c": 2.0}) == []
    assert again.usual("w") == 2.0  # of 4, 1 and 2


@pytest.mark.parametrize("whole", [(), ("w",)])
@pytest.mark.parametrize("first", [1e-9, 1e9])
def test_one_client_alone_does_not_say_what_is_usual(whole: tuple[str, ...], first: float) -> None:
    """With ``participation`` below 1 it may be alone in the first rounds, and refused updates would never count."""
    norms = UpdateNorms()
    assert round_of(norms, {"hostile": first}, whole) == []
    assert round_of(norms, {"hostile": first}, whole) == []
    for drawn in (("a", "b"), ("c", "hostile", "a"), ("b",), ("c", "d")):
        assert round_of(norms, {client: first if client == "hostile" else 1.0 for client in drawn}, whole) in (
            [],
            ["hostile"],
        )
    assert norms.usual("w") == 1.0
    assert round_of(norms, {"a": 1.0, "b": 1.0, "hostile": 1e9}, whole) == ["hostile"]


def test_where_most_of_a_round_are_refused_what_is_usual_follows() -> None:
    norms = UpdateNorms()
    for _ in range(5):
        assert round_of(norms, {"a": 1e-3, "b": 1e-3}) == []
    # One of three does not count.
    for one in "cd":
        assert round_of(norms, {"a": 1e-3, "b": 1e-3, one: 1.0}) == [one]
    assert norms.usual("w") == 1e-3
    assert round_of(norms, {"c": 1.0, "d": 1.0, "e": 1.0}) == ["c", "d", "e"]
    assert norms.usual("w") == 1.0
    assert round_of(norms, {"a": 1e-3, "d": 1.0, "e": 1.0}) == []


def test_a_client_that_is_alone_for_long_does_not_say_what_is_usual() -> None:
    """The others are away, or drawn in other rounds."""
    norms = UpdateNorms()
    for _ in range(3):
        assert round_of(norms, {"a": 1.0, "b": 1.0, "c": 1.0}) == []
    for _ in range(12):
        assert round_of(norms, {"a": 1e12}) == ["a"]
    assert round_of(norms, {"a": 1.0, "b": 1.0, "c": 1.0}) == []


def test_one_client_alone_among_those_that_come_for_the_first_time() -> None:
    """Features of networks that nobody has trained are smaller, by some tens of times and not by a million."""
    for size, refused in ((38.0, []), (1e6, ["a"])):
        norms = UpdateNorms()
        round_of(norms, {"a": size}, ("w",))
        assert round_of(norms, {"a": size} | dict.fromkeys("bcdefgh", 1.0), ("w",)) == refused


def test_a_round_of_which_nothing_counts_takes_no_place() -> None:
    """All come for the first time: a checkpoint has no sizes of such a round, and a resumed run must not differ."""
    norms = UpdateNorms()
    round_of(norms, dict.fromkeys("ab", 1.0), ("w",))
    for size in (1.0, 2.0, 3.0):
        round_of(norms, dict.fromkeys("ab", size), ("w",))
        round_of(norms, {f"new{size}": 1.0}, ("w",))
    again = UpdateNorms()
    again.load_state_dict(norms.state_dict())
    for one in (norms, again):
        for size in (4.0, 5.0, 6.0):
            round_of(one, dict.fromkeys("ab", size), ("w",))
        assert one.usual("w") == 4.0  # of 2 to 6


def test_features_of_networks_that_nobody_has_trained_do_not_say_what_is_usual() -> None:
    """FedDFPA's prototypes are taken before training, by an own extractor: at first, in whatever round, by one that has
    learned nothing. Those of the others are 38 times as large here, and most that are drawn come for the first time.
    """
    norms = UpdateNorms()

    met: set[str] = set()
    for drawn in (["0", "1"], ["2", "3"], ["4", "0", "5"], ["6", "7"], ["1", "8"]):
        # Of a round before which nothing is known replies wait for one another.
        sizes = [{"prototype": 38.0 if client in met else 1.0} for client in drawn]
        for client, size in zip(drawn, sizes, strict=True):
            norms.note(client, size, {"prototype"})
        for client, size in zip(drawn, sizes, strict=True):
            norms.check(size, {})
            norms.accept(client)
        met |= {*drawn}
        norms.end_round()
        again = UpdateNorms()
        again.load_state_dict(norms.state_dict())
        norms = again
    assert norms.known
    assert norms.usual("prototype") == 38.0
    with pytest.raises(FloretError, match=r"its update of prototype is 26\.3 times as large as usual"):
        norms.check({"prototype": 1000.0}, {})
    # Differences to what all were sent count from the first time on.
    norms.note("late", {"head": 2.0}, {"prototype"})
    assert norms.usual("head") == 2.0
    norms.forget_round()
    # While nothing else is known the first uploads do, and replies wait for one another.
    norms = UpdateNorms()
    for client in "abc":
        norms.note(client, {"prototype": 1.0, "head": 1.0}, {"prototype"})
        assert norms.usual("prototype") == 1.0
        norms.end_round()
        assert not norms.known
    # A group that is not sent any more is not waited for.
    norms.note("a", {"head": 1.0})
    norms.end_round()
    assert norms.known


@pytest.mark.parametrize("seed", [0, 1])
def test_honest_clients_of_feddfpa_that_are_drawn_seldom_are_not_refused(tmp_path: Path, seed: int) -> None:
    def larger(message: Message, reply: Message) -> Message:
        if message.metadata.message_type == "train":
            sent, seen = from_record(reply.content.array_records["arrays"]), message.metadata.dst_node_id
            if seen in trained:
                grown = {name: 38 * array for name, array in sent.items() if name.startswith("prototype.")}
                reply.content["arrays"] = to_record(sent | grown)
            trained.add(seen)
        return reply

    trained: set[int] = set()
    keys: dict[str, Any] = {"method": "feddfpa", "rounds": 12, "participation": 0.3, "local_epochs": 1, "seed": seed}
    keys |= {"lr": 1e-4, "max_samples": 300, "evaluate_every": 12, "min_samples": 2}
    assert federate(tmp_path, 12, tamper=larger, **keys).summary["refused"] == 0


def test_heads_that_start_from_nothing_sent_are_no_updates(tmp_path: Path) -> None:
    keys: dict[str, Any] = {"method": "feddfpa", "feddfpa__own_start": True, "feddfpa__fusion": False, "rounds": 12}
    keys |= {"participation": 0.2, "local_epochs": 2, "lr_decay": 0.5, "head_layers": 2, "max_samples": 600}
    outcome = federate(tmp_path, 5, aggregation="trimmed-mean", **keys)
    assert outcome.summary["refused"] == 0


@pytest.mark.parametrize(("own", "fusion"), [(True, True), (False, True), (False, False)])
def test_a_head_of_feddfpa_is_judged_whatever_the_steps_of_its_round(tmp_path: Path, own: bool, fusion: bool) -> None:
    """How far a head that goes on from round to round is from the global one does not come of the round's steps."""

    def larger(message: Message, reply: Message) -> Message:
        if message.metadata.dst_node_id != 1000:
            if message.metadata.message_type == "query.describe":
                reply.content.config_records["client"]["train"] = 10**7
            elif message.metadata.message_type == "train":
                reply.content.metric_records["metrics"]["num-examples"] = 10**7
        return reply

    keys: dict[str, Any] = {"feddfpa__own_start": own, "feddfpa__fusion": fusion, "lr": 0.1, "local_epochs": 1}
    outcome = federate(tmp_path, 4, tamper=larger, method="feddfpa", partition="pathological", rounds=4, **keys)
    assert outcome.summary["refused"] == 0


@pytest.mark.parametrize(
    ("name", "factor", "refused"), [("unit", 100, 0), ("auxiliary", 100, 0), ("auxiliary", 10_000, 3)]
)
def test_what_ua_pdfl_says_of_no_sample_may_be_a_hundred_times_the_usual(
    tmp_path: Path, name: str, factor: float, refused: int
) -> None:
    def larger(message: Message, reply: Message) -> Message:
        if message.metadata.message_type == "train" and message.metadata.dst_node_id == 1000:
            sent = from_record(reply.content.array_records["arrays"])
            reply.content["arrays"] = to_record(sent | {name: (factor * sent[name]).astype(np.float32)})
        return reply

    outcome = federate(tmp_path, 4, tamper=larger, method="ua-pdfl", rounds=3, local_epochs=1)
    assert outcome.summary["refused"] == refused


def test_what_travels_counts_whatever_becomes_of_it(tmp_path: Path) -> None:
    travelled = {"up": 0, "down": 0}

    def seen(message: Message, reply: Message) -> Message:
        if message.metadata.message_type in ("train", "evaluate"):
            for way, content in (("down", message.content), ("up", reply.content)):
                record = content.array_records.get("arrays")
                travelled[way] += payload_bytes(record) if record else 0
        if message.metadata.message_type == "train" and message.metadata.dst_node_id == 1001:
            reply.content["metrics"] = MetricRecord({"num-examples": 0})
        return reply

    outcome = federate(tmp_path, 3, tamper=seen, method="fedavg", rounds=2, participation=0.67, evaluate_every=2)
    assert outcome.summary["refused"] > 0
    assert outcome.summary["bytes"] == travelled
    assert travelled["up"] > 0


@pytest.mark.parametrize("keys", [{"privacy__unit": "client", "privacy__noise": 1.0}, {"privacy__unit": "example"}])
def test_who_tells_no_accuracy_is_not_sent_a_model_to_measure(tmp_path: Path, keys: dict[str, Any]) -> None:
    kinds: list[str] = []

    def seen(message: Message, reply: Message) -> Message:
        kinds.append(message.metadata.message_type)
        return reply

    federate(
        tmp_path,
        3,
        tamper=seen,
        method="fedavg",
        rounds=1,
        participation=0.34,
        evaluate_every=1,
        num_classes=10,
        **keys,
    )
    assert "evaluate" not in kinds
    assert "train" in kinds


def test_what_goes_into_no_mean_is_not_clipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shortened: list[set[str]] = []

    def noted(arrays: NamedArrays, before: Any, sizes: Any, usual: Any) -> NamedArrays:
        shortened.append({*usual})
        return arrays

    monkeypatch.setattr("strategies.core.base.clipped", noted)
    federate(tmp_path, 3, method="fedpac", aggregation="clipped-mean", rounds=1, local_epochs=1)
    # Of a client with more samples than the median the extractor alone, besides.
    assert sorted(map(sorted, shortened)) == [["extractor"], *[["extractor", "prototype"]] * 3]


def test_fedpac_combines_no_head_of_a_client_that_keeps_a_mean_back(tmp_path: Path) -> None:
    """As a node does with ``min-class-samples``: without it the client would look like all that lack the class."""

    def kept_back(message: Message, reply: Message) -> Message:
        if message.metadata.message_type == "train" and message.metadata.dst_node_id == 1000:
            sent = from_record(reply.content.array_records["arrays"])
            del sent[next(name for name in sent if name.startswith("mean."))]
            reply.content["arrays"] = to_record(sent)
        return reply

    outcome = federate(tmp_path, 3, method="fedpac", rounds=2, local_epochs=1, tamper=kept_back)
    assert outcome.summary["refused"] == 0
    second = [m for m in outcome.grid.messages if m.content.config_records["config"].get("round") == 2]
    heads = {
        message.metadata.dst_node_id: any(name.startswith("head.") for name in message.content.array_records["arrays"])
        for message in second
        if message.metadata.message_type == "train"
    }
    assert heads == {1000: False, 1001: True, 1002: True}


def test_a_tensor_that_is_absurd_in_a_group_of_a_usual_size() -> None:
    norms = UpdateNorms()
    norms.note("a", {"extractor": 0.05})
    fine = {"extractor.bias": np.full(4, 24.9, np.float32), "head.bias": np.full(4, 1e9, np.float32)}
    norms.check_tensors(fine, {})  # of the head nothing is known
    with pytest.raises(FloretError, match=r"its extractor\.bias has a root mean square of 25\.1, 502 times what is"):
        norms.check_tensors({"extractor.bias": np.full(4, 25.1, np.float32)}, {})
    # Where there is a global model, updates are measured, and its own weights say what is usual of weights.
    norms.check_tensors({"extractor.bias": np.full(4, 99.0, np.float32)}, {"extractor": 0.2})
    with pytest.raises(FloretError, match="502 times what is usual for extractor"):
        norms.check_tensors({"extractor.bias": np.full(4, 0.502, np.float32)}, {"extractor": 1e-9})


@pytest.mark.parametrize("method", ["apple", "dfedavgm", "ua-pdfl"])
def test_an_upload_with_all_of_its_size_in_one_small_tensor_stops_nobody(tmp_path: Path, method: str) -> None:
    def all_in_one(message: Message, reply: Message) -> Message:
        if message.metadata.message_type == "train" and message.metadata.dst_node_id == 1000:
            sent = from_record(reply.content.array_records["arrays"])
            extractor = np.concatenate([a.ravel() for name, a in sent.items() if name.startswith("extractor.")])
            # Fifteen times the usual size as a whole, if the clients' weights were the usual ones.
            size = 15 * math.sqrt(float(np.square(extractor).sum()) / sent["extractor.conv1.bias"].size)
            worst = np.full_like(sent["extractor.conv1.bias"], size)
            reply.content["arrays"] = to_record(sent | {"extractor.conv1.bias": worst})
        return reply

    keys: dict[str, Any] = {"model": "cnn2", "rounds": 2, "local_epochs": 1} | small_images(tmp_path / "data", 4)
    outcome = federate(tmp_path / "runs", 4, tamper=all_in_one, method=method, **keys)
    for line in outcome.history:
        (refusal,) = line["refused"]
        assert refusal["client"] == "0"
        assert "extractor" in refusal["reason"]
        assert all(line["clients"][name]["trained"] for name in "123")


def test_what_goes_into_the_mean_is_looked_at_tensor_by_tensor_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A small tensor of a large network can have a thousand times the size of its group: others refuse the mean."""
    monkeypatch.setattr("strategies.core.update_norms._ABSURD_IN_MEAN", 8.0)

    def biased(message: Message, reply: Message) -> Message:
        if message.metadata.message_type == "train" and message.metadata.dst_node_id == 1000:
            sent = from_record(reply.content.array_records["arrays"])
            sent["extractor.fc2.bias"] = np.full_like(sent["extractor.fc2.bias"], 1.0)
            reply.content["arrays"] = to_record(sent)
        return reply

    outcome = federate(tmp_path, 3, tamper=biased, method="fedavg", rounds=2, local_epochs=5)
    for line in outcome.history:
        (refusal,) = line["refused"]
        assert refusal["client"] == "0"
        assert refusal["reason"].startswith("its extractor.fc2.bias has a root mean square of 1, ")


def test_one_message_of_who_declares_a_billion_samples_ruins_no_run(tmp_path: Path) -> None:
    """They count for most of the mean, and explain a large update: of both, what is usual bounds what comes of it."""

    def grown(message: Message, reply: Message) -> Message:
        kind = message.metadata.message_type
        if message.metadata.dst_node_id != 1000 or not reply.has_content():
            return reply
        if kind.endswith("describe"):
            reply.content.config_records["client"]["train"] = 10**9
        elif kind == "train":
            sent, received = (from_record(m.content.array_records["arrays"]) for m in (reply, message))
            metrics = reply.content.metric_records["metrics"]
            steps = math.sqrt(5 * math.ceil(int(metrics["num-examples"]) / 32))  # type: ignore[arg-type]
            metrics["num-examples"] = 10**9
            for group in ("extractor", "head"):
                names = [name for name in sent if name.startswith(group)]
                weights = root_mean_squares({name: received[name] for name in names}, {})[group]
                update = root_mean_squares({name: sent[name] for name in names}, received)[group]
                size = 170 * max(update, 0.005 * weights * steps)
                for name in names:
                    sent[name] = (received[name] * np.float32(1 + size / weights)).astype(np.float32)
            reply.content["arrays"] = to_record(sent)
        return reply

    outcome = federate(tmp_path, 5, tamper=grown, method="fedavg", rounds=6, local_epochs=5, partition="iid")
    for line in outcome.history:
        assert {refusal["client"] for refusal in line["refused"]} <= {"0"}
        assert all(line["clients"][name]["trained"] for name in "1234")
    assert outcome.history[-1]["accuracy"]["after"]["test"]["mean"] > 0.7


def test_a_client_that_still_learns_is_not_absurd_beside_others_that_have_learned() -> None:
    """The sizes are those of FedALA on CIFAR-10, FedDFPA's table 1, in round 145: an honest client with 969 samples."""
    norms = UpdateNorms()
    for size in (1.1e-4, 1.85e-5):
        for client in "ab":
            norms.note(client, {"extractor": size})
        norms.end_round()
    weights = {"extractor": 0.019}
    assert norms.usual("extractor") == 1.85e-5
    norms.check({"extractor": 20.3 * 1.9e-5}, weights)
    # In round 8 the usual size was 1.1e-4: what was absurd then is so now.
    with pytest.raises(FloretError, match=r"its update of extractor is 23\.2 times as large as usual"):
        norms.check({"extractor": 20 * 1.1e-4}, weights)


def test_what_is_held_is_read_from_a_file(tmp_path: Path) -> None:
    sent = {"large": np.arange(50_000, dtype=np.float32).reshape(100, 500), "small": np.ones(3, bool)}
    held = spooled(sent, tmp_path)
    assert isinstance(held["large"], np.memmap)
    assert all(np.array_equal(sent[name], held[name]) for name in sent)
    assert not list(tmp_path.iterdir())
    # Some file systems of a network map no files.
    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(np, "memmap", raising(OSError(errno.ENODEV, "No such device")))
        held = spooled(sent, tmp_path)
    assert all(np.array_equal(sent[name], held[name]) for name in sent)


def raising(error: Exception) -> Any:
    def call(*_: Any) -> Any:
        raise error

    return call


@pytest.mark.parametrize("keys", [{"aggregation": "median"}, {"aggregation": "trimmed-mean"}, {}])
@pytest.mark.parametrize("file", ["/dev/full", "none"])
def test_replies_that_find_no_room_on_the_disk_end_the_run_and_no_client_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keys: dict[str, Any], file: str
) -> None:
    keys = {"method": "fedper", "checkpoint_every": 2, "rounds": 3, **keys}
    monkeypatch.setattr("strategies.core.spool._SMALL", 0)
    whole, folders = federate(tmp_path / "whole", **keys), set[Path]()

    def full(dir: Path) -> Any:
        folders.add(dir)
        if file == "none":
            raise OSError(errno.ENOSPC, "No space left on device")
        return open(file, "r+b")

    states = tmp_path / "states"
    line = r"^round 1: .*: replies cannot wait there \(No space left on device\); resumed, the run goes on after rou"
    with monkeypatch.context() as patches:
        patches.setattr("tempfile.TemporaryFile", full)
        with pytest.raises(FloretError, match=line):
            federate(tmp_path / "full", states=states, **keys)
    (directory,) = (tmp_path / "full").iterdir()
    assert folders == {directory}
    assert not (directory / "history.jsonl").read_text()
    resumed = federate(tmp_path / "full", states=states, **keys, resume=str(directory))
    assert timeless(resumed.history) == timeless(whole.history)


def times(factor: float) -> Any:
    """Return a tamper that multiplies what client 0 sends."""

    def tamper(message: Message, reply: Message) -> Message:
        if message.metadata.message_type == "train" and message.metadata.dst_node_id == 1000:
            sent = from_record(reply.content.array_records["arrays"])
            reply.content["arrays"] = to_record({name: np.float32(factor) * array for name, array in sent.items()})
        return reply

    return tamper


def honest(outcome: Outcome) -> list[Any]:
    return [{name: c for name, c in timeless(line["clients"]).items() if name != "0"} for line in outcome.history]


@pytest.mark.parametrize("method", ["fedavg", "fedproto", "ua-pdfl"])
@pytest.mark.parametrize("factor", [1e10, -1e5])
def test_an_absurd_update_is_refused_in_every_round_also_the_first(tmp_path: Path, method: str, factor: float) -> None:
    keys: dict[str, Any] = {"method": method, "rounds": 3, "local_epochs": 1}
    outcome = federate(tmp_path, 5, tamper=times(factor), **keys)
    for line in outcome.history:
        (refusal,) = [entry for entry in line["refused"] if "times as large as usual" in entry["reason"]]
        assert refusal["client"] == "0"
    assert all(c["trained"] for line in outcome.history for name, c in line["clients"].items() if name != "0")
    assert outcome.summary["accuracy"]["after"]["mean"] > 0.5


def test_features_of_a_network_that_nobody_trained_judge_none_that_came_later(tmp_path: Path) -> None:
    """FedPAC's clients send the means of features under the extractor that they received."""

    def small_at_first(message: Message, reply: Message) -> Message:
        if message.metadata.message_type == "train" and message.content.config_records["config"]["round"] == 1:
            sent = from_record(reply.content.array_records["arrays"])
            small = {name: array * np.float32(1e-3) for name, array in sent.items() if name.startswith("mean.")}
            reply.content["arrays"] = to_record(sent | small)
        return reply

    outcome = federate(tmp_path, 4, method="fedpac", rounds=4, local_epochs=1, tamper=small_at_first)
    assert outcome.summary["refused"] == 0
    assert outcome.summary["accuracy"]["after"]["mean"] > 0.5


@pytest.mark.parametrize("clients", [1, 2])
def test_an_update_beyond_measure_is_refused_also_where_nobody_else_is_to_compare(tmp_path: Path, clients: int) -> None:
    """Its size would be infinite, and with one or two clients so would be what is usual."""
    fails = "no reply of any round was used" if clients == 1 else ""
    outcome = federate(tmp_path, clients, tamper=times(1e30), method="fedavg", local_epochs=1, fails=fails)
    for line in outcome.history:
        (refusal,) = line["refused"]
        assert refusal == {"client": "0", "reason": refusal["reason"]}
        assert refusal["reason"].endswith("is too large to be measured; it is refused")
    assert len(outcome.grid.messages) > 2 * clients


def test_one_who_is_refused_leaves_no_trace_in_the_aggregate(tmp_path: Path) -> None:
    """The others compute what they compute without that client."""

    def failing(message: Message, reply: Message) -> Message:
        if message.metadata.message_type == "train" and message.metadata.dst_node_id == 1000:
            return Message(RecordDict({"error": ConfigRecord({"reason": "it failed"})}), reply_to=message)
        return reply

    keys: dict[str, Any] = {"method": "fedavg", "rounds": 3, "local_epochs": 1}
    without = federate(tmp_path, 4, tamper=failing, **keys)
    refused = federate(tmp_path, 4, tamper=times(1e10), **keys)
    assert honest(without) == honest(refused)


def test_honest_clients_of_very_different_size_are_not_refused(tmp_path: Path) -> None:
    for part, samples in (("train", (2, 2, 2, 2, 1500)), ("test", (20,) * 5)):
        (tmp_path / part).mkdir()
        for i, count in enumerate(samples):
            rng = np.random.default_rng([i, part == "test"])
            y = np.arange(count) % 2
            np.savez(tmp_path / part / f"{i}.npz", x=(rng.normal(size=(count, 8)) + y[:, None]).astype("f4"), y=y)
    for method in ("fedper", "fedproto"):
        keys: dict[str, Any] = {"dataset": "npz-clients", "data_dir": str(tmp_path), "validation_fraction": 0.0}
        outcome = federate(tmp_path / "runs", 5, method=method, rounds=5, **keys)
        assert outcome.summary["refused"] == 0


def test_honest_clients_of_a_relay_are_judged_by_their_weights_not_by_their_steps(tmp_path: Path) -> None:
    for client, samples in enumerate((1000, 1000, 2)):
        for part, count in (("train", samples), ("test", 10)):
            (tmp_path / "data" / part).mkdir(parents=True, exist_ok=True)
            x = np.random.default_rng(client).normal(size=(count, 4)).astype(np.float32)
            np.savez(tmp_path / "data" / part / f"{client}.npz", x=x, y=np.arange(count) % 2)
    keys: dict[str, Any] = {"dataset": "npz-clients", "data_dir": str(tmp_path / "data"), "validation_fraction": 0.0}
    # A thousand steps against two: divided by the root of the steps, equal weights would differ 22 times.
    keys |= {"batch_size": 1, "rounds": 2, "local_epochs": 1, "lr": 1e-4}
    outcome = federate(tmp_path / "runs", 3, method="apple", **keys)
    assert outcome.summary["refused"] == 0


def test_who_declares_a_billion_samples_does_not_count_for_them(tmp_path: Path) -> None:
    """Neither as a weight nor as steps that would make its update smaller than it is."""
    roster = Roster()
    for i, train in enumerate((30, 10, 20, 10**9)):
        roster.add(Client(str(i), 1000 + i, train, 0, 10))
    assert [roster.counted(samples) for samples in (7, 2500, 2501, 10**9)] == [7, 2500, 2500, 2500]
    roster.add(Client("4", 1004, 20, 0, 10))
    assert roster.counted(10**9) == 2000
    # Nor do the names that its node had before.
    roster.see(range(1000, 1005))
    for name in ("a", "b", "c", "d", "e"):
        roster.add(Client(name, 1003, 10**9, 0, 10))
    assert roster.counted(10**9) == 2000
    roster.see([1000, 1003])
    assert roster.counted(10**9) == 10**9
    roster.see([1000, 1001, 1003])
    assert roster.counted(10**9) == 3000
    trusted = Roster(trusted=True)
    trusted.add(Client("0", 1000, 10, 0, 10))
    assert trusted.counted(10**9) == 10**9

    def large(factor: float) -> Any:
        def tamper(message: Message, reply: Message) -> Message:
            if message.metadata.dst_node_id != 1000:
                return reply
            if message.metadata.message_type == "query.describe":
                reply.content.config_records["client"].update({"train": 10**9, "test": 10**9})
            elif message.metadata.message_type == "train":
                reply.content.metric_records["metrics"].update({"num-examples": 10**9, "before.test": 1.0})
            return times(factor)(message, reply)  # type: ignore[no-any-return]

        return tamper

    keys: dict[str, Any] = {"method": "fedavg", "rounds": 2, "local_epochs": 1}
    refused = federate(tmp_path, 5, tamper=large(3000.0), **keys)
    assert [[entry["client"] for entry in line["refused"]] for line in refused.history] == [["0"], ["0"]]
    line = federate(tmp_path, 5, tamper=large(1.0), **keys).history[0]
    others = [line["clients"][str(i)]["before"]["test"] for i in range(1, 5)]
    assert line["accuracy"]["before"]["test"]["weighted_mean"] == pytest.approx((100 + sum(others)) / 104, abs=0.01)


def test_a_class_that_comes_late_is_not_absurd(tmp_path: Path) -> None:
    """Prototypes hardly move after many rounds; that of a new class is as large as they are, not as their moves."""
    norms = federate(tmp_path, 4, method="fedproto", rounds=6, local_epochs=1)
    checkpoint, _ = Checkpoints(norms.directory / "checkpoints").read()
    usual = float(np.median(checkpoint.strategy["norms/4/prototype"]))
    sizes = root_mean_squares(checkpoint.arrays, {})
    assert 0.2 * sizes["prototype"] < usual < 5 * sizes["prototype"]


def test_what_is_usual_survives_a_resume(tmp_path: Path) -> None:
    keys: dict[str, Any] = {"method": "fedper", "local_epochs": 1}
    first = federate(tmp_path / "runs", 4, states=tmp_path / "states", rounds=2, **keys)
    keys |= {"rounds": 3, "resume": str(first.directory)}
    resumed = federate(tmp_path / "runs", 4, states=tmp_path / "states", tamper=times(1e6), **keys)
    assert [entry["client"] for entry in resumed.history[-1]["refused"]] == ["0"]
    manifest = json.loads(max(resumed.directory.glob("checkpoints/round-*.json")).read_text())
    assert manifest["round"] == 3


def test_what_was_usual_before_a_resume_judges_the_round_after_it(tmp_path: Path) -> None:
    """Where all updates are absurd, none is beside the others of its round."""

    def enormous(message: Message, reply: Message) -> Message:
        if message.metadata.message_type == "train":
            sent = from_record(reply.content.array_records["arrays"])
            reply.content["arrays"] = to_record({name: np.float32(1e6) * array for name, array in sent.items()})
        return reply

    keys: dict[str, Any] = {"method": "fedper", "local_epochs": 1}
    first = federate(tmp_path / "runs", 4, states=tmp_path / "states", rounds=2, **keys)
    keys |= {"rounds": 3, "resume": str(first.directory)}
    resumed = federate(tmp_path / "runs", 4, states=tmp_path / "states", tamper=enormous, **keys)
    refused = [entry for entry in resumed.history[-1]["refused"] if "times as large as usual" in entry["reason"]]
    assert [entry["client"] for entry in refused] == ["0", "1", "2", "3"]


def test_a_client_refuses_absurd_tensors_before_it_commits(tmp_path: Path) -> None:
    outcome = federate(tmp_path, 2, method="fedper", rounds=2)
    message = next(m for m in reversed(outcome.grid.messages) if m.metadata.message_type == "train")
    context = outcome.grid.contexts[message.metadata.dst_node_id]
    before = kept(context)
    sent = from_record(message.content.array_records["arrays"])
    poisoned = {name: np.float32(1e30) * array for name, array in sent.items()}
    message.content["arrays"] = to_record(poisoned)
    message.content.config_records["config"]["round"] = 3
    reply = app(message, context)
    assert str(reply.content.config_records["error"]["reason"]).startswith("the server sent extractor.fc1.")
    after = kept(context)
    assert (after.round, after.load().keys()) == (before.round, before.load().keys())
    assert Request(context).client() is not None


def test_a_method_that_averages_nothing_has_no_other_aggregate(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="aggregation = 'median': ua-pdfl averages nothing on the server"):
        federate(tmp_path, 3, method="ua-pdfl", aggregation="median")


@pytest.fixture(scope="module")
def unattacked() -> dict[str, float]:
    """The accuracy that a federation without bad members has, by aggregation; each is run once."""
    return {}


@pytest.mark.thorough
@pytest.mark.parametrize("aggregation", ["mean", "clipped-mean", "median", "trimmed-mean"])
@pytest.mark.parametrize("attack", ["1e30", "x100", "nan"])
def test_attacks_that_every_aggregation_withstands(
    tmp_path: Path, unattacked: dict[str, float], aggregation: str, attack: str
) -> None:
    if aggregation not in unattacked:
        unattacked[aggregation] = attacked(tmp_path, "fedper", aggregation, "none", 0, seed=0, rounds=4).after
    bad = attacked(tmp_path, "fedper", aggregation, attack, 1, seed=0, rounds=4)
    assert bad.after > unattacked[aggregation] - 0.05
    assert attack in ATTACKS


def test_a_federation_that_was_refused_goes_on(tmp_path: Path) -> None:
    """In rounds 1 and 2 all send next to nothing; from then on what is honest would be refused for good."""

    def tiny_at_first(message: Message, reply: Message) -> Message:
        if message.metadata.message_type == "train" and message.content.config_records["config"]["round"] in (1, 2):
            sent = from_record(reply.content.array_records["arrays"])
            reply.content["arrays"] = to_record({name: np.float32(1e-6) * array for name, array in sent.items()})
        return reply

    outcome = federate(tmp_path, 3, method="fedproto", rounds=4, local_epochs=1, tamper=tiny_at_first)
    assert [len(line["refused"]) for line in outcome.history] == [0, 0, 3, 0]
