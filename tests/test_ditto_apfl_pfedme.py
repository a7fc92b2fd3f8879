"""Methods with two models on a client, Ditto, APFL and pFedMe: one is shared, the other is what the client uses."""

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from client_app.batches import normalise
from client_app.client import MEMORY, MODEL
from client_app.methods.apfl import ALPHA, PRIVATE, adapted, mixture
from common.tensors import NamedArrays
from common.wire import from_record
from models import SplitModel
from strategies.ditto import Ditto
from strategies.fedavg import FedAvg
from tests.harness import MODEL_SIZE, Outcome, checkpointed, equal, federate, kept, personal, standing
from tests.test_keys import last_train
from tests.test_methods import write_clients
from tests.test_papers import equal as same_models
from tests.test_papers import write_images

# One step a round on all samples, without momentum and weight decay: what a formula says.
ONE_STEP: dict[str, Any] = {
    "local_epochs": 1,
    "batch_size": 1000,
    "momentum": 0.0,
    "weight_decay": 0.0,
    "max_samples": 100,
}
# Keys of pFedMe with which the shared model goes all the way to the personal one, after one step.
FOLLOWS: dict[str, Any] = {"pfedme__inner_steps": 1, "pfedme__lambda": 16.0, "pfedme__local_lr": 1 / 16}


def client_of(outcome: Outcome) -> Any:
    """Return the first client with what it kept, as it stands after it received the last round's message again."""
    client = standing(outcome.grid.contexts[1000], last_train(outcome))
    client.receive()
    return client


