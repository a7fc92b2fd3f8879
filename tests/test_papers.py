"""The five papers: formulas against numbers worked out by hand, ablation switches against published identities."""

import dataclasses
import itertools
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ConfigRecord, Message
from torch import nn

from client_app.app import Request, app
from client_app.client import MODEL
from client_app.methods.fedcpd import contrast_loss, distillation_loss
from client_app.methods.feddfpa import direction_loss, fuse_rows, fusion_coefficients
from client_app.methods.pfps_lwc import head_norm, recall_loss
from client_app.methods.ua_pdfl import auxiliary_term, divergence, weighted_mean
from common.wire import from_record
from models import CBAM, CrossLayerFusion, initialise
from strategies.fedcpd import BLOCKS, Distillation, FedCPD
from strategies.feddfpa import FedDFPA
from strategies.fedrep import FedRep
from tests.harness import ON_MLP, Outcome, federate, kept, standing


def write_images(folder: Path, clients: int, samples: int = 40) -> dict[str, Any]:
    """Write equal files of each client's own, 16 x 16, three classes that differ in a corner; return the keys."""
    for part in ("train", "test"):
        (folder / part).mkdir(parents=True)
        for i in range(clients):
            generator = np.random.default_rng([i, part == "test"])
            y = (np.arange(samples) + i) % 3
            x = generator.normal(size=(samples, 16, 16)).astype(np.float32)
            x[:, :8, :8] += (y[:, None, None] - 1).astype(np.float32)
            np.savez(folder / part / f"{i}.npz", x=x, y=y)
    return {"dataset": "npz-clients", "data_dir": str(folder), "model": "cnn2", "local_epochs": 1, "lr": 0.05}


def models_of(outcome: Outcome) -> list[dict[str, torch.Tensor]]:
    states = [kept(context).load() for context in outcome.grid.contexts.values()]
    return [{name: t for name, t in state.items() if name.startswith(MODEL)} for state in states]


def equal(first: Outcome, second: Outcome) -> bool:
    """Compare personal models and accuracies of two runs, bit for bit."""
    for one, other in zip(models_of(first), models_of(second), strict=True):
        if set(one) != set(other) or not all(torch.equal(one[name], other[name]) for name in one):
            return False
    measured = [
        [(line["accuracy"], line["loss"], {n: c["after"] for n, c in line["clients"].items()}) for line in o.history]
        for o in (first, second)
    ]
    return bool(measured[0] == measured[1])


# PFPS-LWC


def test_recall_loss_is_one_minus_cosine() -> None:
    own = torch.tensor([[1.0, 0.0], [3.0, 4.0]])
    historical = torch.tensor([[0.0, 2.0], [6.0, 8.0]])
    assert recall_loss(own, historical).item() == pytest.approx((1 + 0) / 2)


def test_head_norm_is_not_squared_and_has_a_gradient_at_zero() -> None:
    head = nn.Linear(1, 2)
    with torch.no_grad():
        head.weight.copy_(torch.tensor([[1.0], [2.0]]))
        head.bias.copy_(torch.tensor([2.0, 4.0]))
    norm = head_norm(head)
    assert norm.item() == pytest.approx(5.0)  # sqrt(1 + 4 + 4 + 16)
    norm.backward()
    assert head.bias.grad is not None
    assert head.bias.grad.tolist() == pytest.approx([2 / 5, 4 / 5])
    nn.init.zeros_(head.weight), nn.init.zeros_(head.bias)
    head.zero_grad()
    head_norm(head).backward()
    assert head.weight.grad is not None
    assert torch.isfinite(head.weight.grad).all()


def test_pfps_lwc_with_both_switches_off_is_fedper(tmp_path: Path) -> None:
    keys: dict[str, Any] = {"rounds": 4, "participation": 0.5, "local_epochs": 2}
    fedper = federate(tmp_path, 6, method="fedper", **keys)
    off = federate(tmp_path, 6, method="pfps-lwc", pfps_lwc__recall=False, pfps_lwc__lightweight=False, **keys)
    assert equal(fedper, off)
    switches: list[dict[str, Any]] = [{"pfps_lwc__recall": False}, {"pfps_lwc__lightweight": False}]
    for switch in switches:
        assert not equal(fedper, federate(tmp_path, 6, method="pfps-lwc", **keys, **switch))


