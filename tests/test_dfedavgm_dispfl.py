"""Methods whose clients meet on a graph: the graph and its weights, DFedAvgM, DisPFL, and the graph in a report."""

import json
import math
import re
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, Message
from hypothesis import given, settings
from hypothesis import strategies as st

from client_app.batches import normalise
from client_app.client import MEMORY, MODEL
from client_app.methods.dfedavgm import mixed
from client_app.methods.dispfl import NEXT, annealed, masked_mean, moved
from common.errors import FloretError
from common.tensors import MASK, NamedArrays, Specs
from common.wire import from_record, unpack
from results.follow import Follower
from results.history import ClientRound
from results.report import write_report
from results.report_charts import meetings
from results.run import read_run
from strategies.core import GraphParameters, draw_graph, metropolis_weights
from strategies.core.graph import Graph
from strategies.dispfl import kept_elements
from tests.harness import MODEL_SIZE, SHAPES, Outcome, federate, kept, personal, standing
from tests.test_papers import write_images
from tests.test_report import Page

KINDS = ("ring", "random", "full")
# The second round moves nothing: what a client sends in it is what it received and averaged.
STILL: dict[str, Any] = {"lr": 0.05, "lr_decay": 1e-30, "weight_decay": 0.0, "local_epochs": 1}


def names_of(n: int) -> list[str]:
    return [f"ward-{i}" for i in range(n)]


def over(graph: str, degree: int = 1, *, redraw: bool = False) -> GraphParameters:
    return GraphParameters(graph=graph, degree=degree, redraw=redraw)


def drawn(n: int, kind: str = "random", degree: int = 3, *, redraw: bool = True, seed: int = 0, at: int = 1) -> Graph:
    return draw_graph(names_of(n), over(kind, degree, redraw=redraw), seed, at)


def matrix(graph: Graph) -> np.ndarray:
    """Return the weights as a matrix, what is left of each row on its diagonal."""
    names = list(graph)
    table = np.zeros((len(names), len(names)))
    for i, name in enumerate(names):
        for peer, weight in metropolis_weights(graph, name).items():
            table[i, names.index(peer)] += weight
        table[i, i] = 1 - table[i].sum()
    return table


def reached(graph: Graph) -> set[str]:
    found, new = set(), {next(iter(graph))}
    while new:
        found |= new
        new = {peer for name in new for peer in graph[name]} - found
    return found


# The graph


@given(
    n=st.integers(1, 50),
    kind=st.sampled_from(KINDS),
    degree=st.integers(1, 55),
    redraw=st.booleans(),
    at=st.integers(1),
)
@settings(max_examples=150)
def test_weights_are_symmetric_and_doubly_stochastic(n: int, kind: str, degree: int, redraw: bool, at: int) -> None:
    graph = drawn(n, kind, degree, redraw=redraw, at=at)
    assert list(graph) == names_of(n)
    for name, peers in graph.items():
        assert name not in peers
        assert len(set(peers)) == len(peers)
        assert all(name in graph[peer] for peer in peers)
    wanted = min({"ring": 2, "random": degree, "full": n - 1}[kind], n - 1)
    counts = Counter(len(peers) for peers in graph.values())
    # where no graph is regular, one client has one neighbour less
    assert counts == Counter([wanted] * n if n * wanted % 2 == 0 else [wanted] * (n - 1) + [wanted - 1])
    if kind != "random" or degree >= 2:
        assert reached(graph) == set(graph)
    table = matrix(graph)
    assert np.array_equal(table, table.T)
    assert (table >= 0).all()
    assert (table.diagonal() > 0).all()
    assert np.allclose(table.sum(0), 1)
    assert np.allclose(table.sum(1), 1)


def test_weights_by_hand() -> None:
    path: Graph = {"a": ("b",), "b": ("a", "c"), "c": ("b", "d"), "d": ("c",), "e": ()}
    assert metropolis_weights(path, "a") == {"b": 1 / 3}
    assert metropolis_weights(path, "b") == {"a": 1 / 3, "c": 1 / 3}
    star: Graph = {"a": ("b", "c", "d"), "b": ("a",), "c": ("a",), "d": ("a",)}
    assert metropolis_weights(star, "b") == {"a": 1 / 4}
    assert metropolis_weights(path, "e") == {}


def test_a_random_graph_is_connected() -> None:
    # Of 20 cycles through all of 12 places, drawn without care, about half would be two or more.
    assert all(len(reached(drawn(12, degree=2, seed=seed))) == 12 for seed in range(20))


def test_a_random_graph_is_not_the_lattice_in_another_order() -> None:
    # The lattice, with edges to both next places and across, has no three that all meet each other.
    graphs = [drawn(8, degree=3, seed=seed) for seed in range(20)]
    assert any(set(graph[a]) & set(graph[b]) for graph in graphs for a in graph for b in graph[a])


def test_a_ring_is_in_the_order_of_names() -> None:
    assert drawn(4, "ring") == {
        "ward-0": ("ward-1", "ward-3"),
        "ward-1": ("ward-0", "ward-2"),
        "ward-2": ("ward-1", "ward-3"),
        "ward-3": ("ward-0", "ward-2"),
    }
    assert drawn(2, "ring") == {"ward-0": ("ward-1",), "ward-1": ("ward-0",)}
    assert drawn(1, "ring") == {"ward-0": ()}


