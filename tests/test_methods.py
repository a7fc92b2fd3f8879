"""Methods in the real ServerApp and ClientApp: what is sent, what stays private, which of them coincide."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict

from client_app.client import MODEL
from common.errors import FloretError
from common.wire import from_record, to_record
from data import load_client
from results.report import client_table, table, write_report
from results.run import read_run
from server_app.settings import read_config
from strategies import METHODS
from strategies.core import Client, FloretStrategy
from strategies.fedper import FedPer
from tests.harness import (
    EVERY_METHOD,
    EXTRACTOR,
    HEAD,
    ON_MLP,
    DirectGrid,
    Outcome,
    federate,
    kept,
    run_config,
    standing,
    timeless,
    without_the_first_after_two_rounds,
)


def travelled(outcome: Outcome, way: str) -> list[dict[str, int]]:
    return [{name: c["bytes"][way] for name, c in line["clients"].items()} for line in outcome.history]


@pytest.mark.parametrize(
    ("method", "scalars"),
    [
        ("local", 0),
        ("fedavg", EXTRACTOR + HEAD),
        ("fedprox", EXTRACTOR + HEAD),
        ("fedbn", EXTRACTOR + HEAD),  # there is no batch normalisation in an MLP
        ("fedper", EXTRACTOR),
        ("fedrep", EXTRACTOR),
        ("pfakd", EXTRACTOR),
    ],
)
def test_bytes_are_those_of_the_formula(tmp_path: Path, method: str, scalars: int) -> None:
    outcome = federate(tmp_path, method=method)
    every = {str(i): 4 * scalars for i in range(4)}
    assert travelled(outcome, "up") == [every, every]
    assert travelled(outcome, "down") == [every, every]
    assert outcome.summary["bytes"] == {"up": 2 * 4 * 4 * scalars, "down": 2 * 4 * 4 * scalars}


@pytest.mark.parametrize(
    ("name", "value", "line"),
    [
        ("shares", "extractors", "shares = 'extractors': must be one of model, extractor, head, model-without-batch-"),
        ("shares", "none", "shares = 'none': must be one of model, extractor, head, model-without-batch-norm, nothing"),
        ("head", "lats", "head = 'lats': must be one of last, linear (did you mean 'last'?)"),
        ("protects", frozenset({"clients"}), "protects = frozenset({'clients'}): must be a frozenset of ['client', "),
        ("protects", "client", "protects = 'client': must be a frozenset of ['client', 'example']"),
    ],
)
def test_a_typo_in_what_a_method_says_of_itself_is_refused(name: str, value: object, line: str) -> None:
    with pytest.raises(FloretError) as error:
        type("Mine", (FloretStrategy,), {"__module__": "strategies.mine", name: value})
    assert str(error.value).startswith(f"strategies.mine.Mine: {line}")


def test_fedproto_sends_its_own_classes_and_gets_those_that_exist(tmp_path: Path) -> None:
    outcome = federate(tmp_path, method="fedproto", classes_per_client=2)
    config = read_config(run_config(tmp_path, method="fedproto"))[0]
    classes = [set(load_client(config, i, 4).train.y.tolist()) for i in range(4)]
    assert travelled(outcome, "up") == [{str(i): 4 * 64 * 2 for i in range(4)}] * 2
    known = len(set().union(*classes))
    assert travelled(outcome, "down") == [{str(i): 0 for i in range(4)}, {str(i): 4 * 64 * known for i in range(4)}]


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("method", "batch_norm", "scalars"),
    [
        # ResNet-18 for one-channel images: 11,173,962 - 2 * 64 * 9 parameters, of which 9,600 are batch normalisation's
        # weights and biases, and as many running means and variances
        ("fedavg", "shared", 11_172_810 + 9_600),
        ("fedavg", "local", 11_172_810),
        ("fedbn", "shared", 11_172_810 - 9_600),
    ],
)
def test_the_policy_for_batch_normalisation(tmp_path: Path, method: str, batch_norm: str, scalars: int) -> None:
    outcome = federate(
        tmp_path, 2, method=method, model="resnet18", batch_norm=batch_norm, local_epochs=1, max_samples=40
    )
    assert travelled(outcome, "up") == [{"0": 4 * scalars, "1": 4 * scalars}] * 2
    states = [kept(context).load() for context in outcome.grid.contexts.values()]
    means = [state[MODEL + "extractor.bn1.running_mean"] for state in states]
    assert not torch.equal(means[0], means[1])


def test_batch_normalisation_cannot_learn_from_one_value(tmp_path: Path) -> None:
    for part, counts in (("train", (1, 4)), ("test", (3, 3))):
        (tmp_path / part).mkdir()
        for i, count in enumerate(counts):
            np.savez(tmp_path / part / f"{i}.npz", x=np.ones((count, 8, 8), np.uint8), y=np.arange(count) % 2)
    keys: dict[str, Any] = {"dataset": "npz-clients", "data_dir": str(tmp_path), "validation_fraction": 0.0}
    outcome = federate(tmp_path / "runs", 2, method="fedavg", model="resnet18", rounds=1, local_epochs=1, **keys)
    (refused,) = outcome.history[0]["refused"]
    assert refused == {
        "client": "0",
        "reason": "batch-size = 32, 1 training samples: batch normalisation of model 'resnet18' cannot learn from one "
        "sample, of which it has one value per channel; take larger batches or images, or a model without it",
    }
    assert outcome.history[0]["clients"]["1"]["trained"]


@pytest.mark.parametrize("method", EVERY_METHOD)
def test_every_method_learns_and_reports(tmp_path: Path, method: str) -> None:
    keys = {"rounds": 4, "local_epochs": 3, **ON_MLP.get(method, {})}
    outcome = federate(tmp_path, report=True, method=method, **keys)
    assert outcome.summary["method"] == method
    assert outcome.summary["refused"] == 0
    assert outcome.summary["accuracy"]["after"]["mean"] > 0.8
    assert (outcome.directory / "report.html").stat().st_size > 10_000
    for line in outcome.history:
        assert line["accuracy"]["before"]["test"]
        assert line["accuracy"]["after"]["validation"]


def one_line_of(outcome: Outcome) -> Any:
    return [
        {**timeless(line), "clients": {n: timeless(c) for n, c in line["clients"].items()}} for line in outcome.history
    ]


def same(first: Outcome, second: Outcome, ignore: str = "") -> bool:
    """Compare two histories and the personal models behind them, bit for bit."""
    states = [[kept(context).load() for context in outcome.grid.contexts.values()] for outcome in (first, second)]
    for one, other in zip(*states, strict=True):
        if set(one) != set(other) or not all(torch.equal(one[name], other[name]) for name in one):
            return False
    return bool(one_line_of(first) == one_line_of(second))


def test_identities(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fedavg = federate(tmp_path, method="fedavg")
    assert same(fedavg, federate(tmp_path, method="fedbn"))
    assert same(fedavg, federate(tmp_path, method="fedprox", fedprox__mu=0.0))
    assert not same(fedavg, federate(tmp_path, method="fedprox", fedprox__mu=1.0))
    pfakd = federate(tmp_path, method="pfakd", pfakd__beta=0.0)
    assert not same(pfakd, federate(tmp_path, method="fedper"))
    monkeypatch.setattr(FedPer, "weighted", False)
    assert same(pfakd, federate(tmp_path, method="fedper"))


def test_pfakd_switches_change_what_is_learned(tmp_path: Path) -> None:
    data = tmp_path / "data"
    write_clients(data, 2, shape=(16, 16))
    keys: dict[str, Any] = {"dataset": "npz-clients", "data_dir": str(data), "model": "cnn2", "local_epochs": 2}
    runs = [
        federate(tmp_path / "runs", 2, **keys, **switch)
        for switch in (
            {},
            {"pfakd__distill_reduction": "sum"},
            {"pfakd__attention_transfer": True},
            {"pfakd__attention_transfer": True, "pfakd__attention_weight": 0.0},
            {"pfakd__beta": 0.0},
        )
    ]
    losses = [run.history[-1]["loss"] for run in runs]
    assert losses[3] == losses[0]
    assert len({losses[0], losses[1], losses[2], losses[4]}) == 4


def test_attention_transfer_needs_a_convolution(tmp_path: Path) -> None:
    with pytest.raises(
        FloretError, match=r"pfakd\.attention-transfer = true: the extractor of model 'mlp' has no conv"
    ):
        federate(tmp_path, method="pfakd", pfakd__attention_transfer=True)


def write_clients(folder: Path, clients: int, *, shape: tuple[int, ...] = (20,), samples: int = 40) -> None:
    """Write files of each client's own: two classes that differ in their mean."""
    for part in ("train", "test"):
        (folder / part).mkdir(parents=True)
        for i in range(clients):
            generator = np.random.default_rng([i, part == "test"])
            y = np.arange(samples) % 2
            x = generator.normal(size=(samples, *shape)).astype(np.float32)
            x += y.reshape(-1, *[1] * len(shape)).astype(np.float32)
            np.savez(folder / part / f"{i}.npz", x=x, y=y)


