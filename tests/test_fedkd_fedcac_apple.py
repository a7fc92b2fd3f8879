"""FedKD, FedCAC and APPLE: what clients learn with a student, with those like them, and from each other's models."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message
from safetensors.numpy import load_file
from torch import Tensor
from torch.nn.functional import cross_entropy, kl_div, mse_loss
from torch.nn.utils import parameters_to_vector

import strategies.core.method
import strategies.fedcac
from client_app.batches import normalise
from client_app.client import MEMORY, MODEL
from client_app.methods.apple import APPLE, CORE, DOWNLOADED, PEER, RELATIONSHIP, Mixture, probabilities, scheduled
from client_app.methods.fedcac import largest, sensitivity
from client_app.methods.fedkd import VERSION, divergence, intensity
from client_app.state import FileStore
from common.errors import ConfigError, FloretError
from common.names import without_prefix
from common.seeds import torch_generator
from common.tensors import MASK, NamedArrays
from common.wire import BITS, from_record, to_record
from strategies.apple import APPLEParameters, read_choice
from strategies.core import RefusedError, WeightedMean
from strategies.fedcac import collaborators, critical_count, overlaps
from strategies.fedkd import (
    LEFT,
    NOTHING,
    PROJECTION,
    RIGHT,
    STUDENT,
    FedKDParameters,
    energy_at,
    factors,
    most_rank,
    rank_for,
    whole,
)
from tests.harness import (
    MODEL_SIZE,
    SHAPES,
    Outcome,
    checkpointed,
    delivered_again,
    federate,
    kept,
    personal,
    standing,
    uploads,
)
from tests.test_methods import same
from tests.test_papers import equal, write_images
from tests.test_policy import Site, initial

QUICK: dict[str, Any] = {"max_samples": 240, "local_epochs": 1}


def bytes_of(outcome: Outcome, way: str, server_round: int) -> dict[str, int]:
    return {name: c["bytes"][way] for name, c in outcome.history[server_round - 1]["clients"].items()}


def message_to(outcome: Outcome, client: int, server_round: int, kind: str = "train") -> Message:
    wanted = (1000 + client, str(server_round), kind)
    return next(
        m
        for m in outcome.grid.messages
        if (m.metadata.dst_node_id, m.metadata.group_id, m.metadata.message_type) == wanted
    )


def lost(*cases: tuple[int, int]) -> Callable[[Message, Message], Message]:
    """Lose what these clients answer in these rounds; the clients have kept their states."""

    def tamper(message: Message, reply: Message) -> Message:
        at = (message.metadata.dst_node_id - 1000, int(message.metadata.group_id or 0))
        if message.metadata.message_type == "train" and at in cases:
            reply.content["error"] = ConfigRecord({"reason": "lost on the way"})
        return reply

    return tamper


def changed(change: Callable[[ArrayRecord], None]) -> Callable[[Message, Message], Message]:
    """Change what the client 1 sends."""

    def tamper(message: Message, reply: Message) -> Message:
        if message.metadata.message_type == "train" and message.metadata.dst_node_id == 1001:
            record = reply.content.array_records["arrays"]
            assert isinstance(record, ArrayRecord)
            change(record)
        return reply

    return tamper


@pytest.mark.thorough
@pytest.mark.parametrize("method", ["fedkd", "fedcac", "apple"])
def test_a_client_with_one_sample_or_one_class_and_clients_that_are_not_there(tmp_path: Path, method: str) -> None:
    keys = write_images(tmp_path / "data", 4, 12)
    for client, samples in ((0, 1), (1, 8)):
        with np.load(tmp_path / "data" / "train" / f"{client}.npz") as file:
            x, y = file["x"], file["y"]
        rows = np.arange(len(y))[:1] if samples == 1 else np.flatnonzero(y == y[0])
        np.savez(tmp_path / "data" / "train" / f"{client}.npz", x=x[rows], y=y[rows])
    for participation in (1.0, 0.5):
        more: dict[str, Any] = {"validation_fraction": 0.0, "participation": participation, "rounds": 4}
        outcome = federate(tmp_path / "runs", 4, method=method, **keys, **more)
        assert outcome.summary["refused"] == 0
        assert all(math.isfinite(line["loss"]) for line in outcome.history)


@pytest.mark.thorough
@pytest.mark.parametrize("method", ["fedkd", "fedcac", "apple"])
def test_batch_normalisation(tmp_path: Path, method: str) -> None:
    keys = write_images(tmp_path / "data", 2, 12) | {"model": "cnn5-wide-bn", "batch_size": 8, "rounds": 2}
    outcome = federate(tmp_path / "runs", 2, method=method, **keys)
    assert outcome.summary["refused"] == 0
    means = [state[MODEL + "extractor.bn1.running_mean"] for state in personal(outcome)]
    assert not torch.equal(means[0], means[1])


# FedKD


def test_ranks_by_hand() -> None:
    singular = torch.tensor([3.0, 2.0, 1.0])  # squares 9, 4, 1 of 14
    assert [rank_for(singular, energy) for energy in (0.5, 0.65, 0.9, 0.95, 1.0)] == [1, 2, 2, 3, 3]
    assert rank_for(torch.ones(2), 0.5) == 2  # half is not more than half
    # where published code returns 0
    assert rank_for(torch.tensor([5.0]), 0.95) == 1
    assert rank_for(torch.zeros(4), 0.95) == 1
    assert [most_rank(shape) for shape in ((10, 64), (64, 32, 5, 5), (3, 3), (2, 2), (10,), ())] == [8, 59, 1, 0, 0, 0]


def test_factors_keep_the_energy_that_they_are_to_keep() -> None:
    left, right = torch.tensor([[1.0], [2.0], [3.0]]), torch.tensor([[4.0, 5.0, 6.0, 7.0]])
    found = factors(left @ right, 0.95)
    assert found is not None
    assert [tuple(part.shape) for part in found] == [(3, 1), (1, 4)]
    assert torch.allclose(found[0] @ found[1], left @ right, atol=1e-5)
    # both are of the same size, so that a type with a small range holds them
    assert torch.allclose(found[0].norm(), found[1].norm())
    generator = torch_generator(0, "test")
    kernel = torch.randn(12, 3, 5, 5, generator=generator) * torch.linspace(0, 1, 12)[:, None, None, None] ** 8
    for energy in (0.5, 0.9):
        found = factors(kernel, energy)
        assert found is not None
        k = found[0].shape[1]
        assert (tuple(found[0].shape), tuple(found[1].shape)) == ((12, k), (k, 75))
        lost = (kernel.flatten(1) - found[0] @ found[1]).square().sum() / kernel.square().sum()
        assert lost < 1 - energy
        fewer = torch.linalg.svdvals(kernel.flatten(1))[: k - 1].square().sum() / kernel.square().sum()
        assert fewer <= energy
    assert factors(torch.randn(12, 12, generator=generator), 0.99) is None  # they would be larger
    assert factors(left @ right, 1.0) is None  # nothing is to be lost
    assert factors(torch.ones(7), 0.5) is None
    assert factors(torch.full((8, 8), torch.nan), 0.5) is None


def test_the_energy_rises_with_the_rounds() -> None:
    parameters = FedKDParameters(
        student_model="same", energy_start=0.9, energy_end=0.98, distill=True, hidden=True, max_norm=1.0
    )
    energies = [energy_at(parameters, server_round, 4) for server_round in (1, 2, 4)]
    assert energies == pytest.approx([0.92, 0.94, 0.98])


def test_the_divergence_of_scores_that_are_close_is_more_than_the_rounding_of_bfloat16() -> None:
    own = torch.randn(64, 10, generator=torch.Generator().manual_seed(0))
    other = own + 0.02 * torch.randn(64, 10, generator=torch.Generator().manual_seed(1))
    half = own.bfloat16(), other.bfloat16()
    exact = divergence(*(scores.double() for scores in half))
    with torch.autocast("cpu", torch.bfloat16):
        assert divergence(*half).item() == pytest.approx(exact.item(), rel=0.01)


def test_divergence_and_intensity_by_hand() -> None:
    own, other = torch.tensor([[0.0, 0.0]]), torch.tensor([[math.log(3.0), 0.0]])
    assert divergence(own, other).item() == pytest.approx(0.75 * math.log(1.5) + 0.25 * math.log(0.5))
    assert divergence(other, own).item() == pytest.approx(0.5 * math.log(2 / 3) + 0.5 * math.log(2))
    assert divergence(own.repeat(3, 1), other.repeat(3, 1)).item() == pytest.approx(divergence(own, other).item())
    losses = torch.tensor([0.5, 1.5], requires_grad=True)
    weight = intensity(losses[0], losses[1])
    assert weight.item() == pytest.approx(0.5)
    assert not weight.requires_grad


STILL: dict[str, Any] = {
    "momentum": 0.0,
    "weight_decay": 0.0,
    "local_epochs": 1,
    "batch_size": 1000,
    "max_samples": 120,
}


def test_a_step_of_teacher_and_student_is_that_of_their_formulas(tmp_path: Path) -> None:
    # Another network, since a student of the model's kind begins as the teacher does, with nothing to learn from it.
    keys: dict[str, Any] = {"fedkd__student_model": "mlp", **write_images(tmp_path / "data", 2), **STILL, "lr": 0.05}
    outcome = federate(tmp_path / "runs", 2, method="fedkd", fedkd__max_norm=1e9, **keys)
    client = standing(outcome.grid.contexts[1000], message_to(outcome, 0, 1))
    client.receive()
    teacher, student, projection = client.model, client.networks[STUDENT], client.networks[PROJECTION]
    x, y = normalise(client.data.train.x), client.data.train.y
    features, theirs = teacher.features(x), student.features(x)
    scores, answers = teacher.head(features), student.head(theirs)
    tasks = [cross_entropy(scores, y), cross_entropy(answers, y)]
    both = (tasks[0] + tasks[1]).item()
    hidden = mse_loss(features, projection(theirs))

    def kl(target: Tensor, own: Tensor) -> Tensor:
        return kl_div(own.log_softmax(1), target.softmax(1), reduction="batchmean")

    before = {name: p.detach().clone() for n in (teacher, student, projection) for name, p in named(n)}
    for network, loss in (
        (teacher, tasks[0] + kl(answers.detach(), scores) / both + hidden / both),
        (student, tasks[1] + kl(scores.detach(), answers) / both + hidden / both),
        (projection, hidden / both),
    ):
        gradients = torch.autograd.grad(loss, list(network.parameters()), retain_graph=True)
        for (name, _), gradient in zip(named(network), gradients, strict=True):
            before[name] -= 0.05 * gradient
    client.train()
    after = {name: p.detach() for n in (teacher, student, projection) for name, p in named(n)}
    assert all(torch.allclose(after[name], before[name], atol=1e-6) for name in before)


def named(network: torch.nn.Module) -> list[tuple[str, torch.nn.Parameter]]:
    return [(f"{id(network)}.{name}", parameter) for name, parameter in network.named_parameters()]


def test_gradients_of_each_network_are_shortened_to_the_norm_of_the_key(tmp_path: Path) -> None:
    outcome = federate(tmp_path, 2, method="fedkd", lr=1.0, fedkd__max_norm=1e-3, rounds=1, **STILL)
    client = standing(outcome.grid.contexts[1000], message_to(outcome, 0, 1))
    client.receive()
    networks = client.model, client.networks[STUDENT], client.networks[PROJECTION]
    before = [parameters_to_vector(network.parameters()).clone() for network in networks]
    client.train()
    for network, start in zip(networks, before, strict=True):
        assert (parameters_to_vector(network.parameters()) - start).norm().item() == pytest.approx(1e-3, rel=1e-3)


def test_a_student_of_the_models_kind_begins_as_the_model(tmp_path: Path) -> None:
    outcome = federate(tmp_path, 2, method="fedkd", rounds=1, **QUICK)
    client = standing(outcome.grid.contexts[1000], message_to(outcome, 0, 1))
    client.receive()
    initial, student = client.initial_model().state_dict(), client.networks[STUDENT].state_dict()
    assert all(torch.equal(initial[name], student[name]) for name in initial)


@pytest.mark.thorough
def test_fedkd_without_its_losses_is_local_and_fedavg(tmp_path: Path) -> None:
    """The teacher is Local's model, and the student FedAvg's, bit for bit."""
    keys: dict[str, Any] = {"rounds": 3, **QUICK}
    off: dict[str, Any] = {
        "fedkd__distill": False,
        "fedkd__hidden": False,
        "fedkd__energy_start": 1.0,
        "fedkd__energy_end": 1.0,
        "fedkd__max_norm": 1e9,
    }
    run = partial(federate, tmp_path, method="fedkd", **keys)
    plain = run(**off)
    assert equal(federate(tmp_path, method="local", **keys), plain)
    fedavg = checkpointed(federate(tmp_path, method="fedavg", **keys))
    students = {f"{STUDENT}.{name}": array for name, array in fedavg.items()}

    def is_fedavg(outcome: Outcome) -> bool:
        found = checkpointed(outcome)
        assert found.keys() == students.keys()
        return all(np.array_equal(found[name], students[name]) for name in students)

    assert is_fedavg(plain)
    for switch in ("distill", "hidden"):
        other = run(**off | {f"fedkd__{switch}": True})
        assert not equal(plain, other)
        assert not is_fedavg(other)
    # What is truncated is another student, and as long as nobody learns from it the same teacher.
    for energies in ((0.5, 1.0), (0.9, 0.9)):
        truncated = run(**off | {"fedkd__energy_start": energies[0], "fedkd__energy_end": energies[1]})
        assert equal(plain, truncated)
        assert not is_fedavg(truncated)
    assert not equal(run(), run(fedkd__energy_start=0.3))
    assert not equal(run(), run(fedkd__energy_end=0.5))


def sizes_of(record: ArrayRecord) -> dict[str, tuple[int, ...]]:
    return {name: tuple(array.shape) for name, array in record.items()}


def formula(shapes: dict[str, tuple[int, ...]]) -> int:
    """Return the bytes of a student of which these are the tensors and factors that travel."""
    total = 0
    for name, shape in SHAPES.items():
        left = shapes.get(f"{STUDENT}.{name}{LEFT}")
        total += 4 * (math.prod(shape) if left is None else left[1] * (shape[0] + shape[1]))
    return total


def test_a_student_travels_as_factors_both_ways(tmp_path: Path) -> None:
    outcome, records = uploads(tmp_path, method="fedkd", clients=3, rounds=3, **QUICK)
    shapes = [sizes_of(record) for record in records]
    assert [formula(found) for found in shapes] == [u for r in (1, 2, 3) for u in bytes_of(outcome, "up", r).values()]
    assert all(formula(found) < 2 * MODEL_SIZE for found in shapes)
    # a head of 10 x 64 by ten classes: two classes give it rank two at most
    assert all(1 <= found[f"{STUDENT}.head.weight{LEFT}"][1] <= 8 for found in shapes)
    assert set(bytes_of(outcome, "down", 1).values()) == {4 * MODEL_SIZE}
    for server_round in (2, 3):
        down = [sizes_of(message_to(outcome, i, server_round).content.array_records["arrays"]) for i in range(3)]
        assert down[0] == down[1] == down[2]
        assert bytes_of(outcome, "down", server_round) == dict.fromkeys("012", formula(down[0]))
        assert formula(down[0]) < 3 * MODEL_SIZE
    # projection and teacher never travel
    assert {name.split(".")[0] for found in (*shapes, *down) for name in found} == {STUDENT}
    assert {name.removesuffix(LEFT).removesuffix(RIGHT) for name in shapes[0]} == {f"{STUDENT}.{n}" for n in SHAPES}


@pytest.mark.thorough
def test_the_global_student_is_that_of_the_server_at_each_client(tmp_path: Path) -> None:
    """What clients put together from the first student and all changes is what the server has."""
    outcome = federate(tmp_path, 3, method="fedkd", rounds=4, **QUICK)
    before = checkpointed(outcome)
    client = standing(outcome.grid.contexts[1000], message_to(outcome, 0, 4))
    assert int(client.memory[VERSION]) == 3
    states = personal(outcome)
    for name in SHAPES:
        students = [state[f"{MEMORY}{STUDENT}.{name}"] for state in states]
        assert torch.equal(students[0], students[1])
        assert not np.array_equal(students[0].numpy(), before[f"{STUDENT}.{name}"])
    # As a run says that ends there: the energies are those of four rounds.
    last = federate(tmp_path, 3, method="fedkd", rounds=3, **QUICK, fedkd__energy_end=0.95 + 0.03 * 3 / 4)
    for name, array in checkpointed(last).items():
        assert np.allclose(states[0][MEMORY + name].numpy(), array, atol=1e-6)


def test_who_was_not_there_is_sent_the_whole_student(tmp_path: Path) -> None:
    outcome = federate(tmp_path, 4, method="fedkd", rounds=6, participation=0.5, **QUICK)
    assert outcome.summary["refused"] == 0
    there = [{n for n, c in line["clients"].items() if c["trained"]} for line in outcome.history]
    seen = set()
    for server_round in range(2, 7):
        for name in there[server_round - 1]:
            again = name in there[server_round - 2]
            assert (bytes_of(outcome, "down", server_round)[name] < 4 * MODEL_SIZE) == again
            seen.add(again)
    assert seen == {True, False}


def test_a_client_whose_reply_was_lost_is_sent_the_whole_student(tmp_path: Path) -> None:
    outcome = federate(tmp_path, 3, method="fedkd", rounds=4, tamper=lost((1, 2)), **QUICK)
    assert [[r["client"] for r in line["refused"]] for line in outcome.history] == [[], ["1"], [], []]
    down = [bytes_of(outcome, "down", server_round) for server_round in (3, 4)]
    assert down[0]["1"] == 4 * MODEL_SIZE > down[0]["0"] > 0
    assert down[1]["1"] == down[1]["0"] < 4 * MODEL_SIZE


def test_who_has_the_student_is_sent_nothing(tmp_path: Path) -> None:
    """A round with too few replies changes nothing: the client that took part in it has what there is."""
    tamper = lost((0, 2), (1, 2))
    outcome = federate(tmp_path, 3, method="fedkd", rounds=4, min_replies=2, tamper=tamper, **QUICK)
    assert [len(line["refused"]) for line in outcome.history] == [0, 2, 0, 0]
    assert bytes_of(outcome, "down", 3) == {"0": 4 * MODEL_SIZE, "1": 4 * MODEL_SIZE, "2": 0}
    down = bytes_of(outcome, "down", 4)
    assert down["0"] == down["1"] == down["2"] < 4 * MODEL_SIZE


def test_a_client_does_not_take_the_change_of_another_student(tmp_path: Path) -> None:
    outcome = federate(tmp_path, 2, method="fedkd", rounds=3, **QUICK)
    client = standing(outcome.grid.contexts[1000], message_to(outcome, 0, 2))  # it has that of round 2 by now
    with pytest.raises(FloretError, match="the server sent a change of the student of round 0, this client has 2"):
        client.receive()


def test_a_student_that_is_not_whole_is_refused(tmp_path: Path) -> None:
    before = {"w": np.ones((4, 3), np.float32), "b": np.zeros(2, np.float32)}
    left, right = np.ones((4, 1), np.float32), np.full((1, 3), 2, np.float32)
    found = whole(before, {"w" + LEFT: left, "w" + RIGHT: right, "b": np.ones(2, np.float32)})
    assert found["w"].tolist() == [[3.0] * 3] * 4
    assert found["b"].tolist() == [1.0, 1.0]
    for sent, there in (
        ({}, "nothing"),
        ({"w" + LEFT: left}, "w.left"),
        ({"w": left, "w" + LEFT: left}, "w and w.left"),
    ):
        with pytest.raises(FloretError, match=f"of tensor w there is {there}: it must be the tensor or both factors"):
            whole(before, sent)
    name = f"{STUDENT}.extractor.fc1.weight"

    def drop(record: ArrayRecord) -> None:
        del record[name + RIGHT]

    def narrow(record: ArrayRecord) -> None:
        array = record[name + LEFT].numpy()
        record[name + LEFT] = Array(np.ascontiguousarray(np.concatenate([array, array], 1)))

    def grow(record: ArrayRecord) -> None:
        record[name + LEFT] = Array(record[name + LEFT].numpy() * np.float32(1e4))

    for change, reason in (
        (drop, f"of tensor {name} there is {name}.left: it must be the tensor or both factors of its change"),
        (narrow, f"tensor {name}.right has "),
        (grow, "its update of student is "),
    ):
        outcome = federate(tmp_path, 3, method="fedkd", rounds=1, tamper=changed(change), **QUICK)
        (refusal,) = outcome.history[0]["refused"]
        assert refusal["client"] == "1"
        assert refusal["reason"].startswith(reason)


@dataclass
class Asked:
    """A client's answers to FedKD's messages: of a run's first round, of the server's choice of scalars and tensors."""

    site: Site
    student: NamedArrays = field(default_factory=lambda: {f"{STUDENT}.{name}": a for name, a in initial().items()})

    def __call__(self, sent: NamedArrays, run: str, base: Any, version: Any, server_round: int = 1) -> str:
        """Return the reason of a refusal, an empty text for an answer."""
        self.site.round = server_round - 1
        scalars = {"session.lineage": run, "base": base, "version": version}
        reply = self.site.ask("train", sent, scalars, method="fedkd", local_epochs=2)
        error = reply.config_records.get("error")
        return str(error["reason"]) if error else ""

    def kept(self) -> NamedArrays:
        """Return the newest version of the client's state."""
        folder = self.site.folder / "state/default/fedkd/site"
        return load_file(max(folder.glob("*.safetensors")))


