"""A node's policy against servers that ask for more than they should, each attack as it was tried; audit; disk."""

import dataclasses
import errno
import json
import logging
import math
import re
import stat
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict

from cli.main import floret
from client_app.app import app
from client_app.audit import Audit
from client_app.batches import Batch
from client_app.client import FloretClient
from client_app.policy import Outgoing, Policy, PolicyError, kind_of, setup_of
from common.config import RunConfig, key_of, read_keys
from common.errors import ConfigError
from common.filters import Payload
from common.registry import load_class
from common.seeds import torch_generator
from common.wire import from_record, payload_bytes, to_record
from data import ClientData, Split
from models import build_model
from server_app.settings import read_config
from strategies import METHODS
from strategies.core import FloretStrategy
from tests.harness import ROOT, federate, run_config

CLASSES, SIDE = 10, 30
# How often each class is among the test samples.
# Of the features of mlp.
WIDTH = 64
HISTOGRAM = (20, 3, 11, 7, 16, 9, 1, 14, 12, 7)


@dataclass
class Site:
    """A node with data of its own, and a server that may ask it anything."""

    folder: Path
    policy: str = ""

    def __post_init__(self) -> None:
        rng = np.random.default_rng(0)
        self.train_x = rng.standard_normal((60, SIDE), dtype=np.float32)
        self.train_y = np.arange(60) % CLASSES
        (self.folder / "data").mkdir(parents=True)
        np.savez(self.folder / "data" / "train.npz", x=self.train_x, y=self.train_y)
        self.test_y = np.repeat(np.arange(CLASSES), HISTOGRAM)
        test_x = rng.random((len(self.test_y), SIDE), dtype=np.float32)
        np.savez(self.folder / "data" / "test.npz", x=test_x, y=self.test_y)
        self.node: dict[str, Any] = {
            "client-name": "site",
            "data-dir": str(self.folder / "data"),
            "state-dir": str(self.folder / "state"),
        }
        if self.policy:
            (self.folder / "policy.yaml").write_text(self.policy)
            self.node["policy"] = str(self.folder / "policy.yaml")
        self.round = 0

    @property
    def audit(self) -> list[dict[str, Any]]:
        """The lines of the audit files, in order of time."""
        lines: list[dict[str, Any]] = []
        for folder in (".audit", ".audit/uncounted"):
            file = self.folder / "state" / folder / "site.jsonl"
            lines += map(json.loads, file.read_text().splitlines() if file.exists() else [])
        return sorted(lines, key=lambda line: str(line["time"]))

    def ask(
        self,
        kind: str,
        arrays: dict[str, np.ndarray] | ArrayRecord | None = None,
        scalars: dict[str, Any] | None = None,
        **keys: Any,
    ) -> RecordDict:
        """Return what the node answers to a message of a run with these keys."""
        self.round += 1
        resumed: Any = (scalars or {}).get("session.resumed", [])
        said = {
            "round": self.round,
            "num-classes": CLASSES,
            "head-layers": 1,
            "session.lineage": "run",
            "session.directory": "",
            "session.checkpointed": 0,
            "session.resumed": [0][:0],
            "session.starts": [f"start{i}" for i in range(1 + len(resumed))],
            "session.started": [0, *resumed],
            **(scalars or {}),
        }
        record = arrays if isinstance(arrays, ArrayRecord) else to_record(arrays or {})
        content = RecordDict({"arrays": record, "config": ConfigRecord(said)})
        message = Message(content, 7, kind)
        message.metadata.__dict__["_message_id"] = str(self.round)
        values = run_config(self.folder, **({"method": "fedper", "model": "mlp"} | keys))
        context = Context(run_id=1, node_id=7, node_config=self.node, state=RecordDict(), run_config=values)
        return app(message, context).content

    def refusal(self, kind: str = "train", **asked: Any) -> str:
        """Return the line with which the node refuses."""
        record = self.ask(kind, **asked)["error"]
        assert isinstance(record, ConfigRecord)
        return str(record["reason"])


def arrays_of(reply: RecordDict) -> dict[str, np.ndarray]:
    record = reply["arrays"]
    assert isinstance(record, ArrayRecord)
    return from_record(record)


def metrics_of(reply: RecordDict) -> dict[str, Any]:
    record = reply["metrics"]
    assert isinstance(record, MetricRecord)
    return dict(record)


def described(site: Site) -> dict[str, Any]:
    record = site.ask("query.describe")["client"]
    assert isinstance(record, ConfigRecord)
    return dict(record)


def initial(**weights: torch.Tensor) -> dict[str, np.ndarray]:
    """Return a model's tensors as a server makes them, the given ones put in place."""
    model = build_model("mlp", (SIDE,), CLASSES, 1, torch_generator(0, "model"))
    tensors = model.state_dict() | {name.replace("__", "."): weight for name, weight in weights.items()}
    return {name: tensor.numpy() for name, tensor in tensors.items()}