def test_the_historical_extractor_is_that_of_the_last_round_taken_part_in(tmp_path: Path) -> None:
    sent: dict[tuple[int, int], dict[str, np.ndarray]] = {}

    def tamper(message: Message, reply: Message) -> Message:
        if message.metadata.message_type == "train":
            key = (message.metadata.dst_node_id, int(message.metadata.group_id))
            sent[key] = from_record(reply.content.array_records["arrays"])
        return reply

    outcome = federate(tmp_path, 10, method="pfps-lwc", rounds=6, participation=0.3, tamper=tamper)
    last = next(m for m in reversed(outcome.grid.messages) if m.metadata.message_type == "train")
    missed = 0
    for node, context in outcome.grid.contexts.items():
        taken_part = kept(context).round
        client = standing(context, last)
        client.receive()
        if not taken_part:
            assert client._historical is None
            continue
        historical = {f"extractor.{name}": t.numpy() for name, t in client._historical.state_dict().items()}
        own = sent[node, taken_part]
        assert historical.keys() == own.keys()
        assert all(np.array_equal(historical[name], own[name]) for name in own)
        assert any(not np.array_equal(historical[name], client.received[name].numpy()) for name in own)
        missed += taken_part < 5
    assert missed >= 3


def test_recall_moves_the_received_extractor_towards_the_historical_one(tmp_path: Path) -> None:
    outcome = federate(tmp_path, 4, method="pfps-lwc", rounds=2, pfps_lwc__recall_epochs=5)
    message = next(m for m in reversed(outcome.grid.messages) if m.metadata.message_type == "train")
    client = standing(outcome.grid.contexts[1000], message)
    client.receive()
    target = client.training_features(client._historical)
    before = recall_loss(client.training_features(client.model.extractor), target)
    client.message |= {"round": 3}
    client.config = dataclasses.replace(client.config, local_epochs=0)
    client.train()  # without local epochs: the recall alone
    after = recall_loss(client.training_features(client.model.extractor), target)
    assert after < 0.8 * before


# FedCPD


def test_contrast_by_hand() -> None:
    prototypes = torch.tensor([[2.0, 0.0], [0.0, 3.0], [0.0, 0.0]])
    known = torch.tensor([True, True, False])
    features = torch.tensor([[5.0, 0.0], [1.0, 1.0]])
    # the first: cosines 1 and 0, over tau 0.5 logits 2 and 0; the second is of a class without a prototype
    loss = contrast_loss(features, torch.tensor([0, 2]), prototypes, known, 0.5)
    assert loss.item() == pytest.approx((math.log(math.exp(2) + 1) - 2) / 2)


def test_contrast_has_a_finite_gradient_with_unknown_classes() -> None:
    features = torch.rand(4, 3, generator=torch.Generator().manual_seed(0)).requires_grad_()
    known = torch.tensor([True, False, True])
    contrast_loss(features, torch.tensor([0, 1, 2, 1]), torch.eye(3), known, 0.1).backward()
    assert features.grad is not None
    assert torch.isfinite(features.grad).all()
    assert not features.grad[1].any()


def test_cbam_by_hand() -> None:
    block: Any = CBAM(1)
    for parameter in block.parameters():
        nn.init.zeros_(parameter)
    x = torch.tensor([[[[1.0, -2.0], [3.0, 4.0]]]])
    assert torch.allclose(block(x), x / 4)  # sigmoid(0) twice
    with torch.no_grad():
        block.squeeze.weight.fill_(1.0)
        block.excite.weight.fill_(0.5)
    # the mean 1.5 and the maximum 4 each pass the ReLU, times 0.5, summed: 2.75
    assert torch.allclose(block(x), x / (1 + math.exp(-2.75)) / 2)
    with torch.no_grad():
        block.excite.weight.fill_(0.0)
        block.spatial.weight[0, :, 3, 3] = torch.tensor([1.0, 2.0])
    # after the channel's half: mean and maximum over the one channel are the map itself, so 3 times half the map
    assert torch.allclose(block(x), x / 2 * torch.sigmoid(1.5 * x))