@pytest.mark.parametrize("key", ["base", "version"])
@pytest.mark.parametrize("wrong", [[], [1, 2], "x", 0.5, True, -2, 2**40])
def test_a_student_of_no_round_is_refused_before_it_is_kept(tmp_path: Path, key: str, wrong: Any) -> None:
    ask = Asked(Site(tmp_path))
    assert ask(ask.student, "good", NOTHING, 0) == ""
    said = {"base": NOTHING, "version": 0, key: wrong}
    assert ask(ask.student, "bad", **said).startswith(f"{key} = {wrong!r}: must be a whole number from ")
    assert int(ask.kept()[f"{MEMORY}{VERSION}"]) == 0
    assert ask(ask.student, "another", NOTHING, 0) == ""
    assert ask({}, "another", 0, 0, 2) == ""


@pytest.mark.parametrize("kept", [torch.zeros(0), torch.tensor([1.0, 2.0]), torch.tensor(0.5), torch.tensor(math.inf)])
def test_a_student_of_no_round_that_was_kept_stops_no_run(tmp_path: Path, kept: Tensor) -> None:
    ask = Asked(Site(tmp_path))
    assert ask(ask.student, "good", NOTHING, 0) == ""
    read = FileStore.read
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FileStore, "read", lambda self, v: read(self, v) | {f"{MEMORY}{VERSION}": kept})
        assert ask({}, "good", 0, 0, 2) == "the server sent a change of the student of round 0, this client has -1"
        assert ask(ask.student, "good", NOTHING, 1, 2) == ""
    assert ask({}, "good", 1, 1, 3) == ""


