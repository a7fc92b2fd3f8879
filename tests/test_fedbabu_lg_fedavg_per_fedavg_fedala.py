"""Methods whose clients start a round in a way of their own: FedBABU, LG-FedAvg, Per-FedAvg, FedALA."""

import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Message
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from client_app.app import Request
from client_app.batches import Batch, batch_of
from client_app.client import MEMORY, MODEL, FloretClient
from client_app.methods.fedala import WEIGHT, converged, mixed, stepped
from client_app.methods.feddfpa import FedDFPA as FedDFPAClient
from client_app.methods.fedper import FedPer as FedPerClient
from client_app.methods.per_fedavg import hessian_product
from common.errors import ConfigError, FloretError
from common.seeds import torch_generator
from common.tensors import NamedArrays
from common.wire import from_record
from models.build import BUILDERS
from models.layers import Layer
from strategies.fedavg import FedAvg
from strategies.feddfpa import FedDFPA
from strategies.fedper import FedPer
from tests.harness import EXTRACTOR, HEAD, Outcome, checkpointed, federate, personal, standing
from tests.harness import equal as equal_arrays
from tests.test_keys import last_train
from tests.test_methods import arrays_of, same, travelled
from tests.test_papers import equal
from tests.test_resume import CLIENTS, assert_same, crash

STARTS = ("fedbabu", "lg-fedavg", "per-fedavg", "fedala")
RATE = 0.05
SGD: dict[str, Any] = {"lr": 0.04, "momentum": 0.6, "weight_decay": 0.01, "batch_size": 7}


class Exchange:
    """What clients were sent and sent back when they trained, by round and node."""

    def __init__(self) -> None:
        self.down: dict[tuple[int, int], NamedArrays] = {}
        self.up: dict[tuple[int, int], NamedArrays] = {}

    def see(self, message: Message, reply: Message) -> Message:
        if message.metadata.message_type == "train":
            key = (int(message.metadata.group_id), message.metadata.dst_node_id)
            self.down[key] = from_record(message.content.array_records["arrays"])
            self.up[key] = from_record(reply.content.array_records["arrays"])
        return reply


def kept_model(outcome: Outcome, node: int = 1000) -> NamedArrays:
    """Return the personal model that a client keeps."""
    state = personal(outcome)[node - 1000]
    return {name.removeprefix(MODEL): t.numpy() for name, t in state.items() if name.startswith(MODEL)}


def part(arrays: NamedArrays, prefix: str) -> NamedArrays:
    return {name: array for name, array in arrays.items() if name.startswith(prefix)}


def halted(outcome: Outcome, node: int = 1000) -> Any:
    """Return a client that has taken its last training message and done nothing with it."""
    return standing(outcome.grid.contexts[node], last_train(outcome, node))


def befores(outcome: Outcome) -> list[Any]:
    return [{n: c["before"] for n, c in line["clients"].items() if c["trained"]} for line in outcome.history]


# All of them


def write_uneven(folder: Path) -> dict[str, Any]:
    """Write files of three clients: one training sample, one class alone, two classes; return the keys."""
    for kind in ("train", "test"):
        (folder / kind).mkdir(parents=True)
        for i, samples in enumerate((1, 20, 30) if kind == "train" else (8, 8, 8)):
            y = np.arange(samples) % (1 if i == 1 else 2)
            x = np.random.default_rng([i, samples]).normal(size=(samples, 12)).astype(np.float32)
            np.savez(folder / kind / f"{i}.npz", x=x + y[:, None].astype(np.float32), y=y)
    return {"dataset": "npz-clients", "data_dir": str(folder), "validation_fraction": 0.0, "num_classes": 2}


@pytest.mark.thorough
@pytest.mark.parametrize("method", STARTS)
def test_one_sample_and_one_class_are_enough(tmp_path: Path, method: str) -> None:
    keys = write_uneven(tmp_path / "data")
    outcome = federate(tmp_path / "runs", 3, method=method, rounds=3, lg_fedavg__fedavg_rounds=1, **keys)
    assert outcome.summary["refused"] == 0
    assert all(np.isfinite(array).all() for node in range(3) for array in kept_model(outcome, 1000 + node).values())


@pytest.mark.thorough
@pytest.mark.parametrize("method", STARTS)
def test_absent_clients_are_measured_with_their_own_last_model(tmp_path: Path, method: str) -> None:
    keys: dict[str, Any] = {
        "participation": 0.5,
        "rounds": 5,
        "evaluate_every": 1,
        "local_epochs": 1,
        "max_samples": 400,
    }
    outcome = federate(tmp_path, 6, method=method, lg_fedavg__fedavg_rounds=0, **keys)
    last: dict[str, Any] = {}
    for line in outcome.history:
        for name, client in line["clients"].items():
            if client["trained"]:
                last[name] = client["after"]
            else:
                assert (client["before"], client["after"]) == (None, last[name])
                assert client["bytes"] == {"up": 0, "down": 0}
        assert set(line["clients"]) == set(last)


