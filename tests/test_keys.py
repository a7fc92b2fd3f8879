"""Keys of the run config act where they should: each test fails when its key does nothing, or something else."""

import ast
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from flwr.app import Context, Message, RecordDict
from PIL import Image
from torch import Tensor
from torch.nn.functional import cosine_similarity, cross_entropy

import data
from client_app.app import Request
from client_app.batches import Batch, normalise
from client_app.client import MEMORY, MODEL
from client_app.methods.ua_pdfl import divergence, probabilities
from client_app.serving import load_personal
from client_app.state import FileStore
from common.config import keys_of
from common.errors import DataError, FloretError
from common.run_config import default_config
from common.seeds import torch_generator
from common.sgd import Sgd
from common.tensors import NamedArrays, TensorSpec
from common.wire import from_record, pack, unpack
from data import Split, load_client
from models import SplitModel
from server_app.app import run
from server_app.federation import Federation
from server_app.settings import read_config
from strategies import METHODS
from strategies.fedcpd import BLOCKS
from tests.harness import (
    EVERY_METHOD,
    ON_MLP,
    ROOT,
    DirectGrid,
    Outcome,
    delivered_again,
    federate,
    kept,
    run_config,
    standing,
)
from tests.test_losses import Halted
from tests.test_papers import write_images

DIVERGENCES = ("symmetric-kl", "jensen-shannon")


def trained_by(outcome: Outcome, server_round: int) -> set[str]:
    """Return the clients that were asked to train in a round."""
    asked = [m for m in outcome.grid.messages if m.metadata.message_type == "train"]
    return {str(m.metadata.dst_node_id - 1000) for m in asked if m.metadata.group_id == str(server_round)}


@pytest.mark.parametrize(("rounds", "lr"), [(1, 0.08), (4, 0.01)])
def test_lr_decay_is_of_the_rounds_before(tmp_path: Path, rounds: int, lr: float) -> None:
    outcome = federate(tmp_path, 2, method="fedper", rounds=rounds, lr=0.08, lr_decay=0.5, local_epochs=1)
    assert delivered_again(outcome.grid.contexts[1000], last_train(outcome)).lr == lr


@pytest.mark.parametrize(
    ("keys", "drawn"),
    [
        ({"participation": 0.5}, 4),
        ({"participation": 0.01}, 1),
        ({"participation": 0.01, "min_replies": 3}, 3),
        ({"participation": 0.5, "min_replies": 3}, 4),
        ({"participation": 0.56}, 4),  # 4.48
        ({"participation": 0.57}, 5),  # 4.56
        ({"participation": 1.0}, 8),
    ],
)
def test_as_many_clients_are_drawn_as_participation_and_min_replies_say(
    tmp_path: Path, keys: dict[str, Any], drawn: int
) -> None:
    outcome = federate(tmp_path, 8, method="local", local_epochs=1, **keys)
    first, second = (trained_by(outcome, server_round) for server_round in (1, 2))
    assert len(first) == len(second) == drawn
    if drawn == 4:
        assert first != second


def test_evaluate_every_and_the_last_round(tmp_path: Path) -> None:
    outcome = federate(tmp_path, 4, method="fedavg", rounds=5, evaluate_every=2, participation=0.5, local_epochs=1)
    measured = [len(line["clients"]) for line in outcome.history]
    asked = {m.metadata.group_id for m in outcome.grid.messages if m.metadata.message_type == "evaluate"}
    assert asked == {"2", "4", "5"}
    assert measured == [2, 4, 2, 4, 4]


# Data


def sizes(client: data.ClientData) -> tuple[int, int, int]:
    return len(client.train), len(client.validation), len(client.test)


def dealt(tmp_path: Path, clients: int = 10, **keys: Any) -> list[data.ClientData]:
    """Return what each client has."""
    config = read_config(run_config(tmp_path, **keys))[0]
    return [data.load_client(config, i, clients) for i in range(clients)]


def classes(client: data.ClientData) -> int:
    return len(torch.cat([split.y for split in (client.train, client.validation, client.test)]).unique())


