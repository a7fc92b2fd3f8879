"""CriticalFL and FedPA: formulas by hand, what travels, with what settings they are FedAvg, and what is refused."""

import math
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from flwr.app import ConfigRecord, Error, Message
from torch import nn

from client_app.batches import normalise
from client_app.client import MODEL
from client_app.methods.criticalfl import CriticalFL, largest
from client_app.policy import kinds_sent
from common.adam import Adam
from common.errors import ConfigError, FloretError
from common.prototypes import alignment_loss
from common.registry import load_class
from common.seeds import torch_generator
from common.tensors import MASK, NamedArrays, TensorSpec
from common.wire import DENSE, SPARSE, from_record, pack, payload_bytes, to_record, unpack
from server_app.checkpoint import Checkpoints
from server_app.settings import read_config
from server_app.setup import build_strategy
from strategies.core import Client, FloretStrategy, Roster, Session
from strategies.core.update_norms import UpdateNorms
from strategies.criticalfl import NORM, CriticalFLParameters, Periods, SparseMean, federated_norm
from strategies.fedpa import COUNTS, FedPA, Generator, diversity_loss, fidelity_loss
from tests.harness import MODEL_SIZE, Outcome, checkpointed, equal, federate, kept, run_config, standing, uploads
from tests.test_keys import last_train
from tests.test_losses import Halted
from tests.test_methods import write_clients
from tests.test_papers import write_images
from tests.test_resume import CLIENTS, assert_same, crash

SIDES = [64 * 128, 128, 128 * 64, 64, 64 * 10, 10]
SMALL: dict[str, Any] = {"local_epochs": 1, "max_samples": 400}
OFF: dict[str, Any] = {"criticalfl__delta": math.inf, "criticalfl__initial_checks": 0}
NO_TERMS: dict[str, Any] = {
    "fedpa__generator_weight": 0.0,
    "fedpa__prototype_weight": 0.0,
    "fedpa__prototype_floor": 0.0,
}


def model_of(arrays: NamedArrays) -> NamedArrays:
    return {name: array for name, array in arrays.items() if name.startswith(("extractor.", "head."))}


def same_models(one: Outcome, other: Outcome) -> bool:
    """Compare global models, personal models and measured figures, bit for bit."""
    if not equal(model_of(checkpointed(one)), model_of(checkpointed(other))):
        return False
    for contexts in zip(one.grid.contexts.values(), other.grid.contexts.values(), strict=True):
        first, second = ({n: t for n, t in kept(c).load().items() if n.startswith(MODEL)} for c in contexts)
        if first.keys() != second.keys() or not all(torch.equal(first[name], second[name]) for name in first):
            return False
    return bool([line["accuracy"] for line in one.history] == [line["accuracy"] for line in other.history])


def trained(outcome: Outcome) -> list[int]:
    """Return how many clients were asked to train in each round."""
    asked = [m.metadata.group_id for m in outcome.grid.messages if m.metadata.message_type == "train"]
    return [asked.count(str(line["round"])) for line in outcome.history]


def refusals(outcome: Outcome) -> list[list[str]]:
    return [[r["reason"] for r in line["refused"]] for line in outcome.history]


def arrays_of(reply: Message) -> Any:
    """Return the record of a reply's tensors, to be changed."""
    return reply.content["arrays"]


def tampered(client: str, at: int, **tensors: Any) -> Any:
    """Return a function that replaces tensors of one client in one round."""

    def tamper(message: Message, reply: Message) -> Message:
        about = message.metadata
        if (about.message_type, about.dst_node_id, about.group_id) == ("train", 1000 + int(client), str(at)):
            for name, array in tensors.items():
                arrays_of(reply)[name.replace("__", ".").replace("_", "-")] = to_record({"x": array})["x"]
        return reply

    return tamper


# CriticalFL


def parameters(**keys: Any) -> CriticalFLParameters:
    own = {"delta": 0.1, "initial_checks": 0, "window": 2, "check_every": 1}
    return CriticalFLParameters(**{**own, "max_participation": 0.75, "upload_fraction": 0.2, **keys})


def test_critical_periods_by_hand() -> None:
    periods, own = Periods(critical=False), parameters()
    found = []
    for norm in (1.0, 1.1, 1.4, 1.2, 1.8, 1.0, 3.0, 3.0):
        periods.check(norm, own, 3, 11)
        found.append((periods.critical, periods.clients, periods.reached))
    # Old and New: none; 1, 1.05; 1.05, 1.25; 1.25, 1.3; 1.3, 1.5; 1.5, 1.4; 1.4, 2.0; 2.0, 3.0
    assert found == [
        (False, 3, False),
        (False, 3, False),
        (True, 6, False),
        (False, 3, False),
        (True, 6, False),
        (False, 3, False),
        (True, 6, False),
        (True, 11, False),
    ]
    assert periods.norms == [1.0, 3.0, 3.0]
    periods.check(9.0, own, 3, 11)
    assert (periods.critical, periods.clients, periods.reached) == (True, 11, True)
    # From the largest number down, and never up again.
    for norm, clients in ((1.0, 6), (1.0, 3), (1.0, 3), (9.0, 3)):
        periods.check(norm, own, 3, 11)
        assert periods.clients == clients
    assert periods.critical
    # More clients went away than there are to lose.
    periods.check(1.0, own, 5, 5)
    assert periods.clients == 5