@pytest.mark.parametrize(
    ("method", "scalars"), [("fedbabu", EXTRACTOR), ("per-fedavg", EXTRACTOR + HEAD), ("fedala", EXTRACTOR + HEAD)]
)
def test_bytes(tmp_path: Path, method: str, scalars: int) -> None:
    outcome = federate(tmp_path, method=method, local_epochs=1)
    every = [{str(i): 4 * scalars for i in range(4)}] * 2
    assert travelled(outcome, "up") == every
    assert travelled(outcome, "down") == every


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("method", "weighted"), [("fedbabu", True), ("lg-fedavg", True), ("per-fedavg", False), ("fedala", True)]
)
def test_what_is_sent_next_is_the_mean_of_what_came(tmp_path: Path, method: str, weighted: bool) -> None:
    seen = Exchange()
    outcome = federate(tmp_path, 3, method=method, tamper=seen.see, local_epochs=1, lg_fedavg__fedavg_rounds=0)
    sizes = [len(halted(outcome, 1000 + i).data.train) if weighted else 1 for i in range(3)]
    assert len({len(halted(outcome, 1000 + i).data.train) for i in range(3)}) > 1
    for name, array in seen.down[2, 1000].items():
        mean = np.average([seen.up[1, 1000 + i][name].astype(float) for i in range(3)], axis=0, weights=sizes)
        assert np.allclose(array, mean, rtol=0, atol=1e-6), name


def normalised_mlp(shape: tuple[int, ...], classes: int) -> list[Layer]:
    """Batch normalisation in the extractor, and before the last layer."""
    first = Layer((("flatten", nn.Flatten()), ("fc1", nn.Linear(math.prod(shape), 32)), ("bn1", nn.BatchNorm1d(32))))
    second = Layer(
        (("relu1", nn.ReLU()), ("fc2", nn.Linear(32, 16)), ("bn2", nn.BatchNorm1d(16)), ("relu2", nn.ReLU()))
    )
    return [first, second, Layer((("fc", nn.Linear(16, classes)),))]