def test_a_users_own_files(tmp_path: Path) -> None:
    write_clients(tmp_path / "data", 3)
    keys: dict[str, Any] = {
        "dataset": "npz-clients",
        "data_dir": str(tmp_path / "data"),
        "rounds": 5,
        "local_epochs": 5,
    }
    outcome = federate(tmp_path / "runs", 3, method="fedper", **keys)
    assert outcome.summary["accuracy"]["after"]["mean"] > 0.8
    assert {c["bytes"]["up"] for c in outcome.history[0]["clients"].values()} == {4 * (21 * 128 + 129 * 64)}


@pytest.mark.thorough
@pytest.mark.parametrize("method", METHODS)
def test_the_order_in_which_clients_answer_changes_nothing(tmp_path: Path, method: str) -> None:
    assert same(
        federate(tmp_path, 6, method=method, participation=0.5, rounds=3, **ON_MLP.get(method, {})),
        federate(tmp_path, 6, method=method, participation=0.5, rounds=3, **ON_MLP.get(method, {}), backwards=True),
    )


def test_the_seed_changes_everything_that_is_drawn(tmp_path: Path) -> None:
    first, second = (federate(tmp_path, 10, participation=0.3, rounds=3, seed=seed) for seed in (0, 1))
    sampled = [
        [sorted(n for n, c in line["clients"].items() if c["trained"]) for line in o.history] for o in (first, second)
    ]
    assert all(len(names) == 3 for run in sampled for names in run)
    assert len({tuple(names) for names in sampled[0]}) > 1
    assert sampled[0] != sampled[1]