def test_keys_of_partitions(tmp_path: Path) -> None:
    assert {classes(client) for client in dealt(tmp_path)} == {2}
    assert {classes(client) for client in dealt(tmp_path, classes_per_client=3)} == {3}
    assert {classes(client) for client in dealt(tmp_path, partition="extreme", classes_per_client=5)} == {5}
    # 1,797 samples, of which every shard takes as many
    for shards in (1, 4):
        totals = {sum(sizes(c)) for c in dealt(tmp_path, partition="shards", shards_per_client=shards)}
        assert totals == {shards * (1797 // (10 * shards))}
    assert all(classes(client) == 10 for client in dealt(tmp_path, partition="iid"))

    def largest_share(alpha: float, name: str = "dirichlet") -> float:
        clients = dealt(tmp_path, partition=name, alpha=alpha, min_samples=20)
        return float(np.mean([client.train.y.bincount().max() / len(client.train) for client in clients]))

    assert largest_share(100.0) < 0.25 < 0.4 < largest_share(0.1)
    assert largest_share(0.1, "pfllib") > 0.4


def test_data_seed_holds_clients_and_their_test_samples(tmp_path: Path) -> None:
    def drawn(**keys: Any) -> bytes:
        clients = dealt(tmp_path, partition="dirichlet", min_samples=20, max_samples=900, **keys)
        return b"".join(split.x.numpy().tobytes() for client in clients for split in (client.train, client.test))

    assert drawn(seed=3) == drawn(seed=3, data_seed=-1) == drawn(seed=4, data_seed=3) != drawn(seed=4)
    assert drawn(seed=3, data_seed=0) == drawn(seed=0) != drawn(seed=3)


def test_min_samples_of_a_run(tmp_path: Path) -> None:
    few, enough = (dealt(tmp_path, partition="dirichlet", alpha=0.1, min_samples=n) for n in (2, 60))
    assert 2 <= min(sum(sizes(client)) for client in few) < 60 <= min(sum(sizes(client)) for client in enough)


def test_fractions_are_of_all_samples_of_a_client(tmp_path: Path) -> None:
    (client,) = dealt(tmp_path, 1, partition="iid", max_samples=200, validation_fraction=0.2, test_fraction=0.3)
    assert sizes(client) == (100, 40, 60)
    (client,) = dealt(tmp_path, 1, partition="iid", max_samples=200, validation_fraction=0.3, test_fraction=0.1)
    assert sizes(client) == (120, 60, 20)


def test_keys_of_images(tmp_path: Path) -> None:
    """Of a pool of images in class folders; those of a node's own images are in tests/test_data_images.py."""
    for part, samples in (("train", 6), ("test", 3)):
        for name in ("cat", "dog"):
            (tmp_path / part / name).mkdir(parents=True)
            for i in range(samples):
                Image.fromarray(np.full((8, 6), 20 * i, np.uint8)).save(tmp_path / part / name / f"{i}.png")
    keys: dict[str, Any] = {"dataset": "image-folder", "data_dir": str(tmp_path), "partition": "iid"}
    for own, shape in (
        ({}, (1, 8, 6)),
        ({"image_channels": 3}, (3, 8, 6)),
        ({"image_size": 5}, (1, 5, 5)),
        ({"image_size": 4, "image_channels": 3}, (3, 4, 4)),
    ):
        clients = dealt(tmp_path, 2, **keys, **own)
        assert {client.input_shape for client in clients} == {shape}
        assert {tuple(client.train.x.shape[1:]) for client in clients} == {shape}
    swapped, sorted_ = (dealt(tmp_path, 2, **keys, class_names=names)[0] for names in ("dog,cat", ""))
    assert swapped.train.y.tolist() == (1 - sorted_.train.y).tolist()


def test_download_fetches_what_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []

    class MNIST:
        def __init__(self, root: Path, *, train: bool, download: bool) -> None:
            asked.append(download)
            raise OSError("no network")

    monkeypatch.setattr("torchvision.datasets.MNIST", MNIST)
    config = read_config(run_config(tmp_path, dataset="mnist", data_dir=str(tmp_path), download=True))[0]
    with pytest.raises(DataError, match=r"torchvision cannot download MNIST in .*: no network"):
        data.check(config)
    assert asked == [True]
    with pytest.raises(DataError, match="dataset mnist is not in data-dir"):
        data.check(replace(config, download=False))
    assert asked == [True]


# Model


def up(outcome: Outcome) -> set[int]:
    return {client["bytes"]["up"] for line in outcome.history for client in line["clients"].values()}


def test_keys_of_the_model_say_what_travels(tmp_path: Path) -> None:
    keys: dict[str, Any] = {"local_epochs": 1, "max_samples": 100}
    first, second, last = 64 * 128 + 128, 128 * 64 + 64, 64 * 10 + 10
    assert up(federate(tmp_path, 2, method="fedper", **keys)) == {4 * (first + second)}
    assert up(federate(tmp_path, 2, method="fedper", head_layers=2, **keys)) == {4 * first}
    assert up(federate(tmp_path, 2, method="fedavg", num_classes=12, **keys)) == {4 * (first + second + 65 * 12)}
    assert up(federate(tmp_path, 2, method="fedavg", wire="float16", **keys)) == {2 * (first + second + last)}


# Rounds


class Arriving(DirectGrid):
    """Nodes that connect one after the other, one with every third look at them."""

    looks = 0

    def get_node_ids(self) -> list[int]:
        self.looks += 1
        return list(self.contexts)[: 1 + self.looks // 3]


def test_a_start_waits_for_min_clients(tmp_path: Path) -> None:
    for wanted in (1, 3):
        values = run_config(tmp_path, min_clients=wanted)
        federation = Federation(Arriving(values, 5, tmp_path / "states"), read_config(values)[0])
        federation.gather(lambda here, wanted: None)
        assert wanted <= len(federation.roster) <= wanted + 1
        assert len(federation.roster) < 5


def test_a_start_waits_no_longer_than_round_timeout(tmp_path: Path) -> None:
    values = run_config(tmp_path, min_clients=3, round_timeout=1.0)
    load_client(read_config(values)[0], 0, 2)  # the first time takes longer
    federation = Federation(DirectGrid(values, 2, tmp_path / "states"), read_config(values)[0])
    begun = time.monotonic()
    with pytest.raises(FloretError, match=r"2 of 3 clients joined within round-timeout = 1 s"):
        federation.gather(lambda here, wanted: None)
    assert 1 <= time.monotonic() - begun < 20


def test_a_start_that_waits_says_so_and_leaves_nothing_if_nobody_comes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("server_app.federation._SILENCE", 1.0)
    output = tmp_path / "runs"
    values = run_config(output, min_clients=3, round_timeout=4.0)
    load_client(read_config(values)[0], 0, 2)  # the first time takes longer
    context = Context(run_id=1, node_id=0, node_config={}, state=RecordDict(), run_config=values)
    with caplog.at_level("INFO", "flwr"), pytest.raises(FloretError, match=r"2 of 3 clients joined within"):
        run(DirectGrid(values, 2, tmp_path / "states"), context)
    # Once after 1 s; it would be said again after 6 s more.
    assert caplog.messages.count("Waiting for clients: 2 of 3 are there; see min-clients") == 1
    assert list(output.iterdir()) == []


def test_as_many_rounds_as_the_key_says(tmp_path: Path) -> None:
    outcome = federate(tmp_path, 2, method="local", rounds=3, local_epochs=1)
    assert [line["round"] for line in outcome.history] == [1, 2, 3]
    assert outcome.summary["rounds"] == 3


@dataclass
class Sent:
    """What clients sent in the first round, with their samples, and what they were sent in it and in the next."""

    went: list[NamedArrays] = field(default_factory=list)
    came: list[tuple[int, NamedArrays]] = field(default_factory=list)

    def see(self, message: Message, reply: Message) -> Message:
        if message.metadata.message_type == "train":
            self.went.append(from_record(message.content.array_records["arrays"]))
            if message.metadata.group_id == "1":
                samples: Any = reply.content.metric_records["metrics"]["num-examples"]
                self.came.append((samples, from_record(reply.content.array_records["arrays"])))
        return reply


def clipped_mean(sent: Sent) -> NamedArrays:
    """Updates of a group are shortened to their median size, the root mean square over the root of the steps."""
    before, result = sent.went[0], {}
    weights = [samples for samples, _ in sent.came]
    for group in {name.split(".")[0] for name in before}:
        names = [name for name in before if name.startswith(group)]
        updates = [{name: arrays[name].astype(float) - before[name] for name in names} for _, arrays in sent.came]
        flat = [np.concatenate([update[name].reshape(-1) for name in names]) for update in updates]
        steps = [math.ceil(samples / 32) for samples in weights]
        sizes = [np.sqrt(np.mean(one**2) / count) for one, count in zip(flat, steps, strict=True)]
        factors = [min(1.0, np.median(sizes) / size) for size in sizes]
        assert sum(factor < 1 for factor in factors) == len(factors) // 2
        for name in names:
            short = [factor * update[name] for factor, update in zip(factors, updates, strict=True)]
            result[name] = before[name] + np.average(short, axis=0, weights=weights)
    return result


def trimmed_mean(sent: Sent, cut: int) -> NamedArrays:
    stacks = {name: np.sort([arrays[name] for _, arrays in sent.came], axis=0) for name in sent.went[0]}
    return {name: stack[cut : len(stack) - cut].astype(float).mean(0) for name, stack in stacks.items()}


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"aggregation": "median"}, lambda sent: trimmed_mean(sent, 4)),
        ({"aggregation": "trimmed-mean", "trim": 0.1}, lambda sent: trimmed_mean(sent, 1)),
        ({"aggregation": "trimmed-mean", "trim": 0.39}, lambda sent: trimmed_mean(sent, 3)),
        ({"aggregation": "clipped-mean", "method": "fedavg"}, clipped_mean),
    ],
)
def test_the_aggregate_is_the_one_that_the_keys_name(
    tmp_path: Path, keys: dict[str, Any], expected: Callable[[Sent], NamedArrays]
) -> None:
    sent = Sent()
    federate(tmp_path, 10, **{"method": "fedper", "local_epochs": 1, **keys}, tamper=sent.see)
    result = expected(sent)
    for name, array in sent.went[-1].items():
        assert np.allclose(array, result[name], rtol=0, atol=1e-6), name
    mean = np.average([a["extractor.fc1.bias"] for _, a in sent.came], axis=0, weights=[n for n, _ in sent.came])
    assert not np.allclose(sent.went[-1]["extractor.fc1.bias"], mean, rtol=0, atol=1e-6)