@pytest.mark.thorough
@pytest.mark.parametrize("method", STARTS)
def test_batch_normalisation(tmp_path: Path, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(BUILDERS, "mlp", normalised_mlp)
    keys: dict[str, Any] = {"local_epochs": 1, "lg_fedavg__fedavg_rounds": 1, "fedala__layers": 2, "rounds": 3}
    outcome = federate(tmp_path, 2, method=method, **keys)
    assert "extractor.bn1.running_mean" in kept_model(outcome)
    # Statistics that do not travel are the client's own.
    local = federate(tmp_path, 2, method=method, batch_norm="local", **keys)
    assert outcome.summary["refused"] == local.summary["refused"] == 0
    assert kept_model(local)["extractor.bn1.running_mean"].any()
    if method == "fedbabu":
        other = federate(tmp_path, 2, method=method, fedbabu__fine_tune_epochs=1, **keys)
        assert equal_arrays(checkpointed(outcome), checkpointed(other))
    if method in ("per-fedavg", "fedala"):
        still = federate(tmp_path, 2, method=method, per_fedavg__inner_lr=0.0, fedala__eta=0.0, **keys)
        monkeypatch.setattr(FedAvg, "weighted", method == "fedala")
        # Running statistics among them: what a method computes beside its steps does not move them.
        assert equal_arrays(checkpointed(still), checkpointed(federate(tmp_path, 2, method="fedavg", **keys)))
        assert not equal_arrays(checkpointed(still), checkpointed(outcome))


# FedBABU


@pytest.mark.thorough
def test_fedbabu_shares_the_extractor_of_fedper_with_a_frozen_head(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys: dict[str, Any] = {"rounds": 3, "participation": 0.75, "local_epochs": 2, "max_samples": 300}
    fedper = federate(tmp_path, method="fedper", **keys)
    monkeypatch.setattr(
        FedPerClient, "train", lambda self: self.run_epochs(self.config.local_epochs, self.model.extractor.parameters())
    )
    frozen = federate(tmp_path, method="fedper", **keys)
    assert not equal_arrays(checkpointed(fedper), checkpointed(frozen))
    models = []
    for tuned, epochs in (("model", 1), ("model", 3), ("head", 1), ("extractor", 2)):
        own: dict[str, Any] = {"fedbabu__fine_tune": tuned, "fedbabu__fine_tune_epochs": epochs}
        babu = federate(tmp_path, method="fedbabu", **keys, **own)
        assert equal_arrays(checkpointed(babu), checkpointed(frozen)), own
        assert befores(babu) == befores(frozen)
        assert [line["loss"] for line in babu.history] == [line["loss"] for line in frozen.history]
        models.append(kept_model(babu))
    # What is fine-tuned shows in the personal models alone.
    assert all(not equal_arrays(a, b) for i, a in enumerate(models) for b in models[:i])


@pytest.mark.parametrize("tuned", ["model", "head", "extractor"])
def test_fedbabu_fine_tunes_what_it_received_and_keeps_it(tmp_path: Path, tuned: str) -> None:
    seen = Exchange()
    keys: dict[str, Any] = {"fedbabu__fine_tune": tuned, "fedbabu__fine_tune_epochs": 2}
    outcome = federate(tmp_path, 2, method="fedbabu", rounds=2, local_epochs=1, tamper=seen.see, **keys)
    start = {name: t.numpy() for name, t in halted(outcome).initial_model().state_dict().items()}
    own, came, went = kept_model(outcome), seen.down[2, 1000], seen.up[2, 1000]
    assert set(came) == set(went) == set(part(start, "extractor."))
    assert equal_arrays(part(own, "head."), part(start, "head.")) == (tuned == "extractor")
    assert equal_arrays(part(own, "extractor."), came) == (tuned == "head")
    assert not equal_arrays(part(own, "extractor."), went)
    # The next round starts from the head that all have.
    client = halted(outcome)
    assert not np.array_equal(client.model.state_dict()["head.bias"], start["head.bias"]) or tuned == "extractor"
    client.receive()
    assert np.array_equal(client.model.state_dict()["head.bias"], start["head.bias"])


@pytest.mark.parametrize(("tuned", "epochs"), [("head", 2), ("model", 1)])
def test_fedbabu_is_that_of_a_plain_loop(tmp_path: Path, tuned: str, epochs: int) -> None:
    keys: dict[str, Any] = {
        "fedbabu__fine_tune": tuned,
        "fedbabu__fine_tune_epochs": epochs,
        "max_samples": 60,
        "seed": 5,
        **SGD,
    }
    seen = Exchange()
    outcome = federate(
        tmp_path, 1, method="fedbabu", rounds=1, partition="iid", local_epochs=3, tamper=seen.see, **keys
    )
    client = halted(outcome)
    train, order = client.data.train, torch_generator(5, "batches", client.setting.name, 1)

    def trained(chosen: Callable[[Any], Any], times: int) -> NamedArrays:
        model = client.initial_model()
        sgd = torch.optim.SGD(chosen(model).parameters(), lr=0.04, momentum=0.6, weight_decay=0.01)
        for _ in range(times):
            for index in torch.randperm(len(train), generator=order).split(7):
                model.zero_grad()
                batch = batch_of(train, index)
                cross_entropy(model(batch.x), batch.y).backward()
                sgd.step()
        return {name: tensor.numpy() for name, tensor in model.state_dict().items()}

    for name, array in part(trained(lambda model: model.extractor, 3), "extractor.").items():
        assert np.allclose(seen.up[1, 1000][name], array, rtol=0, atol=1e-5), name
    own = kept_model(outcome)
    for name, array in trained(lambda model: model.head if tuned == "head" else model, epochs).items():
        assert np.allclose(own[name], array, rtol=0, atol=1e-5), name


# LG-FedAvg


@pytest.mark.thorough
def test_lg_fedavg_of_fedavg_rounds_alone_is_fedavg(tmp_path: Path) -> None:
    keys: dict[str, Any] = {"rounds": 3, "participation": 0.5, "local_epochs": 1, "evaluate_every": 1}
    fedavg = federate(tmp_path, 6, method="fedavg", **keys)
    assert same(fedavg, federate(tmp_path, 6, method="lg-fedavg", lg_fedavg__fedavg_rounds=3, **keys))
    assert not same(fedavg, federate(tmp_path, 6, method="lg-fedavg", lg_fedavg__fedavg_rounds=2, **keys))


@pytest.mark.thorough
def test_lg_fedavg_without_fedavg_rounds_is_fedper_turned_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys: dict[str, Any] = {"rounds": 3, "participation": 0.75, "local_epochs": 1}
    lg = federate(tmp_path, method="lg-fedavg", lg_fedavg__fedavg_rounds=0, **keys)
    assert not same(lg, federate(tmp_path, method="lg-fedavg", lg_fedavg__fedavg_rounds=1, **keys))
    assert not same(lg, federate(tmp_path, method="fedper", **keys))
    monkeypatch.setattr(FedPer, "shares", "head")
    assert same(lg, federate(tmp_path, method="fedper", **keys))


@pytest.mark.thorough
def test_lg_fedavg_is_feddfpa_without_its_terms(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys: dict[str, Any] = {"rounds": 3, "local_epochs": 1}
    lg = federate(tmp_path, method="lg-fedavg", lg_fedavg__fedavg_rounds=0, **keys)
    off: dict[str, Any] = {f"feddfpa__{name}": False for name in ("fusion", "align_global", "align_historical")}
    # Without fusion FedDFPA leaves the received head alone; here it takes it whole, and counts samples.
    monkeypatch.setattr(FedDFPAClient, "receive", FloretClient.receive)
    monkeypatch.setattr(FedDFPA, "weighted", True)
    assert equal(lg, federate(tmp_path, method="feddfpa", **keys, **off))
    assert not equal(lg, federate(tmp_path, method="feddfpa", **keys, **off | {"feddfpa__align_global": True}))


def lg_bytes(outcome: Outcome, fedavg_rounds: int) -> None:
    """Check every client's bytes: the whole model in FedAvg rounds, and once more to each, then the head."""
    started: set[str] = set()
    for line in outcome.history:
        for name, client in line["clients"].items():
            if not client["trained"]:
                continue
            fedavg = line["round"] <= fedavg_rounds
            whole = fedavg or (fedavg_rounds > 0 and name not in started)
            assert client["bytes"] == {
                "up": 4 * (HEAD + EXTRACTOR * fedavg),
                "down": 4 * (HEAD + EXTRACTOR * whole),
            }, (line["round"], name)
            started |= set() if fedavg else {name}
    # Nobody was refused for sending more.
    assert started


def test_lg_fedavg_sends_every_client_the_last_shared_extractor_once(tmp_path: Path) -> None:
    seen = Exchange()
    keys: dict[str, Any] = {"rounds": 6, "participation": 0.5, "local_epochs": 1, "lg_fedavg__fedavg_rounds": 2}
    outcome = federate(tmp_path, 6, method="lg-fedavg", tamper=seen.see, **keys)
    lg_bytes(outcome, 2)
    starts = {key: part(arrays, "extractor.") for key, arrays in seen.down.items() if key[0] > 2}
    given = [extractor for extractor in starts.values() if extractor]
    # Some come later than others, and get the same.
    assert len(given) > 3
    assert len({server_round for (server_round, _), extractor in starts.items() if extractor}) > 1
    assert all(equal_arrays(extractor, given[0]) for extractor in given)
    assert equal_arrays(part(checkpointed(outcome), "extractor."), given[0])
    came = [seen.up[2, node] for (server_round, node) in seen.up if server_round == 2]
    sizes = [len(halted(outcome, node).data.train) for (server_round, node) in seen.up if server_round == 2]
    for name, array in given[0].items():
        mean = np.average([arrays[name].astype(float) for arrays in came], axis=0, weights=sizes)
        assert np.allclose(array, mean, rtol=0, atol=1e-6)
    extractors = [part(kept_model(outcome, 1000 + i), "extractor.") for i in range(6)]
    assert all(not equal_arrays(one, given[0]) for one in extractors)


def test_an_extractor_that_was_trained_alone_is_not_given_up(tmp_path: Path) -> None:
    outcome = federate(tmp_path, 2, method="lg-fedavg", lg_fedavg__fedavg_rounds=1, rounds=3, local_epochs=1)
    kept = part(kept_model(outcome), "extractor.")
    # What the client was sent in its first round alone, as a server sends it that lost the reply.
    first = next(m for m in outcome.grid.messages if m.metadata.group_id == "2" and m.metadata.dst_node_id == 1000)
    client = standing(outcome.grid.contexts[1000], first)
    assert any(name.startswith("extractor.") for name in client.received)
    client.receive()
    assert equal_arrays(part(client.copy_tensors(), "extractor."), kept)


def test_lg_fedavg_gives_a_client_that_lost_its_state_an_extractor_again(tmp_path: Path) -> None:
    down: dict[tuple[int, int], NamedArrays] = {}

    def tamper(message: Message, reply: Message) -> Message:
        metadata = message.metadata
        if metadata.message_type == "train":
            server_round = int(metadata.group_id)
            down[server_round, metadata.dst_node_id] = from_record(message.content.array_records["arrays"])
            if server_round == 3 and metadata.dst_node_id == 1000:
                (state,) = (tmp_path / "states").glob("**/lg-fedavg/0")
                shutil.rmtree(state)
        return reply

    keys: dict[str, Any] = {"rounds": 5, "local_epochs": 1, "lg_fedavg__fedavg_rounds": 1}
    outcome = federate(tmp_path / "runs", 2, method="lg-fedavg", states=tmp_path / "states", tamper=tamper, **keys)
    reason = "the server sent the head alone, and this client has no extractor of its own in this run"
    assert [line["refused"] for line in outcome.history] == [[], [], [], [{"client": "0", "reason": reason}], []]
    shared = part(checkpointed(outcome), "extractor.")
    given = {key for key, arrays in down.items() if key[0] > 1 and part(arrays, "extractor.")}
    assert given == {(2, 1000), (2, 1001), (5, 1000)}
    assert all(equal_arrays(part(down[key], "extractor."), shared) for key in given)


@pytest.mark.thorough
def test_lg_fedavg_resumed_knows_who_has_an_extractor(tmp_path: Path) -> None:
    keys: dict[str, Any] = {"method": "lg-fedavg", "rounds": 5, "participation": 0.6, "local_epochs": 1}
    keys |= {"lg_fedavg__fedavg_rounds": 1, "evaluate_every": 2}
    whole = federate(tmp_path / "whole", CLIENTS, **keys)
    directory = crash(tmp_path / "cut", tmp_path / "states", 4, **keys)
    resumed = federate(tmp_path / "cut", CLIENTS, states=tmp_path / "states", resume=str(directory), **keys)
    assert_same(whole, resumed)
    lg_bytes(resumed, 1)


@pytest.mark.parametrize(
    ("server_round", "reason"),
    [
        ("1", "tensor extractor.fc1.bias is missing"),
        ("2", "tensor extractor.fc1.bias is private to the client now"),
    ],
)
def test_lg_fedavg_refuses_what_is_not_shared_in_a_round(tmp_path: Path, server_round: str, reason: str) -> None:
    name = "extractor.fc1.bias"

    def tamper(message: Message, reply: Message) -> Message:
        metadata = message.metadata
        if (metadata.message_type, metadata.group_id, metadata.dst_node_id) == ("train", server_round, 1001):
            # In the second round it sends back what it was given to start from.
            sent = from_record(message.content.array_records["arrays"])[name]
            arrays_of(lambda a: a.pop(name) if server_round == "1" else a.update({name: sent}))(reply.content)
        return reply

    keys: dict[str, Any] = {"rounds": 2, "local_epochs": 1, "lg_fedavg__fedavg_rounds": 1}
    outcome = federate(tmp_path, 3, method="lg-fedavg", tamper=tamper, **keys)
    assert outcome.history[int(server_round) - 1]["refused"] == [{"client": "1", "reason": reason}]


def test_lg_fedavg_takes_no_extractor_where_none_is_shared(tmp_path: Path) -> None:
    outcome = federate(tmp_path, 2, method="lg-fedavg", rounds=1, local_epochs=1, lg_fedavg__fedavg_rounds=0)
    whole = federate(tmp_path, 2, method="lg-fedavg", rounds=1, local_epochs=1, lg_fedavg__fedavg_rounds=1)
    context, message = outcome.grid.contexts[1000], last_train(whole)
    with pytest.raises(FloretError, match=r"the server sent extractor\.\S+, which lg-fedavg keeps private"):
        Request(context, message).arguments(Request(context).client())


# Per-FedAvg


def test_hessian_product_by_hand_and_by_autograd() -> None:
    # f = w^T A w / 2 with A = [[2, 1], [1, 3]]: the product is A d, wherever.
    matrix, weights = torch.tensor([[2.0, 1.0], [1.0, 3.0]]), [torch.zeros(2)]
    found = hessian_product(
        weights, [torch.tensor([5.0, -7.0])], [torch.tensor([1.0, -2.0])], 0.5, lambda: [matrix @ weights[0]]
    )
    assert found[0].tolist() == [0.0, -5.0]
    # Logistic regression, where it depends on the place, in double precision.
    generator = torch.Generator().manual_seed(3)
    x, start, d = (torch.randn(*size, generator=generator, dtype=torch.float64) for size in ((20, 4), (4,), (4,)))
    y = (x.sum(1) > 0).double()

    def loss(w: Tensor) -> Tensor:
        return torch.nn.functional.binary_cross_entropy_with_logits(x @ w, y)

    moving = start.clone().requires_grad_()
    exact = torch.autograd.functional.hvp(loss, start, d)[1]
    elsewhere = torch.autograd.functional.hvp(loss, start + d, d)[1]
    found = hessian_product([moving], [start], [d], 1e-4, lambda: torch.autograd.grad(loss(moving), [moving]))
    assert torch.allclose(found[0], exact, rtol=1e-6, atol=0)
    assert not torch.allclose(found[0], elsewhere, rtol=1e-2)
    assert exact.norm() > 1e-2


def adapted(client: Any, weights: list[Tensor], batch: Batch, rate: float) -> list[Tensor]:
    """Return weights after one step on a batch, with a graph."""
    loss = cross_entropy(functional(client, weights, batch), batch.y)
    gradients = torch.autograd.grad(loss, weights, create_graph=True)
    return [w - rate * g for w, g in zip(weights, gradients, strict=True)]


def functional(client: Any, weights: list[Tensor], batch: Batch) -> Tensor:
    names = [name for name, _ in client.model.named_parameters()]
    scores: Tensor = torch.func.functional_call(client.model, dict(zip(names, weights, strict=True)), (batch.x,))
    return scores


def meta_trained(client: Any, *, rate: float, second_order: bool) -> list[Tensor]:
    """Return the meta model after a round by a plain loop, with the exact Hessian on the batch before the last."""
    weights = [p.detach().clone() for p in client.initial_model().parameters()]
    buffers: list[Tensor | None] = [None] * len(weights)
    batches = [batch for _ in range(client.config.local_epochs) for batch in client.training_batches()]
    for i, batch in enumerate(batches):
        inner, outer = batches[max(i - 1, 0)], batches[max(i - 2, 0)]
        leaves = [w.clone().requires_grad_() for w in weights]
        moved = [w.detach().requires_grad_() for w in adapted(client, leaves, inner, rate)]
        loss = cross_entropy(functional(client, moved, batch), batch.y)
        gradients = list(torch.autograd.grad(loss, moved))
        if second_order:
            first = torch.autograd.grad(
                cross_entropy(functional(client, leaves, outer), outer.y), leaves, create_graph=True
            )
            products = torch.autograd.grad(first, leaves, grad_outputs=gradients)
            gradients = [g - rate * h for g, h in zip(gradients, products, strict=True)]
        for place, gradient in enumerate(gradients):
            step = gradient + SGD["weight_decay"] * weights[place]
            before = buffers[place]
            buffers[place] = step = step if before is None else SGD["momentum"] * before + step
            weights[place] = weights[place] - SGD["lr"] * step
    return weights


@pytest.mark.parametrize(("variant", "adapt"), [("hessian-free", "trained"), ("first-order", "received")])
def test_per_fedavg_is_that_of_a_plain_loop(tmp_path: Path, variant: str, adapt: str) -> None:
    keys: dict[str, Any] = {"per_fedavg__inner_lr": RATE, "per_fedavg__variant": variant, "max_samples": 60, **SGD}
    # In units of the gradient: small enough that few ReLUs switch on the way.
    keys |= {"per_fedavg__adapt": adapt, "per_fedavg__delta": 1e-4}
    seen = Exchange()
    outcome = federate(
        tmp_path, 1, method="per-fedavg", rounds=1, partition="iid", local_epochs=2, tamper=seen.see, **keys
    )
    expected = {}
    for second_order in (False, True):
        client = halted(outcome)
        names = [name for name, _ in client.model.named_parameters()]
        weights = meta_trained(client, rate=RATE, second_order=second_order)
        expected[second_order] = dict(zip(names, weights, strict=True))

    def distance(second_order: bool) -> float:
        return max(
            float((torch.tensor(seen.up[1, 1000][n]) - w).abs().max()) for n, w in expected[second_order].items()
        )

    right = variant == "hessian-free"
    assert distance(right) < 1e-3
    assert distance(not right) > 10 * distance(right)
    # The personal model is one step over all the data from there, or from what was received.
    client = halted(outcome)
    arrays = (seen.up if adapt == "trained" else seen.down)[1, 1000]
    client.model.load_state_dict({n: torch.tensor(a) for n, a in arrays.items()})
    train = client.data.train
    whole = batch_of(train, torch.arange(len(train)))
    gradients = torch.autograd.grad(cross_entropy(client.model(whole.x), whole.y), list(client.model.parameters()))
    own = kept_model(outcome)
    for (name, weight), gradient in zip(client.model.named_parameters(), gradients, strict=True):
        assert np.allclose(own[name], (weight - RATE * gradient).detach(), rtol=0, atol=1e-6)
    assert not equal_arrays(own, seen.up[1, 1000])


@pytest.mark.thorough
@pytest.mark.parametrize("variant", ["hessian-free", "first-order"])
def test_per_fedavg_without_an_inner_step_is_fedavg(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variant: str
) -> None:
    keys: dict[str, Any] = {"rounds": 3, "participation": 0.75, "local_epochs": 2, "max_samples": 300}
    own: dict[str, Any] = {"method": "per-fedavg", "per_fedavg__variant": variant, "per_fedavg__adapt": "trained"}
    monkeypatch.setattr(FedAvg, "weighted", False)
    monkeypatch.setattr(FedAvg, "serves_global", False)
    fedavg = federate(tmp_path, method="fedavg", **keys)
    assert same(fedavg, federate(tmp_path, **own, **keys, per_fedavg__inner_lr=0.0))
    assert not equal_arrays(checkpointed(fedavg), checkpointed(federate(tmp_path, **own, **keys)))


def test_per_fedavg_keys_change_what_is_shared(tmp_path: Path) -> None:
    changes: list[dict[str, Any]] = [
        {},
        {"per_fedavg__inner_lr": 0.1},
        {"per_fedavg__variant": "first-order"},
        {"per_fedavg__delta": 3.0},
    ]
    keys: dict[str, Any] = {"method": "per-fedavg", "rounds": 1, "local_epochs": 1}
    models = [checkpointed(federate(tmp_path, 2, **keys, **change)) for change in changes]
    assert all(not equal_arrays(a, b) for i, a in enumerate(models) for b in models[:i])


def test_per_fedavg_in_bfloat16_has_the_hessian_in_float32(tmp_path: Path) -> None:
    outcome = federate(tmp_path, 1, method="per-fedavg", rounds=1, precision="bfloat16", max_samples=40)
    client = halted(outcome)
    seen: list[torch.dtype] = []
    client.model.extractor.fc1.register_forward_hook(lambda _, __, output: seen.append(output.dtype))
    batch = next(iter(client.training_batches()))
    client._gradient(batch)
    client._gradient(batch, precise=True)
    assert seen == [torch.bfloat16, torch.float32]


# FedALA


def test_ala_by_hand() -> None:
    own, received = torch.tensor([1.0, 1.0, 1.0, 0.1]), torch.tensor([3.0, 3.0, -1.0, 0.7])
    weight = torch.tensor([0.0, 0.25, 0.5, 1.0])
    assert mixed(own, received, weight)[:3].tolist() == [1.0, 1.5, 0.0]
    assert torch.equal(mixed(own, received, torch.ones(4)), received)
    gradient = torch.tensor([0.1, -0.05, -0.1, 0.0])
    # differences 2, 2, -2: 0 - 0.2 is cut to 0; 0.25 + 0.1; 0.5 - 0.2
    assert stepped(weight, gradient, own, received, 1.0).tolist() == pytest.approx([0.0, 0.35, 0.3, 1.0])
    assert stepped(weight, gradient, own, received, -9.0)[0] == 1.0
    assert stepped(weight, gradient, own, received, 0.5)[1].item() == pytest.approx(0.3)


def test_ala_has_converged_when_the_last_ten_losses_are_alike() -> None:
    # of 0, 1, ..., 9 the deviation is sqrt(8.25) = 2.872
    assert not converged([1.0] * 10, 0.1)
    assert converged([1.0] * 11, 0.1)
    assert not converged([1.0] * 11, 0.0)
    assert converged([99.0, *map(float, range(10))], 2.88)
    assert not converged([99.0, *map(float, range(10))], 2.87)


@pytest.mark.thorough
def test_fedala_with_weights_that_stay_at_1_is_fedavg(tmp_path: Path) -> None:
    keys: dict[str, Any] = {"rounds": 3, "local_epochs": 1, "max_samples": 300}
    fedavg = federate(tmp_path, method="fedavg", **keys)
    still = federate(tmp_path, method="fedala", fedala__eta=0.0, **keys)
    assert equal(fedavg, still)
    assert befores(fedavg) == befores(still)
    assert not equal(fedavg, federate(tmp_path, method="fedala", **keys))
    # All the layers, and clients that miss rounds.
    keys |= {"participation": 0.5, "rounds": 4}
    fedavg = federate(tmp_path, method="fedavg", **keys)
    still = federate(tmp_path, method="fedala", fedala__eta=0.0, fedala__layers=3, **keys)
    assert equal_arrays(checkpointed(fedavg), checkpointed(still))
    assert not equal_arrays(checkpointed(fedavg), checkpointed(federate(tmp_path, method="fedala", **keys)))


def test_fedala_learns_its_weights_anew_in_each_run(tmp_path: Path) -> None:
    """Those of an earlier run were learned against other global models; the own model still is what is mixed in."""
    keys: dict[str, Any] = {"rounds": 2, "local_epochs": 1, "max_samples": 300, "method": "fedala"}
    states = tmp_path / "states"
    federate(tmp_path / "first", 3, states=states, **keys)
    again = federate(tmp_path / "second", 3, states=states, fedala__eta=0.0, fedala__layers=2, seed=1, **keys)
    assert equal(again, federate(tmp_path / "fedavg", 3, **(keys | {"method": "fedavg", "seed": 1})))
    again = federate(tmp_path / "third", 3, states=states, seed=1, **(keys | {"rounds": 1}))
    fresh = federate(tmp_path / "fresh", 3, seed=1, **(keys | {"rounds": 1}))
    assert not equal_arrays(checkpointed(again), checkpointed(fresh))


@pytest.mark.parametrize(("layers", "percent", "eta"), [(1, 100, 1.0), (1, 30, 0.4), (2, 80, 1.0), (3, 100, 0.4)])
def test_ala_is_that_of_a_plain_loop(tmp_path: Path, layers: int, percent: int, eta: float) -> None:
    keys: dict[str, Any] = {
        "fedala__layers": layers,
        "fedala__percent": percent,
        "fedala__eta": eta,
        "fedala__first_epochs": 2,
    }
    outcome = federate(tmp_path, 2, method="fedala", rounds=3, local_epochs=1, batch_size=16, seed=5, **keys)
    client = halted(outcome)
    own, received = client.copy_tensors(), client.received
    top = [
        name
        for number in range(3 - layers, 3)
        for name in (
            ("extractor.fc1.weight", "extractor.fc1.bias"),
            ("extractor.fc2.weight", "extractor.fc2.bias"),
            ("head.weight", "head.bias"),
        )[number]
    ]
    assert {name.removeprefix(WEIGHT) for name in client.memory} == set(top)
    before = {name: client.memory[WEIGHT + name] for name in top}
    train = client.data.train
    drawn = torch.randperm(len(train), generator=torch_generator(5, "local aggregation", client.setting.name, 3))
    count = round(percent / 100 * len(train))
    model = client.initial_model().eval()
    model.load_state_dict(received)
    for index in drawn[:count].split(16):
        # By autograd with respect to the weights themselves, not to the mixed tensors.
        weights = {name: tensor.clone().requires_grad_() for name, tensor in before.items()}
        made = {name: own[name] + weights[name] * (received[name] - own[name]) for name in top}
        batch = batch_of(train, index)
        loss = cross_entropy(torch.func.functional_call(model, made, (batch.x,)), batch.y)
        gradients = torch.autograd.grad(loss, list(weights.values()))
        before = {n: (w.detach() - eta * g).clamp(0, 1) for (n, w), g in zip(weights.items(), gradients, strict=True)}
    client.receive()
    for name, tensor in client.model.state_dict().items():
        if name in top:
            assert torch.allclose(client.memory[WEIGHT + name], before[name], rtol=0, atol=1e-5)
            expected = own[name] + before[name] * (received[name] - own[name])
            assert torch.allclose(tensor, expected, rtol=0, atol=1e-5), name
        else:
            assert torch.equal(tensor, received[name]), name
    assert any((weight < 1).any() for weight in before.values())


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("keys", "epochs"),
    [
        ({"fedala__threshold": 1e9}, 11),
        ({"fedala__threshold": 0.0, "fedala__first_epochs": 13}, 13),
        ({"fedala__threshold": 1e9, "fedala__first_epochs": 3}, 3),
    ],
)
def test_ala_runs_until_it_has_converged_the_first_time_and_once_later(
    tmp_path: Path, keys: dict[str, Any], epochs: int
) -> None:
    small: dict[str, Any] = {"max_samples": 80, "local_epochs": 1, "batch_size": 8}
    # After one round a client has a model of its own to mix, and no weights yet.
    for rounds, expected in ((1, epochs), (2, 1)):
        outcome = federate(tmp_path, 2, method="fedala", rounds=rounds, **small, **keys)
        client = halted(outcome)
        assert bool(client.memory) == (rounds == 2)
        batches, seen = -(-round(0.8 * len(client.data.train)) // 8), 0
        loss = client.loss

        def counted(batch: Batch, loss: Callable[[Batch], Tensor] = loss) -> Tensor:
            nonlocal seen
            seen += 1
            return loss(batch)

        client.loss = counted
        client.receive()
        assert seen == expected * batches


def test_fedala_takes_the_global_model_the_first_time_and_keeps_its_weights_to_itself(tmp_path: Path) -> None:
    seen = Exchange()
    outcome = federate(tmp_path, 4, method="fedala", rounds=4, participation=0.5, local_epochs=1, tamper=seen.see)
    models = {name for arrays in seen.up.values() for name in arrays}
    assert models == set(kept_model(outcome)) - {"num_batches_tracked"}
    often = {node: [r for r, n in seen.up if n == node] for node in {n for _, n in seen.up}}
    assert min(rounds[0] for rounds in often.values()) == 1 < max(rounds[0] for rounds in often.values())
    fedavg = federate(tmp_path, 4, method="fedavg", rounds=1, participation=0.5, local_epochs=1)
    assert befores(outcome)[0] == befores(fedavg)[0]
    mixes = []
    for node, rounds in often.items():
        memory = {n: t for n, t in personal(outcome)[node - 1000].items() if n.startswith(MEMORY)}
        assert set(memory) == ({f"{MEMORY}{WEIGHT}head.{kind}" for kind in ("weight", "bias")} if rounds[1:] else set())
        assert all(bool(((t >= 0) & (t <= 1)).all()) for t in memory.values())
        mixes += [memory[f"{MEMORY}{WEIGHT}head.weight"]] if memory else []
    assert len(mixes) > 1
    assert not torch.equal(mixes[0], mixes[1])


def test_fedala_refuses_more_layers_than_there_are(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"fedala\.layers = 4: must be at most 3, model 'mlp' has 3 layers"):
        federate(tmp_path, 2, method="fedala", fedala__layers=4)