def test_cross_layer_fusion_by_hand() -> None:
    fusion: Any = CrossLayerFusion([1, 1], 1)
    for parameter in fusion.parameters():
        nn.init.zeros_(parameter)
    with torch.no_grad():
        for level in range(2):
            fusion.lateral[level].weight.fill_(1.0)
            fusion.enhance[level].weight[0, 0, 1, 1] = 2.0
            fusion.smooth[level].weight[0, 0, 1, 1] = 1.0
    low, high = torch.tensor([[[[1.0, 2.0], [3.0, 4.0]]]]), torch.tensor([[[[5.0]]]])
    fused = fusion([low, high])
    assert fused[0][0, 0].tolist() == [[8.0, 11.0], [14.0, 17.0]]  # 5 + x + 2 x
    assert fused[1].item() == 15.0  # no stage above
    assert [m.flatten().tolist() for m in fusion.unify([low, high])] == [[1.0, 2.0, 3.0, 4.0], [5.0]]


def test_distillation_is_the_sum_over_maps_of_the_mean_squared_error() -> None:
    student = [torch.tensor([[1.0, 3.0]]), torch.tensor([[2.0]])]
    teacher = [torch.tensor([[0.0, 0.0]]), torch.tensor([[5.0]])]
    assert distillation_loss(student, teacher).item() == pytest.approx((1 + 9) / 2 + 9)


@pytest.mark.parametrize(("raw", "channels"), [(False, (6, 6)), (True, (4, 8))])
def test_shapes_of_teacher_and_student_meet(raw: bool, channels: tuple[int, int]) -> None:
    blocks = Distillation([4, 8], 6, raw)
    initialise(blocks, torch.Generator().manual_seed(0))
    maps = [torch.rand(2, 4, 6, 5), torch.rand(2, 8, 3, 2)]
    student, teacher = blocks.student(maps), blocks.teacher(maps)
    assert [tuple(m.shape) for m in student] == [(2, channels[0], 6, 5), (2, channels[1], 3, 2)] * 2
    assert [m.shape for m in student] == [m.shape for m in teacher]


@pytest.mark.parametrize("turns", [True, False])
def test_fedcpd_with_all_off_is_fedrep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, turns: bool) -> None:
    keys = write_images(tmp_path / "data", 3) | {"local_epochs": 2}
    off: dict[str, Any] = {"fedcpd__distill": False, "fedcpd__align": False, "fedcpd__contrast": False}
    keys["fedcpd__every_batch"] = turns
    fedcpd = federate(tmp_path / "runs", 3, method="fedcpd", **keys, **off)
    monkeypatch.setattr(FedRep, "weighted", False)
    own: dict[str, Any] = {"fedrep__every_batch": turns, "fedrep__head_epochs": 2}
    assert equal(fedcpd, federate(tmp_path / "runs", 3, method="fedrep", **keys, **own))
    for switch in off:
        on = federate(tmp_path / "runs", 3, method="fedcpd", **keys, **(off | {switch: True}))
        assert not equal(fedcpd, on), switch
    assert not FedCPD.weighted


def test_fedcpd_keeps_its_blocks_and_trains_them(tmp_path: Path) -> None:
    keys = write_images(tmp_path / "data", 2)
    first, second = (federate(tmp_path / "runs", 2, method="fedcpd", rounds=n, **keys) for n in (1, 2))
    one, two = (kept(outcome.grid.contexts[1000]).load() for outcome in (first, second))
    name = f"memory.{BLOCKS}.fuse_features.smooth.0.weight"
    # in the first round there is no teacher, so nothing moves the blocks
    assert not torch.equal(one[name], two[name])
    up = {m.metadata.group_id: m for m in second.grid.messages if m.metadata.message_type == "train"}
    assert not any("distillation" in key for m in up.values() for key in m.content.array_records["arrays"])


# FedDFPA


def test_fusion_coefficients_by_hand() -> None:
    own, received = torch.tensor([0.8, 1.0, 0.0, 0.3]), torch.tensor([0.4, 0.0, 1.0, 0.9])
    measured = torch.tensor([True, True, True, False])
    got = fusion_coefficients(own, received, measured)
    expected = [1 / (1 + math.exp(-1 / 3)), 1 / (1 + math.exp(-1)), 1 / (1 + math.exp(1)), 0.5]
    assert got.tolist() == pytest.approx(expected)
    assert fusion_coefficients(torch.zeros(1), torch.zeros(1), torch.tensor([True])).item() == 0.5


