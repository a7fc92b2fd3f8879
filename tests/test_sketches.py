"""Sketches of methods of other kinds than those in ``strategies/``, each in two small files: the base supports them.

Their files are below ``tests/sketches``, where methods are found, too, while a test runs.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, Message

import client_app.methods
import server_app.setup
import strategies
from client_app.app import Request
from client_app.client import MEMORY, MODEL
from common.errors import FloretError
from common.filters import ClientFilters, Payload
from common.run_config import default_config
from common.tensors import NamedArrays, TensorError
from common.wire import payload_bytes
from strategies import METHODS
from strategies.core import StrategySetting
from tests.harness import Outcome, federate, kept
from tests.test_resume import CLIENTS, assert_same, crash

SKETCHES = Path(__file__).parent / "sketches"
MODEL_SIZE = (64 * 128 + 128) + (128 * 64 + 64) + (64 * 10 + 10)
HEAD = 64 * 10 + 10
KEYS: dict[str, dict[str, Any]] = {
    "sketch-student": {"width": 16, "rank": 4},
    "sketch-inner": {"steps": 3, "inner-lr": 0.02, "lambda": 5.0, "server-lr": 0.05},
}


@pytest.fixture(autouse=True)
def _sketched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the sketches methods of Floret."""
    monkeypatch.setattr(strategies, "__path__", [*strategies.__path__, str(SKETCHES / "strategies")])
    monkeypatch.setattr(client_app.methods, "__path__", [*client_app.methods.__path__, str(SKETCHES / "methods")])
    defaults = default_config
    own = {f"{method}.{key}": value for method, keys in KEYS.items() for key, value in keys.items()}
    monkeypatch.setattr("tests.harness.default_config", lambda app: defaults(app) | own)
    for method in KEYS:
        monkeypatch.setitem(METHODS, method, "a sketch")


@pytest.mark.thorough
@pytest.mark.parametrize("method", KEYS)
def test_a_sketch_learns_keeps_its_state_and_resumes(tmp_path: Path, method: str) -> None:
    keys: dict[str, Any] = {"method": method, "rounds": 5, "participation": 0.6, "local_epochs": 1, "evaluate_every": 2}
    whole = federate(tmp_path / "whole", CLIENTS, **keys)
    assert whole.summary["refused"] == 0
    assert whole.history[-1]["loss"] < whole.history[0]["loss"]
    directory = crash(tmp_path / "cut", tmp_path / "states", 4, **keys)
    resumed = federate(tmp_path / "cut", CLIENTS, states=tmp_path / "states", resume=str(directory), **keys)
    assert_same(whole, resumed)
    again = federate(tmp_path / "again", CLIENTS, backwards=True, **keys)
    assert_same(whole, again)


def uploads(tmp_path: Path, **keys: Any) -> tuple[Outcome, list[ArrayRecord]]:
    """Return a run, and the record that each client sent in each round."""
    found: list[ArrayRecord] = []

    def tamper(message: Message, reply: Message) -> Message:
        if message.metadata.message_type == "train":
            found.append(ArrayRecord(dict(reply.content.array_records["arrays"])))
        return reply

    return federate(tmp_path, tamper=tamper, **keys), found


def checkpointed(outcome: Outcome) -> NamedArrays:
    """Return the global tensors of a run's last checkpoint."""
    from server_app.checkpoint import Checkpoints

    return Checkpoints(outcome.directory / "checkpoints").read()[0].arrays


def equal(one: NamedArrays, other: NamedArrays) -> bool:
    return one.keys() == other.keys() and all(np.array_equal(one[name], other[name]) for name in one)


def personal(outcome: Outcome) -> list[dict[str, torch.Tensor]]:
    return [kept(context).load() for context in outcome.grid.contexts.values()]