def test_a_random_graph_depends_on_the_seed_and_if_drawn_anew_on_the_round() -> None:
    assert drawn(12) == drawn(12)
    assert drawn(12) != drawn(12, seed=1)
    assert drawn(12) != drawn(12, at=2)
    assert drawn(12, redraw=False) == drawn(12, redraw=False, at=2)
    assert drawn(12, redraw=False) != drawn(12, redraw=False, seed=1)
    assert drawn(12, "ring") == drawn(12, "ring", at=2, seed=1)


@pytest.mark.thorough
@pytest.mark.parametrize(("n", "degree"), [(7, 2), (8, 3), (9, 4)])
def test_every_pair_meets_as_often(n: int, degree: int) -> None:
    rounds = 600
    met = Counter(
        frozenset((name, peer))
        for at in range(rounds)
        for name, peers in drawn(n, "random", degree, at=at).items()
        for peer in peers
    )
    assert len(met) == n * (n - 1) // 2
    share = degree / (n - 1)
    spread = math.sqrt(share * (1 - share) / rounds)
    assert all(abs(count / 2 / rounds - share) < 5 * spread for count in met.values())


# What a run did


class Seen:
    """A run, and the tensors that each client sent in each round, with masks: ``sent[round][name]``."""

    def __init__(self, path: Path, clients: int = 4, **keys: Any) -> None:
        records: list[tuple[int, str, ArrayRecord]] = []

        def tamper(message: Message, reply: Message) -> Message:
            if message.metadata.message_type == "train":
                place = str(message.metadata.dst_node_id - 1000)
                copy = ArrayRecord(dict(reply.content.array_records["arrays"]))
                records.append((int(message.metadata.group_id), place, copy))
            return reply

        self.outcome = federate(path, clients, tamper=tamper, **keys)
        assert self.outcome.summary["refused"] == 0
        last = next(m for m in reversed(self.outcome.grid.messages) if m.metadata.message_type == "train")
        client = standing(self.outcome.grid.contexts[last.metadata.dst_node_id], last)
        self.specs: Specs = client.uplink()
        self.sent: dict[int, dict[str, NamedArrays]] = {}
        for number, place, record in records:
            self.sent.setdefault(number, {})[place] = unpack(record, self.specs)

    def line(self, number: int) -> dict[str, Any]:
        return dict(self.outcome.history[number - 1]["clients"])

    def states(self) -> list[dict[str, torch.Tensor]]:
        return states_of(self.outcome)


def states_of(outcome: Outcome) -> list[dict[str, torch.Tensor]]:
    return [kept(context).load() for context in outcome.grid.contexts.values()]


def models_of(outcome: Outcome) -> list[dict[str, torch.Tensor]]:
    """Return the personal models."""
    return [{name: t for name, t in state.items() if name.startswith(MODEL)} for state in states_of(outcome)]


def equal(one: Outcome, other: Outcome) -> bool:
    return all(
        torch.equal(a[name], b[name]) for a, b in zip(models_of(one), models_of(other), strict=True) for name in a
    )


def near(one: Outcome, other: Outcome) -> bool:
    """Return whether the personal models are the same but for rounding, and what a flipped ReLU makes of it."""
    return all(
        torch.allclose(a[name], b[name], atol=2e-4)
        for a, b in zip(models_of(one), models_of(other), strict=True)
        for name in a
    )


def accuracies(outcome: Outcome) -> list[Any]:
    return [[(c["before"], c["after"]) for c in line["clients"].values()] for line in outcome.history]


def initial_model(path: Path) -> NamedArrays:
    outcome = federate(path, 2, method="fedavg", rounds=1, max_samples=40, local_epochs=1)
    return from_record(outcome.grid.messages[-1].content.array_records["arrays"])


# DFedAvgM


def test_mixed_by_hand() -> None:
    own, others = torch.tensor([1.0, 2.0]), [torch.tensor([3.0, 0.0]), torch.tensor([-1.0, 8.0])]
    assert torch.equal(mixed(own, others, [0.25, 0.5]), torch.tensor([0.5, 4.5]))
    assert torch.equal(mixed(own, [], []), own)


@pytest.mark.parametrize(("kind", "degree", "clients"), [("ring", 1, 5), ("random", 3, 5), ("full", 1, 4)])
def test_a_client_takes_the_weighted_mean_over_its_neighbours(
    tmp_path: Path, kind: str, degree: int, clients: int
) -> None:
    keys: dict[str, Any] = {"dfedavgm__graph": kind, "dfedavgm__degree": degree, "dfedavgm__momentum": 0.0}
    seen = Seen(tmp_path, clients, method="dfedavgm", rounds=2, **STILL, **keys)
    graph = draw_graph([str(i) for i in range(clients)], over(kind, degree), 0, 2)
    table = matrix(graph)
    assert kind != "random" or len({len(peers) for peers in graph.values()}) == 2
    first, second = ([seen.sent[number][str(i)] for i in range(clients)] for number in (1, 2))
    for name in first[0]:
        stacked = np.stack([arrays[name] for arrays in first]).astype(np.float64)
        assert np.ptp(stacked, axis=0).max() > 1e-3
        wanted = np.tensordot(table, stacked, axes=1)
        assert np.allclose(wanted, np.stack([arrays[name] for arrays in second]), atol=1e-6)
    for name, client in seen.line(2).items():
        assert client["peers"] == list(graph[name])
        assert client["bytes"] == {"up": 4 * MODEL_SIZE, "down": 4 * MODEL_SIZE * len(graph[name])}
    for client in seen.line(1).values():
        assert "peers" not in client
        assert client["bytes"] == {"up": 4 * MODEL_SIZE, "down": 0}