def test_rows_of_own_classes_are_fused_and_the_others_stay() -> None:
    own, received = torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([[5.0, 6.0], [7.0, 8.0]])
    fused = fuse_rows(own, received, torch.tensor([0.25, 0.25]), torch.tensor([True, False]))
    assert fused.tolist() == [[4.0, 5.0], [3.0, 4.0]]
    bias = fuse_rows(own[:, 0], received[:, 0], torch.tensor([0.25, 0.5]), torch.tensor([True, True]))
    assert bias.tolist() == [4.0, 5.0]


def test_direction_by_hand() -> None:
    features = torch.tensor([[1.0, 0.0], [1.0, 1.0], [2.0, 2.0]])
    prototypes, known = torch.tensor([[0.0, 1.0], [3.0, 3.0], [9.0, 9.0]]), torch.tensor([True, True, False])
    # orthogonal 1, parallel 0, unknown class nothing
    loss = direction_loss(features, torch.tensor([0, 1, 2]), prototypes, known)
    assert loss.item() == pytest.approx(1 / 3, abs=1e-6)


def test_feddfpa_without_fusion_and_alignment_is_local(tmp_path: Path) -> None:
    off: dict[str, Any] = {
        "feddfpa__fusion": False,
        "feddfpa__align_global": False,
        "feddfpa__align_historical": False,
    }
    local = federate(tmp_path, method="local", rounds=3)
    feddfpa = federate(tmp_path, method="feddfpa", rounds=3, **off)
    assert equal(local, feddfpa)
    for switch in off:
        assert not equal(local, federate(tmp_path, method="feddfpa", rounds=3, **(off | {switch: True}))), switch
    assert not FedDFPA.weighted


def test_feddfpa_never_sends_its_extractor(tmp_path: Path) -> None:
    def tamper(message: Message, reply: Message) -> Message:
        for one in (message, reply):
            if message.metadata.message_type == "train":
                names = one.content.array_records["arrays"]
                assert all(name.startswith(("head.", "prototype.")) for name in names)
        return reply

    outcome = federate(tmp_path, method="feddfpa", tamper=tamper)
    # the head and the prototypes of two classes
    assert {c["bytes"]["up"] for line in outcome.history for c in line["clients"].values()} == {4 * (650 + 2 * 64)}


@pytest.mark.parametrize(("own", "starts"), [(True, 3), (False, 1)])
def test_feddfpa_starts_from_own_or_common_weights(tmp_path: Path, own: bool, starts: int) -> None:
    sent = set()

    def tamper(message: Message, reply: Message) -> Message:
        if message.metadata.message_type == "train":
            sent.add(from_record(reply.content.array_records["arrays"])["head.weight"].tobytes())
        return reply

    still: dict[str, Any] = {"lr": 1e-30, "momentum": 0.0, "weight_decay": 0.0, "feddfpa__fusion": False}
    federate(tmp_path, 3, method="feddfpa", rounds=1, tamper=tamper, feddfpa__own_start=own, **still)
    assert len(sent) == starts


def test_feddfpa_sends_the_prototypes_that_it_took_before_training(tmp_path: Path) -> None:
    sent: list[dict[str, np.ndarray]] = []

    def tamper(message: Message, reply: Message) -> Message:
        if message.metadata.message_type == "train" and message.metadata.dst_node_id == 1000:
            sent.append(from_record(reply.content.array_records["arrays"]))
        return reply

    outcome = federate(tmp_path, method="feddfpa", rounds=1, tamper=tamper)
    client: Any = Request(outcome.grid.contexts[1000]).client()
    client.begin({"num-classes": 10, "head-layers": 1, "round": 1})
    client.model = client.initial_model()
    for name, prototype in client.local_prototypes().items():
        assert np.array_equal(prototype.numpy(), sent[0][name])
    left = kept(outcome.grid.contexts[1000]).load()
    assert all(np.array_equal(left[f"memory.{name}"].numpy(), sent[0][name]) for name in client.local_prototypes())


# UA-PDFL