def shared(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {name: array for name, array in tensors.items() if name.startswith("extractor")}


# The run config of the first attack: one sample, one epoch, one step.
ONE_SAMPLE: dict[str, Any] = {"max_samples": 1, "local_epochs": 1, "validation_fraction": 0.0, "weight_decay": 0.0}


def samples_in(site: Site, before: dict[str, np.ndarray], after: dict[str, np.ndarray]) -> float:
    """Return for how many of a linear layer's units the weight difference divided by the bias difference is a training
    sample, as a part of those that moved.
    """
    weight = next(name for name in before if name.endswith("weight"))
    bias = weight.replace("weight", "bias")
    moved = after[bias] - before[bias]
    rows = (after[weight] - before[weight])[np.abs(moved) > 1e-5] / moved[np.abs(moved) > 1e-5, None]
    return float(np.mean([np.abs(site.train_x - row).max(axis=1).min() < 1e-2 for row in rows]))


@pytest.mark.parametrize("method", ["fedavg", "fedper", "fedbabu", "apfl", "pfedme", "per-fedavg", "ditto", "fedala"])
def test_the_personal_model_does_not_leave_in_the_place_of_what_was_not_sent(tmp_path: Path, method: str) -> None:
    site, full = Site(tmp_path), initial()
    sent = full if load_class("strategies", method, FloretStrategy).shares == "model" else shared(full)
    assert set(arrays_of(site.ask("train", sent, lr=0.1, method=method))) == set(sent)
    for missing in (["extractor.fc1.weight"], sorted(full)):
        arrays = {name: array for name, array in sent.items() if name not in missing}
        said = site.refusal(arrays=arrays, lr=1e-30, method=method)
        assert said == f"the server sent no {min(set(missing) & set(sent))}; {method} starts a round from what it sends"


def test_a_message_does_not_say_at_which_rate_a_client_trains(tmp_path: Path) -> None:
    sent, sizes = shared(initial()), []
    for lr in (0.01, 1.0):
        got = arrays_of(Site(tmp_path / str(lr)).ask("train", sent, {"lr": lr}))
        sizes.append(sum(float(np.square(got[name] - array).sum()) for name, array in sent.items()) ** 0.5)
    # Each site divides its samples by its own seed.
    assert sizes[1] == pytest.approx(sizes[0], rel=0.2)


def test_lg_fedavg_sends_no_extractor_that_was_trained_alone(tmp_path: Path) -> None:
    site, full = Site(tmp_path), initial()
    head = {name: array for name, array in full.items() if name.startswith("head.")}
    run: dict[str, Any] = {"method": "lg-fedavg", "local_epochs": 1, "weight_decay": 0.0}
    alone: dict[str, Any] = {"lr": 0.1, "lg_fedavg__fedavg_rounds": 0}
    for _ in range(2):
        assert set(arrays_of(site.ask("train", head, **run, **alone))) == set(head)
    # Another run by the same server, whose first round is FedAvg's: what it learns of the extractor is what it sent.
    site.round = 0
    other: dict[str, Any] = {"scalars": {"session.lineage": "other"}, "lr": 1e-30, **run, "lg_fedavg__fedavg_rounds": 1}
    said = site.refusal(arrays=head, **other)
    assert said == "the server sent no extractor.fc1.bias; lg-fedavg starts a round from what it sends"
    site.round = 0
    came = arrays_of(site.ask("train", full, **other))
    assert all(np.array_equal(came[name], array) for name, array in full.items())


def test_a_server_cannot_choose_one_sample(tmp_path: Path) -> None:
    # A unit that by chance only one sample activates shows it all the same: SECURITY.md says so.
    site, before = Site(tmp_path), shared(initial())
    for seed in range(5):
        reply = site.ask("train", before, **ONE_SAMPLE, seed=seed, batch_size=8)
        assert metrics_of(reply)["num-examples"] == 54
        assert samples_in(site, before, arrays_of(reply)) == 0
    line = "this node's policy has min-batch-size = 8, and batch-size = 7"
    assert site.refusal(arrays=before, **ONE_SAMPLE, batch_size=7) == line


SINGLED_OUT: list[tuple[str, dict[str, Any]]] = [
    ("fedavg", {}),
    ("per-fedavg", {}),
    ("fedala", {"fedala__percent": 1, "fedala__layers": 3, "fedala__first_epochs": 1}),
    ("dispfl", {"dispfl__regrow": "gradient", "dispfl__own_masks": False}),
]


@pytest.mark.parametrize(("method", "keys"), SINGLED_OUT)
@pytest.mark.parametrize("least", [8, 1])
def test_no_step_is_of_a_few_samples(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, keys: dict[str, Any], least: int
) -> None:
    """54 samples in batches of 26 leave a rest of 2, and one percent of them is one."""
    sizes: list[int] = []

    def counted(self: FloretClient, batch: Batch, real: Any = FloretClient.loss) -> Any:
        sizes.append(len(batch.y))
        return real(self, batch)

    monkeypatch.setattr(FloretClient, "loss", counted)
    site = Site(tmp_path, f"min-batch-size: {least}")
    for _ in range(2):
        sent = {} if method == "dispfl" else initial()
        assert "arrays" in site.ask("train", sent, method=method, batch_size=26, local_epochs=1, **keys)
    assert (min(sizes) >= 8) == (least == 8)
    assert max(sizes) <= 26 + least


def test_samples_are_divided_anew_where_they_are_divided_in_another_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two batches that differ in one sample the difference is that sample."""
    orders: list[list[int]] = []

    def noted(self: FloretClient, batch: Batch, real: Any = FloretClient.loss) -> Any:
        orders[-1] += batch.index.tolist()
        return real(self, batch)

    monkeypatch.setattr(FloretClient, "loss", noted)
    site = Site(tmp_path, "min-batch-size: 1")

    def order(lineage: str = "run", **keys: Any) -> list[int]:
        orders.append([])
        site.round = 0
        sent = initial() if "method" in keys else shared(initial())
        site.ask("train", sent, {"session.lineage": lineage}, client_state="fresh", **({"local_epochs": 1} | keys))
        assert sorted(orders[-1]) == list(range(54))
        return orders[-1]

    first = order(batch_size=27)
    assert order(batch_size=27, lr=0.5) == first
    others = [order(batch_size=26), order("other", batch_size=27)]
    others += [order(batch_size=27, method="fedala", fedala__percent=percent) for percent in (70, 69)]
    assert len({*map(tuple, [first, *others])}) == 5


@pytest.mark.parametrize(
    ("policy", "told"),
    [
        ("", False),
        ("accuracies: exact", False),
        ("accuracies: none\nhidden-below: 0", False),
        ("accuracies: rounded\nhidden-below: 0", True),
        ("accuracies: exact\nhidden-below: 0", True),
    ],
)
def test_a_fused_head_tells_no_accuracy_that_the_node_does_not_tell(tmp_path: Path, policy: str, told: bool) -> None:
    site = Site(tmp_path, f"validation-fraction: 0.5\n{policy}")
    keys: dict[str, Any] = {"method": "feddfpa", "lr": 1e-30, "batch_size": 54, "local_epochs": 2}
    rng, own, farthest = np.random.default_rng(1), np.zeros(()), 0.0
    for number in range(8):
        head = {n: rng.normal(size=a.shape).astype(np.float32) for n, a in initial().items() if "head" in n}
        came = arrays_of(site.ask("train", head, **keys))["head.weight"]
        if number:
            apart = own - head["head.weight"]
            weights = (came - head["head.weight"])[np.abs(apart) > 0.1] / apart[np.abs(apart) > 0.1]
            # The rows of classes that this client has not are its own.
            farthest = max(farthest, np.abs(weights[np.abs(weights - 1) > 0.01] - 0.5).max())
        own = came
    assert (farthest > 0.05) == told


def test_the_attack_succeeds_where_the_policy_lets_it(tmp_path: Path) -> None:
    # So that the test above can fail: one sample, one step, as the server wants.
    site = Site(tmp_path, "max-samples: 1\nmin-samples: 1\nmin-steps: 1\nvalidation-fraction: 0")
    before = shared(initial())
    after = arrays_of(site.ask("train", before, **ONE_SAMPLE, batch_size=1))
    assert samples_in(site, before, after) == 1.0


def test_a_nodes_own_seed_divides_and_orders_its_data(tmp_path: Path) -> None:
    one, other = Site(tmp_path / "one"), Site(tmp_path / "other")

    def update(site: Site, **keys: Any) -> bytes:
        site.round = 0
        reply = site.ask("train", shared(initial()), client_state="fresh", **keys)
        return b"".join(array.tobytes() for array in arrays_of(reply).values())

    # The run's seed draws first weights of a head and nothing else of a node with own data: neither is in its order.
    first = update(one, validation_fraction=0.3)
    assert update(one, validation_fraction=0.0, max_samples=3) == first
    assert update(other) != first
    assert (one.folder / "state" / "seed").read_text() != (other.folder / "state" / "seed").read_text()
    assert stat.S_IMODE((one.folder / "state" / "seed").stat().st_mode) == 0o600
    sent = json.dumps([one.audit, other.audit])
    assert (one.folder / "state" / "seed").read_text() not in sent


def constant(chosen: int) -> dict[str, np.ndarray]:
    """Return a model that answers the class ``chosen``."""
    bias = torch.full((CLASSES,), -50.0)
    bias[chosen] = 50.0
    tensors = initial()
    names = [name for name in tensors if name.startswith("head")]
    return tensors | {n: bias.numpy() if n.endswith("bias") else np.zeros_like(tensors[n]) for n in names}


@pytest.mark.parametrize(("accuracies", "exact"), [("exact", True), ("rounded", False), ("none", False)])
def test_the_label_histogram_from_accuracies(tmp_path: Path, accuracies: str, exact: bool) -> None:
    site = Site(tmp_path, f"accuracies: {accuracies}")
    found: list[Any] = []
    for chosen in range(CLASSES):
        metrics = metrics_of(site.ask("evaluate", constant(chosen), method="fedavg"))
        found.append(metrics.get("before.test"))
        # The loss of such a model is the histogram, too; of an evaluation none is told.
        assert "loss" not in metrics
    loss = metrics_of(site.ask("train", constant(0), method="fedavg")).get("loss")
    truth = [count / 100 for count in HISTOGRAM]
    if exact:
        assert found == pytest.approx(truth)
    elif accuracies == "rounded":
        assert all(round(value * 20, 6).is_integer() for value in found)
        assert sum(abs(a - b) > 0.005 for a, b in zip(found, truth, strict=True)) >= 7
        # That of training is told with one digit.
        assert loss == float(f"{loss:.0e}")
    else:
        assert found == [None] * CLASSES
        assert loss is None


def test_few_test_samples_are_not_told(tmp_path: Path) -> None:
    site = Site(tmp_path, "accuracies: exact\nhidden-below: 101")
    metrics = metrics_of(site.ask("train", shared(initial())))
    assert metrics.keys() == {"num-examples", "seconds"}
    site = Site(tmp_path / "other", "accuracies: exact\nhidden-below: 100\nvalidation-fraction: 0.5")
    metrics = metrics_of(site.ask("train", shared(initial())))
    assert metrics.keys() == {"num-examples", "seconds", "before.test", "after.test"}  # 30 samples to train on


def test_prototypes_of_rare_classes_stay(tmp_path: Path) -> None:
    names = {f"prototype.{c}" for c in range(CLASSES)}
    site = Site(tmp_path, "validation-fraction: 0\nmin-class-samples: 6")
    assert set(arrays_of(site.ask("train", method="fedproto"))) == names
    site = Site(tmp_path / "other", "validation-fraction: 0\nmin-class-samples: 7")
    assert set(arrays_of(site.ask("train", method="fedproto"))) == set()


@pytest.mark.parametrize("method", ["fedcpd", "gpfl"])
@pytest.mark.parametrize(("least", "read"), [(5, False), (1, True)])
def test_a_target_for_a_class_of_one_sample_tells_nothing_of_it(
    tmp_path: Path, method: str, least: int, read: bool
) -> None:
    """With a large weight and a small rate an update is the term that draws this class, and the class is one sample."""
    site = Site(tmp_path, f"validation-fraction: 0\nmin-class-samples: {least}")
    site.train_y = np.where(np.arange(60) == 17, 9, np.arange(60) % 9)
    np.savez(site.folder / "data" / "train.npz", x=site.train_x, y=site.train_y)
    target = np.full(WIDTH, 900.0, np.float32)
    sent = shared(initial()) | (
        {"prototype.9": target}
        if method == "fedcpd"
        else {"embeddings.weight": np.eye(CLASSES, 1, -9, np.float32) * target}
    )
    keys: dict[str, Any] = {"lr": 1e-10, "momentum": 0.0, "weight_decay": 0.0, "local_epochs": 2, "batch_size": 60}
    keys |= {"fedcpd__alpha": 1e7, "fedcpd__distill": False}
    keys |= {"gpfl__lambda": 1e9, "gpfl__valve": False, "gpfl__mu": 0.0}
    after = arrays_of(site.ask("train", sent, method=method, **keys))
    moves = np.abs(after["extractor.fc1.bias"] - sent["extractor.fc1.bias"]).max() > 1e-5
    # Of what the others add, the less a unit is drawn the more it shows.
    assert (moves and samples_in(site, sent, after) > 0.05) == read


@pytest.mark.parametrize(("least", "moves"), [(5, False), (1, True)])
def test_an_embedding_of_a_class_of_one_sample_is_not_trained(tmp_path: Path, least: int, moves: bool) -> None:
    """GPFL's angle draws the class to its embedding, and the embedding to the class."""
    site = Site(tmp_path, f"validation-fraction: 0\nmin-class-samples: {least}")
    site.train_y = np.where(np.arange(60) == 17, 9, np.arange(60) % 9)
    np.savez(site.folder / "data" / "train.npz", x=site.train_x, y=site.train_y)
    embeddings = np.eye(CLASSES, WIDTH, dtype=np.float32)
    keys: dict[str, Any] = {"gpfl__valve": False, "gpfl__mu": 0.0, "weight_decay": 0.0, "local_epochs": 2}
    sent = shared(initial()) | {"embeddings.weight": embeddings}
    after = arrays_of(site.ask("train", sent, method="gpfl", **keys))["embeddings.weight"]
    assert not np.array_equal(after[:9], embeddings[:9])
    assert (not np.array_equal(after[9], embeddings[9])) == moves


def test_a_personal_model_that_is_finite_and_of_no_use_is_not_kept(tmp_path: Path) -> None:
    site, sent = Site(tmp_path, "min-steps: 1\naccuracies: exact"), shared(initial())
    keys: dict[str, Any] = {"local_epochs": 1, "batch_size": 60, "weight_decay": 0.0}
    site.ask("train", sent, **keys)
    before = metrics_of(site.ask("evaluate", sent))
    line = site.refusal(arrays=sent, lr=1e5, **keys)
    assert re.match(
        r"training diverged: (head|extractor) is more than 100 times as large as when the round began; "
        r"lower lr \(now 100000\) or weight-decay \(now 0\)$",
        line,
    )
    assert metrics_of(site.ask("evaluate", sent)) | {"seconds": 0.0} == before | {"seconds": 0.0}


def test_tensors_that_begin_near_zero_may_grow_a_little(tmp_path: Path) -> None:
    sent = shared(initial())
    nothing = {name: (1e-6 * array).astype(np.float32) for name, array in sent.items()}
    keys: dict[str, Any] = {"local_epochs": 1, "batch_size": 60, "weight_decay": 0.0}
    trained = arrays_of(Site(tmp_path / "one", "min-steps: 1").ask("train", nothing, lr=0.3, **keys))

    def size(arrays: dict[str, np.ndarray]) -> float:
        return float(np.sqrt(np.mean(np.concatenate([array.ravel() for array in arrays.values()]) ** 2)))

    assert size(trained) > 100 * size(nothing)
    site = Site(tmp_path / "two", "min-steps: 1")
    site.ask("train", nothing, lr=1e-10, **keys)
    fits, absurd = ({name: np.full_like(array, value) for name, array in sent.items()} for value in (0.9, 1.1))
    line = site.refusal(arrays=absurd, lr=1e-10, **keys)
    assert re.match(r"the server sent extractor\S+ with a root mean square of 1\.1; more than 1000 times", line)
    assert "arrays" in site.ask("train", fits, lr=1e-10, **keys)


def test_what_is_sent_and_kept_beside_the_model_is_looked_at_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """APPLE's core model is no part of the model; a server that says how it is mixed makes it grow alone."""
    site, upload = Site(tmp_path), FloretClient.upload

    def grown(client: FloretClient) -> dict[str, torch.Tensor]:
        return {name: 1e4 * tensor for name, tensor in upload(client).items()}

    site.ask("train", shared(initial()))
    monkeypatch.setattr(FloretClient, "upload", grown)
    assert site.refusal(arrays=shared(initial())).startswith(
        "training diverged: extractor is more than 100 times as large as when the round began; "
    )


def test_what_a_method_did_not_declare_does_not_leave() -> None:
    """The last look is at the tensors themselves, whatever ``check_method`` found in the method's declaration."""
    y = torch.tensor([0, 1, 1])
    split = Split(torch.zeros(3, 4), y)
    outgoing = Outgoing(Policy(leaves=("extractor",)), ClientData(split, split, split, 2, (4,)))
    sent = Payload("train", "a", 1, {"extractor.w": np.ones(2, np.float32)}, 3, {})
    assert set(outgoing(sent).tensors) == {"extractor.w"}
    for name, kind in (("head.w", "head"), ("prototype.1", "prototypes"), ("labels", "representations")):
        with pytest.raises(PolicyError, match=f"leaves = extractor, and {name} is of the kind {kind}"):
            outgoing(dataclasses.replace(sent, tensors={**sent.tensors, name: np.ones(2, np.float32)}))


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("methods: [fedrep, pfakd]", {}, "methods = fedrep, pfakd, and method = 'fedper'"),
    ("federations: [hospitals]", {}, "federations = hospitals, and federation = 'default'"),
    ("leaves: [head]", {}, "leaves = head, and method = 'fedper' sends extractor"),
    ("leaves: [extractor]", {"method": "fedavg"}, "leaves = extractor, and method = 'fedavg' sends head"),
    ("leaves: model", {"method": "fedproto"}, "leaves = model, and method = 'fedproto' sends prototypes"),
    ("min-samples: 55", {}, "min-samples = 55, and there are 54 training samples"),
    (
        "min-steps: 3",
        {"local_epochs": 2, "batch_size": 54},
        "min-steps = 3, and a round would have 2 steps (local-epochs = 2, batch-size = 54)",
    ),
    ("max-local-epochs: 4", {}, "max-local-epochs = 4, and local-epochs = 5"),
    (
        "max-local-epochs: 4",
        {"privacy__unit": "example", "privacy__noise": 1.0, "num_classes": CLASSES, "local_epochs": 3},
        "max-local-epochs = 4, and privacy.head-epochs = 5",
    ),
    ("", {"local_epochs": 1001}, "max-local-epochs = 1000, and local-epochs = 1001"),
    ("", {"method": "fedrep", "fedrep__head_epochs": 10**6}, "and fedrep.head-epochs = 1000000"),
    ("", {"method": "pfedme", "pfedme__inner_steps": 201}, "and local-epochs times pfedme.inner-steps = 1005"),
    ("max-local-epochs: 24", {"method": "pfedme"}, "= 24, and local-epochs times pfedme.inner-steps = 25"),
    ("leaves: all", {"method": "fedpa", "fedpa__generator_steps": 10**9}, "and fedpa.generator-steps = 1000000000"),
    ("max-batch-size: 20", {"batch_size": 21}, "max-batch-size = 20, and batch-size = 21"),
    (
        "max-batch-size: 60",
        {"privacy__unit": "client", "privacy__noise": 1.0, "num_classes": CLASSES, "batch_size": 61},
        "max-batch-size = 60, and batch-size = 61",
    ),
    ("", {"lr": 2.0**-7, "weight_decay": 8320.0}, "max-decay = 0.1, and lr times weight-decay = 65"),
    (
        "leaves: all",
        {"method": "fedpac", "fedpac__head_lr": 10.0, "weight_decay": 0.02},
        "and fedpac.head-lr times weight-decay = 0.2",
    ),
    (
        "",
        {"method": "pfps-lwc", "pfps_lwc__recall_lr": 10.0, "weight_decay": 0.02},
        "and pfps-lwc.recall-lr times weight-decay = 0.2",
    ),
    ("", {"method": "gpfl", "lr": 0.1, "gpfl__mu": 10.0}, "max-decay = 0.1, and lr times gpfl.mu = 1"),
    ("max-decay: 0.5", {"method": "fedprox", "lr": 0.1, "fedprox__mu": 6.0}, "= 0.5, and lr times fedprox.mu = 0.6"),
    (
        "",
        {"method": "pfedme", "pfedme__local_lr": 1.0, "weight_decay": 0.0},
        "and pfedme.local-lr times pfedme.lambda = 15, above 2",
    ),
    ("", {"method": "pfedme", "lr": 0.2, "weight_decay": 0.0}, "and lr times pfedme.lambda = 3, above 2"),
    ("", {"image_size": 30_000}, "max-image-size = 1024, and image-size = 30000"),
    ("max-classes: 9", {}, "max-classes = 9, and num-classes = 10"),
]