def test_weights_of_neighbours_that_have_not_published_go_to_the_client(tmp_path: Path) -> None:
    keys: dict[str, Any] = {"dfedavgm__graph": "ring", "dfedavgm__momentum": 0.0, "participation": 0.5}
    seen = Seen(tmp_path, 6, method="dfedavgm", rounds=2, **STILL, **keys)
    graph = draw_graph([str(i) for i in range(6)], over("ring"), 0, 2)
    begun = initial_model(tmp_path / "begun")
    published = seen.sent[1]
    met = []
    for name, arrays in seen.sent[2].items():
        peers = [peer for peer in graph[name] if peer in published]
        met.append((name in published, len(peers)))
        assert seen.line(2)[name].get("peers", []) == peers
        assert seen.line(2)[name]["bytes"]["down"] == 4 * MODEL_SIZE * len(peers)
        for tensor, array in arrays.items():
            own = published.get(name, begun)[tensor]
            wanted = own * (1 - len(peers) / 3) + sum(published[peer][tensor] / 3 for peer in peers)
            assert np.allclose(array, wanted, atol=1e-6)
    assert len(set(met)) > 1


def test_what_is_mixed_is_the_last_that_a_neighbour_published(tmp_path: Path) -> None:
    """With half of the clients in each round, the mail of a neighbour may be some rounds old."""
    keys: dict[str, Any] = {"participation": 0.5, "local_epochs": 1, "rounds": 6, "dfedavgm__graph": "full"}
    seen = Seen(tmp_path, 4, method="dfedavgm", **keys)
    last = max(seen.sent)
    name = next(iter(seen.sent[last]))
    message = next(
        m
        for m in seen.outcome.grid.messages
        if m.metadata.group_id == str(last) and m.metadata.dst_node_id == 1000 + int(name)
    )
    packed = message.content.array_records["arrays"]
    peers = seen.line(last)[name]["peers"]
    assert peers
    ages = []
    for i, peer in enumerate(peers):
        at = max(number for number, sent in seen.sent.items() if number < last and peer in sent)
        ages.append(last - at)
        assert np.array_equal(packed[f"{i}.head.bias"].numpy(), seen.sent[at][peer]["head.bias"])
    assert max(ages) > 1


EQUAL: dict[str, Any] = {"partition": "iid", "max_samples": 400, "rounds": 3, "local_epochs": 2}


@pytest.mark.thorough
def test_on_a_full_graph_dfedavgm_is_fedavg_to_rounding(tmp_path: Path) -> None:
    """Equal numbers of samples, and the run's momentum: the mean that FedAvg's server takes, in another order."""
    fedavg = federate(tmp_path, method="fedavg", **EQUAL)
    full = federate(tmp_path, method="dfedavgm", dfedavgm__graph="full", **EQUAL)
    assert near(fedavg, full)
    assert not near(fedavg, federate(tmp_path, method="dfedavgm", dfedavgm__graph="ring", **EQUAL))
    assert not near(fedavg, federate(tmp_path, method="local", **EQUAL))


@pytest.mark.thorough
def test_the_momentum_is_the_methods_own(tmp_path: Path) -> None:
    plain = federate(tmp_path, method="dfedavgm", **EQUAL)
    assert equal(plain, federate(tmp_path, method="dfedavgm", momentum=0.0, **EQUAL))
    assert not near(plain, federate(tmp_path, method="dfedavgm", dfedavgm__momentum=0.5, **EQUAL))
    other = federate(tmp_path, method="dfedavgm", dfedavgm__graph="full", dfedavgm__momentum=0.5, **EQUAL)
    assert near(other, federate(tmp_path, method="fedavg", momentum=0.5, **EQUAL))


@pytest.mark.thorough
def test_without_edges_dfedavgm_is_local(tmp_path: Path) -> None:
    local = federate(tmp_path, 1, method="local", rounds=3, local_epochs=2)
    alone = federate(tmp_path, 1, method="dfedavgm", rounds=3, local_epochs=2)
    assert equal(local, alone)
    assert accuracies(local) == accuracies(alone)
    # Of three clients that meet in pairs, one has nobody.
    local = federate(tmp_path, 3, method="local", rounds=3, local_epochs=2)
    pairs: dict[str, Any] = {"dfedavgm__graph": "random", "dfedavgm__degree": 1}
    paired = federate(tmp_path, 3, method="dfedavgm", rounds=3, local_epochs=2, **pairs)
    same = [
        all(torch.equal(one[name], other[name]) for name in one)
        for one, other in zip(models_of(local), models_of(paired), strict=True)
    ]
    assert sorted(same) == [False, False, True]


