"""Every method on a real GPU; ``tests.test_rehearsal`` is what can be seen without one."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Message

from client_app.app import app
from client_app.runtime import device_of, training_type
from common.seeds import torch_generator
from common.wire import DENSE, SPARSE
from models import build_model
from strategies.fedkd import LEFT, RIGHT
from tests.harness import checkpointed, equal, federate, kept, personal, timeless
from tests.test_papers import write_images
from tests.test_rehearsal import CASES, MORE, NODE, last, learned, told

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda", 0)


@pytest.fixture(autouse=True, scope="module")
def _there_is_a_gpu() -> None:
    assert torch.cuda.is_available(), "PyTorch sees no NVIDIA GPU here"


def read(reply: Message) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Return what a reply says: sparse tensors with zeros where nothing is, two factors as their product."""
    arrays = {}
    for name, array in reply.content.array_records.get("arrays", {}).items():
        if array.stype == DENSE:
            arrays[name] = array.numpy()
            continue
        size = math.prod(array.shape)
        there = np.unpackbits(np.frombuffer(array.data[: -(-size // 8)], np.uint8), count=size).astype(bool)
        arrays[name] = there.astype(np.float32)
        if array.stype == SPARSE:
            arrays[name][there] = np.frombuffer(array.data[-(-size // 8) :], np.float32)
    for name in [name.removesuffix(LEFT) for name in arrays if name.endswith(LEFT)]:
        arrays[name] = arrays.pop(name + LEFT) @ arrays.pop(name + RIGHT)
    return arrays, told(reply)[1]


@pytest.mark.parametrize(("method", "model"), [case.values[0] for case in CASES])
def test_a_message_gives_on_a_gpu_what_it_gives_on_the_cpu(tmp_path: Path, method: str, model: str) -> None:
    outcome = learned(tmp_path, method, model)
    context, message = outcome.grid.contexts[NODE], last(outcome)
    answer = app(message, context)
    near, metrics = read(answer)
    sparse = {name for name, array in answer.content.array_records.get("arrays", {}).items() if array.stype == SPARSE}
    state = kept(context).load()
    context.run_config["device"] = "cuda"
    if method == "ua-pdfl":
        assert "plan" in app(last(outcome, "query.plan"), context).content
    torch.cuda.reset_peak_memory_stats()
    reply = app(message, context)
    assert torch.cuda.max_memory_allocated() > 0
    assert "error" not in reply.content, reply.content["error"]
    after = kept(context).load()
    far, far_metrics = read(reply)
    assert far.keys() == near.keys()
    for name, array in near.items():
        # Where the largest values are sent, two that are nearly equal may change places.
        other = ~np.isclose(far[name], array, rtol=1e-3, atol=1e-4)
        assert other.mean() <= (0.02 if name in sparse else 0), f"{name}: {other.sum()} of {other.size}"
    assert far_metrics.keys() == metrics.keys()
    for key, value in metrics.items():
        assert far_metrics[key] == pytest.approx(value, rel=1e-3, abs=1e-4), key
    assert after.keys() == state.keys()
    for name, tensor in state.items():
        torch.testing.assert_close(after[name], tensor, rtol=1e-3, atol=1e-4, msg=name)


@pytest.mark.parametrize(("method", "model"), [case.values[0] for case in CASES])
@pytest.mark.filterwarnings("error:.*does not have a deterministic implementation:UserWarning")
def test_the_same_config_gives_the_same_history_on_a_gpu(tmp_path: Path, method: str, model: str) -> None:
    keys: dict[str, Any] = write_images(tmp_path / "data", 3, 40) | {"model": model, "batch_size": 8}
    keys |= MORE.get(method, {}) | {"local_epochs": 2, "device": "cuda", "method": method, "rounds": 3}
    keys |= {"fedcpd__distill": False} if (method, model) == ("fedcpd", "mlp") else {}
    one, other = (federate(tmp_path / name, 3, **keys) for name in ("one", "other"))
    assert timeless(one.history) == timeless(other.history)
    assert equal(checkpointed(one), checkpointed(other))
    for mine, theirs in zip(personal(one), personal(other), strict=True):
        assert mine.keys() == theirs.keys()
        assert all(torch.equal(mine[name], theirs[name]) for name in mine)


@pytest.mark.parametrize("name", ["cnn3", "cnn5-wide-bn", "resnet18", "vgg11"])
def test_a_network_computes_in_float32(name: str) -> None:
    model = build_model(name, (3, 32, 32), 10, 1, torch_generator(0, "model"))
    x, y = torch.rand(64, 3, 32, 32, generator=torch_generator(0, "images")), torch.arange(64) % 10

    def gradients(device: torch.device) -> list[torch.Tensor]:
        model.to(device).zero_grad()
        torch.nn.functional.cross_entropy(model(x.to(device)), y.to(device)).backward()
        return [p.grad.clone().cpu() for p in model.parameters() if p.grad is not None]

    for near, far in zip(gradients(torch.device("cpu")), gradients(device_of("cuda")), strict=True):
        # With TF32 it is 0.02 to 0.1. Under batch normalisation the terms of a sum nearly cancel out.
        assert float((near - far).norm()) <= 0.005 * float(near.norm()) + 1e-5


def test_auto_is_bfloat16_on_a_gpu_that_has_it() -> None:
    native = torch.cuda.get_device_capability() >= (8, 0)
    assert training_type("auto", CUDA) == (torch.bfloat16 if native else torch.float32)