def test_absent_clients_are_evaluated_on_their_own_last_model(tmp_path: Path) -> None:
    outcome = federate(tmp_path, 6, method="fedper", participation=0.5, rounds=6, evaluate_every=1)
    last: dict[str, Any] = {}
    seen = 0
    for line in outcome.history:
        for name, client in line["clients"].items():
            if client["trained"]:
                last[name] = client["after"]
            else:
                assert client["bytes"] == {"up": 0, "down": 0}
                assert client["before"] is None
                assert client["after"] == last[name]
                seen += 1
        # whoever never took part has no personal model to measure
        assert set(line["clients"]) == set(last)
    assert seen > 3


def test_absent_clients_of_fedavg_are_given_the_global_model_to_evaluate(tmp_path: Path) -> None:
    outcome = federate(tmp_path, 6, method="fedavg", participation=0.5, rounds=2, evaluate_every=2)
    absent = [client for client in outcome.history[1]["clients"].values() if not client["trained"]]
    assert len(absent) == 3
    for client in absent:
        assert client["before"] is not None
        assert client["bytes"] == {"up": 0, "down": 4 * (EXTRACTOR + HEAD)}


@pytest.mark.parametrize(
    ("method", "keys"), [("fedavg", {}), ("fedpa", {}), ("lg-fedavg", {"lg_fedavg__fedavg_rounds": 3})]
)
def test_a_global_model_is_measured_before_as_the_round_began_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, keys: dict[str, Any]
) -> None:
    sent: dict[tuple[int, str], list[bytes]] = {}
    original = FloretStrategy._message

    def noted(
        strategy: FloretStrategy,
        client: Client,
        kind: str,
        arrays: ArrayRecord,
        server_round: int,
        config: ConfigRecord,
    ) -> Message:
        found = from_record(arrays)
        model = b"".join(found[name].tobytes() for name in sorted(found) if name.startswith(("extractor.", "head.")))
        sent.setdefault((server_round, kind), []).append(model)
        return original(strategy, client, kind, arrays, server_round, config)

    monkeypatch.setattr(FloretStrategy, "_message", noted)
    federate(tmp_path, 6, method=method, participation=0.5, rounds=3, evaluate_every=1, **keys)
    for server_round in (1, 2, 3):
        trained, measured = (sent[server_round, kind] for kind in (MessageType.TRAIN, MessageType.EVALUATE))
        assert len(trained) == len(measured) == 3
        assert len({*trained, *measured}) == 1
    assert len({sent[server_round, MessageType.TRAIN][0] for server_round in (1, 2, 3)}) == 3