@pytest.mark.thorough
@pytest.mark.parametrize("method", ["dfedavgm", "dispfl"])
def test_keys_of_the_graph_say_who_meets_whom(tmp_path: Path, method: str) -> None:
    def met(**keys: Any) -> list[list[list[str]]]:
        own = {f"{method}__{key}": value for key, value in keys.items()}
        outcome = federate(tmp_path, 7, method=method, rounds=3, max_samples=140, local_epochs=1, **own)
        return [[c.get("peers", []) for c in line["clients"].values()] for line in outcome.history[1:]]

    names = [str(i) for i in range(7)]
    for keys in (
        ("ring", 2, False),
        ("random", 2, False),
        ("random", 4, False),
        ("random", 4, True),
        ("full", 2, True),
    ):
        graphs = [draw_graph(names, over(*keys[:2], redraw=keys[2]), 0, number) for number in (2, 3)]
        assert met(graph=keys[0], degree=keys[1], redraw=keys[2]) == [
            [list(peers) for peers in graph.values()] for graph in graphs
        ]
        assert (graphs[0] != graphs[1]) == (keys == ("random", 4, True))


def test_weights_that_are_no_mean_are_refused(tmp_path: Path) -> None:
    outcome = federate(tmp_path, 3, method="dfedavgm", max_samples=60, local_epochs=1)
    message = next(m for m in outcome.grid.messages if m.metadata.group_id == "2")
    client = standing(outcome.grid.contexts[message.metadata.dst_node_id], message)
    assert client.message["weights"] == [1 / 3, 1 / 3]
    for weights in ([0.5], [0.5, 0.6], [-0.1, 0.5], [math.nan, 0.5], [math.inf, 0.1], [0.0, 0.5], []):
        client.message["weights"] = weights
        with pytest.raises(FloretError, match=r"the server sent .*weights"):
            client.receive()
    client.message["weights"] = [0.5, 0.5]
    client.receive()
    del client.received["1.head.bias"]
    with pytest.raises(FloretError, match=r"the server sent no tensor 1\.head\.bias"):
        client.receive()


# DisPFL


def test_kept_elements_by_hand() -> None:
    # raw densities 0.2 and 1; the second would be 1.83 and is whole, so the first has 55 - 10 of its 100
    assert kept_elements({"a": (10, 10), "b": (10,)}, 0.5) == {"a": 45, "b": 10}
    # 10 of 120 by raw densities 0.2 and 0.6 (12 + 20 * 0.2 ...): scale = 12 / (20 + 12)
    assert kept_elements({"a": (10, 10), "b": (10, 2)}, 0.1) == {"a": round(20 * 0.375), "b": round(12 * 0.375)}
    # the kernel's sides count: (4 + 2 + 3 + 3) / 72
    assert kept_elements({"a": (4, 2, 3, 3), "b": (12, 6)}, 0.25) == {"a": round(12 * 1.2), "b": round(18 * 1.2)}
    assert kept_elements({"a": (10, 10), "b": (10,)}, 1.0) == {"a": 100, "b": 10}
    assert kept_elements({"a": (100, 100), "b": (100, 10)}, 1e-6) == {"a": 1, "b": 1}


@given(
    shapes=st.lists(st.lists(st.integers(1, 40), min_size=1, max_size=4), min_size=1, max_size=8),
    density=st.floats(0.001, 1),
)
@settings(max_examples=200)
def test_kept_elements_are_the_part_that_density_says(shapes: list[list[int]], density: float) -> None:
    named = {str(i): tuple(shape) for i, shape in enumerate(shapes)}
    sizes = {name: math.prod(shape) for name, shape in named.items()}
    kept = kept_elements(named, density)
    assert all(1 <= kept[name] <= sizes[name] for name in named)
    assert abs(sum(kept.values()) - density * sum(sizes.values())) <= len(named)


def test_masked_mean_by_hand() -> None:
    weights = [torch.tensor([1.0, 2.0, 0.0, 0.0]), torch.tensor([3.0, 0.0, 5.0, 0.0])]
    masks = [torch.tensor([True, True, False, False]), torch.tensor([True, False, True, False])]
    assert torch.equal(masked_mean(weights, masks), torch.tensor([2.0, 2.0, 5.0, 0.0]))
    assert torch.equal(weights[0], torch.tensor([1.0, 2.0, 0.0, 0.0]))


def test_annealed_by_hand() -> None:
    assert annealed(0.5, 0, 10) == 0.5
    assert annealed(0.5, 5, 10) == pytest.approx(0.25)
    assert annealed(0.5, 10, 10) == 0
    assert annealed(0.4, 2, 8) == pytest.approx(0.2 * (1 + math.sqrt(0.5)))


def test_a_mask_is_moved_from_small_weights_to_large_scores() -> None:
    mask = torch.tensor([[True, True, True], [False, False, False]])
    weights = torch.tensor([[0.3, -0.1, -0.2], [0.0, 0.0, 0.0]])
    scores = torch.tensor([[9.0, 0.0, 0.0], [1.0, 3.0, 2.0]])
    assert moved(mask, weights, scores, 1).tolist() == [[True, False, True], [False, True, False]]
    assert moved(mask, weights, scores, 2).tolist() == [[True, False, False], [False, True, True]]
    # what was taken away may come back
    scores[0, 1] = 4.0
    assert moved(mask, weights, scores, 1).tolist() == mask.tolist()
    assert moved(mask, weights, scores, 0).tolist() == mask.tolist()
    assert mask.tolist() == [[True, True, True], [False, False, False]]


def masks_of(state: dict[str, torch.Tensor], prefix: str = MASK) -> dict[str, torch.Tensor]:
    whole = MEMORY + prefix
    return {name.removeprefix(whole): t for name, t in state.items() if name.startswith(whole)}