# Local training


def small(tmp_path: Path, method: str) -> dict[str, Any]:
    """Return keys of a small run with which a method does all that it does."""
    return write_images(tmp_path / "data", 2) if method in ON_MLP else {"max_samples": 120, "local_epochs": 1}


def last_train(outcome: Outcome, node: int = 1000) -> Message:
    return next(
        m
        for m in reversed(outcome.grid.messages)
        if m.metadata.message_type == "train" and m.metadata.dst_node_id == node
    )


@pytest.mark.parametrize("method", EVERY_METHOD)
def test_every_optimizer_of_a_method_goes_by_the_keys(tmp_path: Path, method: str) -> None:
    own: dict[str, Any] = {"lr": 0.03, "lr_decay": 0.5, "momentum": 0.7, "weight_decay": 0.02}
    outcome = federate(tmp_path / "runs", 2, method=method, **small(tmp_path, method) | own)
    client = delivered_again(outcome.grid.contexts[1000], last_train(outcome))
    made: list[Sgd] = []
    optimizer = client.optimizer

    def spied(*args: Any, **rates: Any) -> Sgd:
        made.append(optimizer(*args, **rates))
        # But for the rates that the method has keys of its own for.
        expected = {"lr": 0.015, "momentum": 0.7, "weight_decay": 0.02}
        expected |= {name: value for name, value in rates.items() if value is not None}
        assert {name: getattr(made[-1], f"_{name}") for name in expected} == expected
        return made[-1]

    client.optimizer = spied
    client.receive()
    client.train()
    trained = {id(parameter): parameter.numel() for one in made for parameter in one._parameters}
    needed = {id(parameter): parameter.numel() for parameter in client.model.parameters()}
    # Its parameters, or as many values that they are made of.
    assert needed.items() <= trained.items() or sum(needed.values()) <= sum(trained.values())


def plain(client: Any, epochs: list[tuple[str, int]], lr: float) -> tuple[SplitModel, float]:
    """Return the model after training by a plain loop, of each part of it, in turn, so many epochs; and the mean loss
    over the steps of the last part.
    """
    model: SplitModel = client.initial_model()
    train = client.data.train
    assert len(train) > 32  # several batches, of whatever size
    order = torch_generator(5, "batches", client.setting.name, 1)
    for part, times in epochs:
        parameters = list((getattr(model, part) if part else model).parameters())
        sgd, losses = torch.optim.SGD(parameters, lr=lr, momentum=0.6, weight_decay=0.01), []
        for _ in range(times):
            for index in torch.randperm(len(train), generator=order).split(7):
                model.zero_grad()
                loss = cross_entropy(model(normalise(train.x[index])), train.y[index])
                loss.backward()
                sgd.step()
                losses.append(loss.item())
    return model, float(np.mean(losses))


@pytest.mark.parametrize(
    ("method", "keys", "epochs"),
    [
        ("local", {}, [("", 3)]),
        ("fedrep", {"fedrep__head_epochs": 2}, [("head", 2), ("extractor", 3)]),
    ],
)
def test_a_round_is_that_of_a_plain_loop(
    tmp_path: Path, method: str, keys: dict[str, Any], epochs: list[tuple[str, int]]
) -> None:
    own: dict[str, Any] = {"lr": 0.04, "momentum": 0.6, "weight_decay": 0.01, "batch_size": 7, "local_epochs": 3}
    outcome = federate(tmp_path, 1, method=method, rounds=1, partition="iid", seed=5, max_samples=60, **own, **keys)
    context = outcome.grid.contexts[1000]
    model, loss = plain(standing(context, last_train(outcome)), epochs, 0.04)
    assert outcome.history[0]["loss"] == pytest.approx(loss, rel=1e-5)
    expected, found = model.state_dict(), kept(context).load()
    for name, tensor in expected.items():
        assert torch.allclose(found[MODEL + name], tensor, rtol=0, atol=1e-5), name