@pytest.mark.parametrize(("policy", "keys", "reason"), REFUSED)
@pytest.mark.parametrize("kind", ["train", "evaluate", "query.plan", "query.describe"])
def test_what_a_policy_refuses_is_one_line(
    tmp_path: Path, policy: str, keys: dict[str, Any], reason: str, kind: str
) -> None:
    site = Site(tmp_path, policy)
    line = site.refusal(kind, **keys)
    assert line.startswith("this node's policy has " if kind != "query.describe" else "client site: this node's policy")
    assert reason in line
    assert "\n" not in line
    assert site.audit[-1]["records"]["error"]["reason"] == line
    # Nothing was made in the name of what was refused, but for a note that the data were asked about.
    made = {path.name for path in (tmp_path / "state").iterdir()}
    assert made <= {".audit", ".lock", ".privacy", "seed", "identity"}


@pytest.mark.parametrize("keys", [{}, {"privacy__unit": "client", "privacy__noise": 1.0, "num_classes": CLASSES}])
def test_epochs_that_are_not_made_are_not_bounded(tmp_path: Path, keys: dict[str, Any]) -> None:
    site = Site(tmp_path, "max-local-epochs: 3")
    assert "arrays" in site.ask("train", shared(initial()), local_epochs=3, **keys)


def test_a_message_cannot_ask_for_a_model_that_is_too_large(tmp_path: Path) -> None:
    site = Site(tmp_path)
    assert "max-classes = 10000, and num-classes = 1000000000" in site.refusal(scalars={"num-classes": 10**9})
    site = Site(tmp_path / "other", "max-classes: 1000000000")
    assert re.search(
        r"max-model-mb = 1000, and the model 'mlp' has \d+\.\d MB", site.refusal(scalars={"num-classes": 10**9})
    )
    assert "no num-classes" in site.refusal(scalars={"num-classes": "ten"})