def test_the_first_checks_find_a_critical_period_whatever_the_norms() -> None:
    periods = Periods()
    found = []
    for _ in range(4):
        periods.check(1.0, parameters(initial_checks=2, delta=math.inf), 1, 100)
        found.append((periods.critical, periods.clients))
    assert found == [(True, 2), (True, 4), (False, 2), (False, 1)]


def test_what_is_known_of_periods_survives() -> None:
    periods, own = Periods(), parameters(initial_checks=1)
    for norm in (1.0, 1.5, 1.0):
        periods.check(norm, own, 2, 9)
        again = Periods()
        again.load_state_dict(periods.state_dict())
        assert asdict(again) == asdict(periods)


def test_one_norm_counts_for_twice_the_median_at_most() -> None:
    assert federated_norm([1.0, 0.5, 1.0, 100.0]) == pytest.approx((1 + 0.5 + 1 + 2) / 4)
    assert federated_norm([4.0]) == 4.0
    assert federated_norm([0.0, 0.0, 100.0]) == 0.0


def test_the_largest_updates_by_hand() -> None:
    updates = {"a": torch.tensor([[0.1, -5.0], [0.0, 0.3]]), "b": torch.tensor([2.0, -0.2])}

    def found(fraction: float) -> list[list[Any]]:
        return [mask.flatten().tolist() for mask in largest(updates, fraction).values()]

    assert found(0.01) == [[False, True, False, False], [False, False]]
    assert found(0.33) == [[False, True, False, False], [True, False]]
    assert found(0.5) == [[False, True, False, True], [True, False]]
    assert found(1.0) == [[True, True, False, True], [True, True]]  # what did not change does not travel
    assert not any(mask.any() for mask in largest({"a": torch.zeros(5)}, 0.2).values())


def test_a_sparse_mean_by_hand() -> None:
    mean = SparseMean({"w": np.array([10.0, 20.0, 30.0, 40.0], np.float32)})
    for values, mask, weight in (([1, 2, 3, 4], [1, 1, 0, 0], 1.0), ([5, 6, 7, 8], [1, 0, 1, 0], 3.0)):
        mean.add({"w": np.array(values, np.float32), MASK + "w": np.array(mask, bool)}, weight)
    assert mean.result()["w"].tolist() == [4.0, 2.0, 7.0, 40.0]
    assert mean.result()["w"].dtype == np.float32


@pytest.mark.thorough
def test_without_critical_periods_it_is_fedavg(tmp_path: Path) -> None:
    fedavg = federate(tmp_path, method="fedavg", rounds=3, participation=0.5)
    off = federate(tmp_path, method="criticalfl", rounds=3, participation=0.5, **OFF)
    assert same_models(fedavg, off)
    sent = [[{n: c["bytes"] for n, c in line["clients"].items()} for line in run.history] for run in (fedavg, off)]
    for one, other in zip(*sent, strict=True):
        norm = {name: 4 if size["up"] else 0 for name, size in one.items()}
        assert other == {name: {"up": s["up"] + norm[name], "down": s["down"]} for name, s in one.items()}
    # Critical, but with all weights of the usual number of clients.
    dense: dict[str, Any] = {"criticalfl__upload_fraction": 1.0, "criticalfl__max_participation": 0.0}
    assert same_models(fedavg, federate(tmp_path, method="criticalfl", rounds=3, participation=0.5, **dense))
    assert not same_models(fedavg, federate(tmp_path, method="criticalfl", rounds=3, participation=0.5))