@pytest.mark.parametrize(
    ("method", "keys", "epochs"),
    [
        ("local", {"local_epochs": 4}, 4),
        ("fedrep", {"local_epochs": 2, "fedrep__head_epochs": 3}, 5),
        ("fedrep", {"local_epochs": 2, "fedrep__every_batch": True}, 2),
        ("fedcpd", {"local_epochs": 2, "fedcpd__distill": False}, 2),
        ("fedcpd", {"local_epochs": 2, "fedcpd__distill": False, "fedcpd__every_batch": False}, 4),
        ("pfps-lwc", {"local_epochs": 2, "pfps_lwc__recall_epochs": 3}, 5),
        ("pfps-lwc", {"local_epochs": 2, "pfps_lwc__recall": False}, 2),
    ],
)
def test_a_round_goes_so_often_through_the_data(tmp_path: Path, method: str, keys: dict[str, Any], epochs: int) -> None:
    outcome = federate(tmp_path, 1, method=method, max_samples=60, **keys)
    client = standing(outcome.grid.contexts[1000], last_train(outcome))
    begun = 0
    batches = client.training_batches

    def counted() -> Any:
        nonlocal begun
        begun += 1
        return batches()

    client.training_batches = counted
    client.receive()
    client.train()
    assert begun == epochs


def test_the_order_of_batches_is_new_in_every_round(tmp_path: Path) -> None:
    outcome = federate(tmp_path, 2, method="local", rounds=2, local_epochs=1, max_samples=60)
    orders = []
    for node, server_round in ((1000, "1"), (1000, "2"), (1001, "2")):
        for m in outcome.grid.messages:
            if (m.metadata.message_type, m.metadata.dst_node_id, m.metadata.group_id) == ("train", node, server_round):
                client = standing(outcome.grid.contexts[node], m)
                client.data = replace(client.data, train=Split(torch.zeros(20, 1), torch.zeros(20, dtype=torch.int64)))
                orders.append(torch.cat([batch.index for batch in client.training_batches()]).tolist())
    assert len({tuple(order) for order in orders}) == 3
    assert all(sorted(order) == list(range(20)) for order in orders)


def test_one_value_that_is_not_finite_is_divergence(tmp_path: Path) -> None:
    outcome = federate(tmp_path, 1, method="local", rounds=1, local_epochs=1, max_samples=40)
    client = standing(outcome.grid.contexts[1000], last_train(outcome))
    tensors = {"w": torch.ones(3, 4), "n": torch.tensor(2)}
    client._check_finite(tensors)
    for wrong in (math.nan, math.inf, -math.inf):
        tensors["w"][1, 2] = wrong
        with pytest.raises(FloretError, match="training diverged: w is not finite; lower lr"):
            client._check_finite(tensors)


def test_threads_of_a_client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("client_app.runtime.given_cpus", lambda: 3)
    before, found = torch.get_num_threads(), []

    def tamper(message: Message, reply: Message) -> Message:
        if message.metadata.message_type == "train":
            found.append(torch.get_num_threads())
        return reply

    try:
        federate(tmp_path, 2, method="local", rounds=1, local_epochs=1, threads=2, max_samples=40, tamper=tamper)
    finally:
        torch.set_num_threads(before)
    assert found == [2, 2]


# Methods


def changed(value: Any) -> Any:
    """Return another value for a key; a text has no other that is known here."""
    if isinstance(value, bool):
        return not value
    # Half of a number may be a fraction of something still.
    return value if isinstance(value, str) else value / 2 if isinstance(value, float) else value + 1


@pytest.mark.parametrize("method", METHODS)
def test_a_methods_keys_arrive_on_both_sides(tmp_path: Path, method: str) -> None:
    values = run_config(tmp_path)
    table = {key: changed(value) for key, value in values.items() if key.startswith(f"{method}.")}
    values |= {"method": method, **table}
    _, _, parameters = read_config(values)
    context = DirectGrid(values, 1, tmp_path / "states").contexts[1000]
    for side in (parameters, Request(context).parameters):
        assert {f"{method}.{key}": value for key, value in keys_of(side).items()} == table


def aligned(halted: Halted, batch: Batch, prototypes: dict[str, Tensor], prefix: str) -> tuple[Tensor, Tensor]:
    """Return features of a batch, and the prototypes of their classes."""
    return halted.client.model.features(batch.x), torch.stack([prototypes[f"{prefix}{c}"] for c in batch.y.tolist()])


def loss_of_fedprox(halted: Halted, batch: Batch) -> Tensor:
    parameters, received = dict(halted.client.model.named_parameters()), halted.client.received
    return 0.35 * torch.stack([(parameters[name] - received[name]).square().sum() for name in parameters]).sum()


def loss_of_fedproto(halted: Halted, batch: Batch) -> Tensor:
    features, prototypes = aligned(halted, batch, halted.client.received, "prototype.")
    return 0.3 * (features - prototypes).square().mean()


def loss_of_feddfpa(halted: Halted, batch: Batch) -> Tensor:
    features, received = aligned(halted, batch, halted.client.received, "prototype.")
    _, historical = aligned(halted, batch, halted.kept, f"{MEMORY}prototype.")
    direction = (1 - cosine_similarity(features, historical)).mean()
    assert direction > 1e-2
    return (features - received).square().sum(1).mean() + 0.2 * direction


def loss_of_ua_pdfl(halted: Halted, batch: Batch) -> Tensor:
    client = halted.client
    difference: Tensor = client.model.features(torch.ones(1, *client.data.input_shape))[0] - client._average
    return 0.6 * difference.square().mean()


def loss_of_pfps_lwc(halted: Halted, batch: Batch) -> Tensor:
    squared = torch.stack([parameter.square().sum() for parameter in halted.client.model.head.parameters()])
    return 0.5 * squared.sum().sqrt()


def loss_of_pfakd(halted: Halted, batch: Batch) -> Tensor:
    teacher = halted.model_with(halted.client.received)
    difference: Tensor = halted.client.model.features(batch.x) - teacher.features(batch.x)
    return 0.4 * difference.square().sum(1).mean()


def loss_of_attention(halted: Halted, batch: Batch) -> Tensor:
    teacher = halted.model_with(halted.client.received).extractor
    maps, targets = (part.stages(batch.x)[1] for part in (halted.client.model.extractor, teacher))
    attended = [torch.nn.functional.normalize(m.square().sum(1).flatten(1)) for m in (*maps, *targets)]
    pairs = zip(attended[: len(maps)], attended[len(maps) :], strict=True)
    return 2.5 * torch.stack([(a - b).square().sum(1).mean() for a, b in pairs]).sum()