@pytest.mark.parametrize("density", [0.5, 0.1])
def test_bytes_are_those_of_the_masks(tmp_path: Path, density: float) -> None:
    counts = kept_elements(SHAPES, density)
    assert abs(sum(counts.values()) - density * MODEL_SIZE) <= len(SHAPES)
    bits = sum(-(-math.prod(shape) // 8) for name, shape in SHAPES.items() if counts[name] < math.prod(shape))
    assert 0 < bits < MODEL_SIZE // 8 + 6
    up = 4 * sum(counts.values()) + bits
    seen = Seen(tmp_path, method="dispfl", rounds=3, local_epochs=1, dispfl__density=density)
    for number in (1, 2, 3):
        for client in seen.line(number).values():
            assert client["bytes"] == {"up": up, "down": up * len(client.get("peers", []))}
            assert len(client.get("peers", [])) == (0 if number == 1 else 3)


def test_a_client_that_comes_from_a_run_of_another_density_gets_a_mask_of_this_one(tmp_path: Path) -> None:
    keys: dict[str, Any] = {"method": "dispfl", "local_epochs": 1, "rounds": 2}
    federate(tmp_path / "first", states=tmp_path / "states", dispfl__density=0.5, **keys)
    second = federate(tmp_path / "second", states=tmp_path / "states", dispfl__density=0.3, **keys)
    assert [line["refused"] for line in second.history] == [[], []]
    counts = kept_elements(SHAPES, 0.3)
    for state in personal(second):
        for name, mask in masks_of(state).items():
            assert int(mask.sum()) == counts[name]
            assert not state[MODEL + name][~mask].any()
            assert state[MODEL + name].any()


def test_a_personal_model_is_zero_outside_its_mask_which_moves_at_the_next_aggregation(tmp_path: Path) -> None:
    keys: dict[str, Any] = {"method": "dispfl", "local_epochs": 1, "rounds": 3}
    seen = Seen(tmp_path, **keys)
    sparse = {name for name, spec in seen.specs.items() if spec.sparse}
    assert {"extractor.fc1.weight", "extractor.fc2.weight"} <= sparse
    assert "extractor.fc1.bias" not in sparse
    for place, state in enumerate(seen.states()):
        masks = masks_of(state)
        assert set(masks) == set(masks_of(state, NEXT)) == sparse
        for name, mask in masks.items():
            assert not state[MODEL + name][~mask].any()
            assert np.array_equal(seen.sent[3][str(place)][MASK + name], mask.numpy())
            count = int(mask.sum())
            for number in (2, 3):
                now, before = (seen.sent[n][str(place)][MASK + name] for n in (number, number - 1))
                assert now.sum() == count
                # all that it lost it lost of its smallest weights
                gone = before & ~now
                most = math.ceil(annealed(0.5, number - 2, 3) * count)
                assert 0 < gone.sum() <= most
                sizes = np.abs(seen.sent[number - 1][str(place)][name])
                assert sizes[gone].max() <= np.sort(sizes[before])[most - 1]
            assert not torch.equal(mask, masks_of(state, NEXT)[name])


def test_sparse_tensors_are_averaged_over_those_who_have_them(tmp_path: Path) -> None:
    keys: dict[str, Any] = {"dispfl__graph": "ring", "momentum": 0.0}
    seen = Seen(tmp_path, 5, method="dispfl", rounds=2, **STILL, **keys)
    graph = draw_graph([str(i) for i in range(5)], over("ring"), 0, 2)
    grown = 0
    for place, arrays in seen.sent[2].items():
        met = [seen.sent[1][name] for name in (place, *graph[place])]
        for name, spec in seen.specs.items():
            if not spec.sparse:
                assert np.allclose(arrays[name], np.mean([sent[name] for sent in met], axis=0), atol=1e-6)
                continue
            count = np.sum([sent[MASK + name] for sent in met], axis=0)
            total = np.sum([sent[name] for sent in met], axis=0)
            mean = np.where(arrays[MASK + name], total / np.maximum(count, 1), 0)
            assert np.allclose(arrays[name], mean, atol=1e-6)
            # what it has anew comes from neighbours that had it; what nobody had begins at zero
            new = arrays[MASK + name] & ~met[0][MASK + name]
            grown += int((np.abs(arrays[name][new]) > 1e-20).sum())
            assert (np.abs(arrays[name][arrays[MASK + name] & (count == 0)]) < 1e-20).all()
    assert grown > 100


def test_a_client_that_trained_elsewhere_in_time_puts_on_the_mask_that_it_chose_then(tmp_path: Path) -> None:
    seen = Seen(tmp_path, 4, method="dispfl", rounds=6, local_epochs=1, participation=0.5, max_samples=200)
    counts = kept_elements(SHAPES, 0.5)
    for sent in seen.sent.values():
        for arrays in sent.values():
            assert all(arrays[MASK + n].sum() == counts[n] for n, spec in seen.specs.items() if spec.sparse)
    assert any("peers" in client for line in seen.outcome.history for client in line["clients"].values())


DENSE: dict[str, Any] = {"dispfl__density": 1.0, "momentum": 0.5, "dfedavgm__momentum": 0.5, "rounds": 3}


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["ring", "full"])
def test_dense_dispfl_is_dfedavgm_to_rounding(tmp_path: Path, kind: str) -> None:
    """On a regular graph Metropolis' weights are those of the plain mean."""
    keys: dict[str, Any] = {"clients": 5, "local_epochs": 2, "dfedavgm__graph": kind, "dispfl__graph": kind}
    one, other = (federate(tmp_path, method=method, **keys, **DENSE) for method in ("dfedavgm", "dispfl"))
    assert near(one, other)
    assert not any(masks_of(state) for state in states_of(other))
    for first, second in zip(one.history, other.history, strict=True):
        assert first["bytes"] == second["bytes"]
        peers = [[c.get("peers") for c in line["clients"].values()] for line in (first, second)]
        assert peers[0] == peers[1]
    sparse = federate(tmp_path, method="dispfl", **keys, **(DENSE | {"dispfl__density": 0.5}))
    assert not near(one, sparse)


def test_dense_dispfl_of_one_client_is_local(tmp_path: Path) -> None:
    keys: dict[str, Any] = {"clients": 1, "local_epochs": 2, "rounds": 3}
    local = federate(tmp_path, method="local", **keys)
    dense = federate(tmp_path, method="dispfl", dispfl__density=1.0, **keys)
    assert equal(local, dense)
    assert accuracies(local) == accuracies(dense)
    assert not equal(local, federate(tmp_path, method="dispfl", **keys))


def sent_masks(seen: Seen, number: int) -> list[np.ndarray]:
    return [arrays[MASK + "extractor.fc1.weight"] for arrays in seen.sent[number].values()]


def test_first_masks_are_each_clients_own_or_the_same(tmp_path: Path) -> None:
    keys: dict[str, Any] = {"method": "dispfl", "rounds": 1, "local_epochs": 1, "max_samples": 100}
    own = sent_masks(Seen(tmp_path, **keys), 1)
    assert all(not np.array_equal(own[0], mask) for mask in own[1:])
    common = sent_masks(Seen(tmp_path, dispfl__own_masks=False, **keys), 1)
    assert all(np.array_equal(common[0], mask) for mask in common[1:])
    assert not np.array_equal(common[0], own[0])
    again = sent_masks(Seen(tmp_path, seed=1, dispfl__own_masks=False, **keys), 1)
    assert not np.array_equal(common[0], again[0])


@pytest.mark.thorough
def test_keys_say_how_many_elements_move_and_where_to(tmp_path: Path) -> None:
    keys: dict[str, Any] = {"method": "dispfl", "rounds": 2, "local_epochs": 1, "max_samples": 200}
    plain = Seen(tmp_path, **keys)
    by_chance = Seen(tmp_path, dispfl__regrow="random", **keys)
    still = Seen(tmp_path, dispfl__prune_rate=0.0, **keys)
    fewer = Seen(tmp_path, dispfl__prune_rate=0.1, **keys)
    for first, second in zip(sent_masks(still, 1), sent_masks(still, 2), strict=True):
        assert np.array_equal(first, second)
    for one, other in zip(sent_masks(plain, 1), sent_masks(by_chance, 1), strict=True):
        assert np.array_equal(one, other)
    for one, other in zip(sent_masks(plain, 2), sent_masks(by_chance, 2), strict=True):
        assert not np.array_equal(one, other)
    lost = [
        [(a & ~b).sum() for a, b in zip(sent_masks(seen, 1), sent_masks(seen, 2), strict=True)]
        for seen in (plain, fewer)
    ]
    assert all(few < 0.5 * many for many, few in zip(*lost, strict=True))


@pytest.mark.parametrize("model", ["mlp", "cnn2", "cnn5-bn"])
def test_what_grows_is_where_the_gradient_is_largest(tmp_path: Path, model: str) -> None:
    """All training data are one batch, so that the gradient of a batch is known whatever the order."""
    keys: dict[str, Any] = {"batch_size": 512, "max_samples": 60, "rounds": 2, "local_epochs": 2, "lr": 0.1}
    keys |= {"dataset": "digits"} if model == "mlp" else write_images(tmp_path / "data", 2)
    keys |= {"model": model}
    outcome = federate(tmp_path / "runs", 2, method="dispfl", **keys)
    message = next(m for m in outcome.grid.messages if m.metadata.group_id == "2")
    client = standing(outcome.grid.contexts[message.metadata.dst_node_id], message)
    client.receive()
    client.train()
    client.model.eval()
    data = client.data.train
    loss = torch.nn.functional.cross_entropy(client.model(normalise(data.x)), data.y)
    named = dict(client.model.named_parameters())
    for name in [n.removeprefix(MASK) for n in client.memory if n.startswith(MASK)]:
        (gradient,) = torch.autograd.grad(loss, [named[name]], retain_graph=True)
        mask, after = client.memory[MASK + name], client.memory[NEXT + name]
        count = math.ceil(annealed(0.5, 1, 2) * int(mask.sum()))
        smallest = named[name].detach().abs().where(mask, torch.tensor(math.inf)).flatten().argsort(stable=True)[:count]
        left = mask.flatten().clone()
        left[smallest] = False
        grown, passed_over = after.flatten() & ~left, ~after.flatten() & ~left
        assert int(grown.sum()) == count
        sizes = gradient.abs().flatten()
        assert sizes[grown].min() >= sizes[passed_over].max() - 1e-6
        assert sizes[grown].mean() > 1.5 * sizes[passed_over].mean()


def test_a_mask_of_another_size_is_refused(tmp_path: Path) -> None:
    def tamper(message: Message, reply: Message) -> Message:
        if message.metadata.message_type == "train" and message.metadata.dst_node_id == 1000:
            record = reply.content.array_records["arrays"]
            array = record["extractor.fc1.weight"]
            bits = bytes([255] * (128 * 64 // 8))
            data = bits + np.full(128 * 64, 0.02, np.float32).tobytes()
            whole = type(array)(array.dtype, array.shape, array.stype, data)
            reply.content["arrays"] = ArrayRecord({**record, "extractor.fc1.weight": whole})
        return reply

    counts = kept_elements(SHAPES, 0.3)
    outcome = federate(tmp_path, 3, method="dispfl", local_epochs=1, tamper=tamper, dispfl__density=0.3)
    for line in outcome.history:
        (refusal,) = line["refused"]
        assert refusal["client"] == "0"
        assert refusal["reason"] == (
            "its mask of extractor.fc1.weight has 8192 elements, "
            f"dispfl.density asks for {counts['extractor.fc1.weight']}"
        )
        assert all("0" not in client.get("peers", []) for client in line["clients"].values())


def test_a_peer_without_a_mask_is_refused(tmp_path: Path) -> None:
    outcome = federate(tmp_path, 2, method="dispfl", max_samples=60, local_epochs=1)
    message = next(m for m in outcome.grid.messages if m.metadata.group_id == "2")
    client = standing(outcome.grid.contexts[message.metadata.dst_node_id], message)
    del client.received["0." + MASK + "extractor.fc1.weight"]
    with pytest.raises(FloretError, match=r"the server sent no tensor 0\.mask\.extractor\.fc1\.weight"):
        client.receive()


@pytest.mark.thorough
@pytest.mark.parametrize("method", ["dfedavgm", "dispfl"])
def test_batch_normalisation(tmp_path: Path, method: str) -> None:
    """Running statistics are averaged with the neighbours', or stay."""
    keys = write_images(tmp_path / "data", 2) | {"model": "cnn5-wide-bn", f"{method}__graph": "full"}
    name = "extractor.bn1.running_mean"
    shared = Seen(tmp_path, 2, method=method, rounds=2, **keys)
    message = next(m for m in shared.outcome.grid.messages if m.metadata.group_id == "2")
    client = standing(shared.outcome.grid.contexts[message.metadata.dst_node_id], message)
    own = client.model.state_dict()[name].clone()
    client.load_tensors({name: torch.from_numpy(shared.sent[1]["0"][name].copy())})
    assert not torch.equal(own, client.model.state_dict()[name])
    client.receive()
    both = [torch.from_numpy(shared.sent[1][place][name].copy()) for place in ("0", "1")]
    assert torch.allclose(client.model.state_dict()[name], (both[0] + both[1]) / 2, atol=1e-6)
    local = Seen(tmp_path, 2, method=method, rounds=1, batch_norm="local", **keys)
    assert name not in local.sent[1]["0"]


@pytest.mark.parametrize("method", ["dfedavgm", "dispfl"])
def test_clients_with_one_sample_take_part(tmp_path: Path, method: str) -> None:
    keys: dict[str, Any] = {"partition": "iid", "max_samples": 8, "validation_fraction": 0.0, "local_epochs": 1}
    outcome = federate(tmp_path, 4, method=method, rounds=3, test_fraction=0.5, **keys)
    assert outcome.summary["refused"] == 0
    assert all(len(line["clients"]) == 4 for line in outcome.history)


@pytest.mark.parametrize("method", ["dfedavgm", "dispfl"])
def test_an_aggregate_is_refused(tmp_path: Path, method: str) -> None:
    with pytest.raises(FloretError, match=f"aggregation = 'median': {method} averages nothing on the server"):
        federate(tmp_path, 2, method=method, aggregation="median")


@pytest.mark.thorough
@pytest.mark.parametrize("method", ["dfedavgm", "dispfl"])
def test_float16_halves_the_bytes_of_the_values(tmp_path: Path, method: str) -> None:
    runs = [federate(tmp_path, method=method, wire=wire, rounds=3) for wire in ("float32", "float16")]
    sent = [[(c["bytes"]["up"], c["bytes"]["down"]) for c in run.history[-1]["clients"].values()] for run in runs]
    bits = sum(-(-mask.numel() // 8) for mask in masks_of(states_of(runs[0])[0]).values())
    assert (bits > 0) == (method == "dispfl")
    assert sent[1] == [((up - bits) // 2 + bits, (down - 3 * bits) // 2 + 3 * bits) for up, down in sent[0]] or (
        method == "dfedavgm" and sent[1] == [(up // 2, down // 2) for up, down in sent[0]]
    )
    assert runs[1].summary["refused"] == 0
    accuracies = [run.summary["accuracy"]["after"]["mean"] for run in runs]
    assert abs(accuracies[0] - accuracies[1]) < 0.05


# The history, and the graph in a report


def test_peers_are_written_and_read() -> None:
    line = {"trained": True, "before": None, "after": None, "loss": None, "bytes": {"up": 1, "down": 2}, "seconds": 0.1}
    old = ClientRound.from_json(line)
    assert old.peers == ()
    assert old.to_json() == line
    new = ClientRound.from_json({**line, "peers": ["b", "ward 1"]})
    assert new.peers == ("b", "ward 1")
    assert new.to_json() == {**line, "peers": ["b", "ward 1"]}
    for wrong in ("abc", 5, [1, 2], {"a": 1}):
        with pytest.raises(TypeError, match="is not a list of names"):
            ClientRound.from_json({**line, "peers": wrong})


def lines_of(svg: str, rounds: int) -> list[float]:
    """Return the opacity of each edge that is drawn."""
    return [float(found) for found in re.findall(r"stroke: var\(--series-0\); stroke-opacity: ([0-9.]+)", svg)]


def graph_of(path: Path) -> str:
    """Return the figure of the communication graph on a page, or an empty text."""
    page = Page(path)
    assert page.says("Communication graph") == ("Which clients exchanged models" in path.read_text())
    found = re.search(r'<svg[^>]*aria-label="Which clients exchanged models".*?</svg>', path.read_text(), re.DOTALL)
    return found[0] if found else ""


@pytest.mark.thorough
def test_a_report_shows_the_graph(tmp_path: Path) -> None:
    keys: dict[str, Any] = {"local_epochs": 1, "max_samples": 120, "report": True}
    outcome = federate(tmp_path, 6, method="dfedavgm", rounds=3, **keys)
    run = read_run(outcome.directory)
    assert meetings(run) == {(str(i), str(i + 1)): 2 for i in range(5)} | {("0", "5"): 2}
    svg = graph_of(outcome.directory / "report.html")
    opacities = lines_of(svg, 3)
    assert len(opacities) == 6
    assert len(set(opacities)) == 1
    assert all(f">{name}</text>" in svg for name in "012345")
    # Places on the circle: the ring's edges are all as long.
    paths = [tuple(map(float, found)) for found in re.findall(r'd="M ([\d.]+) ([\d.]+) \nL ([\d.]+) ([\d.]+)', svg)]
    lengths = [math.dist(ends[:2], ends[2:]) for ends in paths if ends[2] < 1000]
    assert len(lengths) == 6
    assert max(lengths) - min(lengths) < 0.01 * min(lengths)
    # A method without a server's relay has none.
    assert not graph_of(federate(tmp_path, 3, method="fedavg", **keys).directory / "report.html")


@pytest.mark.thorough
def test_an_edge_is_as_opaque_as_it_was_used_often(tmp_path: Path) -> None:
    keys: dict[str, Any] = {"local_epochs": 1, "max_samples": 160, "dispfl__degree": 3, "rounds": 4}
    outcome = federate(tmp_path, 8, method="dispfl", **keys)
    run = read_run(outcome.directory)
    counts = meetings(run)
    assert sum(counts.values()) == 3 * 8 * 3 // 2
    assert len(set(counts.values())) > 1
    write_report([run], tmp_path / "report.html")
    opacities = lines_of(graph_of(tmp_path / "report.html"), 4)
    by_use = Counter(round(0.1 + 0.6 * count / max(counts.values()), 4) for count in counts.values())
    assert Counter(round(value, 4) for value in opacities) == by_use


@pytest.mark.thorough
@pytest.mark.parametrize(("clients", "drawn_as"), [(45, "lines"), (120, "picture")])
def test_the_graph_of_many_clients(tmp_path: Path, clients: int, drawn_as: str) -> None:
    outcome = federate(tmp_path, 3, method="dfedavgm", rounds=2, max_samples=60, local_epochs=1)
    history = outcome.directory / "history.jsonl"
    lines = [json.loads(line) for line in history.read_text().splitlines()]
    names = [f"ward {i}" for i in range(clients)]
    lines[1]["clients"] = {
        name: lines[1]["clients"]["0"] | {"peers": [other for other in names if other != name]} for name in names
    }
    history.write_text("".join(json.dumps(line) + "\n" for line in lines))
    run = read_run(outcome.directory)
    assert len(meetings(run)) == clients * (clients - 1) // 2
    write_report([run], tmp_path / "report.html")
    svg = graph_of(tmp_path / "report.html")
    assert ("<image" in svg) == (drawn_as == "picture")
    assert len(lines_of(svg, 2)) == (0 if drawn_as == "picture" else clients * (clients - 1) // 2)
    assert "</text>" not in svg
    assert len(svg) < 600_000


def test_a_run_with_peers_is_followed(tmp_path: Path) -> None:
    outcome = federate(tmp_path, 4, method="dfedavgm", rounds=3, max_samples=80, local_epochs=1)
    follower = Follower(outcome.directory)
    follower.look()
    assert follower.last == 3
    assert not follower.problems
    news = follower.news(-1, 0)
    assert len(news["rounds"]) == 3
    assert len(news["clients"]) == 4
    history = outcome.directory / "history.jsonl"
    line = json.loads(history.read_text().splitlines()[-1])
    line["clients"]["0"]["peers"] = "1"
    with history.open("a") as file:
        file.write(json.dumps(line | {"round": 4}) + "\n")
    follower.look()
    assert follower.problems == ["history.jsonl, line 4: cannot be read (TypeError)"]


def test_peers_of_ua_pdfl_are_those_in_its_queue(tmp_path: Path) -> None:
    outcome = federate(tmp_path, 5, method="ua-pdfl", rounds=2, ua_pdfl__n_com=2, max_samples=100, local_epochs=1)
    first, second = (line["clients"] for line in outcome.history)
    assert all("peers" not in client for client in first.values())
    assert all(len(set(client["peers"]) - {name}) == 2 for name, client in second.items())