def test_factors_whose_product_is_absurd_are_refused_before_it_is_kept(tmp_path: Path) -> None:
    ask = Asked(Site(tmp_path))
    assert ask(ask.student, "good", NOTHING, 0) == ""
    name = f"{STUDENT}.extractor.fc1.weight"
    own = float(np.sqrt(np.mean(np.concatenate([array.ravel() for array in ask.student.values()]) ** 2)))
    rows, columns = ask.student[name].shape
    rank = most_rank((rows, columns))

    def sent(size: float) -> NamedArrays:
        """Return factors with values of this size each, whose product has values of its square times the rank."""
        left, right = np.full((rows, rank), size, np.float32), np.full((rank, columns), size, np.float32)
        return {n: a for n, a in ask.student.items() if n != name} | {name + LEFT: left, name + RIGHT: right}

    for size in (900 * own, math.sqrt(1100 * own / rank)):
        reason = ask(sent(size), "bad", NOTHING, 1)
        assert reason.startswith(f"the server sent {name} with a root mean square of "), reason
        assert np.abs(ask.kept()[MEMORY + name]).max() < 10 * own
    # Large, and not absurd: below a thousand times the client's own.
    assert ask(sent(math.sqrt(100 * own / rank)), "large", NOTHING, 1) == ""
    assert np.abs(ask.kept()[MEMORY + name]).mean() > 50 * own