@pytest.mark.thorough
def test_a_fifth_of_the_weights_travels_in_critical_periods(tmp_path: Path) -> None:
    keys: dict[str, Any] = {"criticalfl__initial_checks": 1, "criticalfl__delta": math.inf, "rounds": 4}
    outcome, records = uploads(tmp_path, method="criticalfl", **keys, **SMALL)
    bits = sum(-(-side // 8) for side in SIDES)
    for line, fraction in zip(outcome.history, (0.2, 0.2, 0.2, 1.0), strict=True):
        # 64 inputs, some of which are 0 in all images: their weights change by the weight decay alone, and so little
        # that the sum is exact.
        expected = 4 * math.ceil(fraction * MODEL_SIZE) + (bits if fraction < 1 else 0) + 4
        assert [c["bytes"]["up"] for c in line["clients"].values()] == pytest.approx([expected] * 4, abs=20)
        assert [c["bytes"]["down"] for c in line["clients"].values()] == [4 * MODEL_SIZE] * 4
    assert records[0]["extractor.fc1.weight"].stype == SPARSE
    assert {array.stype for array in records[-1].values()} == {DENSE}
    half = federate(tmp_path, method="criticalfl", criticalfl__upload_fraction=0.5, **keys, **SMALL)
    up = half.history[0]["clients"]["0"]["bytes"]["up"]
    assert up == pytest.approx(4 * math.ceil(0.5 * MODEL_SIZE) + bits + 4, abs=20)


def test_the_server_averages_what_was_sent_and_keeps_the_rest(tmp_path: Path) -> None:
    outcome, records = uploads(tmp_path, method="criticalfl", rounds=2, **SMALL)
    went = [m for m in outcome.grid.messages if m.metadata.message_type == "train"]
    before, after = (from_record(went[place].content.array_records["arrays"]) for place in (0, 4))
    specs = load_class("strategies", "criticalfl", FloretStrategy).uplink(Halted(outcome).client.setup)
    sent = [unpack(record, specs) for record in records[:4]]
    samples = [m.content.metric_records["metrics"]["num-examples"] for m in replies_of(outcome, tmp_path)]
    untouched = 0
    for name, array in before.items():
        weights = np.array([n * s[MASK + name] for n, s in zip(samples, sent, strict=True)], float)
        values = np.array([s[name] for s in sent], float)
        total = weights.sum(0)
        expected = np.where(total > 0, (weights * values).sum(0) / np.maximum(total, 1), array)
        assert np.allclose(after[name], expected, rtol=0, atol=1e-6), name
        assert np.array_equal(after[name][total == 0], array[total == 0])
        untouched += int((total == 0).sum())
    assert 0 < untouched < MODEL_SIZE


def replies_of(outcome: Outcome, tmp_path: Path) -> list[Message]:
    """Return the first round's replies of the same run."""
    found: list[Message] = []

    def tamper(message: Message, reply: Message) -> Message:
        if message.metadata.message_type == "train":
            found.append(reply)
        return reply

    federate(tmp_path, method="criticalfl", rounds=1, tamper=tamper, **SMALL)
    return found


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("keys", "numbers"),
    [
        ({"criticalfl__check_every": 1}, [2, 4, 6, 6, 3, 2, 2]),
        ({}, [2, 4, 4, 6, 6, 6, 6]),
        ({"criticalfl__check_every": 1, "criticalfl__initial_checks": 1}, [2, 4, 2, 2, 2, 2, 2]),
        ({"criticalfl__check_every": 1, "criticalfl__max_participation": 0.5}, [2, 4, 4, 4, 2, 2, 2]),
        ({"criticalfl__check_every": 1, "participation": 0.9}, [7] * 7),
    ],
)
def test_the_number_of_clients_follows_the_periods(tmp_path: Path, keys: dict[str, Any], numbers: list[int]) -> None:
    own = {"participation": 0.25, "criticalfl__delta": math.inf, "criticalfl__initial_checks": 3, **keys}
    assert trained(federate(tmp_path, 8, method="criticalfl", rounds=7, **SMALL, **own)) == numbers


@pytest.mark.thorough
def test_growing_norms_are_a_critical_period(tmp_path: Path) -> None:
    """The norm of the last rounds grows or falls as the replies are made to say."""

    def run(norms: list[float], **keys: Any) -> list[int]:
        def tamper(message: Message, reply: Message) -> Message:
            if message.metadata.message_type == "train":
                norm = np.array([norms[int(message.metadata.group_id) - 1]], np.float32)
                arrays_of(reply)[NORM] = to_record({NORM: norm})[NORM]
            return reply

        own: dict[str, Any] = {"criticalfl__initial_checks": 0, "criticalfl__check_every": 1, "participation": 0.25}
        own |= {"partition": "iid", "batch_size": 1000, "seed": 3}
        return trained(federate(tmp_path, 8, method="criticalfl", rounds=5, tamper=tamper, **SMALL, **own | keys))

    # The federated norm is the learning rate times batches times what was sent; all clients have one batch.
    growing, falling = [1.0, 2.0, 4.0, 8.0, 16.0], [16.0, 8.0, 4.0, 2.0, 1.0]
    assert run(growing) == [2, 2, 4, 6, 6]
    assert run(falling) == [2] * 5
    assert run(growing, criticalfl__delta=0.4) == [2, 2, 4, 6, 6]
    # (New - Old) / Old is 1/2, 5/9 and 17/28.
    assert run(growing, criticalfl__delta=0.6) == [2, 2, 2, 2, 4]
    assert run(growing, criticalfl__delta=0.9) == [2, 2, 2, 2, 2]
    # With a window of 1 each norm is compared with the one before: twice as large is not more than twice.
    assert run(growing, criticalfl__delta=0.9, criticalfl__window=1) == [2, 2, 4, 6, 6]
    # A learning rate that halves in every round hides the growth.
    assert run(growing, lr_decay=0.5) == [2] * 5


def test_a_norm_is_taken_in_once_also_if_the_next_round_has_none(tmp_path: Path) -> None:
    def tamper(message: Message, reply: Message) -> Message:
        if (message.metadata.message_type, message.metadata.group_id) == ("train", "2"):
            return Message(Error(0, "lost"), reply_to=message)
        return reply

    keys: dict[str, Any] = {"criticalfl__check_every": 1, "rounds": 4, "max_samples": 100, "local_epochs": 1}
    outcome = federate(tmp_path, 2, method="criticalfl", tamper=tamper, **keys)
    assert [len(reasons) for reasons in refusals(outcome)] == [0, 2, 0, 0]
    norms = Checkpoints(outcome.directory / "checkpoints").read()[0].strategy["norms"].tolist()
    # Those of rounds 1 and 3, before rounds 2 and 4.
    assert len(norms) == len(set(norms)) == 2


def test_the_gradient_norm_by_hand(tmp_path: Path) -> None:
    outcome, records = uploads(tmp_path, clients=2, method="criticalfl", rounds=1, local_epochs=1, batch_size=10_000)
    halted = Halted(outcome)
    client = halted.client
    client.load_tensors(client.received)
    train = client.data.train
    loss = F.cross_entropy(client.model(normalise(train.x)), train.y)
    gradients = torch.autograd.grad(loss, list(client.model.parameters()))
    expected = float(sum(g.square().sum() for g in gradients))
    assert records[0][NORM].numpy().tolist() == pytest.approx([expected], rel=1e-5)
    assert 0 < expected < 100


def test_a_norm_counts_by_the_steps_of_its_client(tmp_path: Path) -> None:
    told: list[tuple[int, float]] = []

    def see(message: Message, reply: Message) -> Message:
        if message.metadata.message_type == "train":
            (square,) = reply.content.array_records["arrays"][NORM].numpy().tolist()
            samples = reply.content.metric_records["metrics"]["num-examples"]
            assert isinstance(samples, int)
            told.append((samples, square))
        return reply

    keys: dict[str, Any] = {"rounds": 1, "local_epochs": 1, "batch_size": 16, "lr": 0.02, "partition": "dirichlet"}
    outcome = federate(tmp_path, 3, method="criticalfl", tamper=see, **keys)
    steps = [math.ceil(samples / 16) for samples, _ in told]
    assert len(set(steps)) == 3
    expected = federated_norm([0.02 * count * square for count, (_, square) in zip(steps, told, strict=True)])
    checkpoint, _ = Checkpoints(outcome.directory / "checkpoints").read()
    (norm,) = (array for name, array in checkpoint.strategy.items() if name.rpartition("/")[2] == "norm")
    assert norm.tolist() == [pytest.approx(expected)]


def test_a_gradient_norm_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = CriticalFL.loss
    monkeypatch.setattr(CriticalFL, "loss", lambda self, batch: 1e3 * plain(self, batch))
    keys: dict[str, Any] = {"lr": 1e-9, "momentum": 0.0, "weight_decay": 0.0}
    outcome, records = uploads(tmp_path, clients=2, method="criticalfl", rounds=1, **SMALL, **keys)
    assert [record[NORM].numpy().tolist() for record in records] == [[100.0], [100.0]]
    assert outcome.summary["refused"] == 0


@pytest.mark.thorough
@pytest.mark.parametrize("value", [math.nan, math.inf, -1e-3, 100.1])
def test_a_gradient_norm_that_is_none_is_refused(tmp_path: Path, value: float) -> None:
    tamper = tampered("1", 2, gradient_norm=np.array([value], np.float32))
    outcome = federate(tmp_path, method="criticalfl", rounds=3, tamper=tamper, **SMALL)
    reasons = refusals(outcome)
    assert [len(of_round) for of_round in reasons] == [0, 1, 0]
    assert NORM in reasons[1][0]
    assert len(outcome.history[1]["clients"]) == 3


def test_norms_may_differ_by_any_factor(tmp_path: Path) -> None:
    def tamper(message: Message, reply: Message) -> Message:
        if message.metadata.message_type == "train":
            norm = 100.0 if message.metadata.dst_node_id == 1001 else 1e-6
            arrays_of(reply)[NORM] = to_record({NORM: np.array([norm], np.float32)})[NORM]
        return reply

    outcome = federate(tmp_path, method="criticalfl", rounds=3, tamper=tamper, **SMALL)
    assert outcome.summary["refused"] == 0


def test_weights_may_be_left_out_in_critical_periods_alone(tmp_path: Path) -> None:
    zeros = np.zeros((10, 64), np.float32)
    packed = pack({"w": zeros}, {"w": TensorSpec((10, 64), sparse=True)})["w"]

    def tamper(message: Message, reply: Message) -> Message:
        if message.metadata.message_type == "train" and message.metadata.dst_node_id == 1002:
            arrays_of(reply)["head.weight"] = packed
        return reply

    keys: dict[str, Any] = {"criticalfl__initial_checks": 1, "criticalfl__check_every": 1}
    keys |= {"criticalfl__delta": math.inf}
    outcome = federate(tmp_path, method="criticalfl", rounds=3, tamper=tamper, **SMALL, **keys)
    assert refusals(outcome) == [[], [], ["it left out weights, and was not asked to"]]


def test_a_client_takes_no_instruction_that_is_none(tmp_path: Path) -> None:
    halted = Halted(federate(tmp_path, 2, method="criticalfl", **SMALL))
    halted.client._square = torch.tensor(1.0)
    assert sum(t.numel() for n, t in halted.client.upload().items() if n.startswith(MASK)) == MODEL_SIZE
    for wrong in (1, "yes", [True]):
        halted.client.message = {**halted.client.message, "critical": wrong}
        with pytest.raises(FloretError, match=r"the server's instruction critical is .*; it must be true or false"):
            halted.client.upload()


def test_an_aggregate_that_needs_all_elements_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="aggregation = 'median': clients of criticalfl do not send all weights"):
        federate(tmp_path, method="criticalfl", aggregation="median", **SMALL)
    for keys in ({"aggregation": "clipped-mean"}, {"aggregation": "median", "criticalfl__upload_fraction": 1.0}):
        assert federate(tmp_path, method="criticalfl", **SMALL, **keys).summary["refused"] == 0