def test_divergence_by_hand() -> None:
    p, q = torch.tensor([0.5, 0.5]), torch.tensor([0.25, 0.75])
    forward = 0.5 * math.log(2) + 0.5 * math.log(2 / 3)
    backward = 0.25 * math.log(0.5) + 0.75 * math.log(1.5)
    assert divergence(p, q, "symmetric-kl").item() == pytest.approx((forward + backward) / 2)
    assert divergence(q, p, "symmetric-kl").item() == pytest.approx((forward + backward) / 2)
    m = (0.375, 0.625)
    to_m = 0.5 * math.log(0.5 / m[0]) + 0.5 * math.log(0.5 / m[1])
    from_q = 0.25 * math.log(0.25 / m[0]) + 0.75 * math.log(0.75 / m[1])
    assert divergence(p, q, "jensen-shannon").item() == pytest.approx((to_m + from_q) / 2)
    assert divergence(p, p, "symmetric-kl").item() == 0
    assert math.isfinite(divergence(torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0]), "symmetric-kl").item())


def test_auxiliary_term_and_weighted_mean_by_hand() -> None:
    own, average = torch.tensor([1.0, 2.0]), torch.tensor([0.0, 4.0])
    assert auxiliary_term(own, average, "sum").item() == pytest.approx(5.0)
    assert auxiliary_term(own, average, "mean").item() == pytest.approx(2.5)
    assert weighted_mean([torch.tensor([1.0, 0.0]), torch.tensor([4.0, 3.0])], [2, 1]).tolist() == [2.0, 1.0]


STILL: dict[str, Any] = {
    "lr": 1e-30,
    "momentum": 0.0,
    "weight_decay": 0.0,
    "local_epochs": 1,
    "ua_pdfl__mu": 0.0,
    "ua_pdfl__own_start": True,
}


class Relay:
    """What clients sent and were sent in a run in which training moves nothing, so that sending shows receiving."""

    def __init__(self, path: Path, clients: int = 5, **keys: Any) -> None:
        self.sent: dict[tuple[int, int], dict[str, np.ndarray]] = {}
        self.told: dict[tuple[int, int], Any] = {}
        self.asked: dict[tuple[int, int], dict[str, np.ndarray]] = {}
        self.outcome = federate(path, clients, method="ua-pdfl", tamper=self._see, **(STILL | keys))

    def _see(self, message: Message, reply: Message) -> Message:
        kind = message.metadata.message_type
        if kind in ("train", "query.plan"):
            key = (message.metadata.dst_node_id, int(message.metadata.group_id))
            arrays = from_record(message.content.array_records["arrays"])
            if kind == "train":
                self.told[key] = (arrays, message.content.config_records["config"])
                self.sent[key] = from_record(reply.content.array_records["arrays"])
            else:
                self.asked[key] = arrays
        return reply

    def peers(self, node: int, server_round: int) -> list[int]:
        """Return the nodes whose representations were sent to ``node``, in order, and check they are last round's."""
        arrays, config = self.told[node, server_round]
        found = []
        for i in range(len(config["samples"])):
            (peer,) = [
                n
                for (n, r), sent in self.sent.items()
                if r == server_round - 1 and np.array_equal(sent["auxiliary"], arrays[f"{i}.auxiliary"])
            ]
            assert np.array_equal(
                self.asked[node, server_round][f"{i}.unit"], self.sent[peer, server_round - 1]["unit"]
            )
            found.append(peer)
        return found


def test_ua_pdfl_below_every_divergence_is_a_decentralised_fedper(tmp_path: Path) -> None:
    relay = Relay(tmp_path, ua_pdfl__th=-1.0, ua_pdfl__n_com=2)
    for node in relay.outcome.grid.contexts:
        before, after = relay.sent[node, 1], relay.sent[node, 2]
        peers = relay.peers(node, 2)
        assert len(set(peers)) == 2
        assert node not in peers
        config = relay.told[node, 2][1]
        own = len(Request(relay.outcome.grid.contexts[node]).data.train)
        weights = np.array([own, *config["samples"]], float)
        for name in (n for n in before if n.startswith(("extractor.", "head."))):
            if name.startswith("head."):
                assert np.array_equal(after[name], before[name])
            else:
                stack = np.stack([before[name], *(relay.sent[p, 1][name] for p in peers)]).astype(float)
                assert np.allclose(after[name], np.average(stack, axis=0, weights=weights), rtol=0, atol=1e-7)
                assert not np.array_equal(after[name], before[name])