def gradients(model: SplitModel, client: Any, at: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the gradients of the loss over all training samples at the weights ``at``."""
    model = copy.deepcopy(model)
    model.load_state_dict(at)
    parameters = dict(model.named_parameters())
    loss = F.cross_entropy(model(normalise(client.data.train.x)), client.data.train.y)
    return dict(zip(parameters, torch.autograd.grad(loss, list(parameters.values())), strict=True))


def assert_close(found: dict[str, Tensor], expected: dict[str, Tensor], atol: float = 1e-6) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.allclose(found[name], tensor, rtol=0, atol=atol), name


def distance(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """Return the largest difference of an element."""
    return max(float((one[name] - other[name]).abs().max()) for name in one)


@pytest.mark.parametrize("method", ["ditto", "apfl", "pfedme"])
def test_one_model_goes_down_and_one_comes_up(tmp_path: Path, method: str) -> None:
    outcome = federate(tmp_path, method=method, local_epochs=1)
    for line in outcome.history:
        assert all(c["bytes"] == {"up": 4 * MODEL_SIZE, "down": 4 * MODEL_SIZE} for c in line["clients"].values())


@pytest.mark.thorough
@pytest.mark.parametrize("method", ["ditto", "apfl", "pfedme"])
def test_a_client_with_one_sample_and_a_client_that_comes_late(tmp_path: Path, method: str) -> None:
    data = tmp_path / "data"
    write_clients(data, 3)
    alone = np.load(data / "train" / "0.npz")
    np.savez(data / "train" / "0.npz", x=alone["x"][:1], y=alone["y"][:1])
    keys: dict[str, Any] = {"dataset": "npz-clients", "data_dir": str(data), "validation_fraction": 0.0}
    outcome = federate(tmp_path / "runs", 3, method=method, rounds=5, participation=0.6, evaluate_every=1, **keys)
    assert outcome.summary["refused"] == 0
    assert len(outcome.history[0]["clients"]) == 2
    assert set(outcome.history[-1]["clients"]) == {"0", "1", "2"}


@pytest.mark.thorough
@pytest.mark.parametrize(("batch_norm", "rounds"), [("shared", 2), ("local", 1)])
def test_identities_with_batch_normalisation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, batch_norm: str, rounds: int
) -> None:
    for strategy in (FedAvg, Ditto):
        monkeypatch.setattr(strategy, "weighted", False)
    keys = write_images(tmp_path / "data", 2) | {"model": "cnn5-wide-bn"}
    keys |= {"batch_norm": batch_norm, "rounds": rounds}
    local, fedavg = (federate(tmp_path, 2, method=method, **keys) for method in ("local", "fedavg"))
    alone: dict[str, Any] = {"ditto__lambda": 0.0, "ditto__personal_epochs": 1}
    ditto = federate(tmp_path, 2, method="ditto", **alone, **keys)
    apfl = federate(tmp_path, 2, method="apfl", apfl__alpha=1.0, apfl__adapt="never", **keys)
    for outcome in (ditto, apfl):
        assert same_models(local, outcome)
        assert equal(checkpointed(fedavg), checkpointed(outcome))
    pfedme = federate(tmp_path, 2, method="pfedme", **FOLLOWS, **keys)
    assert same_models(fedavg, pfedme)
    assert equal(checkpointed(fedavg), checkpointed(pfedme))


# Ditto


@pytest.mark.thorough
@pytest.mark.parametrize("participation", [1.0, 0.5])
def test_what_ditto_shares_is_fedavg(tmp_path: Path, participation: float) -> None:
    keys: dict[str, Any] = {"rounds": 3, "participation": participation, "local_epochs": 2}
    fedavg = federate(tmp_path, method="fedavg", **keys)
    ditto = federate(tmp_path, method="ditto", **keys)
    other = federate(tmp_path, method="ditto", ditto__lambda=0.1, ditto__personal_epochs=1, **keys)
    assert equal(checkpointed(ditto), checkpointed(fedavg))
    assert equal(checkpointed(other), checkpointed(fedavg))
    assert not same_models(ditto, other)
    assert not same_models(ditto, fedavg)


@pytest.mark.thorough
def test_ditto_without_lambda_is_local_beside_fedavg(tmp_path: Path) -> None:
    keys: dict[str, Any] = {"rounds": 3, "participation": 0.5, "local_epochs": 2}
    local = federate(tmp_path, method="local", **keys)
    assert same_models(local, federate(tmp_path, method="ditto", ditto__lambda=0.0, ditto__personal_epochs=2, **keys))
    for own in ({"ditto__personal_epochs": 2}, {"ditto__lambda": 0.0, "ditto__personal_epochs": 3}):
        assert not same_models(local, federate(tmp_path, method="ditto", **own, **keys))


def test_a_step_of_ditto_by_hand(tmp_path: Path) -> None:
    keys: dict[str, Any] = {"lr": 0.1, "ditto__lambda": 0.7, "ditto__personal_epochs": 1}
    client = client_of(federate(tmp_path, 2, method="ditto", rounds=3, **ONE_STEP, **keys))
    v, w = client.copy_tensors(), client.received
    assert distance(v, w) > 1e-3
    by_v, by_w = (gradients(client.model, client, at) for at in (v, w))
    client.train()
    assert_close(client.copy_tensors(), {n: v[n] - 0.1 * (by_v[n] + 0.7 * (v[n] - w[n])) for n in v})
    assert_close(client.upload(), {n: w[n] - 0.1 * by_w[n] for n in w})


@pytest.mark.thorough
def test_ditto_uses_and_keeps_its_personal_model(tmp_path: Path) -> None:
    outcome = federate(tmp_path, method="ditto", rounds=2)
    first, second = (line["clients"] for line in outcome.history)
    assert all(second[name]["before"] == first[name]["after"] for name in second)
    # A large lambda holds the personal model where the shared one is.
    near = federate(tmp_path, method="ditto", rounds=2, momentum=0.0, ditto__lambda=50.0)
    distances = []
    for run in (outcome, near):
        received = client_of(run).received
        distances.append(distance(received, {name: personal(run)[0][MODEL + name] for name in received}))
    assert distances[1] < distances[0] / 5


# APFL


def alphas(outcome: Outcome) -> list[float]:
    return [state[MEMORY + ALPHA].item() for state in personal(outcome)]


def test_a_mixture_and_its_alpha_by_hand() -> None:
    private, shared = torch.tensor([1.0, 4.0]), torch.tensor([3.0, -1.0])
    assert mixture(private, shared, torch.tensor(0.25)).tolist() == [2.5, 0.25]
    # v - w is (-2, 5), the product with (0.5, 0.2) is -1 + 1, with (0.1, 0.3) -0.2 + 1.5
    gradients = [torch.tensor([0.1, 0.3]), torch.tensor([0.5, 0.2])]
    for lr, expected in ((0.1, 0.27), (0.2, 0.14), (0.4, 0.0), (-1.0, 1.0)):
        found = adapted(torch.tensor(0.4), gradients, [private] * 2, [shared] * 2, lr)
        assert found.item() == pytest.approx(expected, abs=1e-6)


@pytest.mark.thorough
@pytest.mark.parametrize("own", [{}, {"apfl__adapt": "batch", "apfl__alpha_lr": 1.0, "apfl__alpha": 0.1}])
def test_what_apfl_shares_is_fedavg_with_equal_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own: dict[str, Any]
) -> None:
    keys: dict[str, Any] = {"rounds": 3, "participation": 0.5, "local_epochs": 2}
    apfl = federate(tmp_path, method="apfl", **own, **keys)
    assert not equal(checkpointed(apfl), checkpointed(federate(tmp_path, method="fedavg", **keys)))
    monkeypatch.setattr(FedAvg, "weighted", False)
    fedavg = federate(tmp_path, method="fedavg", **keys)
    assert equal(checkpointed(apfl), checkpointed(fedavg))
    assert not same_models(apfl, fedavg)


@pytest.mark.parametrize("model", ["mlp", pytest.param("cnn2", marks=pytest.mark.thorough)])
def test_apfl_with_alpha_1_is_local(tmp_path: Path, model: str) -> None:
    keys: dict[str, Any] = {"rounds": 3, "participation": 0.5, "local_epochs": 1}
    if model == "cnn2":
        keys = write_images(tmp_path / "data", 4) | {"rounds": 3}
    local = federate(tmp_path / "runs", method="local", **keys)
    assert same_models(local, federate(tmp_path / "runs", method="apfl", apfl__alpha=1.0, apfl__adapt="never", **keys))
    for own in ({"apfl__alpha": 0.9, "apfl__adapt": "never"}, {"apfl__alpha": 1.0, "apfl__alpha_lr": 3.0}):
        assert not same_models(local, federate(tmp_path / "runs", method="apfl", **own, **keys))


@pytest.mark.thorough
def test_apfl_with_alpha_0_uses_the_shared_model_as_the_client_trained_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FedAvg, "weighted", False)
    keys: dict[str, Any] = {"rounds": 3, "local_epochs": 2}
    fedavg = federate(tmp_path, method="fedavg", **keys)
    assert same_models(fedavg, federate(tmp_path, method="apfl", apfl__alpha=0.0, apfl__adapt="never", **keys))
    assert not same_models(fedavg, federate(tmp_path, method="apfl", **keys))


def test_a_step_of_apfl_by_hand(tmp_path: Path) -> None:
    keys: dict[str, Any] = {"lr": 0.1, "apfl__alpha": 0.3, "apfl__alpha_lr": 0.2}
    client = client_of(federate(tmp_path, 2, method="apfl", rounds=3, **ONE_STEP, **keys))
    m, w = client.copy_tensors(), client.received
    v, alpha = ({n: t.clone() for n, t in client._private.items()}, client._alpha.clone())
    assert alpha != 0.3
    assert distance(v, w) > 1e-3
    assert_close(m, {n: alpha * v[n] + (1 - alpha) * w[n] for n in w})
    by_m, by_w = (gradients(client.model, client, at) for at in (m, w))
    client.train()
    shared = {n: w[n] - 0.1 * by_w[n] for n in w}
    private = {n: v[n] - 0.1 * alpha * by_m[n] for n in v}
    moved = alpha - 0.2 * sum((by_m[n] * (v[n] - w[n])).sum() for n in v)
    assert abs(moved - alpha) > 1e-4
    assert client.memory[ALPHA].item() == pytest.approx(moved.item(), abs=1e-6)
    assert_close(client.upload(), shared)
    assert_close({n: client.memory[PRIVATE + n] for n in v}, private)
    assert_close(client.copy_tensors(), {n: moved * private[n] + (1 - moved) * shared[n] for n in v})


@pytest.mark.thorough
def test_alpha_is_adapted_as_often_as_the_key_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[float] = []

    def counted(alpha: Tensor, *args: Any) -> Tensor:
        calls.append(alpha.item())
        return adapted(alpha, *args)

    monkeypatch.setattr("client_app.methods.apfl.adapted", counted)
    keys: dict[str, Any] = {"rounds": 3, "local_epochs": 2, "max_samples": 200, "batch_size": 4, "apfl__alpha": 0.4}
    found = {}
    for adapt in ("never", "round", "batch"):
        calls.clear()
        outcome = federate(tmp_path, 2, method="apfl", apfl__adapt=adapt, **keys)
        found[adapt] = (len(calls), alphas(outcome))
    assert found["never"][0] == 0
    assert found["never"][1] == pytest.approx([0.4, 0.4])
    assert found["round"][0] == 3 * 2
    assert found["batch"][0] == 3 * 2 * 2 * 5  # 17 samples, batches of 4
    values = [alpha for _, run in found.values() for alpha in run]
    assert len({round(value, 6) for value in values}) == 5
    # A client's first step finds both models equal, so nothing was learned of alpha in the first round.
    assert alphas(federate(tmp_path, 2, method="apfl", **keys | {"rounds": 1})) == pytest.approx([0.4, 0.4])


# pFedMe


@pytest.mark.thorough
def test_pfedme_that_goes_all_the_way_after_one_step_is_fedavg(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys: dict[str, Any] = {"rounds": 3, "local_epochs": 2}
    monkeypatch.setattr(FedAvg, "weighted", False)
    fedavg = federate(tmp_path, method="fedavg", **keys)
    pfedme = federate(tmp_path, method="pfedme", **FOLLOWS, **keys)
    assert same_models(fedavg, pfedme)
    assert equal(checkpointed(fedavg), checkpointed(pfedme))
    for change in ({"pfedme__inner_steps": 2}, {"pfedme__local_lr": 0.05}, {"pfedme__lambda": 15.0}):
        other = federate(tmp_path, method="pfedme", **FOLLOWS | change, **keys)
        assert not equal(checkpointed(fedavg), checkpointed(other))


def test_one_batch_and_one_inner_step_are_a_small_step_of_fedavg(tmp_path: Path) -> None:
    """To rounding: the way to theta is computed, and then a part of it taken."""
    fedavg = federate(tmp_path, 1, method="fedavg", lr=0.2 * 0.3, **ONE_STEP)
    own: dict[str, Any] = {"pfedme__inner_steps": 1, "pfedme__lambda": 3.0, "pfedme__local_lr": 0.1}
    pfedme = federate(tmp_path, 1, method="pfedme", lr=0.2, **own, **ONE_STEP)
    first, second = (checkpointed(outcome) for outcome in (fedavg, pfedme))
    assert all(np.allclose(first[name], second[name], rtol=0, atol=1e-6) for name in first)
    assert not equal(first, checkpointed(federate(tmp_path, 1, method="fedavg", lr=0.2, **ONE_STEP)))


def test_a_batch_of_pfedme_by_hand(tmp_path: Path) -> None:
    own: dict[str, Any] = {"pfedme__inner_steps": 3, "pfedme__lambda": 2.0, "pfedme__local_lr": 0.2}
    client = client_of(federate(tmp_path, 2, method="pfedme", lr=0.1, **ONE_STEP, **own))
    w = {name: tensor.clone() for name, tensor in client.received.items()}
    theta = w
    for _ in range(3):
        found = gradients(client.model, client, theta)
        theta = {n: theta[n] - 0.1 * (found[n] + 2.0 * (theta[n] - w[n])) for n in w}
    client.train()
    assert_close(client.copy_tensors(), theta)
    assert_close(client.upload(), {n: w[n] - 0.2 * 2.0 * (w[n] - theta[n]) for n in w})


def test_pfedme_uses_and_keeps_theta_and_sends_what_follows_it(tmp_path: Path) -> None:
    outcome = federate(tmp_path, method="pfedme", rounds=2, pfedme__local_lr=0.005)
    client = client_of(outcome)
    client.train()
    theta, sent = client.copy_tensors(), client.upload()
    assert distance(theta, sent) > 1e-2
    # A client that measured what it sends, or what it received, would tell the same of both.
    accuracies = []
    for tensors in (theta, sent, client.received):
        client.load_tensors(tensors)
        accuracies.append(client.accuracy(client.data.test))
    assert accuracies[0] > max(accuracies[1:])
    last = outcome.history[-1]["clients"]["0"]
    assert last["after"]["test"] > last["before"]["test"]


def test_only_clients_that_are_drawn_train_and_are_aggregated(tmp_path: Path) -> None:
    outcome = federate(tmp_path, 4, method="pfedme", rounds=1, participation=0.5)
    trained = {name for name, c in outcome.history[0]["clients"].items() if c["trained"]}
    assert len(trained) == 2
    states = {str(node - 1000): kept(context).round for node, context in outcome.grid.contexts.items()}
    assert {name for name, last in states.items() if last} == trained


def test_the_server_of_pfedme_goes_part_of_the_way(tmp_path: Path) -> None:
    keys: dict[str, Any] = {"method": "pfedme", "rounds": 1, "local_epochs": 1}
    sizes = set()

    def tamper(message: Any, reply: Any) -> Any:
        if message.metadata.message_type == "train":
            before.append(from_record(message.content.array_records["arrays"]))
            sent.append(from_record(reply.content.array_records["arrays"]))
            sizes.add(reply.content.metric_records["metrics"]["num-examples"])
        return reply

    for beta in (1.0, 0.25, 1.5):
        before: list[NamedArrays] = []
        sent: list[NamedArrays] = []
        after = checkpointed(federate(tmp_path, 3, tamper=tamper, pfedme__beta=beta, partition="dirichlet", **keys))
        for name, array in after.items():
            mean = np.mean([arrays[name] for arrays in sent], axis=0)
            assert np.allclose(array, (1 - beta) * before[0][name] + beta * mean, rtol=0, atol=1e-6)
    assert len(sizes) > 1  # the mean is plain


def test_running_statistics_do_not_go_part_of_the_way(tmp_path: Path) -> None:
    """Beyond 1 that could make a variance below zero."""
    sent: list[NamedArrays] = []

    def see(message: Any, reply: Any) -> Any:
        if message.metadata.message_type == "train":
            sent.append(from_record(reply.content.array_records["arrays"]))
        return reply

    keys = write_images(tmp_path / "data", 2) | {"model": "cnn5-wide-bn", "rounds": 1, "pfedme__beta": 2.0}
    after = checkpointed(federate(tmp_path / "runs", 2, method="pfedme", tamper=see, **keys))
    running = [name for name in after if name.endswith(("running_mean", "running_var"))]
    assert running
    for name in running:
        assert np.allclose(after[name], np.mean([arrays[name] for arrays in sent], axis=0), rtol=0, atol=1e-6)
