"""Every method on a real GPU; ``tests.test_rehearsal`` is what can be seen without one."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from client_app.app import app
from client_app.runtime import device_of, training_type
from common.seeds import torch_generator
from models import build_model
from tests.harness import checkpointed, equal, federate, kept, personal, timeless
from tests.test_papers import write_images
from tests.test_rehearsal import CASES, MORE, NODE, last, learned, told

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda", 0)


@pytest.fixture(autouse=True, scope="module")
def _there_is_a_gpu() -> None:
    assert torch.cuda.is_available(), "PyTorch sees no NVIDIA GPU here"


@pytest.mark.parametrize(("method", "model"), [case.values[0] for case in CASES])
def test_a_message_gives_on_a_gpu_what_it_gives_on_the_cpu(tmp_path: Path, method: str, model: str) -> None:
    outcome = learned(tmp_path, method, model)
    context, message = outcome.grid.contexts[NODE], last(outcome)
    near, state = told(app(message, context)), kept(context).load()
    context.run_config["device"] = "cuda"
    if method == "ua-pdfl":
        assert "plan" in app(last(outcome, "query.plan"), context).content
    torch.cuda.reset_peak_memory_stats()
    reply = app(message, context)
    assert torch.cuda.max_memory_allocated() > 0
    assert "error" not in reply.content, reply.content["error"]
    far, after = told(reply), kept(context).load()
    assert far[0].keys() == near[0].keys()
    for name, array in near[0].items():
        np.testing.assert_allclose(far[0][name], array, rtol=1e-3, atol=1e-4, err_msg=name)
    assert far[1].keys() == near[1].keys()
    for key, value in near[1].items():
        assert far[1][key] == pytest.approx(value, rel=1e-3, abs=1e-4), key
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
    device = device_of("cuda")
    model = build_model(name, (3, 32, 32), 10, 1, torch_generator(0, "model"))
    x, y = torch.rand(64, 3, 32, 32, generator=torch_generator(0, "images")), torch.arange(64) % 10
    exact = {n: p.detach().double() for n, p in model.named_parameters()}

    def gradients(where: torch.device, kind: torch.dtype) -> list[torch.Tensor]:
        model.to(where, kind).load_state_dict(exact, strict=False)
        model.zero_grad()
        torch.nn.functional.cross_entropy(model(x.to(where, kind)), y.to(where)).backward()
        return [p.grad.cpu().double() for p in model.parameters() if p.grad is not None]

    true, far = gradients(torch.device("cpu"), torch.float64), gradients(device, torch.float32)
    for one, other in zip(true, far, strict=True):
        # With TF32 it is about 1e-3.
        assert float((one - other).norm() / one.norm()) < 1e-4


def test_auto_is_bfloat16_on_a_gpu_that_has_it() -> None:
    native = torch.cuda.get_device_capability() >= (8, 0)
    assert training_type("auto", CUDA) == (torch.bfloat16 if native else torch.float32)
