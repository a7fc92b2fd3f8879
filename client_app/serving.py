"""A client's personal model in use: load it from the client's state without a server, predict, export."""

import copy
import io
import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from client_app.batches import normalise
from client_app.client import FloretClient
from client_app.inventory import shelves
from client_app.runtime import device_of
from client_app.setting import ClientSetting
from client_app.state import ClientState, FileStore
from common.config import RunConfig, one_of, read_keys
from common.durable import write_whole
from common.errors import ConfigError, FloretError
from common.names import without_prefix
from common.registry import load_class
from data import ClientData, Split
from strategies import METHODS
from strategies.core import FloretStrategy, Method

_BATCH = 256
# Keys that older states do not have, with the values that applied when they were written.
_BEFORE = {"precision": "float32", "return-timeout": 60.0, "wire": "float32", "aggregation": "mean", "trim": 0.3}
_BEFORE |= {"privacy.unit": "none", "privacy.where": "node", "privacy.epsilon": 8.0, "privacy.delta": 1e-5}
_BEFORE |= {"privacy.noise": 0.0, "privacy.clip": 1.0, "privacy.clip-quantile": 0.0, "privacy.sampling": "poisson"}
_BEFORE |= {"privacy.accountant": "rdp", "privacy.head-epochs": 5}
_BEFORE |= {"class-names": "", "data-seed": -1, "image-channels": 0, "image-size": 0, "new-owners": "", "tracker": ""}
_BEFORE |= {"tensorboard": False}