def test_a_second_network_is_shared_as_factors_of_low_rank(tmp_path: Path) -> None:
    outcome = federate(tmp_path, method="sketch-student", rounds=2)
    whole = 64 * 16 + 16 + 16 * 10 + 10
    factors = 4 * (64 + 16) + 16 + 4 * (16 + 10) + 10
    for line in outcome.history:
        assert {c["bytes"]["up"] for c in line["clients"].values()} == {4 * factors}
        assert {c["bytes"]["down"] for c in line["clients"].values()} == {4 * whole}
    assert set(checkpointed(outcome)) == {f"student.{n}.{kind}" for n in (1, 3) for kind in ("weight", "bias")}
    students = [state[f"{MEMORY}student.3.weight"] for state in personal(outcome)]
    assert not torch.equal(students[0], students[1])
    # a matrix of 16 x 10 has rank 10 at most, so less than the bound travels
    full = federate(tmp_path, method="sketch-student", rounds=1, sketch_student__rank=12)
    up = {c["bytes"]["up"] for c in full.history[0]["clients"].values()}
    assert up == {4 * (12 * (64 + 16) + 16 + 10 * (16 + 10) + 10)}


def test_a_rank_that_differs_between_the_factors_is_refused(tmp_path: Path) -> None:
    def tamper(message: Message, reply: Message) -> Message:
        if message.metadata.message_type == "train" and message.metadata.dst_node_id == 1000:
            record = reply.content.array_records["arrays"]
            array = record["student.1.weight.u"].numpy()[:, :3]
            reply.content["arrays"] = type(record)(
                {**record, "student.1.weight.u": type(record["student.1.bias"])(np.ascontiguousarray(array))}
            )
        return reply

    outcome = federate(tmp_path, 3, method="sketch-student", rounds=1, tamper=tamper)
    (refusal,) = outcome.history[0]["refused"]
    assert refusal["reason"] == "tensor student.1.weight.v has 4 for the side rank of student.1.weight, " + (
        "student.1.weight.u has 3"
    )


def test_inner_steps_and_a_server_that_trains(tmp_path: Path) -> None:
    runs = [
        federate(tmp_path, method="sketch-inner", rounds=2, **more)
        for more in ({}, {"sketch_inner__steps": 1}, {"sketch_inner__server_lr": 0.0})
    ]
    heads = [checkpointed(run)["head.weight"] for run in runs]
    assert not np.array_equal(heads[0], heads[2])
    assert not np.array_equal(heads[0], heads[1])
    # what is measured and kept is the model of the inner loop, not the one that follows it
    assert runs[0].history[-1]["accuracy"]["after"]["test"]["mean"] > 0.6
    extractor = MODEL + "extractor.fc1.weight"
    assert not np.allclose(personal(runs[0])[0][extractor].numpy(), checkpointed(runs[0])["extractor.fc1.weight"])


# Filters and aggregates


def with_filters(monkeypatch: pytest.MonkeyPatch, filters: ClientFilters) -> None:
    monkeypatch.setattr(Request, "filters", lambda self: filters)


def test_filters_stand_in_a_row_and_see_what_travels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, str, int, int, tuple[str, ...]]] = []

    def note(where: str) -> Callable[[Payload], Payload]:
        def step(payload: Payload) -> Payload:
            seen.append((where, payload.kind, payload.round, payload.samples, tuple(payload.tensors)))
            return payload

        return step

    def double(payload: Payload) -> Payload:
        return replace(payload, tensors={name: 2 * array for name, array in payload.tensors.items()})

    plain, records = uploads(tmp_path, method="fedper", clients=2, rounds=1)
    with_filters(monkeypatch, ClientFilters(sends=(double, double, note("sent")), receives=(note("received"),)))
    filtered, others = uploads(tmp_path, method="fedper", clients=2, rounds=1)
    for one, other in zip(records, others, strict=True):
        assert all(np.array_equal(4 * one[name].numpy(), other[name].numpy()) for name in one)
    # what stays is not touched
    for mine, theirs in zip(personal(plain), personal(filtered), strict=True):
        assert all(torch.equal(mine[name], theirs[name]) for name in mine)
    names = tuple(records[0])
    assert [entry[:3] for entry in seen] == [("received", "train", 1), ("sent", "train", 1)] * 2
    assert all(entry[4] == names for entry in seen)
    assert seen[1][3] > 0