def test_without_a_validation_split_nothing_is_judged_by_it(tmp_path: Path) -> None:
    outcome = federate(tmp_path, validation_fraction=0.0)
    assert outcome.summary["best_validation"] is None
    assert outcome.history[0]["accuracy"]["after"]["validation"] is None
    assert outcome.summary["accuracy"]["after"]["mean"] > 0.5


def test_a_client_does_not_take_what_its_method_keeps_private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def with_head(strategy: FedPer, client: Client, server_round: int) -> dict[str, Any]:
        return {**strategy.arrays, "head.bias": Array(np.zeros(10, np.float32))}

    monkeypatch.setattr(FedPer, "payload", with_head)
    outcome = federate(tmp_path, method="fedper", rounds=1, fails="no reply of any round was used")
    reasons = {refusal["reason"] for refusal in outcome.history[0]["refused"]}
    assert reasons == {"the server sent head.bias, which fedper keeps private to the client"}


def test_training_that_diverges_is_refused_and_loses_nothing(tmp_path: Path) -> None:
    line = "no reply of any round was used, so nothing was learned; .* Client 2 was refused last: .*training diverged"
    outcome = federate(tmp_path, 3, method="fedper", lr=1e12, momentum=0.0, rounds=2, fails=line)
    assert outcome.summary["refused"] == 6
    assert all("training diverged" in r["reason"] for line in outcome.history for r in line["refused"])
    assert all(kept(context).round == 0 for context in outcome.grid.contexts.values())


def arrays_of(change: Callable[[dict[str, np.ndarray]], Any]) -> Callable[[RecordDict], None]:
    def tamper(content: RecordDict) -> None:
        arrays = {name: array.copy() for name, array in from_record(content.array_records["arrays"]).items()}
        change(arrays)
        content["arrays"] = to_record(arrays)

    return tamper


def metrics_of(**change: Any) -> Callable[[RecordDict], None]:
    def tamper(content: RecordDict) -> None:
        metrics = dict(content.metric_records["metrics"]) | {k.replace("_", "-"): v for k, v in change.items()}
        content["metrics"] = MetricRecord({k: v for k, v in metrics.items() if v is not None})

    return tamper


