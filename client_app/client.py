"""The life of one client's round, the same for every method; a method overrides the steps in which it differs.

``fit``: load the private state, receive, measure accuracy before, train, measure accuracy after, commit, send.
"""

import copy
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property, partial
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - the name that every PyTorch program gives it
from flwr.client import NumPyClient
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from client_app.batches import Batch, epoch, normalise, passes, take
from client_app.prototypes import class_means, stack
from client_app.runtime import training_type
from client_app.sgd import Sgd
from client_app.state import ClientState
from common.config import RunConfig, Scalar, key_of
from common.errors import FloretError
from common.names import without_prefix
from common.seeds import torch_generator
from data import ClientData, Split
from models import Part, SplitModel, Stack, build_model, tensor_names

MODEL = "model."
MEMORY = "memory."
# How much of a teacher's answers a client keeps in memory during a round.
TEACHING_BYTES = 256 * 2**20

Loss = Callable[[Batch], Tensor]


@dataclass(frozen=True)
class ClientSetting:
    """What a client's round needs besides the message: who it is, its data, its state, where it computes."""

    name: str
    config: RunConfig
    data: ClientData
    state: ClientState
    device: torch.device


class FloretClient(NumPyClient):
    """A client whose personal model is everything received, trained on its own data.

    A method's client half derives from this class, says in ``shares`` which tensors may leave the client, and
    overrides steps: ``receive``, ``train`` or only its ``loss``, ``upload``, ``serving``.

    Attributes:
        shares: the part of the model that travels; everything else is private to the client.
        model: the client's model, on ``device``.
        memory: tensors that the method keeps in the client's state beside the model, by name.
        received: the tensors of this round's message, by name, on ``device``; empty during evaluation without any.
        data: the client's splits, on ``device``.
    """

    shares: ClassVar[Part] = "model"

    def __init__(self, setting: ClientSetting) -> None:
        self.setting = setting
        self.config = setting.config
        self.device = setting.device
        self._type = training_type(setting.config.precision, setting.device)
        self.model: SplitModel
        self.memory: dict[str, Tensor] = {}
        self.received: dict[str, Tensor] = {}
        self.message: dict[str, Any] = {}
        self.order: torch.Generator
        data = setting.data
        self.data = replace(
            data, train=self._placed(data.train), validation=self._placed(data.validation), test=self._placed(data.test)
        )

    # The two calls of Flower

    def fit(self, parameters: list[np.ndarray], config: dict[str, Any]) -> tuple[list[np.ndarray], int, dict[str, Any]]:
        """Train for one round.

        Args:
            parameters: the arrays that arrived.
            config: ``names`` of the arrays, ``round`` (from 1), ``lr`` of this round, ``num-classes``, ``head-layers``,
                and the method's own parameters.

        Returns:
            The arrays to send, the number of training samples, and metrics: ``names`` of the arrays, ``loss`` (mean
            over the round's steps), accuracies ``before.test``, ``before.validation``, ``after.test``,
            ``after.validation`` in [0, 1] (no key where a split is empty), ``seconds``.

        Raises:
            FloretError: a tensor arrived that this method does not share, or training diverged; the state stays as it
                was before the round.
        """
        started = time.perf_counter()
        self.begin(parameters, config)
        self.receive()
        metrics: dict[str, Any] = self._accuracies("before")
        metrics["loss"] = self.train()
        tensors = self.upload()
        self._check_finite(self.model.state_dict() | self.memory | tensors)
        metrics |= self._accuracies("after")
        upload = {name: tensor.detach().cpu().numpy() for name, tensor in tensors.items()}
        self.setting.state.commit(config["round"], self._personal(), self._about())
        metrics["names"] = list(upload)
        metrics["seconds"] = time.perf_counter() - started
        return list(upload.values()), len(self.data.train), metrics

    def evaluate(self, parameters: list[np.ndarray], config: dict[str, Any]) -> tuple[float, int, dict[str, Any]]:
        """Measure the personal model of the last round that this client took part in, without changing anything.

        A client that never took part has no personal model, and no ``after``. If arrays arrived, what they and the
        private part make is measured too, as ``before``. Arguments as in ``fit``.

        Returns:
            The loss on the test split before receiving, the number of test samples, and metrics as in ``fit``.
        """
        started = time.perf_counter()
        self.begin(parameters, config)
        metrics: dict[str, Any] = self._accuracies("after") if self.setting.state.round else {}
        loss = self.test_loss()
        if self.received:
            self.receive()
            metrics |= self._accuracies("before")
        metrics["seconds"] = time.perf_counter() - started
        return loss, len(self.data.test), metrics

    def plan(self, parameters: list[np.ndarray], config: dict[str, Any]) -> dict[str, Any]:
        """Answer what the method's server half asks before a round, without changing anything; arguments as in ``fit``.

        Returns:
            Scalars and lists of scalars by name; nothing unless a method asks.
        """
        return {}

    # The steps that a method may override

    def receive(self) -> None:
        """Put what arrived into the model; the rest of the model stays the client's own."""
        self.load_tensors(self.received)

    def train(self) -> float:
        """Train the model for ``local-epochs`` and return the mean loss."""
        return self.run_epochs(self.config.local_epochs, self.model.parameters())

    def loss(self, batch: Batch) -> Tensor:
        """Return the loss of one training batch: cross entropy."""
        return F.cross_entropy(self.model.head(self.stages(batch)[0]), batch.y)

    def upload(self) -> dict[str, Tensor]:
        """Return what is sent to the server, by name: the shared part of the model."""
        tensors = self.model.state_dict()
        return {name: tensors[name] for name in self.shared_names()}

    def serving(self) -> nn.Module:
        """Return the personal model as it is used: a module from normalised inputs to scores, (batch, classes)."""
        return self.model

    # What methods use

    def shared_names(self) -> list[str]:
        """Return the names of the model's tensors that travel."""
        return tensor_names(self.model, self.shares, self.config.batch_norm)

    def parameter(self, key: str) -> Scalar:
        """Return the method's own parameter ``key``, as the server sent it with this round's message.

        Raises:
            FloretError: the message does not carry it, because server and client run different versions.
        """
        full = f"{self.config.method}.{key}"
        if full not in self.message:
            raise FloretError(f"{full} is missing from the message: do server and client run the same version?")
        return self.message[full]  # type: ignore[no-any-return]

    def run_epochs(self, epochs: int, parameters: Iterable[nn.Parameter], loss: Loss | None = None) -> float:
        """Go ``epochs`` times through the training data with a fresh SGD over ``parameters``; the rest stays frozen.

        Args:
            epochs: passes through the training split.
            parameters: what is trained.
            loss: from a batch to a scalar; ``self.loss`` by default.

        Returns:
            The mean of the loss over all steps.
        """
        return self.run_turns(epochs, [(list(parameters), loss or self.loss)])

    def run_turns(self, epochs: int, turns: Sequence[tuple[list[nn.Parameter], Loss]]) -> float:
        """Go ``epochs`` times through the training data; on each batch take one step for every turn, in order.

        Each turn has its own SGD over its own parameters, and while it steps, everything else is frozen. The extractor
        may be trained in the last turn only: it is asked once about a batch, and all turns get its answer.

        Returns:
            The mean of the last turn's loss over all batches.
        """
        rates = {"lr": self.message["lr"], "momentum": self.config.momentum, "weight_decay": self.config.weight_decay}
        optimizers = [Sgd(parameters, **rates) for parameters, _ in turns]
        self.model.train()
        everything = {*self.model.parameters(), *(p for parameters, _ in turns for p in parameters)}
        thaws = [partial(_thaw, parameters, everything.difference(parameters)) for parameters, _ in turns]
        thaws[-1]()
        # Summed on the device, so that no step waits for the host.
        total, batches = torch.zeros((), device=self.device), 0
        for _ in range(epochs):
            for batch in self.training_batches():
                shown = self._shown(batch, len(turns))
                for thaw, part, (_, loss), optimizer in zip(thaws, shown, turns, optimizers, strict=True):
                    if len(turns) > 1:
                        thaw()
                    optimizer.zero_grad()
                    with self.autocast():
                        value = loss(part)
                    value.backward()  # type: ignore[no-untyped-call]
                    optimizer.step()
                total += value.detach()
                batches += 1
        return float(total) / batches

    def autocast(self) -> torch.autocast:
        """Return a context in which networks compute as ``precision`` says; their outputs and all losses are float32.

        For training only, not for what is measured or served; weights must not change while it lasts.
        """
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self._type == torch.bfloat16)

    def stages(self, batch: Batch) -> tuple[Tensor, list[Tensor]]:
        """Return the extractor's output for a batch, and the feature maps of its stages."""
        return batch.stages or self.model.extractor.stages(batch.x)

    def training_batches(self) -> Iterable[Batch]:
        """Return the batches of one epoch, in the next order of this client and round."""
        no_single = any(isinstance(module, _BatchNorm) for module in self.model.modules())
        return epoch(self.data.train, self.config.batch_size, self.order, no_single=no_single)

    def frozen_extractor(self) -> Stack:
        """Return a copy of the extractor as it is now, in evaluation mode and without gradients."""
        frozen = copy.deepcopy(self.model.extractor).eval()
        return frozen.requires_grad_(False)

    def historical_extractor(self) -> Stack | None:
        """Return the client's own extractor after the last round that it took part in, frozen; None before its first.

        To be called in ``receive``, before what arrived takes its place.
        """
        return self.frozen_extractor() if self.setting.state.round else None

    def training_features(self, extractor: nn.Module) -> Tensor:
        """Return the outputs of ``extractor`` for the training data in order, (samples, d), without gradients."""
        extractor.eval()
        with torch.no_grad(), self.autocast():
            return torch.cat([extractor(batch.x).flatten(1) for batch in passes(self.data.train)])

    def teaching(self, teacher: Callable[[Tensor], list[Tensor]]) -> Callable[[Batch], list[Tensor]]:
        """Return a function from a training batch to what a frozen ``teacher`` says of it, without gradients.

        Training data do not change during a round, so with several epochs the teacher is asked once about all of them
        if its answers fit into ``TEACHING_BYTES``; else about every batch.

        Args:
            teacher: from normalised inputs to tensors, the samples along the first dimension of each.
        """
        train = self.data.train
        with torch.no_grad(), self.autocast():
            answers = (teacher(batch.x) for batch in passes(train)) if self.config.local_epochs > 1 else iter(())
            first = next(answers, None)
            if first and sum(part.nbytes / len(part) for part in first) * len(train) <= TEACHING_BYTES:
                said = [torch.cat(parts) for parts in zip(first, *answers, strict=True)]
                return lambda batch: [take(tensor, batch.index) for tensor in said]
        return torch.no_grad()(lambda batch: teacher(batch.x))

    @cached_property
    def widths(self) -> tuple[int, list[int]]:
        """The number of features of a sample, and of channels of each convolutional stage."""
        # Not a training sample: a client that only serves has none.
        kind = self.data.train.x.dtype
        sample = normalise(torch.zeros(1, *self.data.input_shape, dtype=kind, device=self.device))
        with torch.no_grad():
            output, maps = self.model.extractor.eval().stages(sample)
        return output.numel(), [stage.shape[1] for stage in maps]

    def local_prototypes(self) -> dict[str, Tensor]:
        """Return the mean feature of each class of the training data under the extractor as it is, by name."""
        return class_means(self.training_features(self.model.extractor), self.data.train.y)

    def known_prototypes(self, tensors: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Return the prototypes among ``tensors`` as in ``prototypes.stack``, for this model's classes and features."""
        return stack(tensors, self.model.classifier.out_features, self.widths[0], self.device)

    def test_loss(self) -> float:
        """Return the mean cross entropy of the personal model on the test split."""
        self.model.eval()
        with torch.no_grad():
            losses = [F.cross_entropy(self.model(b.x), b.y, reduction="sum") for b in passes(self.data.test)]
        return float(sum(losses)) / len(self.data.test)

    def accuracy(self, split: Split) -> float:
        """Return the fraction of ``split`` whose class has the highest score, in [0, 1]."""
        model = self.serving().eval()
        with torch.no_grad():
            right = sum((model(batch.x).argmax(1) == batch.y).sum() for batch in passes(split))
        return float(right) / len(split)

    def copy_tensors(self) -> dict[str, Tensor]:
        """Return copies of the model's tensors by name; those of ``state_dict`` change with the model."""
        return {name: tensor.clone() for name, tensor in self.model.state_dict().items()}

    def load_tensors(self, tensors: dict[str, Tensor]) -> None:
        """Copy ``tensors`` into the model by name.

        Raises:
            FloretError: a tensor has another shape than the model's, or the model has none of its name.
        """
        own = self.model.state_dict()
        for name, tensor in tensors.items():
            if name not in own or own[name].shape != tensor.shape:
                have = tuple(own[name].shape) if name in own else "none"
                raise FloretError(f"tensor {name} {tuple(tensor.shape)} does not fit the model's: {have}")
            own[name].copy_(tensor)

    # The house

    def _placed(self, split: Split) -> Split:
        layout = torch.channels_last if split.x.dim() == 4 else torch.preserve_format
        return Split(split.x.to(self.device, memory_format=layout), split.y.to(self.device))

    def _shown(self, batch: Batch, turns: int) -> list[Batch]:
        """Return the batch as each turn gets it: with the extractor's answer, whose graph only the last turn gets."""
        if turns == 1:
            return [batch]
        with self.autocast():
            output, maps = self.model.extractor.stages(batch.x)
        detached = replace(batch, stages=(output.detach(), [m.detach() for m in maps]))
        return [*[detached] * (turns - 1), replace(batch, stages=(output, maps))]

    def begin(self, parameters: list[np.ndarray], config: dict[str, Any]) -> None:
        """Read a message and bring back the personal model and the memory of the last round taken part in."""
        self.message = config
        self.received = {
            name: torch.from_numpy(array).to(self.device)
            for name, array in zip(config["names"], parameters, strict=True)
        }
        seed = self.config.seed
        self.order = torch_generator(seed, "batches", self.setting.name, config["round"])
        kept = self.setting.state.load()
        own = without_prefix(kept, MODEL)
        # What the state overwrites needs no initial weights: of a large model they take longer than a step.
        model = (self.new_model(None) if own else self.initial_model()).to(self.device)
        self.model = model.to(memory_format=torch.channels_last)
        try:
            self.load_tensors(own)
            lacking = set(self.model.state_dict()).difference(own)
            if own and lacking:
                raise FloretError(f"it has no tensor {min(lacking)}")
        except FloretError as error:
            raise FloretError(
                f"the client's state is of another model ({error}); give this federation another name with the key "
                'federation, or start it with client-state="fresh"'
            ) from error
        self.memory = {name: tensor.to(self.device) for name, tensor in without_prefix(kept, MEMORY).items()}
        foreign = set(self.received) & set(self.model.state_dict()) - set(self.shared_names())
        if foreign:
            raise FloretError(f"the server sent {min(foreign)}, which {self.config.method} keeps private to the client")

    def initial_model(self) -> SplitModel:
        """Return the model before the first round: the same weights as the server's and every other client's.

        A method with the parameter ``own-start`` switched on draws weights that no other client begins with.
        """
        own = [self.setting.name] if self.message.get(f"{self.config.method}.own-start") else []
        return self.new_model(torch_generator(self.config.seed, "model", *own))

    def new_model(self, generator: torch.Generator | None) -> SplitModel:
        """Return a model of the federation's kind with weights drawn from ``generator``, without one with any."""
        classes, head_layers = self.message["num-classes"], self.message["head-layers"]
        return build_model(self.config.model, self.data.input_shape, classes, head_layers, generator)

    def _personal(self) -> dict[str, Tensor]:
        model = {MODEL + name: tensor for name, tensor in self.model.state_dict().items()}
        return model | {MEMORY + name: tensor for name, tensor in self.memory.items()}

    def _about(self) -> dict[str, Any]:
        """Return what it takes to build this client again without a server: the run config, the message's scalars, and
        what inputs are like."""
        config = {key_of(item.name): getattr(self.config, item.name) for item in fields(self.config)}
        told = {key: value for key, value in self.message.items() if key != "names"}
        data = self.data
        inputs = {
            "shape": list(data.input_shape),
            "dtype": str(data.test.x.dtype).removeprefix("torch."),
            "classes": list(data.class_names),
        }
        return {"client": self.setting.name, "config": config, "message": told, "inputs": inputs}

    def _accuracies(self, when: str) -> dict[str, float]:
        splits = {"test": self.data.test, "validation": self.data.validation}
        return {f"{when}.{name}": self.accuracy(split) for name, split in splits.items() if len(split)}

    def _check_finite(self, tensors: Mapping[str, Tensor]) -> None:
        finite = {name: torch.isfinite(t).all() for name, t in tensors.items() if t.is_floating_point()}
        # Looked at together, so that a GPU is waited for once.
        for name, fine in zip(finite, torch.stack(list(finite.values())).tolist(), strict=True):
            if not fine:
                raise FloretError(f"training diverged: {name} is not finite; lower lr (now {self.message['lr']:g})")


def _thaw(parameters: Iterable[nn.Parameter], others: Iterable[nn.Parameter]) -> None:
    for frozen in others:
        frozen.requires_grad_(False)
    for parameter in parameters:
        parameter.requires_grad_(True)