def test_ua_pdfl_above_every_divergence_is_client_wise_dropout_alone(tmp_path: Path) -> None:
    relay = Relay(tmp_path, ua_pdfl__th=float("inf"), ua_pdfl__n_com=3)
    model = 4 * ((64 * 128 + 128) + (128 * 64 + 64) + (64 * 10 + 10))
    for node, context in relay.outcome.grid.contexts.items():
        peers, after = relay.peers(node, 2), relay.sent[node, 2]
        copied = [p for p in peers if all(np.array_equal(after[n], relay.sent[p, 1][n]) for n in after)]
        assert len(copied) == 1
        # three representations of 10 classes and, the head being two layers, 128 features; one model instead of three
        name = str(context.node_config["partition-id"])
        down = relay.outcome.history[1]["clients"][name]["bytes"]["down"]
        assert down == 3 * 4 * (10 + 128) + model
        assert relay.outcome.history[1]["clients"][name]["bytes"]["up"] == model + 4 * (10 + 128)


def test_ua_pdfl_takes_a_peers_model_only_where_all_are_near(tmp_path: Path) -> None:
    first = Relay(tmp_path, clients=6, rounds=1)
    units = {node: torch.from_numpy(sent["unit"]).exp() for (node, _), sent in first.sent.items()}
    apart = {(a, b): divergence(units[a], units[b], "symmetric-kl").item() for a, b in itertools.permutations(units, 2)}
    # Below it lie all of one client's divergences, and some of the others'.
    th = min(max(value for (a, _), value in apart.items() if a == node) for node in units)
    relay = Relay(tmp_path, clients=6, ua_pdfl__th=th * (1 + 1e-5), ua_pdfl__n_com=5)
    some = 0
    for node in relay.outcome.grid.contexts:
        values = [value for (a, _), value in apart.items() if a == node]
        near = [value <= th for value in values]
        replaced = relay.told[node, 2][1]["replace"]
        assert (replaced >= 0) == all(near)
        some += any(near) and not all(near)
    assert some > 0


def test_ua_pdfl_sends_only_what_was_asked_for(tmp_path: Path) -> None:
    # A threshold amid the divergences: some peers are near and some far, and only heads of the near ones may travel.
    first = Relay(tmp_path, clients=6, rounds=1)
    units = [torch.from_numpy(sent["unit"]).exp() for sent in first.sent.values()]
    apart = [divergence(p, q, "symmetric-kl").item() for p, q in itertools.combinations(units, 2)]
    th = float(np.median(apart))
    relay = Relay(tmp_path, clients=6, ua_pdfl__th=th, ua_pdfl__n_com=4, ua_pdfl__client_dropout=False)
    heads = 0
    for node in relay.outcome.grid.contexts:
        arrays, _ = relay.told[node, 2]
        own = torch.from_numpy(relay.sent[node, 1]["unit"]).exp()
        for i, peer in enumerate(relay.peers(node, 2)):
            came = {name.split(".")[1] for name in arrays if name.startswith(f"{i}.")}
            other = torch.from_numpy(relay.sent[peer, 1]["unit"]).exp()
            near = divergence(own, other, "symmetric-kl").item() < th
            assert came == ({"auxiliary", "extractor", "head"} if near else {"auxiliary", "extractor"})
            heads += near
    assert 0 < heads < 24
    alone = Relay(tmp_path, ua_pdfl__layer_personalization=False, ua_pdfl__client_dropout=False)
    for node in alone.outcome.grid.contexts:
        assert not alone.told[node, 2][0]


def test_ua_pdfl_weighs_no_peer_by_what_is_no_number_of_samples(tmp_path: Path) -> None:
    """A weight below zero would make a mean of any size, which the client would keep."""
    keys: dict[str, Any] = {"ua_pdfl__client_dropout": False, "local_epochs": 1, "rounds": 2}
    outcome = federate(tmp_path, 3, method="ua-pdfl", **keys)
    message = next(
        m
        for m in outcome.grid.messages
        if m.metadata.message_type == "train" and m.content.config_records["config"]["round"] == 2
    )
    config, context = message.content.config_records["config"], outcome.grid.contexts[message.metadata.dst_node_id]
    config["round"] = 3
    line = "the server's message must have a number of samples, above 0, of each peer"
    for samples in ([-33.9999, 1.0], [-33, 30], [0, 30], [True, True], [30]):
        config["samples"] = samples
        assert app(message, context).content.config_records["error"]["reason"] == line, samples
        assert kept(context).round == 2
    config["samples"] = [30, 30]
    assert "arrays" in app(message, context).content