NAME = "extractor.fc2.bias"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (arrays_of(lambda a: a.pop(NAME)), f"tensor {NAME} is missing"),
        (arrays_of(lambda a: a.update(extra=np.ones(1, np.float32))), "tensor extra is unknown"),
        (
            arrays_of(lambda a: a.update({NAME: a[NAME][:3]})),
            f"tensor {NAME} is float32 (3,), it must be float32 (64,)",
        ),
        (arrays_of(lambda a: a.update({NAME: a[NAME].astype(float)})), f"tensor {NAME} is float64 (64,), it must be"),
        (arrays_of(lambda a: a[NAME].__setitem__(3, np.nan)), f"tensor {NAME} is not finite"),
        (arrays_of(lambda a: a[NAME].__setitem__(3, -np.inf)), f"tensor {NAME} is not finite"),
        (metrics_of(num_examples=0), "num-examples is 0, not a positive whole number"),
        (metrics_of(num_examples=-5), "num-examples is -5, not a positive whole number"),
        (metrics_of(num_examples=2.5), "num-examples is 2.5, not a positive whole number"),
        (metrics_of(num_examples=None), "num-examples is None, not a positive whole number"),
        (metrics_of(loss=float("nan")), "metric loss is nan, not a finite number"),
        (lambda content: content.pop("arrays"), "the reply has no arrays"),
        (lambda content: content.pop("metrics"), "the reply has no metrics"),
        (lambda content: content.update(error=ConfigRecord({"reason": "disk full"})), "disk full"),
    ],
)
def test_a_bad_reply_is_refused_and_the_round_goes_on(
    tmp_path: Path, change: Callable[[RecordDict], Any], reason: str
) -> None:
    def tamper(message: Message, reply: Message) -> Message:
        if message.metadata.message_type == "train" and message.metadata.dst_node_id == 1001:
            change(reply.content)
        return reply

    outcome = federate(tmp_path, 3, method="fedper", rounds=1, tamper=tamper)
    (refusal,) = outcome.history[0]["refused"]
    assert refusal["client"] == "1"
    assert refusal["reason"].startswith(reason)
    assert sorted(outcome.history[0]["clients"]) == ["0", "1", "2"]  # the last round evaluates whoever is left
    assert not outcome.history[0]["clients"]["1"]["trained"]


def test_an_array_that_hides_a_pickle_is_refused(tmp_path: Path) -> None:
    def tamper(message: Message, reply: Message) -> Message:
        if message.metadata.message_type == "train" and message.metadata.dst_node_id == 1000:
            record: ArrayRecord = reply.content.array_records["arrays"]
            header = np.lib.format.magic(
                1, 0
            ) + b"\x46\x00{'descr': '|O', 'fortran_order': False, 'shape': (64,), }".ljust(72)
            record[NAME].data = header + b"\x80\x04N."
        return reply

    outcome = federate(tmp_path, 3, method="fedper", rounds=1, tamper=tamper)
    (refusal,) = outcome.history[0]["refused"]
    assert refusal["reason"].startswith("an array cannot be read")


def test_a_refused_client_does_not_count_in_the_aggregate(tmp_path: Path) -> None:
    sent: list[dict[str, np.ndarray]] = []

    def tamper(message: Message, reply: Message) -> Message:
        if message.metadata.message_type == "train":
            if message.metadata.dst_node_id == 1001:
                reply.content["metrics"] = MetricRecord({"num-examples": -1})
            elif message.metadata.group_id == "1":
                sent.append(from_record(reply.content.array_records["arrays"]))
        return reply

    outcome = federate(tmp_path, 3, method="pfakd", rounds=2, tamper=tamper)
    second = next(m for m in outcome.grid.messages if m.metadata.group_id == "2")
    received = from_record(second.content.array_records["arrays"])
    for name, array in received.items():
        assert np.allclose(array, (sent[0][name].astype(float) + sent[1][name]) / 2, rtol=2e-7, atol=1e-8)


def test_a_client_that_does_not_answer_is_left_out(tmp_path: Path) -> None:
    def tamper(message: Message, reply: Message) -> Message | None:
        silent = message.metadata.message_type == "train" and message.metadata.dst_node_id == 1000
        return None if silent else reply

    keys: dict[str, Any] = {"method": "fedper", "rounds": 2, "round_timeout": 0.5}
    load_client(read_config(run_config(tmp_path, **keys))[0], 0, 3)  # the first time takes longer
    outcome = federate(tmp_path, 3, tamper=tamper, **keys)
    for line in outcome.history:
        assert line["refused"] == [{"client": "0", "reason": "no answer within round-timeout = 0.5 s"}]
        assert line["seconds"] > 0.4