def test_a_filter_that_refuses_leaves_the_state_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(payload: Payload) -> Payload:
        if payload.client == "1":
            raise FloretError("the site lets nothing leave")
        return payload

    with_filters(monkeypatch, ClientFilters(sends=(refuse,)))
    outcome = federate(tmp_path, 3, method="fedper", rounds=1)
    assert {r["reason"] for r in outcome.history[0]["refused"]} == {"the site lets nothing leave"}
    assert [kept(context).round for context in outcome.grid.contexts.values()] == [1, 0, 1]


def test_the_server_has_filters_and_an_aggregate_to_exchange(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Largest:
        """The largest value of each element."""

        def __init__(self) -> None:
            self._arrays: NamedArrays = {}

        def add(self, arrays: Any, weight: float) -> None:
            for name, array in arrays.items():
                self._arrays[name] = np.maximum(self._arrays[name], array) if name in self._arrays else array

        def result(self) -> NamedArrays:
            return self._arrays

    def positive(payload: Payload) -> Payload:
        return replace(payload, tensors={name: abs(array) for name, array in payload.tensors.items()})

    monkeypatch.setattr(server_app.setup, "aggregate_of", lambda name, trim: Largest)
    monkeypatch.setattr(server_app.setup, "StrategySetting", partial(StrategySetting, filters=(positive,)))
    outcome, records = uploads(tmp_path, method="fedper", clients=3, rounds=1)
    for name, array in checkpointed(outcome).items():
        assert np.array_equal(array, np.max([abs(record[name].numpy()) for record in records], axis=0))


# The type in which tensors travel


@pytest.mark.thorough
@pytest.mark.parametrize("method", ["fedavg", "fedproto", "ua-pdfl", "sketch-student"])
def test_float16_halves_the_bytes(tmp_path: Path, method: str) -> None:
    runs = [federate(tmp_path, method=method, wire=wire, rounds=3) for wire in ("float32", "float16")]
    sent = [[(c["bytes"]["up"], c["bytes"]["down"]) for c in run.history[-1]["clients"].values()] for run in runs]
    assert sent[1] == [(up // 2, down // 2) for up, down in sent[0]]
    assert runs[1].summary["refused"] == 0
    accuracies = [run.summary["accuracy"]["after"]["mean"] for run in runs]
    assert abs(accuracies[0] - accuracies[1]) < 0.05


def test_a_value_that_float16_cannot_carry_is_said_and_nothing_is_lost(tmp_path: Path) -> None:
    outcome = federate(tmp_path, 2, method="fedper", wire="float16", lr=3e4, momentum=0.0, rounds=1, local_epochs=1)
    reasons = {refusal["reason"] for refusal in outcome.history[0]["refused"]}
    assert reasons
    assert all("has values beyond 65504" in reason or "diverged" in reason for reason in reasons)
    assert all(kept(context).round == 0 for context in outcome.grid.contexts.values())


def test_the_client_checks_what_it_is_sent(tmp_path: Path) -> None:
    # a server that sends in another type than the run's config says
    outcome = federate(tmp_path, 2, method="fedper", rounds=1)
    message = next(m for m in outcome.grid.messages if m.metadata.message_type == "train")
    context = outcome.grid.contexts[1000]
    context.run_config["wire"] = "float16"
    request = Request(context, message)
    with pytest.raises(TensorError, match=r"tensor extractor.fc1.weight is float32 .*, it must be float16"):
        request.arguments(Request(context).client())
    assert payload_bytes(message.content.array_records["arrays"]) == 4 * (MODEL_SIZE - HEAD)
