"""What travels between client and server: filters on both sides, an aggregate in exchange, the type of values."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import server_app.setup
from client_app.app import Request
from common.errors import FloretError
from common.filters import ClientFilters, Payload
from common.tensors import NamedArrays, TensorError
from common.wire import payload_bytes
from strategies.core import StrategySetting
from tests.harness import EXTRACTOR, checkpointed, federate, kept, personal, uploads

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

    monkeypatch.setattr(server_app.setup, "aggregate_of", lambda name, trim, folder: Largest)
    monkeypatch.setattr(server_app.setup, "StrategySetting", partial(StrategySetting, filters=(positive,)))
    outcome, records = uploads(tmp_path, method="fedper", clients=3, rounds=1)
    for name, array in checkpointed(outcome).items():
        assert np.array_equal(array, np.max([abs(record[name].numpy()) for record in records], axis=0))


# The type in which tensors travel


@pytest.mark.thorough
@pytest.mark.parametrize("method", ["fedavg", "fedproto", "ua-pdfl", "gpfl"])
def test_float16_halves_the_bytes(tmp_path: Path, method: str) -> None:
    runs = [federate(tmp_path, method=method, wire=wire, rounds=3) for wire in ("float32", "float16")]
    sent = [[(c["bytes"]["up"], c["bytes"]["down"]) for c in run.history[-1]["clients"].values()] for run in runs]
    assert sent[1] == [(up // 2, down // 2) for up, down in sent[0]]
    assert runs[1].summary["refused"] == 0
    accuracies = [run.summary["accuracy"]["after"]["mean"] for run in runs]
    assert abs(accuracies[0] - accuracies[1]) < 0.05


def test_a_value_that_float16_cannot_carry_is_said_and_nothing_is_lost(tmp_path: Path) -> None:
    outcome = federate(
        tmp_path, 2, method="fedper", wire="float16", lr=3e4, momentum=0.0, rounds=1, local_epochs=1, fails="no reply"
    )
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
    assert payload_bytes(message.content.array_records["arrays"]) == 4 * EXTRACTOR