@pytest.mark.parametrize("kind", ["train", "evaluate", "query.plan", "query.describe"])
def test_networks_beside_the_model_count(tmp_path: Path, kind: str) -> None:
    site = Site(tmp_path, "max-model-mb: 40\nleaves: all")
    wide: dict[str, Any] = {"method": "fedpa", "fedpa__generator_width": 1000}
    # Of what is within the bound only the tensors of a round are missing.
    answer = site.ask(kind, **wide)
    assert ("error" in answer) == (kind == "train")
    assert "max-model-mb" not in str(answer)
    line = site.refusal(kind, **wide, fedpa__generator_noise=1000)
    # 1000 x 1010 and 1000 x 64 weights, 1000 and 64 biases, 2 x 1000 of the normalisation; the model has 12,874 values;
    # 256 batches of 32 times 1000 random numbers, 10 classes, 1000 hidden units and 64 features.
    assert line.endswith("max-model-mb = 40, and the model 'mlp' and what fedpa has beside it have 72.3 MB")
    line = site.refusal(kind, **wide, fedpa__generator_noise=10**18)
    assert line == "method = 'fedpa': what it has beside the model cannot be made"


def test_what_a_generator_makes_counts(tmp_path: Path) -> None:
    """A message of some kilobytes could make a node draw 190 GB of random numbers."""
    site = Site(tmp_path, "leaves: all")
    line = site.refusal(
        method="fedpa", fedpa__generator_batch=4096, fedpa__generator_noise=30_000, fedpa__generator_width=1
    )
    # 256 batches of 4096 times 30,000 numbers, 10 classes, 1 hidden unit and 64 features.
    assert line.endswith("the model 'mlp' and what fedpa has beside it have 126143.9 MB")


def test_a_line_of_the_log_has_no_codes_and_is_not_long(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    site = Site(tmp_path)
    name = "x\x1b[2J\nINFO: all is well" + "x" * 100_000
    with caplog.at_level(logging.ERROR, "flwr"):
        line = site.refusal(arrays={**shared(initial()), name: np.zeros(1, np.float32)})
    (logged,) = caplog.messages
    assert line.isprintable()
    assert logged.isprintable()
    assert line.startswith("tensor x?[2J INFO: all is well")
    assert len(logged) < 1100


BESIDE: list[tuple[str, str, tuple[int, ...], dict[str, Any], int, float]] = [
    ("fedcpd", "cnn2", (1, 28, 28), {"fedcpd__fusion_width": 20_000}, 1000, 57_756.9),
    ("fedkd", "mlp", (3, 32, 32), {"fedkd__student_model": "vgg11"}, 10, 40.7),
    ("fedkd", "mlp", (3, 32, 32), {"fedkd__student_model": "same"}, 3, 3.2),
    ("fedpa", "mlp", (64,), {"fedpa__generator_width": 100_000, "fedpa__generator_noise": 100_000}, 1000, 46_586.9),
    ("gpfl", "cnn5-wide", (3, 32, 32), {}, 11, 12.5),
]


@pytest.mark.parametrize(("method", "model", "shape", "keys", "most", "size"), BESIDE)
def test_networks_beside_the_model_are_counted_and_not_made(
    tmp_path: Path, method: str, model: str, shape: tuple[int, ...], keys: dict[str, Any], most: int, size: float
) -> None:
    config, kind, parameters = read_config(run_config(tmp_path, method=method, model=model, **keys))
    made: list[int] = []
    empty = torch.empty

    def noted(*sides: Any, **of: Any) -> torch.Tensor:
        tensor = empty(*sides, **of)
        made.append(0 if tensor.is_meta else tensor.numel())
        return tensor

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "empty", noted)
        with pytest.raises(PolicyError) as error:
            Policy(max_model_mb=most).check_model(config, parameters, shape, 10)
    assert sum(made) == 0
    assert str(error.value).endswith(f"what {method} has beside it have {size:.1f} MB")
    if size < 100:
        setup = setup_of(config, kind, parameters, shape, 10)
        networks = [setup.model, *(network.bare() for network in kind.networks(setup).values())]
        count = sum(tensor.numel() for network in networks for tensor in network.state_dict().values())
        assert f"{4e-6 * count:.1f}" == f"{size:.1f}"