LOSSES: dict[str, tuple[dict[str, Any], Callable[[Halted, Batch], Tensor]]] = {
    "fedprox": ({"fedprox__mu": 0.7}, loss_of_fedprox),
    "fedproto": ({"fedproto__lambda": 0.3}, loss_of_fedproto),
    "feddfpa": ({"feddfpa__historical_weight": 0.2, "feddfpa__align_reduction": "sum"}, loss_of_feddfpa),
    "ua-pdfl": ({"ua_pdfl__mu": 0.6, "ua_pdfl__aux_reduction": "mean", "ua_pdfl__th": -1.0}, loss_of_ua_pdfl),
    "pfps-lwc": ({"pfps_lwc__lambda": 0.5}, loss_of_pfps_lwc),
    "pfakd": ({"pfakd__beta": 0.4, "pfakd__distill_reduction": "sum"}, loss_of_pfakd),
    "pfakd with attention transfer": (
        {"pfakd__beta": 0.0, "pfakd__attention_transfer": True, "pfakd__attention_weight": 2.5},
        loss_of_attention,
    ),
}


@pytest.mark.parametrize("case", LOSSES)
def test_a_loss_has_the_weights_of_the_keys(tmp_path: Path, case: str) -> None:
    """Cross entropy and the method's own term by hand, with keys that are not the defaults."""
    (keys, term), method = LOSSES[case], case.split()[0]
    data = write_images(tmp_path / "data", 2) if " with " in case else {"max_samples": 150}
    # With two epochs a teacher is asked once about all samples, and remembered.
    halted = Halted(federate(tmp_path / "runs", 2, method=method, rounds=3, **data | {"local_epochs": 2}, **keys))
    for _ in range(5):
        halted.shift()
    batch = halted.batch()
    expected, own = halted.cross_entropy(batch), term(halted, batch)
    # Neither hides the other.
    assert 1e-3 < own / expected < 1e3
    assert halted.phases[-1].loss(batch).item() == pytest.approx((expected + own).item(), rel=1e-5)


def test_fusion_width_is_that_of_the_fused_maps(tmp_path: Path) -> None:
    keys = write_images(tmp_path / "data", 1)
    outcome = federate(tmp_path / "runs", 1, method="fedcpd", fedcpd__fusion_width=6, **keys)
    client = standing(outcome.grid.contexts[1000], last_train(outcome))
    _, maps = client.model.extractor.stages(normalise(client.data.train.x[:2]))
    for blocks in (client.networks[BLOCKS].student(maps), client.networks[BLOCKS].teacher(maps)):
        assert [fused.shape[1] for fused in blocks] == [6] * 4


def test_fedproto_predicts_by_what_inference_says(tmp_path: Path) -> None:
    for inference in ("prototype", "head"):
        keys: dict[str, Any] = {"fedproto__inference": inference, "max_samples": 80, "local_epochs": 1}
        outcome = federate(tmp_path, 2, method="fedproto", **keys)
        client = standing(outcome.grid.contexts[1000], last_train(outcome))
        client.receive()
        assert (client.serving() is client.model) == (inference == "head")


def test_fedproto_may_predict_among_its_own_classes_alone(tmp_path: Path) -> None:
    keys: dict[str, Any] = {"partition": "pathological", "classes_per_client": 2, "max_samples": 400}
    for inference, all_ten in (("prototype", True), ("own-prototype", False)):
        outcome = federate(tmp_path, 5, method="fedproto", fedproto__inference=inference, **keys)
        client = standing(outcome.grid.contexts[1000], last_train(outcome))
        client.receive()
        own = set(client.data.train.y.tolist())
        global_classes = {int(name.split(".")[1]) for name in client.received}
        assert own < global_classes
        scores = client.serving()(normalise(client.data.train.x))
        assert len(own) == 2
        assert set(torch.isfinite(scores).nonzero()[:, 1].tolist()) == (global_classes if all_ten else own)
        # A node that serves has no training data. The last state is of after the training.
        trained = standing(outcome.grid.contexts[1000], last_train(outcome)).serving()(normalise(client.data.test.x))
        served = load_personal(cast(FileStore, Request(outcome.grid.contexts[1000]).store)).scores(client.data.test.x)
        assert torch.allclose(served, trained, atol=1e-5)


def test_ua_pdfl_asks_by_the_divergence_of_the_key(tmp_path: Path) -> None:
    outcome = federate(tmp_path, 4, method="ua-pdfl", rounds=2, ua_pdfl__client_dropout=False, ua_pdfl__n_com=2)
    message = next(m for m in reversed(outcome.grid.messages) if m.metadata.message_type == "query.plan")
    client = standing(outcome.grid.contexts[message.metadata.dst_node_id], message)
    own, _ = client.representations()
    peers = [tensors["unit"] for tensors in client.peers().values()]
    assert len(peers) == 2
    values = {kind: [float(divergence(own.exp(), peer.exp(), kind)) for peer in peers] for kind in DIVERGENCES}
    assert all(js < kl for js, kl in zip(values["jensen-shannon"], values["symmetric-kl"], strict=True))
    for peer in range(2):
        th = (values["jensen-shannon"][peer] + values["symmetric-kl"][peer]) / 2
        for kind in DIVERGENCES:
            client.parameters = replace(client.parameters, divergence=kind, th=th)
            assert client.plan()["heads"] == [i for i, value in enumerate(values[kind]) if value < th]
            assert (peer in client.plan()["heads"]) == (kind == "jensen-shannon")


def test_ua_pdfl_asks_the_same_peers_whatever_the_wire(tmp_path: Path) -> None:
    """Of a probability that float16 cannot hold a divergence would be another, and not the same both ways."""
    outcome = federate(tmp_path, 4, method="ua-pdfl", rounds=2, ua_pdfl__client_dropout=False, ua_pdfl__n_com=1)
    message = next(m for m in reversed(outcome.grid.messages) if m.metadata.message_type == "query.plan")
    client = standing(outcome.grid.contexts[message.metadata.dst_node_id], message)

    def answers(second: float) -> Tensor:
        with torch.no_grad():
            client.model.head[-1].weight.zero_()
            client.model.head[-1].bias.copy_(torch.tensor([1 - second, second] + [1e-4] * 8).log())
        unit: Tensor = client.upload()["unit"]
        return unit

    rare, own = answers(1e-8), answers(3e-3)
    for wire in ("float32", "float16"):
        came = unpack(
            pack({"unit": rare.numpy()}, {"unit": TensorSpec((10,))}, wire), {"unit": TensorSpec((10,))}, wire
        )
        client.received = {"0.unit": torch.from_numpy(came["unit"].copy())}
        found = divergence(probabilities(own), probabilities(client.received["0.unit"]), "symmetric-kl").item()
        assert found == pytest.approx(0.003 / 2 * math.log(0.003 / 1e-8), rel=0.01)
        for th, heads in ((0.018, []), (0.02, [0])):
            client.parameters = replace(client.parameters, th=th)
            assert client.plan()["heads"] == heads
    assert answers(0.0)[1].item() == pytest.approx(math.log(1e-30))  # not -inf, which would not be sent