@pytest.mark.parametrize("participation", [1.0, 0.5])
def test_a_client_that_goes_away_is_told_and_the_figures_say_over_whom_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, participation: float
) -> None:
    monkeypatch.setattr(DirectGrid, "get_node_ids", without_the_first_after_two_rounds)
    outcome = federate(tmp_path, 4, method="fedper", rounds=4, participation=participation, evaluate_every=1)
    notes = [(line["round"], note["client"], note["note"]) for line in outcome.history for note in line["notes"]]
    assert notes == [(3, "0", "is away (3 of 4 clients are there)")]
    measured = [name for name, client in outcome.history[-1]["clients"].items() if client["after"]]
    assert "0" not in measured
    assert (outcome.summary["clients"], outcome.summary["measured"]) == (4, len(measured))
    run = read_run(outcome.directory)
    assert run.over(run.history.last_complete()) == f"{len(measured)} of 4 clients"
    assert client_table(run).splitlines()[0].endswith(f"round 4; the mean is over {len(measured)} of 4 clients")
    whole = read_run(federate(tmp_path / "whole", 4, method="local", rounds=1).directory)
    said = f"fedper: accuracies are over {len(measured)} of 4 clients"
    heading, _, first, second, *lines = table([whole, run]).splitlines()
    assert [line.split()[0] for line in (heading, first, second)] == ["run", "local", "fedper"]
    assert lines == [said]
    write_report([whole, run], tmp_path / "compare.html")
    assert (tmp_path / "compare.html").read_text().count("accuracies are over") == 1
    assert f">{said}<" in (tmp_path / "compare.html").read_text()


def test_who_was_silent_is_not_asked_again_in_the_same_round(tmp_path: Path) -> None:
    def tamper(message: Message, reply: Message) -> Message | None:
        silent = message.metadata.message_type == "train" and message.metadata.dst_node_id == 1000
        return None if silent else reply

    keys: dict[str, Any] = {"method": "fedavg", "rounds": 1, "local_epochs": 1, "round_timeout": 0.5}
    load_client(read_config(run_config(tmp_path, **keys))[0], 0, 3)  # the first time takes longer
    outcome = federate(tmp_path, 3, tamper=tamper, **keys)
    assert not [m for m in outcome.grid.messages if m.metadata.message_type == "evaluate"]
    assert sorted(outcome.history[0]["clients"]) == ["1", "2"]


def test_a_class_that_nobody_sends_keeps_its_prototype(tmp_path: Path) -> None:
    outcome = federate(tmp_path, 5, method="fedproto", rounds=4, participation=0.2, local_epochs=1)
    known: set[str] = set()
    for message in (m for m in outcome.grid.messages if m.metadata.message_type == "train"):
        names = set(message.content.array_records["arrays"])
        assert known <= names
        known = names
    assert len(known) > 2  # more than one client has


def test_accuracies_are_measured_in_evaluation_mode(tmp_path: Path) -> None:
    outcome = federate(tmp_path, 1, method="fedavg", rounds=1, local_epochs=1, max_samples=40)
    message = next(m for m in outcome.grid.messages if m.metadata.message_type == "train")
    client = standing(outcome.grid.contexts[1000], message)
    seen: list[bool] = []
    client.model.extractor.fc1.register_forward_hook(lambda module, _, __: seen.append(module.training))
    for measure in (lambda: client.accuracy(client.data.test), client.local_prototypes):
        client.model.train()
        measure()
    assert seen == [False] * 2
    client.train()
    assert seen[2:]
    assert all(seen[2:])


@pytest.mark.parametrize("bad", [1, 2])
def test_too_few_good_replies_change_nothing(tmp_path: Path, bad: int) -> None:
    def tamper(message: Message, reply: Message) -> Message:
        if message.metadata.message_type == "train" and message.metadata.dst_node_id < 1000 + bad:
            reply.content["metrics"] = MetricRecord({"num-examples": 0})
        return reply

    outcome = federate(tmp_path, 3, method="fedper", min_replies=2, tamper=tamper)
    trains = [m for m in outcome.grid.messages if m.metadata.message_type == "train"]
    first, second = (from_record(trains[i].content.array_records["arrays"]) for i in (0, 3))
    assert all(np.array_equal(first[name], second[name]) == (bad == 2) for name in first)
    assert outcome.summary["refused"] == 2 * bad