def test_ua_pdfl_with_both_switches_off_is_local(tmp_path: Path) -> None:
    off: dict[str, Any] = {"ua_pdfl__layer_personalization": False, "ua_pdfl__client_dropout": False}
    keys: dict[str, Any] = {"rounds": 3, "head_layers": 1}
    local = federate(tmp_path, method="local", **keys)
    assert equal(local, federate(tmp_path, method="ua-pdfl", **keys, **off))
    for switch in off:
        on = federate(tmp_path, method="ua-pdfl", ua_pdfl__th=10.0, **keys, **(off | {switch: True}))
        assert not equal(local, on), switch


def test_ua_pdfl_starts_from_own_or_common_weights(tmp_path: Path) -> None:
    name = "extractor.fc1.weight"
    own = Relay(tmp_path, rounds=1, clients=3)
    assert len({relay[name].tobytes() for relay in own.sent.values()}) == 3
    common = Relay(tmp_path, rounds=1, clients=3, ua_pdfl__own_start=False)
    assert len({relay[name].tobytes() for relay in common.sent.values()}) == 1


def test_ua_pdfl_cuts_at_the_linear_layers(tmp_path: Path) -> None:
    keys = write_images(tmp_path / "data", 2)
    outcome = federate(tmp_path / "runs", 2, method="ua-pdfl", rounds=1, **keys)
    names = {name for name in models_of(outcome)[0] if name.startswith(f"{MODEL}head.")}
    assert names == {f"{MODEL}head.{part}" for part in ("fc1.weight", "fc1.bias", "fc.weight", "fc.bias")}
    fedper = federate(tmp_path / "runs", 2, method="fedper", rounds=1, **keys)
    assert {n for n in models_of(fedper)[0] if n.startswith(f"{MODEL}head.")} == {
        f"{MODEL}head.weight",
        f"{MODEL}head.bias",
    }


def test_a_request_for_a_peer_that_is_not_there_is_refused(tmp_path: Path) -> None:
    def tamper(message: Message, reply: Message) -> Message:
        if message.metadata.message_type == "query.plan" and message.metadata.dst_node_id == 1000:
            reply.content["plan"] = ConfigRecord({"replace": 7, "extractors": [], "heads": []})
        return reply

    outcome = federate(tmp_path, 4, method="ua-pdfl", tamper=tamper)
    assert outcome.history[1]["refused"] == [
        {"client": "0", "reason": "the client asked for a peer that is not among its 3"}
    ]


# The aggregation of each


@pytest.mark.parametrize(
    ("method", "weighted"),
    [
        ("fedper", True),
        ("pfps-lwc", True),
        ("pfakd", False),
        ("fedcpd", False),
        ("feddfpa", False),
        ("fedproto", False),
    ],
)
def test_what_is_sent_next_is_the_mean_of_what_came(tmp_path: Path, method: str, weighted: bool) -> None:
    came: list[tuple[int, dict[str, np.ndarray]]] = []
    went: list[dict[str, np.ndarray]] = []

    def tamper(message: Message, reply: Message) -> Message:
        if message.metadata.message_type == "train":
            if message.metadata.group_id == "1":
                samples: Any = reply.content.metric_records["metrics"]["num-examples"]
                came.append((samples, from_record(reply.content.array_records["arrays"])))
            else:
                went.append(from_record(message.content.array_records["arrays"]))
        return reply

    federate(tmp_path, 4, method=method, tamper=tamper, **ON_MLP.get(method, {}))
    assert len({samples for samples, _ in came}) > 1
    names = {name for _, arrays in came for name in arrays}
    assert set(went[0]) == names
    for name in names:
        weights = [samples if weighted else 1 for samples, arrays in came if name in arrays]
        mean = np.average([arrays[name].astype(float) for _, arrays in came if name in arrays], axis=0, weights=weights)
        assert np.allclose(went[0][name], mean, rtol=0, atol=1e-6), name