def test_factors_whose_product_cannot_travel_are_refused_by_the_server(tmp_path: Path) -> None:
    """Else nobody could be sent the student that they are averaged into, and the run would end."""
    name = f"{STUDENT}.extractor.fc1.weight"

    def tamper(message: Message, reply: Message) -> Message:
        if message.metadata.message_type == "train" and message.metadata.dst_node_id == 1000:
            sent = from_record(reply.content.array_records["arrays"])
            sent.pop(name, None)
            factors = {name + LEFT: np.zeros((128, 1), np.float16), name + RIGHT: np.zeros((1, 64), np.float16)}
            for factor in factors.values():
                factor[0, 0] = 5e4
            reply.content["arrays"] = to_record(sent | factors)
        return reply

    outcome = federate(tmp_path, 2, method="fedkd", rounds=4, local_epochs=1, wire="float16", tamper=tamper)
    assert len(outcome.history) == 4
    for line in outcome.history:
        (refused,) = line["refused"]
        assert refused["client"] == "0"
        assert refused["reason"].startswith(f"tensor {name} has values beyond 65504")


def test_the_student_may_be_another_model(tmp_path: Path) -> None:
    keys = write_images(tmp_path / "data", 2)
    outcome = federate(tmp_path / "runs", 2, method="fedkd", fedkd__student_model="mlp", **keys)
    assert set(checkpointed(outcome)) == {f"{STUDENT}.{name}" for name in SHAPES}
    assert personal(outcome)[0][f"{MEMORY}{PROJECTION}.weight"].shape == (512, 64)
    same = federate(tmp_path / "runs", 2, method="fedkd", **keys)
    assert personal(same)[0][f"{MEMORY}{PROJECTION}.weight"].shape == (512, 512)
    assert checkpointed(same)[f"{STUDENT}.extractor.conv2.weight"].shape == (64, 32, 5, 5)
    sent = message_to(same, 0, 2).content.array_records["arrays"]
    assert isinstance(sent, ArrayRecord)
    assert sent[f"{STUDENT}.extractor.conv2.weight{RIGHT}"].shape[1] == 32 * 5 * 5


