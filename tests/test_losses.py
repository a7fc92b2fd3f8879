"""Each method's loss against the same loss computed by hand, on clients in the middle of a run."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from flwr.app import Message
from torch import Tensor

from client_app.batches import Batch, normalise
from client_app.client import MEMORY, MODEL
from client_app.methods.fedcpd import contrast_loss, distillation_loss
from client_app.methods.pfps_lwc import head_norm
from client_app.training import Phase
from common.errors import ConfigError
from common.wire import from_record
from models import SplitModel
from strategies.fedcpd import BLOCKS, Distillation
from tests.harness import Outcome, federate, kept, standing
from tests.test_papers import write_images

NODE = 1000


class Halted:
    """A client of a finished run that has received the last round's message again and stands before its training.

    ``kept`` are the tensors with which it came into the round; ``phases`` what it was about to train last, with which
    loss, and ``before`` what it was about to train before that.
    """

    def __init__(self, outcome: Outcome, **parameters: Any) -> None:
        context = outcome.grid.contexts[NODE]
        self.kept = kept(context).load()
        self.message = next(
            m
            for m in reversed(outcome.grid.messages)
            if m.metadata.message_type == "train" and m.metadata.dst_node_id == NODE
        )
        self.client = standing(context, self.message)
        if parameters:
            self.client.parameters = replace(self.client.parameters, **parameters)
        self.client.receive()
        self.phases: list[Phase] = []
        self.before: list[Phase] = []
        self.client.run_alternating = self._halt  # what trains; everything before it is real
        self.client.train()

    def _halt(self, epochs: int, phases: list[Phase], **_: Any) -> float:
        self.before, self.phases = self.phases, phases
        return 0.0

    def batch(self) -> Batch:
        train = self.client.data.train
        index = torch.tensor([3, 1, 4, 1, 5])
        return Batch(normalise(train.x[index]), train.y[index], index)

    def shift(self) -> None:
        """Move the model away from where it stands, so that no teacher equals it."""
        with torch.no_grad():
            for parameter in self.client.model.parameters():
                parameter += 0.01 * torch.sign(parameter)

    def model_with(self, tensors: dict[str, Tensor]) -> SplitModel:
        """Return a model that has ``tensors`` where they say so, and the kept ones elsewhere."""
        model: SplitModel = self.client.initial_model().eval()
        own = {n.removeprefix(MODEL): t for n, t in self.kept.items() if n.startswith(MODEL)}
        model.load_state_dict(own | {n: t for n, t in tensors.items() if n in own})
        return model

    def cross_entropy(self, batch: Batch) -> Tensor:
        return F.cross_entropy(self.client.model(batch.x), batch.y)


def test_pfps_lwc(tmp_path: Path) -> None:
    outcome = federate(tmp_path, method="pfps-lwc", rounds=3, lr_decay=0.5)
    halted = Halted(outcome, recall_lr=0.4)
    loss, batch = halted.phases[-1].loss, halted.batch()
    expected = halted.cross_entropy(batch) + 0.02 * head_norm(halted.client.model.head)
    assert loss(batch).item() == pytest.approx(expected.item(), rel=1e-6)
    # The extractor recalls at its own rate, of round 3 a quarter is left; the rest has the round's.
    (recall,) = halted.before
    assert {id(p) for p in recall.parameters} == {id(p) for p in halted.client.model.extractor.parameters()}
    assert recall.lr == pytest.approx(0.1)
    assert halted.phases[-1].lr is None
    assert Halted(outcome).before[0].lr is None


def test_pfakd_distils_from_the_extractor_that_it_received(tmp_path: Path) -> None:
    halted = Halted(federate(tmp_path, method="pfakd", rounds=3))
    halted.shift()
    loss, batch = halted.phases[-1].loss, halted.batch()
    teacher = halted.model_with(halted.client.received)
    difference = halted.client.model.features(batch.x) - teacher.features(batch.x)
    expected = halted.cross_entropy(batch) + difference.square().mean()
    assert loss(batch).item() == pytest.approx(expected.item(), rel=1e-5)


@pytest.mark.parametrize("maps", ["unified", "raw"])
def test_fedcpd(tmp_path: Path, maps: str) -> None:
    keys = write_images(tmp_path / "data", 2) | {"fedcpd__teacher_maps": maps}
    weights = {"alpha": 0.3, "beta": 0.7, "gamma": 1.3, "tau": 0.2}
    halted = Halted(federate(tmp_path / "runs", 2, method="fedcpd", rounds=3, **keys), **weights)
    halted.shift()
    client, batch = halted.client, halted.batch()
    with torch.no_grad():
        for parameter in client.networks[BLOCKS].parameters():
            parameter += 0.1  # as training does, which the teacher's are no part of
    (head, first), (rest, second) = ((phase.parameters, phase.loss) for phase in halted.phases)
    assert {id(p) for p in head} == {id(p) for p in client.model.head.parameters()}
    assert {id(p) for p in client.model.extractor.parameters()} < {id(p) for p in rest}
    assert first(batch).item() == pytest.approx(halted.cross_entropy(batch).item())
    output, student = client.model.extractor.stages(batch.x)
    features = output.flatten(1)
    prototypes = torch.stack([client.received[f"prototype.{c}"] for c in range(3)])
    align = (features - prototypes[batch.y]).square().sum(1).mean()
    contrast = contrast_loss(features, batch.y, prototypes, torch.ones(3, dtype=torch.bool), 0.2)
    # the teacher: what the client kept, extractor and blocks
    blocks = Distillation([32, 64], 32, maps == "raw")
    blocks.load_state_dict({n.removeprefix(f"{MEMORY}{BLOCKS}."): t for n, t in halted.kept.items() if BLOCKS in n})
    _, target = halted.model_with({}).extractor.stages(batch.x)
    if maps == "raw":
        targets = [*target, *(block(x) for block, x in zip(blocks.attention, target, strict=True))]
    else:
        targets = blocks.teacher(target)
    blocks_now = client.networks[BLOCKS]
    assert isinstance(blocks_now, Distillation)
    distillation = distillation_loss(blocks_now.student(student), targets)
    expected = halted.cross_entropy(batch) + 0.3 * align + 0.7 * contrast + 1.3 * distillation
    assert distillation > 0
    assert second(batch).item() == pytest.approx(expected.item(), rel=1e-5)


def keeping(sent: dict[int, dict[str, np.ndarray]]) -> Callable[[Message, Message], Message]:
    """Return a ``tamper`` that changes nothing and puts what each node sends in training into ``sent``."""

    def tamper(message: Message, reply: Message) -> Message:
        if message.metadata.message_type == "train":
            sent[message.metadata.dst_node_id] = from_record(reply.content.array_records["arrays"])
        return reply

    return tamper


@pytest.mark.parametrize("method", ["fedcpd", "fedproto"])
def test_prototypes_are_sent_as_they_are_after_training(tmp_path: Path, method: str) -> None:
    sent: dict[int, dict[str, np.ndarray]] = {}
    keys = write_images(tmp_path / "data", 2)
    halted = Halted(federate(tmp_path / "runs", 2, method=method, tamper=keeping(sent), **keys))
    train = halted.client.data.train
    features = halted.model_with({}).features(normalise(train.x))
    for label in range(3):
        mean = features[train.y == label].mean(0).detach().numpy()
        assert np.allclose(sent[NODE][f"prototype.{label}"], mean, atol=1e-5)


def test_feddfpa_fuses_by_accuracies_of_the_own_extractor(tmp_path: Path) -> None:
    # Digits with a mild split: some classes are missing, others differ in accuracy with the own and the received head.
    outcome = federate(tmp_path, 6, method="feddfpa", partition="dirichlet", alpha=0.2, min_samples=60, local_epochs=2)
    halted = Halted(outcome)
    client = halted.client
    own, received = halted.model_with({}), halted.model_with(client.received)
    x, y = normalise(client.data.validation.x), client.data.validation.y
    has = set(client.data.train.y.tolist())
    assert 1 < len(has) < 10
    fused = dict(client.model.head.named_parameters())
    coefficients = set()
    for label in range(10):
        if label not in has:
            weight = 1.0
        elif not (y == label).any():
            weight = 0.5
        else:
            mine, theirs = (((m(x).argmax(1) == y) & (y == label)).sum() / (y == label).sum() for m in (own, received))
            weight = torch.sigmoid((mine - theirs) / (mine + theirs + 1e-8)).item()
        coefficients.add(round(weight, 4))
        for name, row in fused.items():
            mine, theirs = own.head.state_dict()[name][label], client.received[f"head.{name}"][label]
            assert torch.allclose(row[label], weight * mine + (1 - weight) * theirs, atol=1e-6), label
    assert len(coefficients) > 2
    extractor = {n: t for n, t in client.model.state_dict().items() if n.startswith("extractor.")}
    assert all(torch.equal(t, halted.kept[MODEL + n]) for n, t in extractor.items())


def test_feddfpa(tmp_path: Path) -> None:
    halted = Halted(federate(tmp_path, method="feddfpa", rounds=3))
    halted.shift()
    loss, batch = halted.phases[-1].loss, halted.batch()
    features = halted.client.model.features(batch.x)
    labels = batch.y.tolist()
    received = torch.stack([halted.client.received[f"prototype.{c}"] for c in labels])
    historical = torch.stack([halted.kept[f"{MEMORY}prototype.{c}"] for c in labels])
    direction = (1 - F.cosine_similarity(features, historical)).mean()
    expected = halted.cross_entropy(batch) + (features - received).square().mean() + 0.5 * direction
    assert loss(batch).item() == pytest.approx(expected.item(), rel=1e-5)
    # what it keeps for the next round are the prototypes of this round's start, not those of the round before
    new = halted.client.memory["prototype." + str(labels[0])]
    assert not torch.equal(new, halted.kept[f"{MEMORY}prototype.{labels[0]}"])


@pytest.mark.parametrize("after", [False, True])
def test_feddfpa_takes_prototypes_before_or_after_training(tmp_path: Path, after: bool) -> None:
    sent: dict[int, dict[str, np.ndarray]] = {}
    outcome = federate(tmp_path, method="feddfpa", tamper=keeping(sent), feddfpa__prototypes_after_training=after)
    halted = Halted(outcome)
    train, trained = halted.client.data.train, halted.model_with({})
    for label in set(train.y.tolist()):
        mean = trained.features(normalise(train.x[train.y == label])).mean(0).detach().numpy()
        assert np.allclose(sent[NODE][f"prototype.{label}"], mean, atol=1e-5) == after
        assert np.array_equal(halted.kept[f"{MEMORY}prototype.{label}"], sent[NODE][f"prototype.{label}"])


def test_feddfpa_does_not_fuse_a_head_of_several_layers(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="head-layers = 2: feddfpa fuses the rows of one layer"):
        federate(tmp_path, method="feddfpa", head_layers=2)


@pytest.mark.parametrize("model", ["mlp", pytest.param("resnet18", marks=pytest.mark.thorough)])
def test_ua_pdfl(tmp_path: Path, model: str) -> None:
    small: dict[str, Any] = {"max_samples": 60, "local_epochs": 1} if model == "resnet18" else {}
    outcome = federate(tmp_path, 3, method="ua-pdfl", model=model, ua_pdfl__th=-1.0, ua_pdfl__mu=1e-6, **small)
    halted = Halted(outcome, mu=0.2)
    client, batch = halted.client, halted.batch()
    loss = halted.phases[-1].loss
    ones = torch.ones(1, 1, 8, 8)
    with torch.no_grad():
        own = halted.model_with({}).features(ones)[0]
    average = (own + client.received["0.auxiliary"] + client.received["1.auxiliary"]) / 3
    assert torch.allclose(client._average, average, atol=1e-5)
    before = client.copy_tensors()
    # The batch comes first, in training mode, and moves the running statistics that the unit tensor then meets.
    client.model.train()
    cross_entropy = halted.cross_entropy(batch)
    client.model.eval()
    term = (client.model.features(ones)[0] - average).square().sum()
    gradients = torch.autograd.grad(term, list(client.model.extractor.parameters()))
    assert any(gradient.any() for gradient in gradients)
    client.model.train()
    client.model.load_state_dict(before)
    found = loss(batch)
    assert found.item() == pytest.approx((cross_entropy + 0.2 * term).item(), rel=1e-4)
    # the term reaches the weights
    client.model.zero_grad()
    found.backward()
    with_term = [p.grad.clone() for p in client.model.extractor.parameters()]
    client.model.zero_grad()
    client.model.load_state_dict(before)
    halted.cross_entropy(batch).backward()
    alone = [p.grad for p in client.model.extractor.parameters()]
    for w, a, g in zip(with_term, alone, gradients, strict=True):
        assert torch.allclose(w, a + 0.2 * g, rtol=1e-3, atol=1e-4)


def test_a_phase_freezes_what_is_not_its_own(tmp_path: Path) -> None:
    halted = Halted(federate(tmp_path, method="fedrep", fedrep__every_batch=True))
    client, seen = halted.client, []

    def spy(loss: Any) -> Any:
        def watched(batch: Batch) -> Tensor:
            parts = (client.model.head, client.model.extractor)
            seen.append(tuple({p.requires_grad for p in part.parameters()} for part in parts))
            value: Tensor = loss(batch)
            return value

        return watched

    del client.run_alternating
    client.run_alternating(1, [replace(phase, loss=spy(phase.loss)) for phase in halted.phases])
    assert seen[:4] == [({True}, {False}), ({False}, {True})] * 2