@pytest.mark.parametrize("cut", [2, 0, -1, "1", 1.0])
def test_a_message_cannot_cut_the_model_elsewhere(tmp_path: Path, cut: Any) -> None:
    line = Site(tmp_path).refusal(scalars={"head-layers": cut})
    assert line == (f"the server's message has head-layers = {cut!r}; with this model and method it must be 1")


@pytest.mark.parametrize("kind", ["train", "evaluate"])
def test_no_error_tells_a_label_or_a_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    site = Site(tmp_path)
    sent = shared(initial()) if kind == "train" else {}
    # Of a model with one class PyTorch says which label it has not.
    refusal = site.refusal(kind, arrays=sent, scalars={"num-classes": 1}, batch_size=8)
    assert refusal == "the server's message has num-classes = 1, fewer than this client has classes"
    # What a data file has, and where it is, stays in the node's log.
    hidden = "the client failed; its own log says why"
    assert site.refusal(kind, arrays=sent, num_classes=1) == hidden
    assert site.refusal("query.describe", num_classes=1) == hidden

    # So does what nobody expects.
    def fails(*_: Any) -> None:
        raise IndexError("Target 7 is out of bounds.")

    monkeypatch.setattr("client_app.client.FloretClient.begin", fails)
    assert site.refusal(kind, arrays=sent) == hidden


def test_no_text_for_the_server_says_where_the_nodes_folders_are(tmp_path: Path) -> None:
    site = Site(tmp_path)
    for _ in range(2):
        site.ask("train", shared(initial()))
    newest = max((tmp_path / "state" / "default").rglob("*.safetensors"))
    newest.write_bytes(b"damaged")
    reply = site.ask("train", shared(initial()))
    notes = reply["notes"]
    assert isinstance(notes, ConfigRecord)
    assert str(notes["lines"]).startswith("['<state-dir>/default/fedper/site/00000002.safetensors is damaged")
    (tmp_path / "policy.yaml").write_text("leaves: nonsense")
    site.node["policy"] = str(tmp_path / "policy.yaml")
    assert site.refusal().startswith("policy <policy>: leaves = ")
    # Also where one is below the other.
    (tmp_path / "policy.yaml").rename(tmp_path / "data/policy.yaml")
    site.node["policy"] = str(tmp_path / "data/policy.yaml")
    assert site.refusal().startswith("policy <policy>: leaves = ")
    del site.node["policy"]
    (tmp_path / "state" / ".audit").rename(tmp_path / "audit")
    (tmp_path / "state" / ".audit").write_text("in the way")
    assert str(tmp_path) not in site.refusal()


def test_a_batch_of_all_samples_is_one_whatever_the_key_says(tmp_path: Path) -> None:
    site = Site(tmp_path, "max-batch-size: 54\nmin-steps: 1")
    assert "arrays" in site.ask("train", shared(initial()), batch_size=10**6)


