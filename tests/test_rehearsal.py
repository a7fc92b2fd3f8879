"""Every method on a GPU that is not there (``tests.pretend``): the CPU's numbers, no tensor left behind, no waiting.

In the loop over batches nothing may make the host wait for the device: it prepares the next step while the device
computes this one. Outside of it, once a message, waiting is fine and cannot be avoided: a branch that a mask decides
(``bool(known.any())``), the mean loss, the accuracies, and whatever is sent or kept. So what is asserted is that
neither more batches nor more epochs make the host wait more often, and that an epoch brings one tensor to the device,
the order of its samples, which is drawn on the CPU so that it is the same everywhere.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from flwr.app import Context, Message, MetricRecord
from torch import Tensor

from client_app.app import app
from client_app.batches import Batch, take
from client_app.client import MEMORY
from client_app.methods.fedavg import FedAvg
from common.wire import DENSE
from data import Split
from strategies import METHODS
from tests.harness import ON_MLP, Outcome, delivered_again, federate, kept, standing
from tests.pretend import Far, Gpu, MixedDevicesError
from tests.test_papers import write_images

NODE = 1000
# What else of a method computes on the device.
MORE: dict[str, dict[str, Any]] = {
    "pfakd": {"pfakd__attention_transfer": True},
    # With the others' learning rate it diverges, and then the last digit decides.
    "fedpa": {"lr": 0.005},
    # All of its peers' extractors are asked for, whatever has been learned.
    "ua-pdfl": {"ua_pdfl__th": -1.0},
}
# Images are what all that a method has can be computed on; of two methods also what has no convolution.
CASES = [
    pytest.param((method, model), marks=[] if (method, model) == ("fedavg", "mlp") else pytest.mark.thorough)
    for method, model in [*((method, "cnn2") for method in METHODS), ("fedavg", "mlp"), ("fedcpd", "mlp")]
]


def learned(folder: Path, method: str, model: str) -> Outcome:
    """Run two rounds on the CPU."""
    if model == "mlp":
        keys: dict[str, Any] = {"max_samples": 200, **ON_MLP.get(method, {})}
        keys |= {"ua_pdfl__th": -1.0} if method == "ua-pdfl" else {}
    else:
        keys = write_images(folder / "data", 3) | {"model": model, "batch_size": 8, **MORE.get(method, {})}
    return federate(folder / "runs", 3, method=method, **keys | {"local_epochs": 2, "device": "cpu"})


@pytest.fixture(scope="module", params=CASES, ids="-".join)
def outcome(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    return learned(tmp_path_factory.mktemp("run"), *request.param)


def last(outcome: Outcome, kind: str = "train") -> Message:
    """Return the message of a kind that the first client got last."""
    return next(
        m for m in reversed(outcome.grid.messages) if m.metadata.dst_node_id == NODE and m.metadata.message_type == kind
    )


@contextmanager
def on_gpu(context: Context) -> Iterator[Gpu]:
    """Let the client of a node compute on the device."""
    context.run_config["device"] = "cuda"
    try:
        # With operations that add in a fixed order ``F.interpolate`` asks the driver; ``tests.test_gpu`` has them.
        with patch("client_app.runtime._add_in_order"), Gpu() as gpu:
            yield gpu
    finally:
        context.run_config["device"] = "cpu"


def told(reply: Message) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    metrics: MetricRecord = reply.content.metric_records["metrics"]
    arrays = reply.content.array_records.get("arrays")
    # Of a sparse tensor the mask, too.
    sent = {n: a.numpy() if a.stype == DENSE else np.frombuffer(a.data, np.uint8) for n, a in (arrays or {}).items()}
    return sent, {key: v for key, v in metrics.items() if key != "seconds"}


def check_message(outcome: Outcome, message: Message | None = None, *, anew: bool = False) -> dict[str, Tensor]:
    """The real ClientApp from the message, by default the last one, to the reply, and what the client keeps.

    With ``anew`` the client of a simulation begins without a state.
    """
    context, message = outcome.grid.contexts[NODE], message or last(outcome)
    if anew:
        context.state.clear()
    near, state = told(app(message, context)), kept(context).load()
    if anew:
        context.state.clear()
    with on_gpu(context) as gpu:
        if outcome.summary["method"] == "ua-pdfl":
            assert "plan" in app(last(outcome, "query.plan"), context).content
        reply = app(message, context)
    assert "error" not in reply.content, reply.content["error"]
    assert gpu.counts["computed"] > 100
    far = told(reply)
    assert far[0].keys() == near[0].keys()
    assert all(np.array_equal(far[0][name], near[0][name]) for name in near[0])
    assert far[1] == near[1]
    after = kept(context).load()
    assert after.keys() == state.keys()
    assert all(torch.equal(after[name], state[name]) for name in state)
    return after


def test_a_message_gives_on_the_device_what_it_gives_on_the_cpu(outcome: Outcome) -> None:
    check_message(outcome)


@pytest.mark.thorough
def test_batch_normalisation_on_the_device(tmp_path: Path) -> None:
    keys = write_images(tmp_path / "data", 1, 12) | {"model": "cnn5-wide-bn", "batch_size": 8, "device": "cpu"}
    check_message(federate(tmp_path / "runs", 1, method="fedbn", **keys))


@pytest.mark.parametrize(
    ("unit", "where"),
    [("example", "node"), *(pytest.param("client", by, marks=pytest.mark.thorough) for by in ("node", "server"))],
)
def test_a_protected_message_of_a_simulation_on_the_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unit: str, where: str
) -> None:
    monkeypatch.setattr("server_app.federation.is_simulated", lambda _: True)
    monkeypatch.setattr("client_app.app.in_simulation", lambda: True)
    keys: dict[str, Any] = {"privacy__unit": unit, "privacy__where": where, "privacy__noise": 1.0}
    keys |= {"privacy__epsilon": 0.0, "num_classes": 10, "max_samples": 200, "device": "cpu"}
    outcome = federate(tmp_path / "runs", 3, method="fedper", **keys)
    first = next(message for message in outcome.grid.messages if message.metadata.message_type == "train")
    assert first.metadata.dst_node_id == NODE
    assert check_message(outcome, first, anew=True).keys() >= {f"{MEMORY}privacy.spent"}


def counted(outcome: Outcome, *, batch_size: int, epochs: int) -> Counter[str]:
    """Return what happens on the device while a client receives, trains and prepares what it sends."""
    context = outcome.grid.contexts[NODE]
    with on_gpu(context) as gpu:
        client = delivered_again(context, last(outcome))
        client.config = replace(client.config, batch_size=batch_size, local_epochs=epochs)
        gpu.counts.clear()
        client.receive()
        client.train()
        client.upload()
    return gpu.counts


def test_more_batches_and_epochs_do_not_wait_more_often(outcome: Outcome) -> None:
    few, many, again = (counted(outcome, batch_size=b, epochs=e) for b, e in ((20, 2), (5, 2), (20, 3)))
    assert few["waits"] == many["waits"] == again["waits"], (few, many, again)
    assert few["sent"] == many["sent"] == again["sent"] - 1, (few, many, again)
    # There were more of them: a step computes more than that.
    assert many["computed"] > few["computed"] + 50
    assert again["computed"] > few["computed"] + 20


def test_a_loss_that_waits_in_every_batch_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    outcome = learned(tmp_path, "fedavg", "mlp")
    kind: Any = FedAvg

    def planted(defect: Any) -> Any:
        def loss(client: Any, batch: Batch) -> Tensor:
            value: Tensor = super(kind, client).loss(batch)
            return defect(value, batch)  # type: ignore[no-any-return]

        return loss

    for defect in (
        lambda value, batch: value if value.item() >= 0 else -value,
        lambda value, batch: value + 0 * batch.x[batch.y > 3].sum(),
        lambda value, batch: value + 0 * len(set(batch.y.tolist())),
        lambda value, batch: value + 0 * batch.x.cpu().sum().item(),
    ):
        monkeypatch.setattr(kind, "loss", planted(defect), raising=False)
        few, many = (counted(outcome, batch_size=b, epochs=1) for b in (20, 5))
        assert many["waits"] > few["waits"] + 2
    monkeypatch.setattr(kind, "loss", planted(lambda value, batch: value + torch.ones(3).to("cuda").sum()))
    few, many = (counted(outcome, batch_size=b, epochs=1) for b in (20, 5))
    assert many["sent"] > few["sent"] + 2
    monkeypatch.setattr(kind, "loss", planted(lambda value, batch: value + (batch.x.flatten(1) @ torch.ones(64)).sum()))
    with pytest.raises(MixedDevicesError, match="expected all tensors to be on the same device"):
        counted(outcome, batch_size=20, epochs=1)


def test_accuracy_and_what_is_checked_at_the_end_wait_once(tmp_path: Path) -> None:
    outcome = learned(tmp_path, "fedper", "mlp")
    context = outcome.grid.contexts[NODE]
    with on_gpu(context) as gpu:
        client = standing(context, last(outcome))
        train = client.data.train
        for rows in (10, 2000):  # of which one pass takes 512
            index = torch.zeros(rows, dtype=torch.int64).to("cuda")
            split = Split(take(train.x, index), train.y[index])
            gpu.counts.clear()
            client.accuracy(split)
            assert (gpu.counts["waits"], gpu.counts["sent"]) == (1, 0)
        personal = client._personal()
        assert len(personal) > 5
        gpu.counts.clear()
        client._check_finite(personal)
        assert (gpu.counts["waits"], gpu.counts["sent"]) == (1, 0)


def test_the_device_is_strict_and_counts() -> None:
    with Gpu() as gpu:
        x = torch.arange(4.0, device="cuda")
        assert isinstance(x, Far)
        assert x.device == torch.device("cuda", 0)
        assert x.is_cuda
        y = torch.ones(4)
        assert y.device.type == "cpu"
        gpu.counts.clear()
        assert (x + y.to("cuda") + torch.tensor(1.0)).sum().backward is not None
        assert gpu.counts["sent"] == 1
        assert gpu.counts["waits"] == 0
        for mixed in (lambda: x + y, lambda: y[x.long()], lambda: torch.stack([x, y]), lambda: x[torch.tensor([1])]):
            with pytest.raises(MixedDevicesError):
                mixed()
        gpu.counts.clear()
        for place, wait in enumerate(
            (
                lambda: float(x.sum()),
                lambda: bool(x.any()),
                lambda: x.tolist(),
                lambda: x.cpu(),
                lambda: x[x > 1],
                lambda: x.nonzero(),
                lambda: x.to(torch.device("cpu")),
                lambda: torch.zeros(4).copy_(x),
            ),
            1,
        ):
            wait()
            assert gpu.counts["waits"] == place
        with pytest.raises(TypeError):
            x.numpy()
        w = x.clone().requires_grad_()
        (w.square().sum() * 2).backward()
        assert isinstance(w.grad, Far)
        assert w.grad.tolist() == [0.0, 4.0, 8.0, 12.0]