@pytest.mark.thorough
def test_a_resumed_run_goes_on_in_its_period(tmp_path: Path) -> None:
    keys: dict[str, Any] = {"method": "criticalfl", "rounds": 7, "participation": 0.2, "criticalfl__check_every": 1}
    keys |= {"criticalfl__initial_checks": 2, "evaluate_every": 3, "criticalfl__window": 1, **SMALL}
    whole = federate(tmp_path / "whole", CLIENTS, **keys)
    for at in (2, 4, 6):
        directory = crash(tmp_path / f"cut{at}", tmp_path / f"states{at}", at, **keys)
        states = tmp_path / f"states{at}"
        resumed = federate(tmp_path / f"cut{at}", CLIENTS, states=states, resume=str(directory), **keys)
        assert_same(whole, resumed)
    assert len(set(trained(whole))) > 1


def test_what_is_left_out_is_no_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the same training in round 1, the largest fifth of an update is a little smaller than all of it."""
    noted: list[dict[str, float]] = []
    monkeypatch.setattr(UpdateNorms, "note", lambda self, client, sizes, whole: noted.append(dict(sizes)))

    def sizes(method: str) -> list[float]:
        noted.clear()
        federate(tmp_path, CLIENTS, method=method, rounds=1, **SMALL)
        assert len(noted) == CLIENTS
        return [median(update[group] for update in noted) for group in ("extractor", "head")]

    for whole, part in zip(sizes("fedavg"), sizes("criticalfl"), strict=True):
        assert 0.5 * whole < part < whole


def test_what_is_no_weight_travels_whole(tmp_path: Path) -> None:
    client = Halted(federate(tmp_path, 2, method="criticalfl", rounds=1, **SMALL)).client
    client._square = torch.tensor(1.0)
    # As running statistics are tensors of the model, and no parameters of it.
    parameters = [(name, p) for name, p in client.model.named_parameters() if name != "head.bias"]
    client.model.named_parameters = lambda: parameters
    sent = client.upload()
    assert sent[MASK + "head.bias"].all()
    assert not sent[MASK + "head.weight"].all()


def test_a_sparse_tensor_that_lacks_nothing_travels_dense() -> None:
    specs = {"w": TensorSpec((3, 5), sparse=True)}
    full, part = np.ones((3, 5), np.float32), np.ones((3, 5), np.float32)
    part[1, 2] = 0
    for wire, width in (("float32", 4), ("float16", 2)):
        for array, size in ((full, 15 * width), (part, 14 * width + 2)):
            record = pack({"w": array}, specs, wire)
            assert payload_bytes(record) == size
            found = unpack(record, specs, wire)
            assert np.array_equal(found["w"], array)
            assert np.array_equal(found[MASK + "w"], array != 0)
    zeros = pack({"w": np.zeros((3, 5), np.float32), MASK + "w": np.ones((3, 5), bool)}, specs)
    assert payload_bytes(zeros) == 60
    assert unpack(zeros, specs)[MASK + "w"].all()


# FedPA


def test_the_losses_of_the_generator_by_hand() -> None:
    labels = torch.tensor([0, 1, 1])
    logits = torch.tensor([[2.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
    shares = torch.tensor([0.25, 1.0])
    entropies = [math.log(1 + math.exp(-2)), math.log(1 + math.exp(-1)), math.log(2)]
    expected = (0.25 * entropies[0] + entropies[1] + entropies[2]) / 3
    assert fidelity_loss(logits, labels, shares).item() == pytest.approx(expected)

    features = torch.tensor([[1.0, 2.0], [3.0, 0.0], [0.0, 0.0]])
    prototypes = torch.tensor([[9.0, 9.0], [1.0, 1.0]])
    known = torch.tensor([False, True])
    assert alignment_loss(features, labels, prototypes, known, "mean").item() == pytest.approx((4 + 1 + 1 + 1) / 6)

    noise = torch.tensor([[0.0, 1.0], [1.0, 1.0], [0.0, 0.0]])
    # Pairs of other classes: 0 and 1, noise (1 + 0) / 2, features (2 + 2) / 2; 0 and 2: (0 + 1) / 2 and (1 + 2) / 2.
    expected = math.exp(-2 * (0.5 * 2 + 0.5 * 1.5) / 9)
    assert diversity_loss(noise, features, labels).item() == pytest.approx(expected)


@pytest.mark.thorough
def test_adam_is_that_of_pytorch_from_round_to_round() -> None:
    torch.manual_seed(1)
    mine, theirs = nn.Linear(4, 3), nn.Linear(4, 3)
    theirs.load_state_dict(mine.state_dict())
    reference = torch.optim.Adam(theirs.parameters(), lr=0.01, weight_decay=0.1)
    state: NamedArrays = {}
    for server_round in range(3):
        for group in reference.param_groups:
            group["lr"] = 0.01 * 0.5**server_round
        adam = Adam(dict(mine.named_parameters()), lr=0.01 * 0.5**server_round, weight_decay=0.1, state=state)
        for step in range(4):
            x = torch.full((2, 4), 1.0 + step)
            for net, optimizer in ((mine, adam), (theirs, reference)):
                optimizer.zero_grad()
                net(x).square().sum().backward()
                optimizer.step()
        state = adam.state_dict()
        assert all(torch.equal(a, b) for a, b in zip(mine.parameters(), theirs.parameters(), strict=True))
    assert state["steps"] == 12


def test_batches_of_fedpa_are_those_of_fedavg_also_with_one_sample(tmp_path: Path) -> None:
    write_clients(tmp_path / "data", 2, samples=33)
    keys: dict[str, Any] = {"dataset": "npz-clients", "data_dir": str(tmp_path / "data"), "validation_fraction": 0.0}
    for method in ("fedavg", "fedpa"):
        outcome = federate(tmp_path / method, 2, method=method, rounds=1, batch_size=8, **keys)
        client = standing(outcome.grid.contexts[1000], last_train(outcome))
        # The generator has batch normalisation, but is not asked about the sample that is left over.
        assert [len(batch.y) for batch in client.training_batches()] == [8, 8, 8, 8, 1]


@pytest.mark.thorough
def test_without_its_terms_fedpa_is_fedavg(tmp_path: Path) -> None:
    keys: dict[str, Any] = {"rounds": 3, "participation": 0.75, "local_epochs": 2}
    fedavg = federate(tmp_path, method="fedavg", **keys)
    off = federate(tmp_path, method="fedpa", **keys, **NO_TERMS)
    assert same_models(fedavg, off)
    assert [line["loss"] for line in fedavg.history] == [line["loss"] for line in off.history]
    for name in ("generator_weight", "prototype_weight", "prototype_floor"):
        on = {key: value for key, value in NO_TERMS.items() if key != f"fedpa__{name}"}
        assert not same_models(fedavg, federate(tmp_path, method="fedpa", **keys, **on)), name


def test_what_fedpa_sends_and_receives(tmp_path: Path) -> None:
    keys: dict[str, Any] = {"fedpa__generator_width": 24, "fedpa__generator_noise": 6, "classes_per_client": 2}
    keys |= {"participation": 0.5, "evaluate_every": 2}
    outcome, records = uploads(tmp_path, method="fedpa", rounds=2, **SMALL, **keys)
    generator = (6 + 10) * 24 + 24 + 2 * 24 + 24 * 64 + 64
    known: set[str] = set()
    sent = iter(records)
    for line in outcome.history:
        down, known_before = 4 * (MODEL_SIZE + generator), len(known)
        for client in line["clients"].values():
            if not client["trained"]:
                assert client["bytes"] == {"up": 0, "down": 4 * MODEL_SIZE}
                continue
            record = next(sent)
            own = {name for name in record if name.startswith("prototype.")}
            assert len(own) == 2
            known |= own
            assert client["bytes"]["up"] == 4 * MODEL_SIZE + 4 * 10 + 4 * 64 * 2
            assert client["bytes"]["down"] == down + 4 * 64 * known_before
            counts = record[COUNTS].numpy()
            assert {f"prototype.{c}" for c in np.flatnonzero(counts)} == own
    assert not any(name.startswith("generator.") for record in records for name in record)
    config, _, own = read_config(run_config(tmp_path, method="fedpa"))
    kinds = kinds_sent(config, own)
    assert kinds == {"extractor", "head", "prototypes", "representations"}


def test_prototypes_are_means_by_samples_of_the_class(tmp_path: Path) -> None:
    outcome, records = uploads(tmp_path, clients=3, method="fedpa", rounds=1, partition="dirichlet", alpha=1.0, **SMALL)
    found = checkpointed(outcome)
    several = 0
    for c in range(10):
        have = [record for record in records if f"prototype.{c}" in record]
        several += len(have) > 1
        counts = [record[COUNTS].numpy()[c] for record in have]
        values = [record[f"prototype.{c}"].numpy() for record in have]
        assert np.allclose(found[f"prototype.{c}"], np.average(values, axis=0, weights=counts), atol=1e-6)
    assert several > 3


def test_the_loss_of_a_client_by_hand(tmp_path: Path) -> None:
    keys: dict[str, Any] = {"fedpa__decay": 0.5, "fedpa__generator_weight": 3.0, "fedpa__generator_batch": 8}
    for floor, weight in ((0.1, 0.5), (0.9, 0.9)):
        keys |= {"fedpa__prototype_floor": floor, "fedpa__prototype_weight": 2.0}
        outcome = federate(tmp_path, 2, method="fedpa", rounds=3, **SMALL, **keys)
        halted = Halted(outcome)
        client, batch = halted.client, halted.batch()
        halted.shift()
        expected = halted.cross_entropy(batch)
        prototypes = torch.stack([client.received[f"prototype.{c}"] for c in batch.y.tolist()])
        expected = expected + weight * (client.model.features(batch.x) - prototypes).square().mean()
        features, labels = client._generated[0]
        assert features.shape == (8, 64)
        assert {f"prototype.{c}" for c in labels.tolist()} <= set(client.received)
        network = client.networks["generator"]
        assert isinstance(network, Generator)
        entropy = F.cross_entropy(client.model.head(features), labels)
        expected = expected + 3.0 * 0.25 * 8 / 32 * entropy
        assert halted.phases[-1].loss(batch).item() == pytest.approx(expected.item(), rel=1e-5)
        # The next step takes other features.
        second = halted.phases[-1].loss(batch).item()
        assert second != pytest.approx(expected.item(), rel=1e-6)


def generated(outcome: Outcome) -> NamedArrays:
    return {n: a for n, a in checkpointed(outcome).items() if n.startswith("generator.")}


def test_the_training_of_the_generator_by_hand(tmp_path: Path) -> None:
    """In round 3 two decays have passed, of the rate and of what the heads say of the features."""
    keys: dict[str, Any] = {
        "fedpa__decay": 0.5,
        "fedpa__generator_weight": 3.0,
        "fedpa__adversarial_weight": 0.7,
        "fedpa__diversity_weight": 11.0,
        "fedpa__generator_lr": 0.02,
        "fedpa__generator_decay": 0.3,
        "fedpa__generator_steps": 3,
        "fedpa__generator_batch": 7,
    }
    samples = {"0": [5, 1, 0, 0, 0, 0, 0, 0, 0, 0], "1": [0, 3, 4, 0, 0, 0, 0, 0, 0, 0]}
    roster = Roster()
    for name, counts in samples.items():
        roster.add(Client(name, int(name), sum(counts), 0, 10))
    values = read_config(run_config(tmp_path, method="fedpa", **keys))
    strategy = build_strategy(*values, (1, 8, 8), 10, roster=roster, session=Session("generator"))
    assert isinstance(strategy, FedPA)
    draws = torch.Generator().manual_seed(1)

    def drawn(*sides: int) -> np.ndarray:
        return torch.randn(sides, generator=draws).numpy()

    prototypes = {f"prototype.{c}": drawn(64) for c in (0, 1)}
    sent = to_record({**strategy.initial_arrays(), **prototypes})
    list(strategy.configure_train(3, sent, ConfigRecord(), None))  # type: ignore[arg-type]
    strategy.begin_round()
    heads = {name: (drawn(10, 64), drawn(10)) for name in samples}
    for name, (weight, bias) in heads.items():
        model = {n: strategy.arrays[n] for n in strategy.setup.tensor_names("model")}
        of_client = {"head.weight": weight, "head.bias": bias, COUNTS: np.array(samples[name], np.int32)}
        strategy.accumulate(roster[name], model | of_client, sum(samples[name]))
    found = strategy._trained_generator()

    sides = (10, strategy.parameters.generator_noise, strategy.parameters.generator_width, 64)
    network = Generator(*sides)
    began = {n.removeprefix("generator."): a for n, a in strategy.arrays.items() if n.startswith("generator.")}
    network.load_state_dict({name: torch.from_numpy(array.copy()) for name, array in began.items()})
    optimizer = torch.optim.Adam(network.parameters(), lr=0.02 * 0.25, weight_decay=0.3)
    random = torch_generator(values[0].seed, "generator", 3)
    shares = {"0": {0: 1.0, 1: 0.25, 2: 0.0}, "1": {0: 0.0, 1: 0.75, 2: 1.0}}
    for _ in range(3):
        noise, labels = network.draw(7, [0, 1, 2], random)
        optimizer.zero_grad()
        features = network(noise, labels)
        loss = torch.zeros(())
        for i, c in enumerate(labels.tolist()):
            for name, (weight, bias) in heads.items():
                logits = torch.from_numpy(weight) @ features[i] + torch.from_numpy(bias)
                loss = loss - 3.0 * 0.25 * shares[name][c] * logits.log_softmax(0)[c] / 7
            if c < 2:
                loss = loss - 0.7 * (features[i] - torch.from_numpy(prototypes[f"prototype.{c}"])).square().mean() / 7
        apart = torch.zeros(())
        for i in range(7):
            for j in range(7):
                if labels[i] != labels[j]:
                    apart = apart + (noise[i] - noise[j]).square().mean() * (features[i] - features[j]).abs().mean()
        (loss + 11.0 * (-apart / 49).exp()).backward()
        optimizer.step()
    for name, tensor in network.state_dict().items():
        moved = np.abs(found[f"generator.{name}"] - began[name]).max()
        assert moved > 1e-3
        assert np.allclose(found[f"generator.{name}"], tensor.numpy(), atol=1e-5), name


@pytest.mark.thorough
def test_the_generator_learns_what_the_heads_call_a_class(tmp_path: Path) -> None:
    keys: dict[str, Any] = {"fedpa__generator_lr": 0.01, "fedpa__adversarial_weight": 0.0, "local_epochs": 3}
    client = Halted(federate(tmp_path, method="fedpa", rounds=4, **keys)).client
    features, labels = (torch.cat(parts) for parts in zip(*client._generated, strict=True))
    with torch.no_grad():
        right = (client.model.head(features).argmax(1) == labels).float().mean()
    assert right > 0.9


@pytest.mark.thorough
def test_features_keep_away_from_the_prototypes_as_the_key_says(tmp_path: Path) -> None:
    distances = []
    for weight in (0.0, 5.0):
        keys: dict[str, Any] = {"fedpa__generator_lr": 0.003, "fedpa__adversarial_weight": weight, "local_epochs": 2}
        client = Halted(federate(tmp_path, method="fedpa", rounds=3, **keys)).client
        features, labels = (torch.cat(parts) for parts in zip(*client._generated, strict=True))
        distances.append(alignment_loss(features, labels, client._prototypes, client._known, "mean").item())
    assert distances[1] > 1.2 * distances[0]


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("counts", "reason"),
    [
        ([-1, 30, 0, 0, 0, 0, 0, 0, 0, 0], "its counts must be of 1 to"),
        ([0] * 10, "its counts must be of 1 to"),
        ([2**31 - 1] * 10, "its counts must be of 1 to"),
        ([0] * 9 + [1], "and has no sample of the class"),
    ],
)
def test_counts_that_cannot_be_are_refused(tmp_path: Path, counts: list[int], reason: str) -> None:
    tamper = tampered("0", 2, counts=np.array(counts, np.int32))
    # Client 0 has one of the first classes, and never two samples of the last alone.
    outcome = federate(tmp_path, method="fedpa", rounds=3, tamper=tamper, **SMALL)
    reasons = refusals(outcome)
    assert [len(of_round) for of_round in reasons] == [0, 1, 0]
    assert reason in reasons[1][0]


@pytest.mark.parametrize(
    ("counts", "samples", "kept"),
    [([3, 5, 0], 8, [3, 5, 0]), ([3 * 10**8, 10**8, 0], 40, [30, 10, 0])],
)
def test_a_head_weighs_no_more_than_the_samples_that_its_client_counts_for(
    tmp_path: Path, counts: list[int], samples: int, kept: list[int]
) -> None:
    """Who declares a billion samples, and sends counts of them, decides not alone what the generator learns."""
    roster = Roster()
    roster.add(Client("0", 1000, 10**9, 0, 10))
    values = read_config(run_config(tmp_path, method="fedpa"))
    strategy = build_strategy(*values, (1, 8, 8), 10, roster=roster, session=Session("counts"))
    assert isinstance(strategy, FedPA)
    list(strategy.configure_train(1, to_record(strategy.initial_arrays()), ConfigRecord(), None))  # type: ignore[arg-type]
    arrays = {
        name: np.zeros([int(str(side)) for side in spec.shape], np.float32)
        for name, spec in strategy._uplink.items()
        if not name.startswith("prototype.")
    }
    arrays["counts"] = np.array(counts + [0] * 7, np.int32)
    strategy.begin_round()
    strategy.accumulate(roster["0"], arrays, samples)
    ((_, weighs),) = strategy._heads
    assert weighs.tolist() == kept + [0] * 7


def test_a_generator_that_diverges_stays_as_it_was(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    keys: dict[str, Any] = {"fedpa__generator_lr": 1e30}
    outcome = federate(tmp_path, 2, method="fedpa", rounds=1, **SMALL, **keys)
    assert outcome.summary["refused"] == 0
    assert "the generator diverged and stays as it was" in caplog.text
    start = federate(tmp_path, 2, method="fedpa", rounds=1, fedpa__generator_steps=0, **SMALL)
    assert equal(generated(outcome), generated(start))


def test_the_first_round_with_the_terms_is_not_judged_by_the_one_without(tmp_path: Path) -> None:
    outcome = federate(tmp_path, 2, method="fedpa", rounds=3, **SMALL)
    assert outcome.summary["refused"] == 0
    # Later ones are: of three rounds the last two are known.
    known = Checkpoints(outcome.directory / "checkpoints").read()[0].strategy
    assert sorted(name for name in known if name.endswith("/head") and "clients" not in name) == [
        "norms/0/head",
        "norms/1/head",
    ]


def test_a_head_with_a_convolution_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"head-layers = 3: the head of model .cnn2. takes feature maps, fedpa"):
        federate(
            tmp_path / "runs",
            2,
            method="fedpa",
            head_layers=3,
            **write_images(tmp_path / "data", 2) | {"model": "cnn2"},
        )


@pytest.mark.thorough
def test_moments_of_the_generator_survive(tmp_path: Path) -> None:
    keys: dict[str, Any] = {"method": "fedpa", "rounds": 4, "participation": 0.6, "evaluate_every": 2, **SMALL}
    whole = federate(tmp_path / "whole", CLIENTS, **keys)
    directory = crash(tmp_path / "cut", tmp_path / "states", 3, **keys)
    resumed = federate(tmp_path / "cut", CLIENTS, states=tmp_path / "states", resume=str(directory), **keys)
    assert_same(whole, resumed)
    assert equal(checkpointed(whole), checkpointed(resumed))