def test_what_peers_sent_is_bounded_before_it_is_unpacked(tmp_path: Path) -> None:
    """Of any number of peers there may be sparse tensors, which travel in a thirtieth of their memory."""
    site = Site(tmp_path, "max-received-mb: 2\nleaves: [all]")
    arrays = to_record(initial())
    empty = Array("float32", (128, SIDE), "floret.sparse", bytes(128 * SIDE // 8))
    sparse = {f"{peer}.extractor.fc1.weight": empty for peer in range(200)}
    content = ArrayRecord({**arrays, **sparse})
    sent = 4 * (sum(math.prod(array.shape) for array in content.values()))
    assert sent > 2e6 > payload_bytes(content)
    refusal = site.refusal(arrays=content, method="dispfl")
    assert refusal == f"this node's policy has max-received-mb = 2, and the message has tensors of {sent / 1e6:.1f} MB"
    shape = Array("float32", (10**5000,), "floret.sparse", b"")
    refusal = site.refusal(arrays=ArrayRecord({**arrays, "0.extractor.fc1.weight": shape}), method="dispfl")
    assert refusal.endswith("has a shape that no array has")


def test_rounds_of_a_day(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    site = Site(tmp_path, "max-rounds-a-day: 2")
    assert "arrays" in site.ask("train", shared(initial()))
    assert "metrics" in site.ask("evaluate")
    assert "max-rounds-a-day = 2, and this would be round 3 of the day (UTC)" in site.refusal()
    # Another day, and a clock that is set back.
    count = tmp_path / "state/.audit/site.rounds.json"
    from common.durable import open_plain, read_manifest, write_manifest

    write_manifest(count, {"day": "2020-01-01", "rounds": 2})
    assert "metrics" in site.ask("evaluate")
    assert read_manifest(count)["rounds"] == 1
    assert "the clock says" not in caplog.text
    write_manifest(count, {"day": "2999-01-01", "rounds": 2})
    assert "max-rounds-a-day" in site.refusal()
    assert f"{count}: counts the rounds of 2999-01-01, and the clock says 20" in caplog.text
    # What a clock that is set back counts, it does not count anew when it is right again.
    write_manifest(count, {"day": "2999-01-01", "rounds": 1})
    assert "metrics" in site.ask("evaluate")
    said = read_manifest(count)
    assert (said["day"], said["rounds"]) == ("2999-01-01", 2)

    # Of a count that cannot be read now nobody knows how far it is.
    def failing(path: Path) -> Any:
        if path == count:
            raise OSError(errno.EIO, "Input/output error")
        return open_plain(path)

    with patch("common.durable.open_plain", failing):
        assert site.refusal().endswith("rounds.json cannot be read (Input/output error)")
    assert "max-rounds-a-day" in site.refusal()


def test_federations_and_disk(tmp_path: Path) -> None:
    site = Site(tmp_path, "max-federations: 2")
    for name in ("a", "b", "a"):
        assert "arrays" in site.ask("train", shared(initial()), federation=name)
    assert "max-federations = 2, and federation = 'c' would be one more" in site.refusal(federation="c")
    assert {path.name for path in (tmp_path / "state").iterdir() if path.is_dir()} == {".audit", ".privacy", "a", "b"}
    from click.testing import CliRunner

    runner = CliRunner()
    options = ["state", "remove", "--state-dir", str(tmp_path / "state")]
    done = runner.invoke(floret, [*options, "--federation", "b"], input="n\n")
    assert (tmp_path / "state" / "b").is_dir(), done.output
    done = runner.invoke(floret, [*options, "--federation", "b", "--yes"])
    assert done.output == "deleted: client site in federation b, fedper\n"
    assert not (tmp_path / "state" / "b").exists()
    assert (tmp_path / "state" / "a" / "fedper" / "site").is_dir()
    assert "arrays" in site.ask("train", shared(initial()), federation="c")
    # Larger than a gigabyte, and nothing on the disk.
    with (tmp_path / "state/c/fedper/site/00000009.safetensors").open("wb") as file:
        file.truncate(2 * 10**9)
    (tmp_path / "policy.yaml").write_text("max-state-gb: 1")
    assert re.search(r"max-state-gb = 1, and <state-dir> has 2\.0 GB; see floret state remove", site.refusal())


@pytest.mark.parametrize("name", ["identity", "seed"])
@pytest.mark.parametrize("kind", ["train", "evaluate", "query.plan", "query.describe"])
def test_a_federation_cannot_take_the_place_of_a_nodes_own_file(tmp_path: Path, kind: str, name: str) -> None:
    site = Site(tmp_path)
    line = site.refusal(kind, federation=name)
    assert line.startswith(f"federation = '{name}': must not be identity or seed")
    assert "\n" not in line
    assert [path.name for path in (tmp_path / "state").iterdir()] == [".audit"]
    assert len(described(site)["identity"]) == 32
    assert "arrays" in site.ask("train", shared(initial()))


@pytest.mark.parametrize("said", ["x" * 100_000, b"x" * 100_000, 1.5, True, [1] * 100_000])
def test_a_round_that_is_no_number_is_not_audited(tmp_path: Path, said: Any) -> None:
    site = Site(tmp_path)
    site.refusal(scalars={"round": said})
    assert site.audit[-1]["round"] is None
    assert (tmp_path / "state/.audit/uncounted/site.jsonl").stat().st_size < 1000


@pytest.mark.parametrize("key", ["federation", "method"])
def test_no_text_of_a_line_is_longer_than_it_may_be(tmp_path: Path, key: str) -> None:
    site = Site(tmp_path)
    site.refusal(**{key: "y" * 100_000})
    assert site.audit[-1][key] == "y" * 1000 + "... (100000 characters)"
    assert (tmp_path / "state/.audit/uncounted/site.jsonl").stat().st_size < 5000


def test_a_server_cannot_push_lines_out_of_the_audit_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("client_app.audit._LARGEST", 20_000)
    site = Site(tmp_path)
    site.ask("query.describe")
    assert "arrays" in site.ask("train", shared(initial()))
    for _ in range(3):
        site.refusal(scalars={"round": "x" * 50_000})
    assert [line["message"] for line in site.audit] == ["query.describe", "train", "train", "train", "train"]
    # Nor by any number of messages that no round is counted for.
    for _ in range(20):
        site.refusal(method="y" * 1000)
        site.ask("query.describe")
    folder = tmp_path / "state/.audit"
    assert sorted(path.name for path in (folder / "uncounted").iterdir()) == ["site.jsonl", "site.jsonl.1"]
    (line,) = (folder / "site.jsonl").read_text().splitlines()
    assert json.loads(line)["tensors"]
    assert not (folder / "site.jsonl.1").exists()


def folders_of(site: Site) -> set[str]:
    """Return the names of the federations that have a folder on the device."""
    return {path.name for path in (site.folder / "state").iterdir() if path.is_dir() and path.name[0] != "."}


@pytest.mark.parametrize("kind", ["train", "evaluate", "query.plan"])
def test_messages_that_keep_nothing_fill_no_disk(tmp_path: Path, kind: str) -> None:
    site = Site(tmp_path, "max-federations: 3")
    assert "arrays" in site.ask("train", shared(initial()), federation="honest")
    # A training message is refused only once the client's state is at hand: it has another model's tensors.
    wrong = {"extractor.fc1.weight": np.ones((2, 2), np.float32)} if kind == "train" else {}
    for i in range(10):
        assert ("error" in site.ask(kind, wrong, federation=f"f{i}")) is (kind == "train")
        assert len(folders_of(site)) <= 3
    assert "honest" in folders_of(site)
    for name in ("honest", "another"):
        assert "arrays" in site.ask("train", shared(initial()), federation=name)
    assert {"honest", "another"} <= folders_of(site)


def test_a_folder_without_a_version_that_is_in_use_stays(tmp_path: Path) -> None:
    from client_app.state import FileStore

    site = Site(tmp_path, "max-federations: 1")
    with FileStore.at(tmp_path / "state", "begins", "fedper", "other", sync=True).claim():
        assert "max-federations = 1, and federation = 'b' would be one more" in site.refusal(federation="b")
        assert folders_of(site) == {"begins"}
    # What a crash left of a first version goes with the folder.
    (tmp_path / "state/begins/fedper/other/00000001.safetensors").write_bytes(b"half")
    assert "arrays" in site.ask("train", shared(initial()), federation="b")
    assert folders_of(site) == {"b"}


def test_class_names_stay_if_the_policy_says_so(tmp_path: Path) -> None:
    site = Site(tmp_path)
    (tmp_path / "data" / "classes.txt").write_text("\n".join(f"class {c}" for c in range(CLASSES)))
    assert described(site)["class-names"]
    (tmp_path / "policy.yaml").write_text("class-names: false")
    site.node["policy"] = str(tmp_path / "policy.yaml")
    assert described(site)["class-names"] == []


def test_a_node_says_whose_its_data_are(tmp_path: Path) -> None:
    site = Site(tmp_path)
    assert described(site)["own-data"] is True
    # The folder of the run's dataset is no data of its own.
    site.node |= {"partition-id": 0, "num-partitions": 2}
    assert described(site)["own-data"] is False


def test_a_node_says_how_it_tells_accuracies(tmp_path: Path) -> None:
    site = Site(tmp_path)
    assert described(site)["accuracies"] == "rounded"
    (tmp_path / "policy.yaml").write_text("accuracies: none\n")
    site.node["policy"] = str(tmp_path / "policy.yaml")
    assert described(site)["accuracies"] == "none"
    del site.node["policy"]
    site.node |= {"partition-id": 0, "num-partitions": 2}
    assert described(site)["accuracies"] == "exact"


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"partition-id": 0}, "has partition-id without num-partitions; a node with data of its own has neither"),
        ({"num-partitions": 2}, "has num-partitions without partition-id; a node with data of its own has neither"),
        ({"partition-id": 2, "num-partitions": 2}, "must be a whole number from 0 to num-partitions - 1 = 1"),
        ({"partition-id": -1, "num-partitions": 2}, "must be a whole number from 0 to num-partitions - 1 = 1"),
        ({"partition-id": 0.5, "num-partitions": 2}, "must be a whole number from 0 to num-partitions - 1 = 1"),
        ({"partition-id": 0, "num-partitions": 0}, "num-partitions = 0 in the node config: must be a whole number"),
        ({"partition-id": 0, "num-partitions": "2"}, "num-partitions = '2' in the node config: must be a whole number"),
    ],
)
def test_a_partition_that_is_half_named_or_is_none_opens_nothing(
    tmp_path: Path, keys: dict[str, Any], said: str
) -> None:
    site = Site(tmp_path)
    site.node |= keys
    assert said in site.refusal("query.describe")
    assert said in site.refusal(arrays=shared(initial()), max_samples=1)
    assert not (tmp_path / "state" / "default").exists()


def test_a_demo_node_reads_only_the_folder_of_its_own_command_line(tmp_path: Path) -> None:
    site = Site(tmp_path)
    secret = tmp_path / "secret"
    secret.mkdir()
    site.node = {"partition-id": 0, "num-partitions": 2, "state-dir": str(tmp_path / "state")}
    for dataset in ("npz", "image-folder", "mnist", "npz-clients"):
        line = site.refusal("query.describe", dataset=dataset, data_dir=str(secret), download=True)
        assert line == (
            f"dataset = {dataset!r}: this node was started without --data-dir, the folder that has it; it reads no "
            "other"
        )
    assert not list(secret.iterdir())
    site.node["data-dir"] = str(tmp_path / "data")
    line = site.refusal("query.describe", dataset="npz", data_dir=str(secret))
    assert line.startswith("data-dir = <data-dir> has 2 other npz files")
    assert "secret" not in line


def test_a_text_for_the_server_stays_whole_where_the_data_are_in_the_root(tmp_path: Path) -> None:
    site = Site(tmp_path)
    site.node |= {"partition-id": 0, "num-partitions": 2, "data-dir": "/"}
    line = site.refusal("query.describe", dataset="npz", data_dir="")
    # Nor is every "/" in it the folder's name.
    site.node["data-dir"] = str(tmp_path)
    assert line == site.refusal("query.describe", dataset="npz", data_dir="").replace("<data-dir>", "/")


