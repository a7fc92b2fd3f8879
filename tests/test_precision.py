"""The key ``precision``: which computations are in bfloat16, and which are not."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from client_app.batches import passes
from client_app.runtime import training_type
from common.errors import FloretError
from common.wire import DENSE
from strategies import METHODS
from tests.harness import ON_MLP, federate, kept, standing, uploads
from tests.test_papers import write_images

CPU = torch.device("cpu")

# At this rate with momentum FedPA's weight of 25 on generated features makes its losses jump, also in float32.
WITHOUT_MOMENTUM = {"fedpa": {"momentum": 0.0}}


@pytest.mark.thorough
@pytest.mark.parametrize("method", METHODS)
def test_every_method_learns_in_bfloat16_and_sends_float32(tmp_path: Path, method: str) -> None:
    own = ON_MLP.get(method, {})
    keys: dict[str, Any] = {"method": method, "rounds": 3, "local_epochs": 2}
    # What a method cannot do on an MLP it does on images.
    keys |= write_images(tmp_path / "data", 2, 120) if False in own.values() else {"lr": 0.05, **own}
    keys |= WITHOUT_MOMENTUM.get(method, {})
    precise = federate(tmp_path / "float32", 2, **keys)
    outcome, records = uploads(tmp_path / "bfloat16", 2, **keys, precision="bfloat16")
    sent = [array for record in records for array in record.values()]
    assert {array.dtype for array in sent} <= {"float32", "bool", "int32", "int64"}
    assert all(np.isfinite(array.numpy()).all() for array in sent if array.stype == DENSE)
    state = kept(outcome.grid.contexts[1000]).load()
    assert {tensor.dtype for tensor in state.values() if tensor.is_floating_point()} == {torch.float32}
    losses, exact = ([line["loss"] for line in one.history] for one in (outcome, precise))
    assert losses[0] != exact[0]
    assert losses[0] == pytest.approx(exact[0], rel=0.05)
    assert outcome.summary["accuracy"]["after"]["mean"] > 0.8
    assert outcome.summary["refused"] == 0


def test_training_is_in_bfloat16_and_accuracies_are_not(tmp_path: Path) -> None:
    keys = write_images(tmp_path / "data", 2)
    outcome = federate(tmp_path / "runs", 2, method="fedper", precision="bfloat16", **keys)
    message = next(m for m in reversed(outcome.grid.messages) if m.metadata.message_type == "train")
    client = standing(outcome.grid.contexts[message.metadata.dst_node_id], message)
    seen: list[torch.dtype] = []
    client.model.extractor[0].register_forward_hook(lambda _, __, output: seen.append(output.dtype))
    batch = next(passes(client.data.train))
    with client.autocast():
        output, maps = client.stages(batch)
        loss = client.loss(batch)
    assert (output.dtype, loss.dtype, maps[0].dtype) == (torch.float32, torch.float32, torch.bfloat16)
    assert set(seen) == {torch.bfloat16}
    seen.clear()
    client.accuracy(client.data.test)
    assert set(seen) == {torch.float32}
    seen.clear()
    client.train()
    assert set(seen) == {torch.bfloat16}


def test_auto_is_what_the_device_multiplies_natively(monkeypatch: pytest.MonkeyPatch) -> None:
    for amx, avx in ((False, False), (True, False), (False, True)):
        monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda amx=amx: amx)
        monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda avx=avx: avx)
        assert training_type("auto", CPU) == (torch.bfloat16 if amx or avx else torch.float32)
        assert training_type("float32", CPU) == torch.float32
        assert training_type("bfloat16", CPU) == torch.bfloat16


def test_a_run_keeps_its_precision(tmp_path: Path) -> None:
    outcome = federate(tmp_path, 2, method="fedper")
    with pytest.raises(FloretError, match="precision = 'bfloat16': the run to resume has 'float32'"):
        federate(tmp_path, 2, method="fedper", rounds=3, precision="bfloat16", resume=str(outcome.directory))