@pytest.mark.thorough
def test_float16_changes_little(tmp_path: Path) -> None:
    runs = [federate(tmp_path, method="fedkd", wire=wire, rounds=4) for wire in ("float32", "float16")]
    assert runs[1].summary["refused"] == 0
    assert runs[1].summary["bytes"]["up"] < 0.52 * runs[0].summary["bytes"]["up"]
    accuracies = [run.summary["accuracy"]["after"]["mean"] for run in runs]
    assert abs(accuracies[0] - accuracies[1]) < 0.03


# FedCAC


def test_critical_elements_by_hand() -> None:
    before, after = torch.tensor([[1.0, 2.0], [0.0, -1.0]]), torch.tensor([[2.0, 2.0], [0.5, -2.0]])
    values = sensitivity(before, after)
    assert values.tolist() == [[2.0, 0.0], [0.25, 2.0]]
    assert largest(values, 2).tolist() == [[True, False], [False, True]]
    assert largest(values, 1).tolist() == [[True, False], [False, False]]  # of equal ones the first
    assert largest(values, 3).tolist() == [[True, False], [True, True]]
    assert not largest(values, 0).any()
    assert [critical_count(size, 0.3) for size in (0, 1, 10, 12)] == [0, 0, 3, 4]


def test_overlaps_are_those_of_the_paper(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = np.random.default_rng(0)
    masks = np.zeros((5, 100), bool)
    for mask in masks:
        mask[generator.permutation(100)[:30]] = True
    masks[4] = masks[0]
    expected = [[1 - np.abs(a.astype(int) - b).sum() / (2 * a.sum()) for b in masks] for a in masks]
    for block in (1 << 16, 3):
        monkeypatch.setattr(strategies.fedcac, "_BLOCK", block)
        found = overlaps([np.packbits(mask) for mask in masks])
        assert np.allclose(found, expected)
        assert found[0, 4] == 1


def test_collaborators_by_hand() -> None:
    overlap = np.array([[1, 0.9, 0.5], [0.9, 1, 0.4], [0.5, 0.4, 1]])  # of the pairs mean 0.6 and largest 0.9
    assert collaborators(overlap, 0.0) == [[1], [0], []]
    assert collaborators(overlap - np.diag([0.1] * 3), 1.0) == [[1], [0], []]
    assert collaborators(overlap, 1.01) == [[], [], []]
    wider = np.array([[1, 0.8, 0.7], [0.8, 1, 0.3], [0.7, 0.3, 1]])  # 0.6 and 0.8
    assert collaborators(wider, 0.4) == [[1, 2], [0], [0]]
    assert collaborators(wider, 0.6) == [[1], [0], []]
    alike = np.ones((2, 2))
    assert collaborators(alike, 0.5) == [[1], [0]]
    assert collaborators(alike, 1.5) == [[], []]
    assert collaborators(np.ones((1, 1)), 0.5) == [[]]


@pytest.mark.thorough
def test_fedcac_with_nothing_critical_is_fedavg_and_with_all_of_it_kept_local(tmp_path: Path) -> None:
    keys: dict[str, Any] = {"rounds": 3, **QUICK}
    fedavg, local = (federate(tmp_path, method=method, **keys) for method in ("fedavg", "local"))
    assert same(fedavg, federate(tmp_path, method="fedcac", fedcac__tau=0.0, **keys))
    assert equal(local, federate(tmp_path, method="fedcac", fedcac__tau=1.0, fedcac__beta=0.5, **keys))
    real = federate(tmp_path, method="fedcac", **keys)
    assert not equal(fedavg, real)
    assert not equal(local, real)
    assert not equal(real, federate(tmp_path, method="fedcac", fedcac__tau=0.3, **keys))
    assert not equal(real, federate(tmp_path, method="fedcac", fedcac__beta=0.5, **keys))


def test_each_client_is_sent_its_critical_elements_from_those_like_it(tmp_path: Path) -> None:
    outcome, records = uploads(tmp_path, method="fedcac", clients=4, rounds=2, fedcac__beta=2.0, **QUICK)
    bits = sum(-(-math.prod(shape) // 8) for shape in SHAPES.values())
    for server_round in (1, 2):
        assert bytes_of(outcome, "up", server_round) == dict.fromkeys("0123", 4 * MODEL_SIZE + bits)
        assert bytes_of(outcome, "down", server_round) == dict.fromkeys("0123", 4 * MODEL_SIZE)
    masks = [{n: unpacked(record[MASK + n]) for n in SHAPES} for record in records[:4]]
    models = [from_record(ArrayRecord({n: record[n] for n in SHAPES})) for record in records[:4]]
    for mask in masks:
        assert [int(mask[n].sum()) for n in SHAPES] == [math.prod(shape) // 2 for shape in SHAPES.values()]
    flat = [np.concatenate([mask[n].reshape(-1) for n in SHAPES]) for mask in masks]
    overlap = np.array([[(a & b).sum() / a.sum() for b in flat] for a in flat])
    pairs = overlap[~np.eye(4, dtype=bool)]
    threshold = pairs.mean() + 0.5 * (pairs.max() - pairs.mean())
    mean = WeightedMean()
    for i, model in enumerate(models):
        mean.add(model, float(len(standing(outcome.grid.contexts[1000 + i], message_to(outcome, i, 1)).data.train)))
    collaborating = 0
    for i in range(4):
        near = [i, *(j for j in range(4) if j != i and overlap[i, j] >= threshold)]
        collaborating += len(near) - 1
        record = message_to(outcome, i, 2).content.array_records["arrays"]
        assert isinstance(record, ArrayRecord)
        for name, array in from_record(record).items():
            customised = np.mean([models[j][name] for j in near], axis=0)
            expected = np.where(masks[i][name], customised, mean.result()[name])
            assert np.allclose(array, expected, atol=1e-6)
    assert 0 < collaborating < 12


def unpacked(array: Array) -> np.ndarray:
    bits = np.unpackbits(np.frombuffer(array.data, np.uint8), count=math.prod(array.shape))
    return bits.astype(bool).reshape(array.shape)


@pytest.mark.thorough
@pytest.mark.parametrize("value", [0, 255])
def test_a_mask_of_everything_or_nothing_is_refused_and_leaves_nothing_behind(tmp_path: Path, value: int) -> None:
    name = MASK + "head.bias"

    def spoil(record: ArrayRecord) -> None:
        record[name] = Array("bool", (10,), BITS, bytes([value, value & 0b11000000]))

    outcome = federate(tmp_path, 3, method="fedcac", tamper=changed(spoil), **QUICK)
    reason = f"its mask of head.bias has {10 if value else 0} of 10 elements, tau says 5"
    assert [[(r["client"], r["reason"]) for r in line["refused"]] for line in outcome.history] == [[("1", reason)]] * 2
    without = federate(tmp_path, 3, method="fedcac", tamper=lost((1, 1), (1, 2)), **QUICK)
    for i in (0, 2):
        one, other = (message_to(run, i, 2).content.array_records["arrays"] for run in (outcome, without))
        assert {n: a.data for n, a in one.items()} == {n: a.data for n, a in other.items()}


# APPLE


def parameters_of(**keys: Any) -> APPLEParameters:
    return APPLEParameters(
        **{"relationship_lr": 0.1, "mu": 0.5, "scheduler": "exponential", "scheduled_part": 0.4, "downloads": 0, **keys}
    )


def test_the_proximal_term_fades_out() -> None:
    weights = [scheduled(parameters_of(), server_round, 10) for server_round in (1, 2, 3, 4, 5, 10)]
    assert weights == pytest.approx([0.5, 0.5 * 0.001**0.25, 0.5 * 0.001**0.5, 0.5 * 0.001**0.75, 0, 0])
    weights = [scheduled(parameters_of(scheduler="cosine"), server_round, 10) for server_round in (1, 2, 3, 4, 5)]
    assert weights == pytest.approx([0.5, 0.25 * (1 + math.sqrt(0.5)), 0.25, 0.25 * (1 - math.sqrt(0.5)), 0])
    assert scheduled(parameters_of(scheduled_part=0.0), 1, 10) == 0
    # Fewer rounds than would make one: the first has it.
    assert [scheduled(parameters_of(scheduled_part=0.1), server_round, 9) for server_round in (1, 2)] == [0.5, 0]


def test_what_is_downloaded_is_what_counts() -> None:
    assert probabilities([1.0, -1.0, 0.0], 0.0) == pytest.approx([3 / 8, 3 / 8, 2 / 8])
    assert probabilities([1.0, 0.0], 3.0) == pytest.approx([3 / 4, 1 / 4])
    assert probabilities([1e4, 0.0], 3.0) == [1.0, 0.0]


def test_a_choice_that_cannot_be_is_refused() -> None:
    assert read_choice({"wanted": [2, 0]}, 3, 2) == [2, 0]
    for wanted in (None, 1, [0, 0], [0, 1, 2], [3], [-1], [True], [0.0], ["0"]):
        with pytest.raises(RefusedError, match="the client"):
            read_choice({"wanted": wanted}, 3, 2)


def test_a_mixture_and_its_gradient_by_hand() -> None:
    rows = torch.tensor([[1.0, 2.0], [3.0, -1.0]])
    mixture = Mixture(rows, [1, 0, 1])  # the first and the last client have the same core model
    assert mixture.mixed(torch.tensor([2.0, 1.0, -1.0])).tolist() == [4.0, 1.0]
    assert mixture.products(torch.tensor([1.0, 10.0])).tolist() == [-7.0, 21.0, -7.0]


def test_a_step_on_core_model_and_relationships_is_that_of_the_gradient(tmp_path: Path) -> None:
    keys: dict[str, Any] = {"apple__relationship_lr": 0.8, "apple__mu": 0.3, "apple__scheduled_part": 1.0}
    # In round 3 both rates are a quarter of those of the first round.
    keys |= {"lr": 0.2, "lr_decay": 0.5, **STILL, "weight_decay": 0.1}
    outcome = federate(tmp_path, 3, method="apple", rounds=3, **keys)
    context = outcome.grid.contexts[1000]
    client = standing(context, message_to(outcome, 0, 3))
    client.memory[RELATIONSHIP + "1"] -= 0.4
    client.receive()
    cores = {0: client.memory[CORE]} | {i: client._flat(tensors) for i, tensors in client.peers().items()}
    p = torch.stack([client.memory[f"{RELATIONSHIP}{i}"] for i in range(3)]).requires_grad_()
    core = cores[0].clone().requires_grad_()
    mixed = p[0] * core + p[1] * cores[1] + p[2] * cores[2]
    x, y = client.data.train.x.float().div(127.5).sub(1), client.data.train.y
    scores: Tensor = torch.func.functional_call(client.model, client._tensors(mixed), (x,))
    samples = torch.tensor(
        [len(standing(c, message_to(outcome, i, 1)).data.train) for i, c in enumerate(outcome.grid.contexts.values())]
    )
    first = samples / samples.sum()
    loss = cross_entropy(scores, y) + scheduled(client.parameters, 3, 3) * (p - first).square().sum()
    gradients = torch.autograd.grad(loss, [core, p])
    assert gradients[1].abs().min() > 1e-4
    assert client.train() == pytest.approx(loss.item(), rel=1e-5)
    client.upload()
    # The weight decay is the core model's alone.
    assert torch.allclose(client.memory[CORE], core - 0.05 * (gradients[0] + 0.1 * core), atol=1e-6)
    for i in range(3):
        assert client.memory[f"{RELATIONSHIP}{i}"].item() == pytest.approx(
            (p[i] - 0.2 * gradients[1][i]).item(), abs=1e-6
        )
    # The personal model is the mixture after the step.
    after = torch.stack([client.memory[f"{RELATIONSHIP}{i}"] for i in range(3)])
    expected = after[0] * client.memory[CORE] + after[1] * cores[1] + after[2] * cores[2]
    assert torch.allclose(client._flat(dict(client.model.named_parameters())), expected, atol=1e-6)


@pytest.mark.thorough
def test_apple_with_its_own_core_model_alone_is_local(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys: dict[str, Any] = {"rounds": 3, **QUICK}
    still: dict[str, Any] = {"apple__relationship_lr": 0.0, "apple__mu": 0.0}
    assert equal(federate(tmp_path, 1, method="local", **keys), federate(tmp_path, 1, method="apple", **keys, **still))
    receive = APPLE.receive

    def alone(client: APPLE) -> None:
        receive(client)
        client._relationships.data = torch.tensor([float(name == client.setting.name) for name in client._names])
        client._mix()

    local, apple = (federate(tmp_path, 3, method=method, **keys) for method in ("local", "apple"))
    assert not equal(local, apple)
    monkeypatch.setattr(APPLE, "receive", alone)
    assert equal(local, federate(tmp_path, 3, method="apple", **keys, **still))


def test_core_models_travel_and_relationships_do_not(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        outcome, records = uploads(tmp_path, method="apple", clients=4, rounds=3, **QUICK)
    # There is no global model of which it could say the size.
    assert "apple: 4 clients, each is sent what others have published" in caplog.text
    for server_round in (1, 2, 3):
        assert bytes_of(outcome, "up", server_round) == dict.fromkeys("0123", 4 * MODEL_SIZE)
        down = 0 if server_round == 1 else 3 * 4 * MODEL_SIZE
        assert bytes_of(outcome, "down", server_round) == dict.fromkeys("0123", down)
    assert all(set(record) == set(SHAPES) for record in records)
    for i, state in enumerate(personal(outcome)):
        core = torch.cat([torch.from_numpy(records[8 + i][name].numpy()).flatten() for name in SHAPES])
        assert torch.equal(core, state[MEMORY + CORE])
        assert not torch.equal(core, torch.cat([state[MODEL + name].flatten() for name in SHAPES]))
        assert {name for name in state if name.startswith(MEMORY)} == {
            MEMORY + CORE,
            *(f"{MEMORY}{RELATIONSHIP}{j}" for j in range(4)),
        }
    # The first message's mixture is of initial models only: the initial model.
    begun = federate(tmp_path, 4, method="apple", rounds=1, **QUICK)
    client = delivered_again(begun.grid.contexts[1000], message_to(begun, 0, 1))
    client.receive()
    initial = dict(client.initial_model().named_parameters())
    assert all(torch.allclose(p, initial[name], atol=1e-6) for name, p in client.model.named_parameters())


def test_relationships_are_to_names_and_not_to_places(tmp_path: Path) -> None:
    """The same message in another order, and with a client that is new, is the same mixture."""
    outcome = federate(tmp_path, 3, method="apple", rounds=3, **QUICK)
    client = standing(outcome.grid.contexts[1001], message_to(outcome, 1, 3))
    for i in range(3):
        client.memory[f"{RELATIONSHIP}{i}"] = torch.tensor([0.2, 0.5, -0.3][i])
    kept_before = dict(client.memory)
    client.receive()
    plain = client.copy_tensors()
    order = [2, 0, 1]  # the new places of the clients 0, 1, 2 are 1, 2, 0
    client.memory = dict(kept_before)
    config = dict(client.message)
    client.message = {**config, **{key: [config[key][i] for i in order] for key in ("clients", "samples")}}
    client.received = {
        f"{order.index(int(n.split('.', 1)[0]))}.{n.split('.', 1)[1]}": t for n, t in client.received.items()
    }
    client.receive()
    assert all(torch.allclose(tensor, plain[name], atol=1e-6) for name, tensor in client.copy_tensors().items())
    # A client that joins late has the share of its samples, and the initial model as long as nobody has its own.
    client.memory = dict(kept_before)
    client.message["clients"], client.message["samples"] = [*client.message["clients"], "late"], [10, 10, 10, 30]
    client.receive()
    initial = client.initial_model().state_dict()
    for name, tensor in client.copy_tensors().items():
        assert torch.allclose(tensor, plain[name] + 0.5 * initial[name], atol=1e-6)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "change",
    [
        {"clients": ["0", "2"]},
        {"samples": [3]},
        {"clients": ["0", "0", "1"]},
        {"samples": [5, 0, 5]},
        # Under such a name nothing can be kept.
        {"clients": ["0", "1", "a\x07"]},
    ],
)
def test_a_list_of_clients_that_cannot_be_is_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    outcome = federate(tmp_path, 3, method="apple", rounds=2, **QUICK)
    client = standing(outcome.grid.contexts[1001], message_to(outcome, 1, 2))
    client.message = {**client.message, **change}
    with pytest.raises(FloretError, match="the server's list of clients and samples"):
        client.receive()


@pytest.mark.thorough
def test_a_client_downloads_no_more_than_it_may_and_first_what_is_new(tmp_path: Path) -> None:
    outcome = federate(tmp_path, 4, method="apple", rounds=6, apple__downloads=1, **QUICK)
    assert outcome.summary["refused"] == 0
    for server_round in range(2, 7):
        assert set(bytes_of(outcome, "down", server_round).values()) == {4 * MODEL_SIZE}
    for i, state in enumerate(personal(outcome)):
        # Of the three others one was new in each of the rounds 2, 3 and 4.
        first = {next(iter(message_to(outcome, i, r).content.array_records["arrays"])).split(".")[0] for r in (2, 3, 4)}
        assert first == set("0123") - {str(i)}
        assert {n.removeprefix(MEMORY + PEER) for n in state if n.startswith(MEMORY + PEER)} == first
    more = federate(tmp_path, 4, method="apple", rounds=2, apple__downloads=2, **QUICK)
    assert set(bytes_of(more, "down", 2).values()) == {2 * 4 * MODEL_SIZE}
    asked = [m for m in more.grid.messages if m.metadata.message_type == "query.plan"]
    assert len(asked) == 4
    assert not any(m.content.array_records["arrays"] for m in asked)


def test_core_models_of_peers_in_an_earlier_run_are_forgotten(tmp_path: Path) -> None:
    states = tmp_path / "states"
    federate(tmp_path / "first", 3, method="apple", rounds=3, states=states, apple__downloads=2, **QUICK)
    keys: dict[str, Any] = {"method": "apple", "rounds": 1, "states": states, **QUICK}
    second = federate(tmp_path / "second", 3, apple__downloads=2, **keys)
    for context in second.grid.contexts.values():
        memory = without_prefix(kept(context).load(), MEMORY)
        # In the first round of a run nobody has published anything.
        assert float(memory["downloaded"]) == 0
        assert {name.partition(".")[0] for name in memory} == {"core", "relationship", "downloaded"}


def test_downloads_count_for_their_probabilities_where_they_were_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys: dict[str, Any] = {"apple__downloads": 2, "participation": 0.5, "apple__relationship_lr": 0.5, **QUICK}
    outcome = federate(tmp_path, 4, method="apple", rounds=9, **keys)
    asked = [m for m in outcome.grid.messages if m.metadata.message_type == "query.plan"]
    node = asked[-1].metadata.dst_node_id
    before = [m for m in outcome.grid.messages if m.metadata.message_type == "train" and m.metadata.dst_node_id == node]
    peers = [{name.split(".")[0] for name in m.content.array_records["arrays"]} for m in before[:-1]]
    taken = sum(map(len, peers))
    assert 0 < taken < 2 * 8  # it was not in every round
    bases: list[float] = []

    def spy(relationships: list[float], downloaded: float) -> list[float]:
        bases.append(downloaded)
        return probabilities(relationships, downloaded)

    client = standing(outcome.grid.contexts[node], before[-1])
    # As when it was asked for its last plan: without what it downloaded after that.
    client.memory[DOWNLOADED] = client.memory[DOWNLOADED] - len(client.peers())
    monkeypatch.setattr("client_app.methods.apple.probabilities", spy)
    client.message = dict(asked[-1].content.config_records["config"])
    client.plan()
    assert bases == [pytest.approx(taken / 3)]


def test_what_is_kept_of_others_is_of_those_that_the_server_lists(tmp_path: Path) -> None:
    """Names that a server makes up, and clients of a run long ago, are not kept for ever, with a model each."""
    outcome = federate(tmp_path, 4, method="apple", rounds=4, apple__downloads=1, **QUICK)
    client = standing(outcome.grid.contexts[1000], message_to(outcome, 0, 4))
    made_up = {f"{RELATIONSHIP}gone": torch.tensor(0.1), f"{PEER}gone": client.memory[CORE].clone()}
    client.memory |= made_up
    client.message["clients"], client.message["samples"] = ["0", "1", "2"], [10, 10, 10]
    client.received = {name: tensor for name, tensor in client.received.items() if int(name.split(".")[0]) < 3}
    client.receive()
    client.train()
    client.upload()
    assert client.memory.keys() - {CORE, DOWNLOADED} <= {f"{of}{i}" for i in range(3) for of in (RELATIONSHIP, PEER)}
    assert client.memory.keys() >= {f"{RELATIONSHIP}{i}" for i in range(3)}
    assert any(name.startswith(PEER) for name in client.memory)


@pytest.mark.thorough
def test_what_was_downloaded_is_mixed_until_it_is_downloaded_again(tmp_path: Path) -> None:
    outcome = federate(tmp_path, 4, method="apple", rounds=5, apple__downloads=1, **QUICK)
    client = delivered_again(outcome.grid.contexts[1000], message_to(outcome, 0, 5))
    (new,) = client.peers()
    old = {i: client.memory[f"{PEER}{i}"].clone() for i in range(1, 4)}
    client.receive()
    fresh = client._flat(client.peers()[new])
    p = [client.memory[f"{RELATIONSHIP}{i}"] for i in range(4)]
    expected = p[0] * client.memory[CORE] + sum(p[i] * (fresh if i == new else old[i]) for i in range(1, 4))
    assert torch.allclose(client._flat(dict(client.model.named_parameters())), expected, atol=1e-6)
    assert torch.equal(client.memory[f"{PEER}{new}"], fresh)
    assert not torch.equal(fresh, old[new])


@pytest.mark.thorough
def test_keys_of_apple_change_what_is_learned(tmp_path: Path) -> None:
    keys: dict[str, Any] = {"method": "apple", "rounds": 4, "apple__scheduled_part": 0.75, **QUICK}
    keys |= {"apple__relationship_lr": 0.1}
    runs = [
        federate(tmp_path, 3, **keys | other)
        for other in (
            {},
            {"apple__relationship_lr": 0.05},
            {"apple__mu": 1.0},
            {"apple__scheduler": "cosine"},
            {"apple__scheduled_part": 0.5},
            {"apple__downloads": 1},
        )
    ]
    models: list[NamedArrays] = [{n: t.numpy() for n, t in personal(run)[0].items() if n[:6] == MODEL} for run in runs]
    for i, one in enumerate(models):
        for other in models[:i]:
            assert any(not np.array_equal(one[name], other[name]) for name in one)


def test_apple_takes_no_aggregate(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="aggregation = 'median': apple averages nothing on the server"):
        federate(tmp_path, 3, method="apple", aggregation="median")


@pytest.mark.thorough
def test_what_is_kept_is_of_this_message(tmp_path: Path) -> None:
    """Training does not change what a client has kept from the round before until it is committed."""
    outcome = federate(tmp_path, 2, method="apple", rounds=2, **QUICK)
    context = outcome.grid.contexts[1000]
    before = {name: tensor.clone() for name, tensor in kept(context).load().items()}
    client = standing(context, message_to(outcome, 0, 2))
    client.receive()
    client.train()
    after = kept(context).load()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