def test_the_audit_file_has_what_left(tmp_path: Path) -> None:
    site = Site(tmp_path)
    site.ask("query.describe")
    reply = site.ask("train", shared(initial()))
    site.refusal(local_epochs=5000)
    described, trained, refused = site.audit
    assert described["message"] == "query.describe"
    assert described["records"]["client"]["train"] == 54
    assert (trained["client"], trained["federation"], trained["method"], trained["round"]) == (
        "site", "default", "fedper", 2,
    )  # fmt: skip
    assert (trained["run"], trained["node"]) == ("0", "7")  # texts, which no reader rounds
    sent = arrays_of(reply)
    assert [tensor["name"] for tensor in trained["tensors"]] == list(sent)
    for tensor in trained["tensors"]:
        assert tensor["shape"] == list(sent[tensor["name"]].shape)
        assert tensor["bytes"] == sent[tensor["name"]].nbytes
        assert tensor["norm"] == pytest.approx(np.linalg.norm(sent[tensor["name"]]), rel=1e-5)
    assert trained["bytes"] == sum(array.nbytes for array in sent.values())
    assert trained["records"]["metrics"] == metrics_of(reply)
    assert refused["tensors"] == []
    assert stat.S_IMODE((tmp_path / "state/.audit/site.jsonl").stat().st_mode) == 0o600
    assert stat.S_IMODE((tmp_path / "state/.audit").stat().st_mode) == 0o700


def test_nothing_leaves_without_its_line(tmp_path: Path) -> None:
    site = Site(tmp_path)
    (tmp_path / "state/.audit/uncounted/site.jsonl").mkdir(parents=True)
    (tmp_path / "state/.audit/site.jsonl").mkdir()
    for kind in ("query.describe", "train"):
        refusal = site.refusal(kind, arrays=shared(initial()))
        assert "site.jsonl cannot be written (Is a directory); nothing leaves without it" in refusal


def test_a_line_that_a_full_disk_cut_short_takes_no_other_with_it(tmp_path: Path) -> None:
    site = Site(tmp_path)
    site.ask("train", shared(initial()))
    file = tmp_path / "state/.audit/site.jsonl"
    with file.open("ab") as torn:
        torn.write(b'{"time": "2026')
    site.ask("train", shared(initial()))
    first, cut, last = file.read_text().splitlines()
    assert (json.loads(first)["round"], cut, json.loads(last)["round"]) == (1, '{"time": "2026', 2)


def test_the_audit_file_does_not_grow_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("client_app.audit._LARGEST", 3000)
    site = Site(tmp_path)
    for _ in range(20):
        site.ask("query.describe")
    sizes = {path.name: path.stat().st_size for path in (tmp_path / "state/.audit/uncounted").iterdir()}
    assert sizes.keys() == {"site.jsonl", "site.jsonl.1"}
    assert max(sizes.values()) <= 3000


def test_a_full_audit_file_takes_no_other_clients_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("client_app.audit._LARGEST", 1000)
    message = Message(RecordDict({"config": ConfigRecord({"round": 1})}), 7, "train")
    names = ("ward.1", "ward.jsonl", "ward.jsonl.1", "ward.rounds")
    for name in names:
        Audit(tmp_path, name).write(message, RecordDict(), {"client": name})
    for _ in range(12):
        Audit(tmp_path, "ward").write(message, RecordDict(), {"client": "ward"})
    assert len(list((tmp_path / ".audit").iterdir())) == len(names) + 2
    for name in names:
        lines = (tmp_path / f".audit/{name}.jsonl").read_text().splitlines()
        assert [json.loads(line)["client"] for line in lines] == [name]


# The file


WRONG = [
    ("min-sample: 3", "min-sample is not a key of a policy (did you mean 'min-samples'?)"),
    ("min-samples: many", "min-samples = 'many': must be a whole number"),
    ("min-samples: 0", "min-samples = 0: must be at least 1"),
    ("leaves: [extractr]", "'extractr': must be one of model, extractor"),
    ("leaves: 3", "leaves = 3: must be a list of names"),
    ("methods: [fedperr]", "did you mean 'fedper'?"),
    ("methods: fedper, fedrep", "methods = 'fedper, fedrep': names are a list, as in [fedper, fedrep]"),
    ("federations: [../x]", "must be 1 to 100 letters"),
    ("accuracies: some", "must be one of exact, rounded, none"),
    ("accuracies: no", "accuracies = False: must be one of exact, rounded, none, as a text"),
    ("class-names: maybe", "class-names = 'maybe': must be true or false"),
    ("- a list", "is not a table of keys and values"),
    ("3: 4", "is not a table of keys and values"),
    ("a: [", "is not YAML"),
    ("[" * 600, "is nested too deeply"),
    ("\x00", "is not YAML"),
]


@pytest.mark.parametrize(("text", "wrong"), WRONG)
def test_a_policy_that_cannot_be_read_permits_nothing(tmp_path: Path, text: str, wrong: str) -> None:
    site = Site(tmp_path, text)
    with pytest.raises(ConfigError) as error:
        Policy.read(tmp_path / "policy.yaml")
    assert wrong in str(error.value)
    assert str(error.value).startswith(f"policy {tmp_path}/policy.yaml: ")
    assert wrong in site.refusal("query.describe")


def test_a_key_that_a_file_lacks_is_as_without_the_file(tmp_path: Path) -> None:
    file = tmp_path / "policy.yaml"
    file.write_text("max-classes: 7")
    own, demo = {"policy": str(file)}, {"policy": str(file), "partition-id": 0, "num-partitions": 2}
    assert Policy.of(own) == dataclasses.replace(Policy(), max_classes=7)
    assert Policy.of(demo) == dataclasses.replace(Policy.public(), max_classes=7)
    assert Policy.public() != Policy()
    file.write_text("")
    assert Policy.of(own) == Policy()


def test_a_policy_that_is_gone_permits_nothing(tmp_path: Path) -> None:
    site = Site(tmp_path, "min-samples: 1")
    (tmp_path / "policy.yaml").unlink()
    assert site.refusal() == "policy <policy>: cannot be read (No such file or directory)"


def test_the_docs_have_every_key_with_its_defaults() -> None:
    text = (ROOT / "docs" / "policy.md").read_text()
    rows = dict(re.findall(r"^\| `([a-z-]+)` \| `([^`]*)` \|", text, re.MULTILINE))
    public = dict(re.findall(r"^\| `([a-z-]+)` \| `[^`]*` \| `([^`]*)` \|", text, re.MULTILINE))

    def said(policy: Policy) -> dict[str, str]:
        shown: Callable[[Any], str] = lambda v: ", ".join(v) if isinstance(v, tuple) else str(v).lower()  # noqa: E731
        return {key_of(f.name): shown(getattr(policy, f.name)) for f in dataclasses.fields(policy)}

    assert rows == said(Policy())
    assert public == said(Policy.public())
    lowest = re.findall(r"^\| `([a-z-]+)` \|[^|]*\|[^|]*\| ≥ (\d) \|", text, re.MULTILINE)
    assert len(lowest) == 18
    for key, low in lowest:
        read_keys(Policy, Policy().values() | {key: int(low)})
        with pytest.raises(ConfigError, match=f"{key} = .*must be at least {low}"):
            read_keys(Policy, Policy().values() | {key: int(low) - 1})