class Served(nn.Module):
    """The personal model with its normalisation: from inputs as stored in files to scores.

    Args:
        model: from normalised inputs to scores.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        """Return scores, (batch, classes); the class with the highest is the answer.

        ``x`` is what the client trained on: uint8 images 0..255, (batch, channels, height, width); float32 images or
        features; or word ids, int32 (batch, words).
        """
        return self.model(normalise(x))  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Personal:
    """A client's personal model, ready for use.

    Attributes:
        module: from inputs to scores, in evaluation mode.
        client, federation, method, round: where it was trained, and its last round.
        input_shape, dtype: of one input.
        classes, class_names: number of classes, and their names, empty if the data have none.
        config: the run config that it was trained under.
        notes: what was found damaged in its state, a line each.
    """

    module: Served
    client: str
    federation: str
    method: str
    round: int
    input_shape: tuple[int, ...]
    dtype: torch.dtype
    classes: int
    class_names: tuple[str, ...]
    config: RunConfig
    notes: tuple[str, ...] = ()

    def scores(self, x: Tensor) -> Tensor:
        """Return scores, (n, classes), on the CPU, of inputs (n, *input_shape).

        Raises:
            FloretError: the inputs differ in shape or type from the training data, or a word id is out of range.
        """
        if tuple(x.shape[1:]) != self.input_shape or x.dtype != self.dtype:
            have, want = (_described(shape, kind) for shape, kind in ((x.shape[1:], x.dtype), self._kind()))
            raise FloretError(f"the inputs are {have}, the model takes {want}")
        device = next(self.module.parameters()).device
        try:
            with torch.no_grad():
                return torch.cat([self.module(part.to(device)).cpu() for part in torch.split(x, _BATCH)])
        except IndexError as error:
            raise FloretError("the inputs have a word id that the model does not know") from error

    def export(self, path: Path) -> None:
        """Write a program of torch.export that needs no Floret: ``torch.export.load(path).module()(x)``.

        Its extra file ``floret.json`` is ``about()``.

        Raises:
            FloretError: ``path`` cannot be written.
        """
        file = io.BytesIO()
        torch.export.save(self._program(), file, extra_files={"floret.json": json.dumps(self.about(), indent=1)})
        _write(path, file.getvalue())

    def export_onnx(self, path: Path) -> None:
        """Write an ONNX model with input ``x`` and output ``scores``.

        Raises:
            FloretError: the extra is not installed, or ``path`` cannot be written.
        """
        try:
            import onnxscript  # noqa: F401 - torch.onnx needs it and says so less clearly
        except ImportError as error:
            raise FloretError("ONNX needs an extra; in Floret's folder: pip install '.[onnx]'") from error
        # Silences its optimizer's notes on what it skips.
        logging.getLogger("onnxscript").setLevel(logging.ERROR)
        logging.getLogger("onnx_ir").setLevel(logging.ERROR)
        program = self._program()
        onnx = torch.onnx.export(program, input_names=["x"], output_names=["scores"], dynamo=True, verbose=False)
        assert onnx is not None
        onnx.model.metadata_props["floret"] = json.dumps(self.about())
        _write(path, onnx.model_proto.SerializeToString())

    def about(self) -> dict[str, Any]:
        """Return the metadata that is written into exported files."""
        return {
            "client": self.client,
            "federation": self.federation,
            "method": self.method,
            "round": self.round,
            "input": {"shape": ["batch", *self.input_shape], "dtype": str(self.dtype).removeprefix("torch.")},
            "output": {"shape": ["batch", self.classes], "meaning": "scores; the class with the highest is the answer"},
            "classes": list(self.class_names),
        }

    def _kind(self) -> tuple[tuple[int, ...], torch.dtype]:
        return self.input_shape, self.dtype

    def _program(self) -> torch.export.ExportedProgram:
        # Weights in the usual layout: torch.export.save warns of any other.
        module = copy.deepcopy(self.module).to(memory_format=torch.contiguous_format)
        device = next(module.parameters()).device
        example = torch.zeros(2, *self.input_shape, dtype=self.dtype, device=device)
        return torch.export.export(module, (example,), dynamic_shapes=({0: torch.export.Dim("batch", min=1)},))


def _write(path: Path, content: bytes) -> None:
    try:
        write_whole(path, content)
    except OSError as error:
        raise FloretError(f"--output {path}: cannot be written ({error.strerror})") from error


def _described(shape: Any, dtype: torch.dtype) -> str:
    return f"{str(dtype).removeprefix('torch.')} {tuple(shape)} each"


def find_personal(state_dir: Path, federation: str | None, method: str | None, client: str | None) -> FileStore:
    """Return the state of a client; any of its names may be None if there is only one.

    Raises:
        FloretError: there is none, or more than one; names the choices.
    """
    found = shelves(state_dir, federation, method, client)
    place = state_dir
    for option, names in (
        ("--federation", sorted({shelf.federation for shelf in found})),
        ("--method", sorted({shelf.method for shelf in found})),
        ("--client-name", sorted({shelf.client for shelf in found})),
    ):
        if len(names) > 1:
            raise FloretError(f"{option} is needed: {place} has {', '.join(names)}")
        place /= names[0]
    return found[0].store


def _config_of(keys: Mapping[str, Any], store: FileStore) -> RunConfig:
    try:
        return read_keys(RunConfig, _BEFORE | dict(keys))
    except ConfigError as error:
        key = str(error).split(" ", 1)[0]
        raise FloretError(
            f"{store.directory}: was written by another version of Floret, which had no {key}, or others"
        ) from error


def load_personal(store: FileStore, device: str = "cpu") -> Personal:
    """Build the newest intact personal model in ``store``, which a running federation may be writing.

    Raises:
        FloretError: there is none, or another version of Floret wrote it.
    """
    state = ClientState(store)
    if not state.round:
        raise FloretError(f"{store.directory}: has no personal model yet")
    about, place = state.about, device_of(device)
    try:
        config = replace(_config_of(about["config"], store), device=device)
        inputs = about["inputs"]
        shape, dtype = tuple(inputs["shape"]), getattr(torch, inputs["dtype"])
        message = dict(about["message"])
        wrong = one_of(config.method, METHODS)
        if wrong:
            raise FloretError(f"{store.directory}: is of the method {config.method!r:.60}, which {wrong}")
        method: type[Method] = load_class("strategies", config.method, FloretStrategy)
        # Older states have the parameters among the message's scalars.
        own = about.get("parameters") or without_prefix(message, f"{config.method}.")
        try:
            parameters = method.read_parameters(config.method, {f"{config.method}.{key}": v for key, v in own.items()})
        except ConfigError as error:
            raise FloretError(
                f"{store.directory}: was written by another version of Floret, with other parameters of {config.method}"
            ) from error
        classes = int(message["num-classes"])
        nothing = Split(torch.zeros(0, *shape, dtype=dtype), torch.zeros(0, dtype=torch.int64))
        data = ClientData(nothing, nothing, nothing, classes, shape)
        setting = ClientSetting(about["client"], config, method, parameters, data, state, place)
        client = load_class("client_app.methods", config.method, FloretClient)(setting)
        client.begin(message)
        return Personal(
            module=Served(client.serving()).eval(),
            client=about["client"],
            federation=config.federation,
            method=config.method,
            round=state.round,
            input_shape=shape,
            dtype=dtype,
            classes=classes,
            class_names=tuple(inputs["classes"]),
            config=config,
            notes=tuple(state.notes),
        )
    except torch.OutOfMemoryError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError, RuntimeError) as error:
        raise FloretError(f"{store.directory}: was written by another version of Floret") from error