# All of them


HERE = "tests/test_keys.py"
LOSS = f"{HERE}::test_a_loss_has_the_weights_of_the_keys"
PRIVATE = "tests/test_privacy.py"
PAPERS = "tests/test_papers.py"
TWO = "tests/test_ditto_apfl_pfedme.py"
STARTS = "tests/test_fedbabu_lg_fedavg_per_fedavg_fedala.py"
HEADS = "tests/test_fedpac_fedgh_gpfl.py"
GRAPHS = "tests/test_dfedavgm_dispfl.py"
CRITICAL = "tests/test_criticalfl_fedpa.py"
COLLABORATORS = "tests/test_fedkd_fedcac_apple.py"
# What fails when a key does nothing; `python -m tests.defects` plants what else a key may do wrong.
COVERED = {
    "method": "tests/test_methods.py::test_bytes_are_those_of_the_formula",
    "seed": "tests/test_methods.py::test_the_seed_changes_everything_that_is_drawn",
    "data-seed": f"{HERE}::test_data_seed_holds_clients_and_their_test_samples",
    "dataset": "tests/test_methods.py::test_a_users_own_files",
    "data-dir": f"{HERE}::test_keys_of_images",
    "download": f"{HERE}::test_download_fetches_what_is_not_there",
    "max-samples": "tests/test_data.py::test_max_samples_keeps_a_seeded_choice_of_the_pool",
    "image-size": f"{HERE}::test_keys_of_images",
    "image-channels": f"{HERE}::test_keys_of_images",
    "class-names": "tests/test_data.py::test_names_for_the_classes_of_a_nodes_own_files",
    "partition": f"{HERE}::test_keys_of_partitions",
    "alpha": f"{HERE}::test_keys_of_partitions",
    "classes-per-client": f"{HERE}::test_keys_of_partitions",
    "shards-per-client": f"{HERE}::test_keys_of_partitions",
    "min-samples": f"{HERE}::test_min_samples_of_a_run",
    "validation-fraction": f"{HERE}::test_fractions_are_of_all_samples_of_a_client",
    "test-fraction": f"{HERE}::test_fractions_are_of_all_samples_of_a_client",
    "model": "tests/test_methods.py::test_the_policy_for_batch_normalisation",
    "head-layers": f"{HERE}::test_keys_of_the_model_say_what_travels",
    "batch-norm": "tests/test_methods.py::test_the_policy_for_batch_normalisation",
    "num-classes": f"{HERE}::test_keys_of_the_model_say_what_travels",
    "rounds": f"{HERE}::test_as_many_rounds_as_the_key_says",
    "participation": f"{HERE}::test_as_many_clients_are_drawn_as_participation_and_min_replies_say",
    "evaluate-every": f"{HERE}::test_evaluate_every_and_the_last_round",
    "min-clients": f"{HERE}::test_a_start_waits_for_min_clients",
    "min-replies": "tests/test_methods.py::test_too_few_good_replies_change_nothing",
    "round-timeout": f"{HERE}::test_a_start_waits_no_longer_than_round_timeout",
    "return-timeout": "tests/test_names.py::"
    "test_a_message_to_a_node_that_is_another_client_now_is_not_sent_to_it_again",
    "wire": f"{HERE}::test_keys_of_the_model_say_what_travels",
    "aggregation": f"{HERE}::test_the_aggregate_is_the_one_that_the_keys_name",
    "trim": f"{HERE}::test_the_aggregate_is_the_one_that_the_keys_name",
    "local-epochs": f"{HERE}::test_a_round_is_that_of_a_plain_loop",
    "batch-size": f"{HERE}::test_a_round_is_that_of_a_plain_loop",
    "lr": f"{HERE}::test_a_round_is_that_of_a_plain_loop",
    "lr-decay": f"{HERE}::test_lr_decay_is_of_the_rounds_before",
    "momentum": f"{HERE}::test_a_round_is_that_of_a_plain_loop",
    "weight-decay": f"{HERE}::test_a_round_is_that_of_a_plain_loop",
    "device": "tests/test_rehearsal.py::test_a_message_gives_on_the_device_what_it_gives_on_the_cpu",
    "precision": "tests/test_precision.py::test_training_is_in_bfloat16_and_accuracies_are_not",
    "threads": f"{HERE}::test_threads_of_a_client",
    "output-dir": f"{HERE}::test_as_many_rounds_as_the_key_says",
    "tensorboard": "tests/test_trackers.py::test_both_have_config_rounds_and_summary",
    "tracker": "tests/test_trackers.py::test_both_have_config_rounds_and_summary",
    "checkpoint-every": "tests/test_resume.py::test_checkpoints_that_are_rarer_than_rounds_and_crashes_that_are_not",
    "resume": "tests/test_resume.py::test_a_finished_run_can_be_made_longer",
    "federation": "tests/test_resume.py::test_a_new_run_goes_on_from_the_personal_models_unless_it_is_to_start_afresh",
    "client-state": "tests/test_resume.py::"
    "test_a_new_run_goes_on_from_the_personal_models_unless_it_is_to_start_afresh",
    "new-owners": "tests/test_names.py::test_new_owners_of_a_resumed_run",
    "privacy.unit": f"{PRIVATE}::test_what_a_protected_client_measures_stays_with_it",
    "privacy.where": f"{PRIVATE}::test_a_whole_update_is_clipped_and_noised",
    "privacy.epsilon": f"{PRIVATE}::test_a_run_ends_at_its_budget_with_one_line",
    "privacy.delta": f"{PRIVATE}::test_the_delta_and_the_accountant_of_the_keys_are_those_of_the_figures",
    "privacy.noise": f"{PRIVATE}::test_a_whole_update_is_clipped_and_noised",
    "privacy.clip": f"{PRIVATE}::test_a_whole_update_is_clipped_and_noised",
    "privacy.clip-quantile": f"{PRIVATE}::test_the_bound_follows_the_quantile",
    "privacy.sampling": f"{PRIVATE}::test_a_run_with_noise_by_the_server_is_paid_in_advance",
    "privacy.accountant": f"{PRIVATE}::test_the_delta_and_the_accountant_of_the_keys_are_those_of_the_figures",
    "privacy.head-epochs": f"{PRIVATE}::test_a_personal_head_is_trained_without_noise_beside_the_other",
    "fedprox.mu": LOSS,
    "ditto.lambda": f"{TWO}::test_a_step_of_ditto_by_hand",
    "ditto.personal-epochs": f"{TWO}::test_ditto_without_lambda_is_local_beside_fedavg",
    "apfl.alpha": f"{TWO}::test_apfl_with_alpha_1_is_local",
    "apfl.adapt": f"{TWO}::test_alpha_is_adapted_as_often_as_the_key_says",
    "apfl.alpha-lr": f"{TWO}::test_a_step_of_apfl_by_hand",
    "pfedme.inner-steps": f"{TWO}::test_a_batch_of_pfedme_by_hand",
    "pfedme.lambda": f"{TWO}::test_a_batch_of_pfedme_by_hand",
    "pfedme.local-lr": f"{TWO}::test_a_batch_of_pfedme_by_hand",
    "pfedme.beta": f"{TWO}::test_the_server_of_pfedme_goes_part_of_the_way",
    "criticalfl.delta": f"{CRITICAL}::test_growing_norms_are_a_critical_period",
    "criticalfl.initial-checks": f"{CRITICAL}::test_the_number_of_clients_follows_the_periods",
    "criticalfl.window": f"{CRITICAL}::test_growing_norms_are_a_critical_period",
    "criticalfl.check-every": f"{CRITICAL}::test_the_number_of_clients_follows_the_periods",
    "criticalfl.max-participation": f"{CRITICAL}::test_the_number_of_clients_follows_the_periods",
    "criticalfl.upload-fraction": f"{CRITICAL}::test_a_fifth_of_the_weights_travels_in_critical_periods",
    "fedpa.generator-weight": f"{CRITICAL}::test_the_loss_of_a_client_by_hand",
    "fedpa.prototype-weight": f"{CRITICAL}::test_the_loss_of_a_client_by_hand",
    "fedpa.prototype-floor": f"{CRITICAL}::test_the_loss_of_a_client_by_hand",
    "fedpa.decay": f"{CRITICAL}::test_the_loss_of_a_client_by_hand",
    "fedpa.adversarial-weight": f"{CRITICAL}::test_features_keep_away_from_the_prototypes_as_the_key_says",
    "fedpa.diversity-weight": f"{CRITICAL}::test_the_training_of_the_generator_by_hand",
    "fedpa.generator-lr": f"{CRITICAL}::test_the_training_of_the_generator_by_hand",
    "fedpa.generator-decay": f"{CRITICAL}::test_the_training_of_the_generator_by_hand",
    "fedpa.generator-steps": f"{CRITICAL}::test_the_training_of_the_generator_by_hand",
    "fedpa.generator-batch": f"{CRITICAL}::test_the_loss_of_a_client_by_hand",
    "fedpa.generator-width": f"{CRITICAL}::test_what_fedpa_sends_and_receives",
    "fedpa.generator-noise": f"{CRITICAL}::test_what_fedpa_sends_and_receives",
    "fedrep.head-epochs": f"{HERE}::test_a_round_is_that_of_a_plain_loop",
    "fedrep.every-batch": f"{HERE}::test_a_round_goes_so_often_through_the_data",
    "fedbabu.fine-tune": f"{STARTS}::test_fedbabu_fine_tunes_what_it_received_and_keeps_it",
    "fedbabu.fine-tune-epochs": f"{STARTS}::test_fedbabu_is_that_of_a_plain_loop",
    "lg-fedavg.fedavg-rounds": f"{STARTS}::test_lg_fedavg_sends_every_client_the_last_shared_extractor_once",
    "per-fedavg.inner-lr": f"{STARTS}::test_per_fedavg_is_that_of_a_plain_loop",
    "per-fedavg.variant": f"{STARTS}::test_per_fedavg_is_that_of_a_plain_loop",
    "per-fedavg.adapt": f"{STARTS}::test_per_fedavg_is_that_of_a_plain_loop",
    "per-fedavg.delta": f"{STARTS}::test_per_fedavg_keys_change_what_is_shared",
    "fedala.eta": f"{STARTS}::test_ala_is_that_of_a_plain_loop",
    "fedala.layers": f"{STARTS}::test_ala_is_that_of_a_plain_loop",
    "fedala.percent": f"{STARTS}::test_ala_is_that_of_a_plain_loop",
    "fedala.first-epochs": f"{STARTS}::test_ala_runs_until_it_has_converged_the_first_time_and_once_later",
    "fedala.threshold": f"{STARTS}::test_ala_runs_until_it_has_converged_the_first_time_and_once_later",
    "fedpac.align": f"{HEADS}::test_fedpac_with_both_switches_off_is_fedrep",
    "fedpac.combine": f"{HEADS}::test_fedpac_with_both_switches_off_is_fedrep",
    "fedpac.lambda": f"{HEADS}::test_fedpac_aligns_to_global_prototypes_and_to_own_means_where_there_are_none",
    "fedpac.head-epochs": f"{HEADS}::test_fedpac_with_both_switches_off_is_fedrep",
    "fedpac.head-lr": f"{HEADS}::test_fedpac_with_both_switches_off_is_fedrep",
    "fedgh.server-lr": f"{HEADS}::test_the_server_takes_a_step_on_each_prototype_in_an_order_that_is_drawn",
    "fedgh.server-epochs": f"{HEADS}::test_the_server_takes_a_step_on_each_prototype_in_an_order_that_is_drawn",
    "gpfl.valve": f"{HEADS}::test_gpfl_with_all_switches_off_is_fedper",
    "gpfl.angle": f"{HEADS}::test_gpfl_with_all_switches_off_is_fedper",
    "gpfl.magnitude": f"{HEADS}::test_gpfl_with_all_switches_off_is_fedper",
    "gpfl.magnitude-reduction": f"{HEADS}::test_the_loss_of_gpfl",
    "gpfl.lambda": f"{HEADS}::test_the_loss_of_gpfl",
    "gpfl.mu": f"{HEADS}::test_valve_and_embeddings_have_mu_as_weight_decay_and_no_momentum",
    "fedproto.lambda": LOSS,
    "fedproto.inference": f"{HERE}::test_fedproto_predicts_by_what_inference_says",
    "fedkd.student-model": f"{COLLABORATORS}::test_the_student_may_be_another_model",
    "fedkd.energy-start": f"{COLLABORATORS}::test_fedkd_without_its_losses_is_local_and_fedavg",
    "fedkd.energy-end": f"{COLLABORATORS}::test_fedkd_without_its_losses_is_local_and_fedavg",
    "fedkd.distill": f"{COLLABORATORS}::test_fedkd_without_its_losses_is_local_and_fedavg",
    "fedkd.hidden": f"{COLLABORATORS}::test_fedkd_without_its_losses_is_local_and_fedavg",
    "fedkd.max-norm": f"{COLLABORATORS}::test_gradients_of_each_network_are_shortened_to_the_norm_of_the_key",
    "fedcac.tau": f"{COLLABORATORS}::test_fedcac_with_nothing_critical_is_fedavg_and_with_all_of_it_kept_local",
    "fedcac.beta": f"{COLLABORATORS}::test_fedcac_with_nothing_critical_is_fedavg_and_with_all_of_it_kept_local",
    "apple.relationship-lr": f"{COLLABORATORS}::test_keys_of_apple_change_what_is_learned",
    "apple.mu": f"{COLLABORATORS}::test_keys_of_apple_change_what_is_learned",
    "apple.scheduler": f"{COLLABORATORS}::test_keys_of_apple_change_what_is_learned",
    "apple.scheduled-part": f"{COLLABORATORS}::test_keys_of_apple_change_what_is_learned",
    "apple.downloads": f"{COLLABORATORS}::test_a_client_downloads_no_more_than_it_may_and_first_what_is_new",
    "pfakd.beta": LOSS,
    "pfakd.distill-reduction": LOSS,
    "pfakd.attention-transfer": LOSS,
    "pfakd.attention-weight": LOSS,
    "pfps-lwc.recall": f"{HERE}::test_a_round_goes_so_often_through_the_data",
    "pfps-lwc.recall-epochs": f"{HERE}::test_a_round_goes_so_often_through_the_data",
    "pfps-lwc.recall-lr": "tests/test_losses.py::test_pfps_lwc",
    "pfps-lwc.lightweight": f"{PAPERS}::test_pfps_lwc_with_both_switches_off_is_fedper",
    "pfps-lwc.lambda": LOSS,
    "fedcpd.every-batch": f"{PAPERS}::test_fedcpd_with_all_off_is_fedrep",
    "fedcpd.distill": f"{PAPERS}::test_fedcpd_with_all_off_is_fedrep",
    "fedcpd.align": f"{PAPERS}::test_fedcpd_with_all_off_is_fedrep",
    "fedcpd.contrast": f"{PAPERS}::test_fedcpd_with_all_off_is_fedrep",
    "fedcpd.alpha": "tests/test_losses.py::test_fedcpd",
    "fedcpd.beta": "tests/test_losses.py::test_fedcpd",
    "fedcpd.gamma": "tests/test_losses.py::test_fedcpd",
    "fedcpd.tau": "tests/test_losses.py::test_fedcpd",
    "fedcpd.fusion-width": f"{HERE}::test_fusion_width_is_that_of_the_fused_maps",
    "fedcpd.teacher-maps": "tests/test_losses.py::test_fedcpd",
    "feddfpa.fusion": f"{PAPERS}::test_feddfpa_without_fusion_and_alignment_is_local",
    "feddfpa.align-global": f"{PAPERS}::test_feddfpa_without_fusion_and_alignment_is_local",
    "feddfpa.align-historical": f"{PAPERS}::test_feddfpa_without_fusion_and_alignment_is_local",
    "feddfpa.align-reduction": LOSS,
    "feddfpa.historical-weight": LOSS,
    "feddfpa.prototypes-after-training": (
        "tests/test_losses.py::test_feddfpa_takes_prototypes_before_or_after_training"
    ),
    "feddfpa.own-start": f"{PAPERS}::test_feddfpa_starts_from_own_or_common_weights",
    "ua-pdfl.n-com": f"{PAPERS}::test_ua_pdfl_below_every_divergence_is_a_decentralised_fedper",
    "ua-pdfl.th": f"{PAPERS}::test_ua_pdfl_below_every_divergence_is_a_decentralised_fedper",
    "ua-pdfl.mu": LOSS,
    "ua-pdfl.divergence": f"{HERE}::test_ua_pdfl_asks_by_the_divergence_of_the_key",
    "ua-pdfl.aux-reduction": LOSS,
    "ua-pdfl.client-dropout": f"{HERE}::test_ua_pdfl_asks_by_the_divergence_of_the_key",
    "ua-pdfl.layer-personalization": f"{PAPERS}::test_ua_pdfl_with_both_switches_off_is_local",
    "ua-pdfl.own-start": f"{PAPERS}::test_ua_pdfl_starts_from_own_or_common_weights",
    "dfedavgm.graph": f"{GRAPHS}::test_keys_of_the_graph_say_who_meets_whom",
    "dfedavgm.degree": f"{GRAPHS}::test_keys_of_the_graph_say_who_meets_whom",
    "dfedavgm.redraw": f"{GRAPHS}::test_keys_of_the_graph_say_who_meets_whom",
    "dfedavgm.momentum": f"{GRAPHS}::test_the_momentum_is_the_methods_own",
    "dispfl.graph": f"{GRAPHS}::test_keys_of_the_graph_say_who_meets_whom",
    "dispfl.degree": f"{GRAPHS}::test_keys_of_the_graph_say_who_meets_whom",
    "dispfl.redraw": f"{GRAPHS}::test_keys_of_the_graph_say_who_meets_whom",
    "dispfl.density": f"{GRAPHS}::test_bytes_are_those_of_the_masks",
    "dispfl.prune-rate": f"{GRAPHS}::test_keys_say_how_many_elements_move_and_where_to",
    "dispfl.regrow": f"{GRAPHS}::test_keys_say_how_many_elements_move_and_where_to",
    "dispfl.own-masks": f"{GRAPHS}::test_first_masks_are_each_clients_own_or_the_same",
}


def test_every_key_has_a_test() -> None:
    assert set(COVERED) == set(default_config(ROOT))
    tests = set(COVERED.values())
    for file in {test.partition("::")[0] for test in tests}:
        body = ast.parse((ROOT / file).read_text(encoding="utf-8")).body
        tests -= {f"{file}::{node.name}" for node in body if isinstance(node, ast.FunctionDef)}
    assert not tests