def test_the_command_says_what_is_permitted(tmp_path: Path) -> None:
    from click.testing import CliRunner

    done = CliRunner().invoke(floret, ["policy"])
    assert done.exit_code == 0
    assert "min-samples          10" in done.output
    for name in METHODS:
        assert re.search(rf"^{name} +(sends|not permitted)", done.output, re.MULTILINE), name
    assert re.search(r"^ua-pdfl +not permitted: it sends representations", done.output, re.MULTILINE)
    file = tmp_path / "policy.yaml"
    file.write_text("leaves: extractor")
    done = CliRunner().invoke(floret, ["policy", str(file), "-c", 'method="fedper"'])
    said = "This run is permitted, as far as the data and the server's messages are: it sends extractor.\n"
    assert done.output == said
    done = CliRunner().invoke(floret, ["policy", str(file), "-c", 'method="fedavg"'])
    assert "it sends head" in str(done.exception)
    done = CliRunner().invoke(floret, ["policy", str(file), "-c", "local-epochs=1001"])
    assert "max-local-epochs = 1000, and local-epochs = 1001" in str(done.exception)
    for keys, wrong in (
        ('method="fedproto" privacy.unit="example"', "fedproto sends what has no mechanism for it"),
        ('method="fedper" privacy.unit="example"', "num-classes = 0: with privacy.unit = 'example'"),
    ):
        done = CliRunner().invoke(floret, ["policy", "-c", keys])
        assert wrong in str(done.exception)


NOISED = 'method="fedper" num-classes=10 privacy.clip=1.0 '
LITTLE = "this node's policy has min-noise = 0.1, and this run adds "
COMMAND_REFUSES = [
    (NOISED + 'privacy.unit="example" privacy.noise=0.01', LITTLE + "0.01 times its privacy.clip"),
    (NOISED + 'privacy.unit="client" privacy.noise=0.01', LITTLE + "0.01 times its privacy.clip"),
    (NOISED + 'privacy.unit="client" privacy.epsilon=10000.0 rounds=1', LITTLE + "0.00"),
    ("num-classes=20000", "this node's policy has max-classes = 10000, and num-classes = 20000"),
    ("batch-size=7", "this node's policy has min-batch-size = 8, and batch-size = 7"),
]


@pytest.mark.parametrize(("keys", "wrong"), COMMAND_REFUSES)
def test_the_command_refuses_what_a_node_would(keys: str, wrong: str) -> None:
    from click.testing import CliRunner

    done = CliRunner().invoke(floret, ["policy", "-c", keys])
    assert "This run is permitted" not in done.output
    assert str(done.exception).startswith(wrong)


@pytest.mark.parametrize(
    "keys",
    [
        'method="fedper" model="resnet18" head-layers=4',
        'method="fedper" model="vgg11" head-layers=5',
        'method="fedkd" model="fasttext" dataset="ag-news" fedkd.student-model="fasttext"',
    ],
)
def test_the_command_reads_a_run_with_its_own_model(keys: str) -> None:
    from click.testing import CliRunner

    assert "This run is permitted" in CliRunner().invoke(floret, ["policy", "-c", keys]).output
    done = CliRunner().invoke(floret, ["policy", "-c", 'method="fedper" head-layers=9'])
    assert str(done.exception).startswith("head-layers = 9: must be from 1 to ")


@pytest.mark.parametrize(
    "keys", ['privacy.unit="client" privacy.epsilon=8.0', 'privacy.unit="example" privacy.noise=0.1']
)
def test_the_command_permits_noise_that_a_node_would(keys: str) -> None:
    from click.testing import CliRunner

    assert "This run is permitted" in CliRunner().invoke(floret, ["policy", "-c", NOISED + keys]).output


def test_little_noise_that_the_server_adds_is_its_own_affair(tmp_path: Path) -> None:
    from click.testing import CliRunner

    (tmp_path / "policy.yaml").write_text("noise-by-server: true")
    keys = NOISED + 'privacy.unit="client" privacy.where="server" privacy.noise=0.01'
    assert (
        "This run is permitted"
        in CliRunner().invoke(floret, ["policy", str(tmp_path / "policy.yaml"), "-c", keys]).output
    )


@pytest.mark.parametrize(
    ("policy", "wrong"),
    [("min-samples: 1000", "fewer training samples"), ("min-steps: 50", "a round would have fewer steps (")],
)
def test_noise_by_the_server_takes_the_place_of_no_samples(tmp_path: Path, policy: str, wrong: str) -> None:
    """The update leaves as it is; how much stands behind it is not told all the same."""
    run: dict[str, Any] = {"num_classes": CLASSES, "privacy__unit": "client", "privacy__where": "server"}
    site = Site(tmp_path, f"noise-by-server: true\n{policy}")
    assert wrong in site.refusal(arrays=shared(initial()), **run)
    assert policy.replace(":", " =") in site.refusal(arrays=shared(initial()), **run)


def test_a_step_that_batch_normalisation_does_not_make_is_not_counted(tmp_path: Path) -> None:
    """33 samples in batches of 32 are one batch of 33."""
    policy, keys = Policy(min_samples=1, min_batch_size=1), run_config(tmp_path, batch_size=32, local_epochs=1)
    config = read_keys(RunConfig, keys)

    def data(samples: int) -> ClientData:
        split = Split(torch.zeros(samples, 4), torch.zeros(samples, dtype=torch.int64))
        return ClientData(split, split, split, 2, (4,))

    policy.check_data(config, data(34))
    # Nor is one of a rest that is part of the batch before it.
    dataclasses.replace(policy, min_batch_size=8).check_data(config, data(40))
    with pytest.raises(PolicyError, match="a round would have 1 steps"):
        dataclasses.replace(policy, min_batch_size=8).check_data(config, data(39))
    with pytest.raises(
        PolicyError, match=r"min-steps = 2, and a round would have 1 steps \(local-epochs = 1, batch-si"
    ):
        policy.check_data(config, data(33))


def test_a_node_with_little_noise_does_not_join(tmp_path: Path) -> None:
    run: dict[str, Any] = {"num_classes": CLASSES, "privacy__unit": "example", "privacy__noise": 0.01}
    assert LITTLE + "0.01" in Site(tmp_path).refusal("query.describe", **run)


def test_every_tensor_has_a_kind() -> None:
    kinds = {
        "extractor.conv1.weight": "extractor",
        "head.fc.bias": "head",
        "prototype.3": "prototypes",
        "mask.head.fc.weight": "head",
        "student.extractor.fc1.weight": "networks",
        "unit": "representations",
    }
    assert {name: kind_of(name) for name in kinds} == kinds


# A whole federation


@pytest.mark.thorough
def test_a_run_goes_on_without_those_who_refuse_and_those_who_tell_nothing(tmp_path: Path) -> None:
    def silent(message: Message, reply: Message) -> Message:
        metrics = reply.content.get("metrics")
        if metrics is not None and message.metadata.dst_node_id != 1000:
            for name in list(metrics):
                if name not in ("num-examples", "seconds"):
                    del metrics[name]
        return reply

    outcome = federate(tmp_path / "runs", rounds=2, evaluate_every=1, method="fedper", tamper=silent)
    last = outcome.history[-1]
    assert last["clients"]["1"]["after"] is None
    assert last["clients"]["1"]["loss"] is None
    assert last["clients"]["0"]["after"]["test"] is not None
    assert math.isfinite(last["loss"])
    everybody = federate(
        tmp_path / "others",
        report=True,
        rounds=1,
        tamper=lambda m, r: silent(m, r) if m.metadata.dst_node_id != 1000 else None,
    )
    assert everybody.history[-1]["loss"] is None
    assert (everybody.directory / "report.html").is_file()


def test_a_record_of_arrays_is_audited_however_it_is_packed() -> None:
    from common.tensors import TensorSpec
    from common.wire import norm_of, pack

    specs = {
        "sparse": TensorSpec((2, 5), sparse=True),
        "mask": TensorSpec((11,), "bool"),
        "dense": TensorSpec((3,)),
    }
    sparse = np.array([[0, 3, 0, 0, 0], [0, 0, 0, 4, 0]], np.float32)
    arrays = {"sparse": sparse, "mask": np.arange(11) < 9, "dense": np.array([1, 2, 2], np.float32)}
    for wire in ("float32", "float16"):
        record: ArrayRecord = pack(arrays, specs, wire)
        assert {name: norm_of(array) for name, array in record.items()} == {"sparse": 5.0, "mask": 3.0, "dense": 3.0}
