"""Methods by what becomes of the head: FedPAC combines heads, FedGH's server trains one, GPFL has a valve before it."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict
from safetensors.torch import load_file
from torch import Tensor, nn

from client_app.app import Request, app
from client_app.batches import Batch, normalise
from client_app.client import MEMORY, MODEL, FloretClient
from client_app.methods.gpfl import CONTEXT, magnitude_loss, personal_context
from client_app.methods.local import Local
from client_app.serving import load_personal
from client_app.state import FileStore
from common.errors import ConfigError, FloretError
from common.seeds import torch_generator
from common.sgd import Sgd
from common.tensors import NamedArrays
from common.wire import from_record
from models import build_model
from strategies import fedpac
from strategies.core.simplex import smallest_combination
from strategies.fedgh import CLIP, FedGH, train_head
from strategies.fedpac import class_shares, combination_weights, head_variance
from strategies.gpfl import EMBEDDINGS, VALVE, ConditionalValve
from tests.harness import EXTRACTOR, HEAD, Outcome, checkpointed, federate, kept, standing
from tests.test_keys import last_train
from tests.test_losses import NODE, Halted
from tests.test_methods import arrays_of, same
from tests.test_papers import write_images
from tests.test_resume import CLIENTS, assert_same, crash

Exchange = list[tuple[int, str, NamedArrays, NamedArrays]]


def exchanged(tmp_path: Path, clients: int = 4, **keys: Any) -> tuple[Outcome, Exchange]:
    """Return a run, and of each training in order: round, client, what went down, what came up."""
    found: Exchange = []

    def see(message: Message, reply: Message) -> Message:
        if message.metadata.message_type == "train":
            down, up = (from_record(m.content.array_records["arrays"]) for m in (message, reply))
            found.append((int(message.metadata.group_id), str(message.metadata.dst_node_id - 1000), down, up))
        return reply

    return federate(tmp_path, clients, tamper=see, **keys), found


def states(outcome: Outcome) -> list[dict[str, Tensor]]:
    return [kept(context).load() for context in outcome.grid.contexts.values()]


def equal(one: list[dict[str, Tensor]], other: list[dict[str, Tensor]]) -> bool:
    """Compare what clients keep, bit for bit."""
    return all(
        a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
        for a, b in zip(one, other, strict=True)
    )


def part(arrays: NamedArrays, prefix: str) -> NamedArrays:
    return {name: array for name, array in arrays.items() if name.startswith(prefix)}


# The weights of a combination


def test_a_combination_by_hand() -> None:
    # a^2 + 3 (1 - a)^2 is smallest at a = 3 / 4
    for start in (0, 1):
        assert smallest_combination(np.diag([1.0, 3.0]), start) == pytest.approx([0.75, 0.25])
    # the points 1, 2 and 3 on a line: the nearest to zero is a corner
    points = np.array([[1.0], [2.0], [3.0]])
    assert smallest_combination(points @ points.T, 2).tolist() == [1, 0, 0]
    # those of the points (1, 1), (1, -2), (5, 0): (1, 0) is between the first two
    points = np.array([[1.0, 1.0], [1.0, -2.0], [5.0, 0.0]])
    assert smallest_combination(points @ points.T, 2) == pytest.approx([2 / 3, 1 / 3, 0])


def test_as_good_as_any_other_is_the_one_to_begin_with() -> None:
    assert smallest_combination(np.zeros((3, 3)), 1).tolist() == [0, 1, 0]
    assert smallest_combination(np.array([[2.0]]), 0).tolist() == [1]
    # two points that are the same: one of them
    assert smallest_combination(np.ones((2, 2)), 1).tolist() == [0, 1]


def forms(count: int, sides: int) -> list[np.ndarray]:
    """Return positive semidefinite forms of all kinds: of full and low rank, well and badly scaled."""
    rng = np.random.default_rng(sides)
    found = []
    for i in range(count):
        points = rng.normal(size=(sides, 1 + i % (sides + 2))) * 10 ** rng.uniform(-4, 4)
        own = rng.uniform(0, 1, sides) * (rng.random(sides) < 0.7) * 10 ** rng.uniform(-4, 4)
        found.append(points @ points.T + np.diag(own))
    return found


def test_no_combination_on_a_grid_is_better() -> None:
    steps = np.arange(0, 1.001, 0.02)
    grid = np.array([[a, b, 1 - a - b] for a in steps for b in steps if a + b <= 1 + 1e-9])
    for form in forms(60, 3):
        weights = smallest_combination(form, 0)
        best = np.einsum("ki,ij,kj->k", grid, form, grid).min()
        assert weights @ form @ weights <= best * (1 + 1e-9) + 1e-12 * form.max()


def test_a_form_that_rounding_spoils_has_a_combination_all_the_same() -> None:
    # Means and energies that three clients of six can send, nine orders of magnitude apart.
    rng = np.random.default_rng(3)
    for _ in range(1000):
        means, spread = np.zeros((6, 20)), np.zeros(6)
        means[1] = (rng.normal(size=20) * 10.0 ** rng.uniform(-12, -7)).astype(np.float32)
        spread[[0, 3]], spread[1] = 10.0 ** rng.uniform(-37, -25, 2), 10.0 ** rng.uniform(-12, -7)
        for i in (2, 4, 5):
            means[i], spread[i] = rng.normal(size=20) * 1.15, 10.0 ** rng.uniform(-4, -1)
        weights = combination_weights(spread, means)
        assert (weights >= 0).all()
        assert weights.sum(1) == pytest.approx(np.ones(6))


@pytest.mark.parametrize("sides", [5, 40])
def test_a_combination_meets_the_conditions_for_a_minimum(sides: int) -> None:
    for form in forms(30, sides):
        weights = smallest_combination(form, 1)
        assert weights.min() >= 0
        assert weights.sum() == pytest.approx(1)
        slopes = form @ weights
        # no slope is below the value, and where there is weight it is the value
        gap = 1e-9 * np.abs(form).max()
        assert slopes.min() >= weights @ slopes - gap
        assert np.abs(slopes[weights > 0] - weights @ slopes).max() <= gap


# FedPAC


def test_variance_of_a_head_by_hand() -> None:
    # two samples of class 0, (1, 0) and (3, 0), one of class 1, (0, 3): the mean square is 19 / 3
    # 2/3 of (2, 0), 1/3 of (0, 3), nothing of class 2; 2/3 * 5 + 1/3 * 9 less 4/9 * 4 + 1/9 * 9, over 3 samples
    moments = np.array([[4 / 3, 0.0], [0.0, 1.0], [0.0, 0.0]])
    assert head_variance(19 / 3, moments, 3) == pytest.approx((19 / 3 - 16 / 9 - 1) / 3)


def test_a_variance_is_never_negative() -> None:
    # one sample: rounding on the way may have made the moments larger than their energy
    assert head_variance(4.0, np.array([[2.001, 0.0]]), 1) == 0
    with pytest.raises(FloretError, match=r"its means have the square 9, more than its energy of 4 allows"):
        head_variance(4.0, np.array([[3.0, 0.0]]), 1)
    with pytest.raises(FloretError, match="more than its energy of -1 allows"):
        head_variance(-1.0, np.zeros((1, 2)), 1)
    with pytest.raises(FloretError, match="the square inf"):
        head_variance(3e38, np.full((40, 40), 1e200), 1)


def test_combination_weights_by_hand() -> None:
    # h are 0 and 2, V 1 and 3: client 0 minimises a^2 + (3 + 4) b^2, client 1 (1 + 4) a^2 + 3 b^2
    weights = combination_weights(np.array([1.0, 3.0]), np.array([[0.0], [2.0]]))
    assert weights == pytest.approx(np.array([[7 / 8, 1 / 8], [3 / 8, 5 / 8]]))
    # a weight of 1 / 2001 is none
    far = combination_weights(np.array([1.0, 1.0]), np.array([[0.0], [2000.0**0.5]]))
    assert far.tolist() == [[1, 0], [0, 1]]


def test_a_variance_that_is_made_up_costs_the_others_nothing() -> None:
    variances, h = np.array([1e18, 1.0, 3.0, 2.0]), np.array([[0.0], [0.1], [0.2], [0.3]])
    rest = combination_weights(variances[1:], h[1:])
    weights = combination_weights(variances, h)
    assert weights[1:, 1:] == pytest.approx(rest, abs=1e-3)
    assert rest.max() < 0.6


def test_combination_weights_are_those_of_the_formula() -> None:
    rng = np.random.default_rng(1)
    variances, h = rng.uniform(0.1, 2, 6), rng.normal(size=(6, 3, 4)) / 2 + 50
    weights = combination_weights(variances, h.reshape(6, -1))
    for i in range(6):
        form = np.diag(variances)
        for j in range(6):
            for k in range(6):
                form[j, k] += sum((h[i, c] - h[j, c]) @ (h[i, c] - h[k, c]) for c in range(3))
        best = smallest_combination(form, 0)
        assert weights[i] == pytest.approx(np.where(best < 1e-3, 0, best) / best[best >= 1e-3].sum())
    assert len(np.unique(weights.round(6))) > 10


def test_shares_of_classes() -> None:
    prototypes = {f"prototype.{c}": np.zeros(2, np.float32) for c in (0, 2)}
    assert class_shares(np.array([1, 0, 3]), prototypes) == {"prototype.0": 0.25, "prototype.2": 0.75}
    for counts in ([0, 0, 0], [-1, 2, 3], [2**62, 2**62, 2**62]):
        with pytest.raises(FloretError, match="its counts are no numbers of samples"):
            class_shares(np.array(counts), prototypes)
    with pytest.raises(FloretError, match=r"it sent prototype\.2 and counts no sample of that class"):
        class_shares(np.array([1, 1, 0]), prototypes)


REP: dict[str, Any] = {"lr": 0.02, "local_epochs": 2, "rounds": 3, "lr_decay": 0.5}
AS_REP: dict[str, Any] = {"fedpac__head_lr": 0.02, "fedpac__head_epochs": 2}
OFF: dict[str, Any] = {"fedpac__align": False, "fedpac__combine": False}


@pytest.mark.thorough
def test_fedpac_with_both_switches_off_is_fedrep(tmp_path: Path) -> None:
    fedrep = federate(tmp_path, method="fedrep", fedrep__head_epochs=2, **REP)
    assert same(fedrep, federate(tmp_path, method="fedpac", **REP, **AS_REP, **OFF))
    for change in (
        {"fedpac__align": True},
        {"fedpac__combine": True},
        {"fedpac__head_lr": 0.03},
        {"fedpac__head_epochs": 1},
    ):
        other = federate(tmp_path, method="fedpac", **{**REP, **AS_REP, **OFF, **change})
        assert not equal(states(fedrep), states(other))


@pytest.mark.thorough
def test_with_nothing_of_others_the_head_that_comes_back_is_the_one_that_was_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fedrep = federate(tmp_path, 6, method="fedrep", fedrep__head_epochs=2, participation=0.5, **REP)
    monkeypatch.setattr(fedpac, "combination_weights", lambda variances, moments: np.eye(len(variances)))
    keys = {**REP, **AS_REP, "fedpac__align": False}
    alone = federate(tmp_path, 6, method="fedpac", participation=0.5, **keys)
    assert equal(states(fedrep), states(alone))


def test_what_fedpac_sends(tmp_path: Path) -> None:
    outcome, exchange = exchanged(tmp_path, method="fedpac", rounds=3)
    known = len(set().union(*({n for n in up if n.startswith("prototype.")} for _, _, _, up in exchange)))
    for line in outcome.history:
        first = line["round"] == 1
        for client in line["clients"].values():
            # two classes each, before and after training; counts of eight bytes
            assert client["bytes"]["up"] == 4 * (EXTRACTOR + HEAD + 4 * 64 + 1) + 8 * 10
            assert client["bytes"]["down"] == 4 * (EXTRACTOR + (0 if first else HEAD + known * 64))
    for switch, up, down in (("align", HEAD + 2 * 64 + 1, HEAD), ("combine", 2 * 64, known * 64)):
        other = "combine" if switch == "align" else "align"
        keys: dict[str, Any] = {f"fedpac__{switch}": False, f"fedpac__{other}": True}
        outcome = federate(tmp_path, method="fedpac", **keys)
        bytes_ = {tuple(client["bytes"].values()) for client in outcome.history[-1]["clients"].values()}
        assert bytes_ == {(4 * (EXTRACTOR + up) + 8 * 10, 4 * (EXTRACTOR + down))}


def test_statistics_are_of_the_received_extractor(tmp_path: Path) -> None:
    outcome, exchange = exchanged(tmp_path, method="fedpac", rounds=3)
    _, _, down, up = next(entry for entry in exchange if entry[:2] == (3, "0"))
    halted = Halted(outcome)
    model = halted.model_with({name: torch.from_numpy(array) for name, array in part(down, "extractor.").items()})
    train = halted.client.data.train
    with torch.no_grad():
        features = model.features(normalise(train.x))
    assert {name for name in up if name.startswith("mean.")} == {f"mean.{c}" for c in train.y.tolist()}
    for c in set(train.y.tolist()):
        assert np.allclose(up[f"mean.{c}"], features[train.y == c].mean(0), atol=1e-5)
        assert not np.allclose(up[f"mean.{c}"], up[f"prototype.{c}"], atol=1e-2)
    assert up["energy"] == pytest.approx([features.square().sum(1).mean().item()])
    assert up["counts"].tolist() == train.y.bincount(minlength=10).tolist()


def expected_heads(of_round: Exchange, samples: dict[str, int]) -> dict[str, np.ndarray]:
    """Return the bias that each client of a round is given, from what they sent."""
    h = np.zeros((len(of_round), 10, 64))
    for own, (*_, up) in zip(h, of_round, strict=True):
        for c in np.flatnonzero(up["counts"]):
            own[c] = up["counts"][c] / up["counts"].sum() * up[f"mean.{c}"]
    variances = [
        (up["energy"][0] - np.square(own).sum()) / samples[name]
        for own, (_, name, _, up) in zip(h, of_round, strict=True)
    ]
    weights = combination_weights(np.array(variances), h.reshape(len(h), -1))
    heads = np.stack([up["head.bias"].astype(float) for *_, up in of_round])
    # otherwise this would not tell a combination from the own head
    assert (weights > 0).sum() > len(weights)
    return {name: row @ heads for (_, name, _, _), row in zip(of_round, weights, strict=True)}


def test_a_head_is_combined_of_those_of_the_clients_own_last_round(tmp_path: Path) -> None:
    keys: dict[str, Any] = {"partition": "dirichlet", "alpha": 0.5, "min_samples": 20, "max_samples": 400}
    outcome, exchange = exchanged(tmp_path, 6, method="fedpac", rounds=5, participation=0.5, **keys)
    samples = {
        str(node - 1000): len(Request(context).client().data.train) for node, context in outcome.grid.contexts.items()
    }
    combined: dict[str, np.ndarray] = {}
    late = False
    for number in range(1, 6):
        of_round = [entry for entry in exchange if entry[0] == number]
        for _, name, down, _ in of_round:
            assert ("head.bias" in down) == (name in combined)
            if name in combined:
                assert np.allclose(down["head.bias"], combined[name], atol=1e-6)
                late |= name not in {entry[1] for entry in exchange if entry[0] == number - 1}
        combined |= expected_heads(of_round, samples)
    # somebody had been away and was given what had waited for it
    assert late


def test_prototypes_are_averaged_by_the_samples_of_their_class(tmp_path: Path) -> None:
    keys: dict[str, Any] = {"partition": "dirichlet", "alpha": 0.5, "min_samples": 20}
    outcome, exchange = exchanged(tmp_path, 3, method="fedpac", rounds=2, **keys)
    sent = [up for number, _, _, up in exchange if number == 1]
    down = exchange[-1][2]
    shared = 0
    for c in range(10):
        name = f"prototype.{c}"
        owners = [up for up in sent if name in up]
        shared += len(owners) > 1
        if owners:
            mean = np.average([up[name] for up in owners], axis=0, weights=[up["counts"][c] for up in owners])
            assert np.allclose(down[name], mean, atol=1e-6)
    assert shared > 5
    assert outcome.summary["refused"] == 0


def test_fedpac_aligns_to_global_prototypes_and_to_own_means_where_there_are_none(tmp_path: Path) -> None:
    outcome = federate(tmp_path, method="fedpac", rounds=3, lr_decay=0.5, fedpac__head_lr=0.3, fedpac__lambda=0.4)
    halted = Halted(outcome)
    client, batch = halted.client, halted.batch()
    own = int(batch.y[0])
    del client.received[f"prototype.{own}"]
    phases: list[Any] = []

    def note(epochs: int, some: Any, **_: Any) -> float:
        phases.append((epochs, some))
        return 0.0

    client.run_alternating = note
    client.train()
    (head_epochs, (head,)), (epochs, (body,)) = phases
    assert (head_epochs, epochs, head.lr, body.lr) == (1, 2, 0.3 * 0.25, None)
    assert [id(p) for p in head.parameters] == [id(p) for p in client.model.head.parameters()]
    assert [id(p) for p in body.parameters] == [id(p) for p in client.model.extractor.parameters()]
    before = client.training_features(client.model.extractor)
    mean = before[client.data.train.y == own].mean(0)
    halted.shift()
    assert head.loss(batch).item() == pytest.approx(halted.cross_entropy(batch).item())
    targets = [mean if c == own else client.received[f"prototype.{c}"] for c in batch.y.tolist()]
    expected = halted.cross_entropy(batch) + 0.4 * F.mse_loss(client.model.features(batch.x), torch.stack(targets))
    assert len(set(batch.y.tolist())) == 2
    assert body.loss(batch).item() == pytest.approx(expected.item(), rel=1e-5)


def test_fedpac_does_not_align_before_there_are_prototypes(tmp_path: Path) -> None:
    one, other = (federate(tmp_path, method="fedpac", rounds=1, fedpac__align=align) for align in (True, False))
    assert equal(states(one), states(other))


@pytest.mark.thorough
def test_combined_heads_survive_a_resume(tmp_path: Path) -> None:
    keys: dict[str, Any] = {"method": "fedpac", "rounds": 5, "participation": 0.6, "local_epochs": 1}
    whole = federate(tmp_path / "whole", CLIENTS, **keys)
    directory = crash(tmp_path / "cut", tmp_path / "states", 4, **keys)
    resumed = federate(tmp_path / "cut", CLIENTS, states=tmp_path / "states", resume=str(directory), **keys)
    assert_same(whole, resumed)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda a: [a[name].__imul__(5) for name in a if "mean." in name], "its means have the square"),
        (lambda a: a["energy"].__imul__(-1), "its means have the square"),
        (lambda a: a["counts"].__isub__(1000), "its counts are no numbers of samples"),
        (lambda a: a["counts"].__setitem__(np.flatnonzero(a["counts"])[0], 0), "it sent mean."),
        (lambda a: a.update(counts=a["counts"].astype(np.int32)), "tensor counts is int32 (10,), it must be int64"),
        (lambda a: a.pop("energy"), "tensor energy is missing"),
    ],
)
def test_statistics_that_no_data_have_are_refused(
    tmp_path: Path, change: Callable[[NamedArrays], Any], reason: str
) -> None:
    spoil = arrays_of(change)

    def tamper(message: Message, reply: Message) -> Message:
        if (message.metadata.message_type, message.metadata.dst_node_id) == ("train", 1001):
            spoil(reply.content)
        return reply

    outcome = federate(tmp_path, 4, method="fedpac", rounds=2, local_epochs=1, tamper=tamper)
    for line in outcome.history:
        (refusal,) = line["refused"]
        assert (refusal["client"], refusal["reason"][: len(reason)]) == ("1", reason)
    # nothing of it was kept: it is given no head, and the others get those of each other
    last = [m for m in outcome.grid.messages if (m.metadata.message_type, m.metadata.group_id) == ("train", "2")]
    heads = ["head.bias" in message.content.array_records["arrays"] for message in last]
    assert heads == [True, False, True, True]


# FedGH


def test_the_server_takes_a_step_on_each_prototype_in_an_order_that_is_drawn(tmp_path: Path) -> None:
    for epochs, lr in ((1, 0.5), (2, 0.1)):
        keys = {"fedgh__server_lr": lr, "fedgh__server_epochs": epochs}
        outcome, exchange = exchanged(tmp_path, 3, method="fedgh", rounds=2, backwards=True, **keys)
        first, second = ([entry for entry in exchange if entry[0] == number] for number in (1, 2))
        head = nn.Linear(64, 10)
        head.load_state_dict({n.removeprefix("head."): torch.from_numpy(a) for n, a in first[0][2].items()})
        sgd = torch.optim.SGD(head.parameters(), lr=lr)
        sent = [up for _, _, _, up in sorted(first, key=lambda entry: entry[1])]
        listed = [(up[f"prototype.{c}"], c) for up in sent for c in range(10) if f"prototype.{c}" in up]
        generator = torch_generator(0, "server", 1)
        for _ in range(epochs):
            for place in torch.randperm(len(listed), generator=generator):
                features, c = listed[place]
                sgd.zero_grad()
                F.cross_entropy(head(torch.from_numpy(features)[None]), torch.tensor([c])).backward()
                sgd.step()
        for name, tensor in head.state_dict().items():
            assert np.allclose(second[0][2][f"head.{name}"], tensor.numpy(), atol=1e-7)
            assert not np.allclose(first[0][2][f"head.{name}"], tensor.numpy(), atol=1e-3)
        assert outcome.summary["refused"] == 0


def test_what_fedgh_sends(tmp_path: Path) -> None:
    outcome, exchange = exchanged(tmp_path, method="fedgh")
    for line in outcome.history:
        assert {tuple(c["bytes"].values()) for c in line["clients"].values()} == {(4 * 2 * 64, 4 * HEAD)}
    assert all(set(down) == {"head.weight", "head.bias"} for _, _, down, _ in exchange)


class Reset(FloretClient):
    """Trains alone, with its own extractor and the initial head in every round."""

    def receive(self) -> None:
        initial = self.initial_model().state_dict()
        self.load_tensors({name: tensor for name, tensor in initial.items() if name.startswith("head.")})


@pytest.mark.thorough
def test_fedgh_with_a_server_that_stands_still_trains_alone_from_the_initial_head(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys: dict[str, Any] = {"rounds": 3, "local_epochs": 2, "participation": 0.75}
    still = federate(tmp_path, method="fedgh", fedgh__server_lr=0.0, **keys)
    moving = federate(tmp_path, method="fedgh", **keys)
    local = federate(tmp_path, method="local", **keys)
    monkeypatch.setattr(Local, "receive", Reset.receive)
    reset = federate(tmp_path, method="local", **keys)
    assert equal(states(still), states(reset))
    assert [line["accuracy"] for line in still.history] == [line["accuracy"] for line in reset.history]
    assert not equal(states(still), states(moving))
    assert not equal(states(still), states(local))


def test_the_first_round_of_fedgh_is_local(tmp_path: Path) -> None:
    fedgh, local = (federate(tmp_path, method=method, rounds=1) for method in ("fedgh", "local"))
    assert equal(states(fedgh), states(local))


def test_without_prototypes_the_head_stays(tmp_path: Path) -> None:
    def nothing(message: Message, reply: Message) -> Message:
        if message.metadata.message_type == "train":
            reply.content["arrays"] = ArrayRecord()
        return reply

    outcome = federate(tmp_path, 2, method="fedgh", tamper=nothing)
    still = federate(tmp_path, 2, method="fedgh", fedgh__server_lr=0.0)
    assert outcome.summary["refused"] == 0
    assert equal(states(outcome), states(still))
    one, other = checkpointed(outcome), checkpointed(still)
    assert all(np.array_equal(one[name], other[name]) for name in one)


def test_no_prototype_moves_the_head_far() -> None:
    head = nn.Linear(3, 2)
    before = [parameter.detach().clone() for parameter in head.parameters()]
    features = torch.full((3,), 1e10)
    train_head(head, [(features, int(head(features).argmin()))], lr=0.1)
    moved = torch.cat([(a - b).flatten() for a, b in zip(head.parameters(), before, strict=True)])
    assert moved.norm().item() == pytest.approx(0.1 * CLIP, rel=1e-3)


def test_the_server_trains_a_head_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    aggregate = FedGH.aggregate

    def see(strategy: FedGH) -> NamedArrays:
        before = {name: array.copy() for name, array in strategy.initial_arrays().items()}
        result = aggregate(strategy)
        after = strategy.initial_arrays()
        found.append(all(np.array_equal(before[name], after[name]) for name in before))
        assert not np.array_equal(result["head.weight"], before["head.weight"])
        return result

    monkeypatch.setattr(FedGH, "aggregate", see)
    federate(tmp_path, 2, method="fedgh", rounds=2)
    assert found == [True, True]


def test_prototypes_come_in_another_order_every_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    orders: list[list[float]] = []

    def see(head: nn.Module, prototypes: Iterable[tuple[Tensor, int]], lr: float) -> None:
        orders.append([label + float(features.sum()) for features, label in prototypes])

    monkeypatch.setattr("strategies.fedgh.train_head", see)
    for _ in range(2):
        federate(tmp_path, 2, method="fedgh", rounds=1, partition="iid", fedgh__server_epochs=2)
    first, second, *again = orders
    assert sorted(first) == sorted(second)
    assert first != second
    assert again == [first, second]


def test_the_head_goes_on_from_round_to_round(tmp_path: Path) -> None:
    # with a rate near zero the prototypes are those of the same features, and each round's step is as long
    keys: dict[str, Any] = {"lr": 1e-30, "momentum": 0.0, "weight_decay": 0.0, "local_epochs": 1}
    _, exchange = exchanged(tmp_path, 2, method="fedgh", rounds=4, fedgh__server_lr=1e-3, **keys)
    heads = [down["head.weight"] for _, name, down, _ in exchange if name == "0"]
    lengths = [np.linalg.norm(head - heads[0]) for head in heads[1:]]
    assert lengths == pytest.approx([lengths[0], 2 * lengths[0], 3 * lengths[0]], rel=0.1)


@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        ({"method": "fedgh", "aggregation": "median"}, "aggregation = 'median': fedgh averages nothing on the server"),
        *(
            ({"method": method, "head_layers": 3}, f"the head of model 'cnn2' takes feature maps, {method} needs one")
            for method in ("fedgh", "gpfl")
        ),
    ],
)
def test_what_a_head_cannot_be(tmp_path: Path, keys: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        federate(tmp_path / "runs", 2, **write_images(tmp_path / "data", 2) | {"model": "cnn2"} | keys)


# GPFL


def test_the_valve_by_hand() -> None:
    valve = ConditionalValve(2)
    for net, bias in ((valve.gamma, [3.0, 1.0]), (valve.beta, [0.0, 4.0])):
        net[0].load_state_dict({"weight": torch.zeros(2, 2), "bias": torch.tensor(bias)})
    # normalised, (3, 1) is (1, -1) and (0, 4) is (-1, 1): features are times (2, 0) plus (-1, 1), and not negative
    moved = valve(torch.tensor([[3.0, 7.0], [0.25, 7.0]]), torch.tensor([5.0, 5.0]))
    assert torch.allclose(moved, torch.tensor([[5.0, 1.0], [0.0, 1.0]]), atol=1e-4)


def test_contexts_and_magnitude_by_hand() -> None:
    embeddings = torch.tensor([[4.0, 0.0], [0.0, 8.0], [100.0, 100.0]])
    # a quarter is of class 0, three quarters are of class 1
    assert personal_context(embeddings, torch.tensor([1, 0, 1, 1])).tolist() == [1, 6]
    features, targets = torch.tensor([[3.0, 0.0], [0.0, 1.0]]), torch.tensor([[0.0, 0.0], [4.0, 1.0]])
    # differences of norm 3 and 4
    both = torch.tensor([True, True])
    assert magnitude_loss(features, targets, both, "batch").item() == pytest.approx(5.0)
    assert magnitude_loss(features, targets, both, "sample").item() == pytest.approx(3.5)
    assert magnitude_loss(features, targets, torch.tensor([True, False]), "batch").item() == pytest.approx(3.0)


def gpfl_halted(tmp_path: Path, **keys: Any) -> tuple[Outcome, Any, Batch]:
    """Return a client of a run that has received and stands before its first step, and a batch of it."""
    outcome = federate(tmp_path, method="gpfl", rounds=3, **keys)
    client = standing(outcome.grid.contexts[NODE], last_train(outcome))
    client.receive()
    client.run_steps = lambda epochs, step: 0.0
    client.train()
    train, index = client.data.train, torch.tensor([3, 1, 4, 1, 5])
    with torch.no_grad():
        for module in (client.model, *client.networks.values()):
            for parameter in module.parameters():
                parameter += 0.01 * torch.sign(parameter)
    return outcome, client, Batch(normalise(train.x[index]), train.y[index], index)


@pytest.mark.parametrize("reduction", ["batch", "sample"])
def test_the_loss_of_gpfl(tmp_path: Path, reduction: str) -> None:
    keys = {"gpfl__lambda": 0.7, "gpfl__magnitude_reduction": reduction, "local_epochs": 2}
    _, client, batch = gpfl_halted(tmp_path, **keys)
    received, valve = client.received["embeddings.weight"], client.networks[VALVE]
    live = client.networks[EMBEDDINGS].weight
    assert not torch.equal(received, live)
    prior = client.data.train.y.bincount(minlength=10) / len(client.data.train)
    features = client.model.features(batch.x)
    personal, general = valve(features, prior @ received), valve(features, received.mean(0))
    cosine = F.normalize(general, dim=1) @ F.normalize(live, dim=1).T
    distance = (general - received[batch.y]).norm(dim=1)
    magnitude = distance.mean() if reduction == "sample" else distance.square().sum().sqrt()
    terms = [F.cross_entropy(client.model.head(personal), batch.y), F.cross_entropy(cosine, batch.y), 0.7 * magnitude]
    assert min(terms) > 1e-2
    assert client.loss(batch).item() == pytest.approx(sum(terms).item(), rel=1e-5)


@pytest.mark.thorough
def test_gpfl_with_all_switches_off_is_fedper(tmp_path: Path) -> None:
    keys: dict[str, Any] = {"local_epochs": 2, "rounds": 3, "participation": 0.75}
    fedper = federate(tmp_path, method="fedper", **keys)
    switches: dict[str, Any] = {f"gpfl__{name}": False for name in ("valve", "angle", "magnitude")}
    assert same(fedper, federate(tmp_path, method="gpfl", **keys, **switches))
    models = [[{n: t for n, t in state.items() if n.startswith(MODEL)} for state in states(fedper)]]
    for switch in switches:
        one = federate(tmp_path, method="gpfl", **keys, **{**switches, switch: True})
        models.append([{n: t for n, t in state.items() if n.startswith(MODEL)} for state in states(one)])
        assert not any(equal(models[-1], other) for other in models[:-1])


def test_what_gpfl_sends_and_what_stays(tmp_path: Path) -> None:
    outcome, exchange = exchanged(tmp_path, method="gpfl")
    valve = 2 * (64 * 64 + 64 + 2 * 64)
    for line in outcome.history:
        sizes = {tuple(client["bytes"].values()) for client in line["clients"].values()}
        assert sizes == {(4 * (EXTRACTOR + valve + 10 * 64),) * 2}
    assert not any("context" in name or name.startswith("head.") for _, _, _, up in exchange for name in up)
    for node, context in outcome.grid.contexts.items():
        down = next(down for number, name, down, _ in exchange if (number, name) == (2, str(node - 1000)))
        state, train = kept(context).load(), Request(context).client().data.train
        expected = personal_context(torch.from_numpy(down["embeddings.weight"]), train.y)
        assert torch.equal(state[MEMORY + CONTEXT], expected)
        assert not torch.equal(state[MEMORY + "embeddings.weight"], torch.from_numpy(down["embeddings.weight"]))
    first, second, *_ = (state[MEMORY + CONTEXT] for state in states(outcome))
    assert not torch.allclose(first, second)


def test_gpfl_predicts_by_the_personal_route(tmp_path: Path) -> None:
    outcome = federate(tmp_path, 2, method="gpfl")
    context = outcome.grid.contexts[NODE]
    client = standing(context, last_train(outcome))
    x = normalise(client.data.test.x)
    with torch.no_grad():
        moved = client.networks[VALVE](client.model.features(x), client.memory[CONTEXT])
        scores, plain = client.model.head(moved), client.model(x)
        # a node that serves has no training data
        served = load_personal(cast(FileStore, Request(context).store)).scores(client.data.test.x)
    assert torch.allclose(served, scores, atol=1e-5)
    assert not torch.allclose(served, plain, atol=1e-2)
    accuracy = (scores.argmax(1) == client.data.test.y).float().mean().item()
    assert outcome.history[-1]["clients"]["0"]["after"]["test"] == pytest.approx(accuracy)


@pytest.mark.parametrize("method", ["gpfl", "fedproto"])
def test_the_file_of_a_personal_model_has_all_that_predicts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    outcome = federate(tmp_path / "runs", 2, method=method, states=tmp_path / "states", gpfl__mu=0.0)
    context, trained = outcome.grid.contexts[NODE], last_train(outcome)
    x = standing(context, trained).data.test.x
    scores = load_personal(cast(FileStore, Request(context).store)).scores(x)
    (root,) = {path.parents[2] for path in (tmp_path / "states").glob(f"**/{method}/0")}
    about = {"session.directory": str(root), "directory": str(tmp_path)}
    config = ConfigRecord({**trained.content.config_records["config"], **about})
    monkeypatch.setattr("client_app.app.in_simulation", lambda: True)
    app(Message(RecordDict({"config": config}), NODE, "query.export"), context)
    tensors = load_file(tmp_path / "0.safetensors")
    model = build_model("mlp", (1, 8, 8), 10, 1, torch_generator(0, "model")).eval()
    own = {name: tensors.pop(name) for name in model.state_dict()}
    model.load_state_dict(own)
    with torch.no_grad():
        features = model.features(normalise(x))
        if method == "gpfl":
            valve = ConditionalValve(64)
            valve.load_state_dict({name: tensors.pop(f"valve.{name}") for name in valve.state_dict()})
            found = model.head(valve(features, tensors.pop("context")))
        else:
            known = sorted(int(name.split(".")[1]) for name in tensors)
            found = torch.full((len(x), 10), -torch.inf)
            means = torch.stack([tensors.pop(f"prototype.{c}") for c in known])
            found[:, known] = -torch.cdist(features, means)
    assert not tensors
    assert torch.equal(found.argmax(1), scores.argmax(1))
    assert not torch.equal(model(normalise(x)), found)


def test_valve_and_embeddings_have_mu_as_weight_decay_and_no_momentum(tmp_path: Path) -> None:
    outcome = federate(tmp_path, 2, method="gpfl", rounds=1, gpfl__mu=0.3, weight_decay=0.02, momentum=0.8)
    client = standing(outcome.grid.contexts[NODE], last_train(outcome))
    made: dict[float, Sgd] = {}
    optimizer = client.optimizer

    def spied(parameters: Any, **rates: Any) -> Sgd:
        one: Sgd = optimizer(parameters, **rates)
        made[one._weight_decay] = one
        return one

    client.optimizer = spied
    client.receive()
    client.train()
    networks = [p for network in client.networks.values() for p in network.parameters()]
    assert {decay: {id(p) for p in one._parameters} for decay, one in made.items()} == {
        0.02: {id(p) for p in client.model.parameters()},
        0.3: {id(p) for p in networks},
    }
    assert {decay: one._momentum for decay, one in made.items()} == {0.02: 0.8, 0.3: 0.0}


# All of them


@pytest.mark.thorough
@pytest.mark.parametrize("method", ["fedpac", "fedgh", "gpfl"])
def test_clients_with_one_sample_and_with_one_class(tmp_path: Path, method: str) -> None:
    folder = tmp_path / "data"
    for split in ("train", "test"):
        (folder / split).mkdir(parents=True)
        for i, labels in enumerate(([0], [1] * 30, [0, 1, 2] * 15)):
            y = np.array(labels)
            x = np.random.default_rng([i, split == "test"]).normal(size=(len(y), 12)).astype(np.float32) + y[:, None]
            np.savez(folder / split / f"{i}.npz", x=x, y=y)
    keys: dict[str, Any] = {"dataset": "npz-clients", "data_dir": str(folder), "num_classes": 4, "rounds": 3}
    outcome = federate(tmp_path / "runs", 3, method=method, validation_fraction=0.0, **keys)
    assert outcome.summary["refused"] == 0
    assert all(client["after"]["test"] == 1 for name, client in outcome.history[-1]["clients"].items() if name == "1")
