"""The life of one client's round, the same for every method; a method overrides the steps in which it differs.

``fit``: receive, measure accuracy before, train, measure accuracy after, commit the private state, send.
"""

import copy
import logging
import math
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar, Self

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - the name that every PyTorch program gives it
from flwr.app import ArrayRecord
from flwr.client import NumPyClient
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from client_app.batches import Batch, batch_of, epoch, passes, take
from client_app.protection import Budget, MemoryAccount, Protection, account_on_node
from client_app.runtime import training_type
from client_app.state import ClientState
from common.config import RunConfig, keys_of
from common.errors import FloretError
from common.filters import ClientFilters, Payload, filtered
from common.names import without_prefix
from common.norms import group_of, root_mean_squares
from common.privacy.ledger import Ledger
from common.privacy.noise import Noise
from common.prototypes import class_means, stack
from common.seeds import torch_generator
from common.sgd import Sgd
from common.tensors import NamedArrays, Specs
from common.wire import check_sendable, unpack
from data import ClientData, Split
from models import SplitModel, Stack, build_model, check_examples
from strategies.core import Method, Setup

log = logging.getLogger("flwr")

MODEL = "model."
MEMORY = "memory."
# What privacy keeps in a client's state, and below it the tensors that are trained with what is shared and never leave.
PRIVACY = "privacy."
FEEDS = PRIVACY + "feeds."
# So many times the size of the client's own tensors, what the server sends is refused; a tensor may be larger than the
# others of its group, as running variances are.
ABSURD = 1e3
# So many times as large as the round began with no model becomes by training.
GROWN = 1e2
# The largest root mean square of a tensor that the client has nothing like.
LARGEST = 1e6
# How much of a teacher's answers a client keeps in memory during a round.
TEACHER_BYTES = 256 * 2**20

Loss = Callable[[Batch], Tensor]
# From a batch to the loss of each of its samples, (batch,).
Losses = Callable[[Batch], Tensor]
Step = Callable[[Batch], Tensor]


@dataclass(frozen=True)
class ClientSetting:
    """What a client's round needs besides the message.

    Attributes:
        name: the client's.
        config: the run config.
        method: what the client half shares with its server half.
        parameters: the method's own, an instance of ``method.Parameters``.
        data, state: the client's.
        device: where it computes.
        filters: what passes them is what it sends and what it receives.
        seed: orders its batches; None for the run's.
        resident: the model of the client before, in a process that serves many in turn; None where a client has one of
            its own.
        ledger: of what the client spends on privacy, and what its node permits; None in a simulation.
        min_class_samples: a class of the client's with fewer training samples is drawn to nothing that the server sent.
    """

    name: str
    config: RunConfig
    method: type[Method]
    parameters: Any
    data: ClientData
    state: ClientState
    device: torch.device
    filters: ClientFilters = field(default_factory=ClientFilters)
    seed: int | None = None
    resident: "Resident | None" = None
    ledger: tuple[Ledger, Budget] | None = None
    min_class_samples: int = 1


@dataclass(frozen=True)
class Phase:
    """What one optimizer does on every batch: a step of ``parameters`` along the gradient of ``loss``.

    Attributes:
        parameters: what is trained; everything else is frozen meanwhile.
        loss: from a batch to a scalar.
        lr, momentum, weight_decay: of this optimizer; None for those of the round.
        after_step: called after each step, for a mask or a projection of the weights.
    """

    parameters: Sequence[nn.Parameter]
    loss: Loss
    lr: float | None = None
    momentum: float | None = None
    weight_decay: float | None = None
    after_step: Callable[[], None] | None = None


@dataclass(frozen=True)
class Agreed:
    """What both halves know of a run, and what follows from it.

    Attributes:
        setup: with the model.
        tensors: those of the model by name; they change with it.
        uplink, downlink: what travels, as the method declares it.
        shared: names of the tensors of model and networks that travel.
    """

    setup: Setup
    tensors: dict[str, Tensor]
    uplink: Specs
    downlink: Specs
    shared: list[str]

    @classmethod
    def of(cls, setup: Setup, method: type[Method]) -> Self:
        """Return what follows from ``setup``."""
        shared = [*setup.tensor_names(method.shares), *method.shared_networks(setup)]
        return cls(setup, setup.model.state_dict(), method.uplink(setup), method.downlink(setup), shared)


class Resident:
    """Keeps a model and what follows from it for the next client that has the same one, in a process with many clients.

    To build them takes longer than a small client's round. Only one client at a time may have them.
    """

    def __init__(self) -> None:
        self._key: tuple[Any, ...] = ()
        self._agreed: Agreed | None = None

    def get(self, key: tuple[Any, ...], make: Callable[[], Agreed]) -> Agreed:
        """Return what was made for ``key``, with a model whose values are those of another client."""
        if self._agreed is None or self._key != key:
            self._key, self._agreed = key, make()
        self._agreed.setup.model.requires_grad_(True).zero_grad()
        return self._agreed


class FloretClient(NumPyClient):
    """A client whose personal model is everything received, trained on its own data.

    A method's client half derives from this class and overrides steps: ``receive``, ``train`` or only its ``loss``,
    ``upload``, ``serving``. Which tensors may leave the client and which may come, and which networks it has beside the
    model, its strategy says (``strategies.core.Method``). An object lives for one message: ``begin``, then ``fit``,
    ``evaluate`` or ``plan``.

    Attributes:
        parameters: the method's own.
        setup: what the server half knows, too.
        model: the client's model, on ``device``.
        networks: those beside the model, by name, on ``device``.
        memory: tensors that the method keeps in the client's state besides, by name.
        received: the tensors of this round's message, by name, on ``device``; empty during evaluation without any.
        message: the scalars of this round's message.
        data: the client's splits, on ``device``.
        protection: what is private about the message; None if nothing is protected.
        goes_on: whether a round goes on from what the client has itself, not from what the server sends.
        serves_with: how the names of the tensors of memory and networks begin that ``serving`` needs beside the model.
    """

    goes_on: ClassVar[bool] = False
    serves_with: ClassVar[tuple[str, ...]] = ()
    parameters: Any

    def __init__(self, setting: ClientSetting) -> None:
        self.setting = setting
        self.config = setting.config
        self.parameters = setting.parameters
        self.device = setting.device
        self._agreed: Agreed
        self._type = training_type(setting.config.precision, setting.device)
        self.setup: Setup
        self.model: SplitModel
        self.networks: dict[str, nn.Module] = {}
        self.memory: dict[str, Tensor] = {}
        self.received: dict[str, Tensor] = {}
        self.message: dict[str, Any] = {}
        self.order: torch.Generator
        self.protection: Protection | None = None
        # What privacy remembers, apart from what the method does.
        self._kept: dict[str, Tensor] = {}
        data = setting.data
        self.data = replace(
            data, train=self._placed(data.train), validation=self._placed(data.validation), test=self._placed(data.test)
        )

    def begin(self, config: dict[str, Any]) -> None:
        """Bring back the personal model, the other networks and the memory of the last round taken part in.

        Args:
            config: the scalars of the message: ``round`` (from 1), ``num-classes``, ``head-layers``, and what
                the method's server half gives as ``instructions``.

        Raises:
            FloretError: the client's state is of another model.
        """
        self.message = config
        self.order = self.generator("batches")
        kept = self.setting.state.load()
        own = without_prefix(kept, MODEL)
        self._agreed = self._agree(initial=not own)
        self.setup, self.model = self._agreed.setup, self._agreed.setup.model
        self.networks = {
            name: network.new(self.config.seed, name, self.setting.name).to(self.device)
            for name, network in self.setting.method.networks(self.setup).items()
        }
        memory = without_prefix(kept, MEMORY)
        of_networks = {name: memory.pop(name) for name in self._network_tensors() if name in memory}
        unit, of_privacy = self.config.privacy.unit, [name for name in memory if name.startswith(PRIVACY)]
        self._kept = {name: memory.pop(name) for name in of_privacy}
        if unit != "example":
            # Between two protected rounds of a run nothing of another one gets in by way of a round without.
            self._kept = {name: t for name, t in self._kept.items() if not name.startswith(FEEDS)}
        self.protection = self._protect() if self.config.privacy.on else None
        try:
            self.load_tensors(own | of_networks)
            lacking = self._agreed.tensors.keys() - own.keys()
            if own and lacking:
                raise FloretError(f"it has no tensor {min(lacking)}")
        except FloretError as error:
            raise FloretError(
                f"the client's state is of another model ({error}); give this federation another name with the key "
                'federation, or start it with client-state="fresh"'
            ) from error
        self.memory = {name: tensor.to(self.device) for name, tensor in memory.items()}

    def unpacked(self, record: ArrayRecord) -> NamedArrays:
        """Return the tensors of a message, to be called after ``begin``.

        Raises:
            FloretError: one of them is private to the client, not what the method declares, or absurdly large.
        """
        down = self._agreed.downlink
        private = (set(record) & self._agreed.tensors.keys()) - set(down)
        if private:
            raise FloretError(f"the server sent {min(private)}, which {self.config.method} keeps private to the client")
        arrays = unpack(record, down, self.config.wire, whole=False, peers=True)
        self.check_size(arrays)
        return arrays

    def uplink(self) -> Specs:
        """Return what the method declares to send."""
        return self._agreed.uplink

    # The three calls of the ClientApp

    def fit(self, parameters: list[np.ndarray], config: dict[str, Any]) -> tuple[list[np.ndarray], int, dict[str, Any]]:
        """Train for one round.

        Args:
            parameters: the arrays that arrived, as ``unpacked`` gave them.
            config: as for ``begin``, and the ``names`` of the arrays.

        Returns:
            The arrays to send, the number of training samples, and metrics: ``names`` of the arrays, ``loss`` (mean
            over the round's steps), accuracies ``before.test``, ``before.validation``, ``after.test``,
            ``after.validation`` in [0, 1] (no key where a split is empty), ``seconds``. A protected node says 1 sample,
            and of the metrics only what it has spent.

        Raises:
            FloretError: training diverged, or a filter refuses what came or what is sent; the state stays as it was
                before the round.
        """
        started = time.perf_counter()
        self.take("train", parameters, config)
        self._check_start()
        self.receive()
        begun = self._sizes(self._trainable())
        spent = self._pay() if self.protection else {}
        metrics: dict[str, Any] = self._accuracies("before")
        metrics["loss"], tensors = self._trained()
        if self.protection and self.config.privacy.unit == "client":
            tensors = self.protection.update(tensors, self.received)
        personal = self._personal()
        if self.withholds:
            # That training diverged would tell of the data: the client goes on with zeros.
            for tensor in personal.values():
                tensor.nan_to_num_(0.0, 0.0, 0.0)
            tensors = {name: tensor.nan_to_num(0.0, 0.0, 0.0) for name, tensor in tensors.items()}
        self._check_finite({name.removeprefix(MODEL).removeprefix(MEMORY): t for name, t in personal.items()} | tensors)
        self._check_grown(begun, {} if self.protection else tensors)
        metrics |= self._accuracies("after")
        arrays = {name: tensor.detach().cpu().numpy() for name, tensor in tensors.items()}
        sent = self._leaving("train", arrays, len(self.data.train), metrics, spent)
        check_sendable(sent.tensors, self.uplink(), self.config.wire)
        self.setting.state.commit(config["round"], personal, self._about())
        seconds = self._seconds(started)
        return list(sent.tensors.values()), sent.samples, {**sent.scalars, "names": [*sent.tensors], **seconds}

    def evaluate(self, parameters: list[np.ndarray], config: dict[str, Any]) -> tuple[float, int, dict[str, Any]]:
        """Measure the personal model of the last round that this client took part in, without changing anything.

        A client that never took part has no personal model, and no ``after``. If arrays arrived, what they and the
        private part make is measured too, as ``before``. Arguments as in ``fit``.

        Returns:
            NaN in the place of a loss, of which nothing is made; the number of test samples; and metrics as in ``fit``.
        """
        started = time.perf_counter()
        self.take("evaluate", parameters, config)
        metrics: dict[str, Any] = self._accuracies("after") if self.setting.state.round else {}
        if self.received:
            self.receive()
            metrics |= self._accuracies("before")
        sent = self._leaving("evaluate", {}, len(self.data.test), metrics)
        return math.nan, sent.samples, {**sent.scalars, **self._seconds(started)}

    def answer(self, parameters: list[np.ndarray], config: dict[str, Any]) -> dict[str, Any]:
        """Answer what the method's server half asks before a round, without changing anything; arguments as in ``fit``.

        Returns:
            Scalars and lists of scalars by name.
        """
        self.take("plan", parameters, config)
        return self._filtered("plan", {}, len(self.data.train), self.plan()).scalars

    # The steps that a method may override

    def plan(self) -> dict[str, Any]:
        """Return what the method's server half wants to know before a round, from what it sent with the question."""
        return {}

    def receive(self) -> None:
        """Put the shared tensors that arrived into model and networks; the rest of them stays the client's own."""
        shared = set(self.shared_names())
        self.load_tensors({name: tensor for name, tensor in self.received.items() if name in shared})

    def train(self) -> float:
        """Train the model for ``local-epochs`` and return the mean loss."""
        return self.run_epochs(self.config.local_epochs, self.model.parameters())

    def loss(self, batch: Batch) -> Tensor:
        """Return the loss of one training batch: cross entropy."""
        return F.cross_entropy(self.model.head(self.stages(batch)[0]), batch.y)

    def losses(self, batch: Batch) -> Tensor:
        """Return the loss of each sample of a batch, (batch,), of which ``loss`` without ``penalty`` is the mean.

        Only a method that can protect examples needs it: each loss depends on that sample alone.
        """
        return F.cross_entropy(self.model.head(self.stages(batch)[0]), batch.y, reduction="none")

    def penalty(self) -> Tensor | None:
        """Return what ``loss`` adds to the mean of ``losses`` whatever the batch: a function of the weights alone."""
        return None

    def feeding(self) -> list[str]:
        """Return the names of the model's tensors that never leave, but are trained together with what does."""
        shared = set(self.shared_names())
        return [name for name in self._agreed.tensors if name not in shared]

    def starts_from(self) -> list[str]:
        """Return the names of the tensors without which no round starts: what is shared, but for what is optional."""
        down = self._agreed.downlink
        return [name for name in self.shared_names() if name in down and not down[name].optional]

    def upload(self) -> dict[str, Tensor]:
        """Return what is sent to the server, by name: the shared part of the model and the shared networks."""
        tensors = self._agreed.tensors | self._network_tensors()
        return {name: tensors[name] for name in self.shared_names()}

    def serving(self) -> nn.Module:
        """Return the personal model as it is used: a module from normalised inputs to scores, (batch, classes)."""
        return self.model

    # What methods use

    def shared_names(self) -> list[str]:
        """Return the names of the tensors of model and networks that travel."""
        return self._agreed.shared

    def peers(self, needed: Iterable[str] = ()) -> dict[int, dict[str, Tensor]]:
        """Return the tensors of peers that arrived: those called ``<i>.<name>`` by i and name.

        Raises:
            FloretError: one of the tensors ``needed`` of each is not there.
        """
        found: dict[int, dict[str, Tensor]] = {}
        for name, tensor in self.received.items():
            if match := re.fullmatch(r"([0-9]+)\.(.+)", name):
                found.setdefault(int(match[1]), {})[match[2]] = tensor
        for name in needed:
            for i, tensors in found.items():
                if name not in tensors:
                    raise FloretError(f"the server sent no tensor {i}.{name}, but others of this peer")
        return found

    def run_epochs(
        self,
        epochs: int,
        parameters: Iterable[nn.Parameter],
        loss: Loss | None = None,
        *,
        losses: Losses | None = None,
        leaves: bool = True,
    ) -> float:
        """Go ``epochs`` times through the training data with a fresh SGD over ``parameters``; the rest stays frozen.

        Args:
            epochs: passes through the training split.
            parameters: what is trained.
            loss: from a batch to a scalar; ``self.loss`` by default.
            losses, leaves: as in ``run_alternating``.

        Returns:
            The mean of the loss over all steps.
        """
        phases = [Phase(list(parameters), loss or self.loss)]
        return self.run_alternating(epochs, phases, losses=losses, leaves=leaves)

    def run_alternating(
        self, epochs: int, phases: Sequence[Phase], *, losses: Losses | None = None, leaves: bool = True
    ) -> float:
        """Go ``epochs`` times through the training data; on each batch take one step of every phase, in order.

        Each phase has its own SGD over its own parameters, and while it steps, everything else is frozen. The extractor
        may be trained in the last phase only: it is asked once about a batch, and all phases get its answer.

        Args:
            epochs: passes through the training split.
            phases: what is done on each batch.
            losses: as the method of this name, by default that; for where examples are protected.
            leaves: what is trained leaves this client, or what does is trained with it. Without, it is trained as ever
                where examples are protected.

        Returns:
            The mean of the last phase's loss over all batches.
        """
        optimizers = [
            self.optimizer(phase.parameters, lr=phase.lr, momentum=phase.momentum, weight_decay=phase.weight_decay)
            for phase in phases
        ]
        trained = {parameter for phase in phases for parameter in phase.parameters}
        everything = trained.union(*(module.parameters() for module in (self.model, *self.networks.values())))
        thaws = [partial(_thaw, phase.parameters, everything.difference(phase.parameters)) for phase in phases]
        if leaves and self.trains_examples:
            return self._run_protected(epochs, phases, optimizers, thaws, losses or self.losses)
        thaws[-1]()

        def step(batch: Batch) -> Tensor:
            parts = self._parts(batch, len(phases))
            for thaw, part, phase, optimizer in zip(thaws, parts, phases, optimizers, strict=True):
                if len(phases) > 1:
                    thaw()
                optimizer.zero_grad()
                with self.autocast():
                    value = phase.loss(part)
                value.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                if phase.after_step:
                    phase.after_step()
            return value

        return self.run_steps(epochs, step)

    def run_steps(self, epochs: int, step: Step) -> float:
        """Go ``epochs`` times through the training data and call ``step`` with each batch, which trains on it.

        Returns:
            The mean over all batches of the scalar that ``step`` returns; 0 without any.
        """
        for module in (self.model, *self.networks.values()):
            module.train()
        # Summed on the device, so that no step waits for the host.
        total, batches = torch.zeros((), device=self.device), 0
        for _ in range(epochs):
            for batch in self.training_batches():
                total += step(batch).detach()
                batches += 1
        return float(total) / max(batches, 1)

    def optimizer(
        self,
        parameters: Iterable[nn.Parameter],
        *,
        lr: float | None = None,
        momentum: float | None = None,
        weight_decay: float | None = None,
    ) -> Sgd:
        """Return a fresh SGD over ``parameters``, with the round's rates where none are given."""
        return Sgd(
            list(parameters),
            lr=self.lr if lr is None else lr,
            momentum=self.config.momentum if momentum is None else momentum,
            weight_decay=self.config.weight_decay if weight_decay is None else weight_decay,
        )

    @property
    def lr(self) -> float:
        """The learning rate of this round."""
        return self.config.decayed(self.config.lr, self.message["round"])

    def autocast(self) -> torch.autocast:
        """Return a context in which networks compute as ``precision`` says; their outputs and all losses are float32.

        For training only, not for what is measured or served; weights must not change while it lasts.
        """
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self._type == torch.bfloat16)

    def stages(self, batch: Batch) -> tuple[Tensor, list[Tensor]]:
        """Return the extractor's output for a batch, and the feature maps of its stages."""
        return batch.stages or self.model.extractor.stages(batch.x)

    def generator(self, purpose: str) -> torch.Generator:
        """Return a generator of this client, round and ``purpose``; what is drawn from it leaves the batches' order."""
        seed = self.config.seed if self.setting.seed is None else self.setting.seed
        return torch_generator(seed, purpose, self.setting.name, self.message["round"])

    @contextmanager
    def still_statistics(self) -> Iterator[None]:
        """While it lasts, batch normalisation takes each batch's statistics and leaves the running ones as they are.

        For what a method computes beside the steps of its training, such as a gradient elsewhere.
        """
        layers = [module for module in self.model.modules() if isinstance(module, _BatchNorm)]
        for layer in layers:
            layer.track_running_stats = False
        try:
            yield
        finally:
            for layer in layers:
                layer.track_running_stats = True

    def on_batches(self) -> tuple[nn.Module, ...]:
        """Return the networks that are asked about training batches: with batch normalisation, none of one sample."""
        return (self.model, *self.networks.values())

    def training_batches(self) -> Iterable[Batch]:
        """Return the batches of one epoch, in the next order of this client and round."""
        trained = (module for network in self.on_batches() for module in network.modules())
        no_single = any(isinstance(module, _BatchNorm) for module in trained)
        return epoch(self.data.train, self.config.batch_size, self.order, no_single=no_single)

    def frozen_extractor(self) -> Stack:
        """Return a copy of the extractor as it is now, in evaluation mode and without gradients."""
        frozen = copy.deepcopy(self.model.extractor).eval()
        return frozen.requires_grad_(False)

    def is_of_this_run(self) -> bool:
        """Return whether the personal model is of this run, not of an earlier one of the same federation."""
        kept = self.setting.state.version
        return kept is not None and kept.lineage == self.message.get("session.lineage")

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

    def cached_teacher(
        self, teacher: Callable[[Tensor], list[Tensor]], *, leaves: bool = True
    ) -> Callable[[Batch], list[Tensor]]:
        """Return a function from a training batch to what a frozen ``teacher`` answers for it, without gradients.

        Training data do not change during a round, so with several epochs the teacher is asked once about all of them
        if its answers fit into ``TEACHER_BYTES``; else about every batch.

        Where examples are protected it is asked about every batch, as the student is: an answer from another batch may
        differ in its last bits, by how many examples there are, and a server may make much of the difference.

        Args:
            teacher: from normalised inputs to tensors, the samples along the first dimension of each.
            leaves: what is trained on the answers leaves the client.
        """
        train = self.data.train
        once = self.config.local_epochs > 1 and not (leaves and self.trains_examples)
        with torch.no_grad(), self.autocast():
            answers = (teacher(batch.x) for batch in passes(train)) if once else iter(())
            first = next(answers, None)
            if first and len(train) and sum(part.nbytes / len(part) for part in first) * len(train) <= TEACHER_BYTES:
                cached = [torch.cat(parts) for parts in zip(first, *answers, strict=True)]
                return lambda batch: [take(tensor, batch.index) for tensor in cached]
        return torch.no_grad()(lambda batch: teacher(batch.x))

    def local_prototypes(self) -> dict[str, Tensor]:
        """Return the mean feature of each class of the training data under the extractor as it is, by name."""
        return class_means(self.training_features(self.model.extractor), self.data.train.y)

    def known_prototypes(self, tensors: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Return the prototypes among ``tensors`` as in ``prototypes.stack``, for this model's classes and features."""
        return stack(tensors, self.setup.classes, self.setup.features, self.device)

    def targets(self, tensors: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Return the known prototypes that a loss may draw features to; the server may have made them up.

        Those of ``rare`` classes are left out: a term with a large weight would be all of the update, and tell of them.
        """
        prototypes, known = self.known_prototypes(tensors)
        return prototypes, known & ~self.rare()

    def rare(self) -> Tensor:
        """Return which classes, (classes,), have training samples, but fewer than the node's policy demands of one.

        None in a protected run: noise covers them, and what others' gradients are must not depend on an example.
        """
        counts = self.data.train.y.bincount(minlength=self.setup.classes)
        least = 1 if self.config.privacy.on else self.setting.min_class_samples
        return (counts > 0) & (counts < least)

    def accuracy(self, split: Split) -> float:
        """Return the fraction of ``split`` whose class has the highest score, in [0, 1]."""
        model = self.serving().eval()
        with torch.no_grad():
            right = sum((model(batch.x).argmax(1) == batch.y).sum() for batch in passes(split))
        return float(right) / len(split)

    def copy_tensors(self) -> dict[str, Tensor]:
        """Return copies of the model's tensors by name; those of ``state_dict`` change with the model."""
        return {name: tensor.clone() for name, tensor in self._agreed.tensors.items()}

    def load_tensors(self, tensors: dict[str, Tensor]) -> None:
        """Copy ``tensors`` into the model and the other networks by name.

        Raises:
            FloretError: a tensor has another shape than the model's, or the model has none of its name.
        """
        own = self._agreed.tensors | self._network_tensors()
        for name, tensor in tensors.items():
            if name not in own or own[name].shape != tensor.shape:
                have = tuple(own[name].shape) if name in own else "none"
                raise FloretError(f"tensor {name} {tuple(tensor.shape)} does not fit the model's: {have}")
            own[name].copy_(tensor)

    def check_size(self, arrays: NamedArrays) -> None:
        """Refuse what would spoil the personal model: tensors far larger than the client's own of the same group.

        Tensors of peers count by themselves; what the client has nothing like must only be below ``LARGEST``. What came
        is checked so; a method that makes larger tensors of it must ask about those.

        Raises:
            FloretError: names the first that is too large.
        """
        tensors = self._agreed.tensors | self._network_tensors()
        if self.withholds:
            # Whether a message is refused would tell of the personal model: the bound is that of the initial one.
            tensors = self.initial_model().state_dict()
        own = root_mean_squares({name: tensor.cpu().numpy() for name, tensor in tensors.items()}, {})
        for name, size in ((n, root_mean_squares({n: a}, {})) for n, a in arrays.items()):
            for group, value in size.items():
                own_group = group_of(name.partition(".")[2]) if group.isdecimal() else group
                bound = ABSURD * max(own[own_group], 1e-3) if own_group in own else LARGEST
                if not value <= bound:
                    raise FloretError(
                        f"the server sent {name} with a root mean square of {value:.3g}; more than {ABSURD:g} times "
                        "that of the client's own tensors is refused"
                    )

    # Differential privacy

    @property
    def trains_examples(self) -> bool:
        """Whether single examples are protected: what leaves is trained on clipped and noised gradients."""
        return self.protection is not None and self.config.privacy.unit == "example"

    @property
    def withholds(self) -> bool:
        """Whether what a protected client measures stays with it; in a simulation it is the user's own."""
        return self.protection is not None and self.setting.ledger is not None

    def _protect(self) -> Protection:
        """Return what is private about this message."""
        setting, config = self.setting, self.config
        passes = setting.method.passes(config, self.parameters)
        if setting.ledger is None:
            noise = Noise.of(config.seed, setting.name, self.message["round"])
            return Protection(config, passes, MemoryAccount(self._kept), noise)
        ledger, budget = setting.ledger
        account = account_on_node(ledger, budget, config, self.message, self.message["round"])
        return Protection(config, passes, account, Noise.secret())

    def _pay(self) -> dict[str, float]:
        """Pay for this round, before anything is computed that leaves."""
        assert self.protection is not None
        return self.protection.pay(len(self.data.train))

    def _trained(self) -> tuple[float, dict[str, Tensor]]:
        """Train; return the loss and what is to be sent, before anything of it is noised.

        A protected client that cannot train sends what it received, and keeps its personal model: that it failed would
        tell of its data, as a server may choose what some data make fail. Where examples are protected the layers that
        do so are refused for every client.

        Raises:
            FloretError: a batch of one sample, of which batch normalisation learns nothing.
        """
        hides = self.withholds and not self.trains_examples
        beside = self._network_tensors()
        own = {name: tensor.clone() for name, tensor in (self._agreed.tensors | beside).items()} if hides else {}
        memory = dict(self.memory)
        try:
            loss = self._train_feeding() if self.trains_examples else self.train()
            return loss, self.upload()
        except Exception as error:
            reason: str | None = None
            if isinstance(error, ValueError) and "more than 1 value per channel" in str(error):
                reason = (
                    f"batch-size = {self.config.batch_size}, {len(self.data.train)} training samples: batch "
                    f"normalisation of model {self.config.model!r} cannot learn from one sample, of which it has one "
                    "value per channel; take larger batches or images, or a model without it"
                )
            if not hides:
                if reason is None:
                    raise
                raise FloretError(reason) from error
            log.warning("Client %s: %s; it sends noise alone", self.setting.name, reason or error, exc_info=not reason)
        self.load_tensors(own)
        self.memory = memory
        return 0.0, {name: self.received[name] for name in self.shared_names()}

    def _train_feeding(self) -> float:
        """Train with protected examples; then the head of the personal model, which nobody else sees, without noise.

        What is trained with the shared part is kept beside the personal model, and alone is trained on in the next
        round: a head without noise would carry the examples into the gradients of the extractor.
        """
        check_examples(self.model, self.config.model)
        tensors, names = self._agreed.tensors, self.feeding()
        personal = {name: tensors[name].clone() for name in names}
        first = self.initial_model().state_dict()
        self.load_tensors({name: self._kept.get(FEEDS + name, first[name]).to(self.device) for name in names})
        loss = self.train()
        self._kept |= {FEEDS + name: tensors[name].clone() for name in names}
        epochs = self.config.privacy.head_epochs
        if names and epochs:
            if self.setting.state.round:
                self.load_tensors(personal)
            features = self.cached_teacher(lambda x: [self.model.extractor(x)], leaves=False)

            def head_loss(batch: Batch) -> Tensor:
                return F.cross_entropy(self.model.head(features(batch)[0]), batch.y)

            self.run_epochs(epochs, self.model.head.parameters(), head_loss, leaves=False)
            if not all(torch.isfinite(tensors[name]).all() for name in names):
                # The client goes on without it: an error would tell the server of its data.
                self.load_tensors({name: self._kept[FEEDS + name] for name in names})
        return loss

    def _run_protected(
        self,
        epochs: int,
        phases: Sequence[Phase],
        optimizers: Sequence[Sgd],
        thaws: Sequence[Callable[[], None]],
        losses: Losses,
    ) -> float:
        """Do what ``run_alternating`` does by clipped and noised gradients; each phase is a release of its own."""
        from client_app.clipping import clipping

        assert self.protection is not None
        for module in (self.model, *self.networks.values()):
            module.train()
        total, samples = 0.0, 0
        for _ in range(epochs):
            batches = zip(*(self.protection.batches(len(self.data.train)) for _ in phases), strict=True)
            for drawn in batches:
                for index, phase, optimizer, thaw in zip(drawn, phases, optimizers, thaws, strict=True):
                    thaw()
                    optimizer.zero_grad()
                    batch = batch_of(self.data.train, torch.from_numpy(index).to(self.device))
                    exact = torch.backends.cudnn.flags(enabled=True, allow_tf32=False)
                    with exact, clipping(self.model, self.config.privacy.clip) as clipper:
                        value = clipper.sum_gradients(phase.parameters, losses, batch)
                    self._add_noise(phase.parameters)
                    optimizer.step()
                total, samples = total + value, samples + len(index)
        return total / max(samples, 1)

    def _add_noise(self, parameters: Sequence[nn.Parameter]) -> None:
        """Turn sums of clipped gradients into noised means, and add the gradient of the penalty."""
        assert self.protection is not None
        for parameter in parameters:
            assert parameter.grad is not None
            parameter.grad = self.protection.noised(parameter.grad)
        penalty = self.penalty()
        if penalty is not None:
            for parameter, gradient in zip(parameters, torch.autograd.grad(penalty, list(parameters)), strict=True):
                assert parameter.grad is not None
                parameter.grad += gradient

    # Inside a message

    def _placed(self, split: Split) -> Split:
        layout = torch.channels_last if split.x.dim() == 4 else torch.preserve_format
        return Split(split.x.to(self.device, memory_format=layout), split.y.to(self.device))

    def _parts(self, batch: Batch, phases: int) -> list[Batch]:
        """Return the batch as each phase gets it: with the extractor's answer, whose graph only the last phase gets."""
        if phases == 1:
            return [batch]
        with self.autocast():
            output, maps = self.model.extractor.stages(batch.x)
        detached = replace(batch, stages=(output.detach(), [m.detach() for m in maps]))
        return [*[detached] * (phases - 1), replace(batch, stages=(output, maps))]

    def _agree(self, *, initial: bool) -> Agreed:
        """Return the model, ``initial`` or with any values, and what follows from it."""
        config, shape, cut = self.config, self.data.input_shape, int(self.message["head-layers"])

        def make(model: SplitModel) -> Agreed:
            model = model.to(self.device).to(memory_format=torch.channels_last)
            return Agreed.of(Setup(config, self.parameters, model, cut, shape), self.setting.method)

        resident = self.setting.resident
        if resident is None:
            # What the state overwrites needs no initial weights: of a large model they take longer than a step.
            return make(self.initial_model() if initial else self.new_model(None))
        key = (config, self.parameters, shape, self.message["num-classes"], cut, self.device)
        agreed = resident.get(key, lambda: make(self.new_model(None)))
        if initial:
            for name, tensor in self.initial_model().state_dict().items():
                agreed.tensors[name].copy_(tensor)
        return agreed

    def initial_model(self) -> SplitModel:
        """Return the model before the first round: the same weights as the server's and every other client's.

        A method with the parameter ``own-start`` switched on draws weights that no other client begins with.
        """
        own = [self.setting.name] if getattr(self.parameters, "own_start", False) else []
        return self.new_model(torch_generator(self.config.seed, "model", *own))

    def new_model(self, generator: torch.Generator | None) -> SplitModel:
        """Return a model of the federation's kind with weights drawn from ``generator``, without one with any."""
        classes, head_layers = self.message["num-classes"], self.message["head-layers"]
        return build_model(self.config.model, self.data.input_shape, classes, head_layers, generator)

    def take(self, kind: str, parameters: list[np.ndarray], config: dict[str, Any]) -> None:
        """Take the arrays and scalars of a message, after they passed the filters; to be called after ``begin``."""
        arrays = dict(zip(config["names"], parameters, strict=True))
        scalars = {key: value for key, value in config.items() if key != "names"}
        payload = Payload(kind, self.setting.name, config["round"], arrays, 0, scalars)
        payload = filtered(payload, self.setting.filters.receives)
        self.message = payload.scalars
        self.received = {name: torch.from_numpy(array).to(self.device) for name, array in payload.tensors.items()}

    def _check_start(self) -> None:
        """Check that all came that the round starts from.

        Raises:
            FloretError: a tensor is missing. In its place would be that of the personal model, which would leave.
        """
        lacking = set() if self.goes_on else set(self.starts_from()) - self.received.keys()
        if lacking:
            raise FloretError(
                f"the server sent no {min(lacking)}; {self.config.method} starts a round from what it sends"
            )

    def _leaving(
        self,
        kind: str,
        arrays: NamedArrays,
        samples: int,
        measured: dict[str, Any],
        spent: Mapping[str, float] | None = None,
    ) -> Payload:
        """Return what leaves: of a protected client neither what it measured nor how many samples it has."""
        if self.withholds:
            samples, measured = 1, {}
        return self._filtered(kind, arrays, samples, {**measured, **(spent or {})})

    def _seconds(self, started: float) -> dict[str, float]:
        return {} if self.withholds else {"seconds": time.perf_counter() - started}

    def _filtered(self, kind: str, arrays: NamedArrays, samples: int, scalars: dict[str, Any]) -> Payload:
        """Return what leaves, after it passed the filters."""
        payload = Payload(kind, self.setting.name, self.message["round"], arrays, samples, scalars)
        return filtered(payload, self.setting.filters.sends)

    def _network_tensors(self) -> dict[str, Tensor]:
        return {f"{n}.{name}": t for n, module in self.networks.items() for name, t in module.state_dict().items()}

    def _personal(self) -> dict[str, Tensor]:
        model = {MODEL + name: tensor for name, tensor in self._agreed.tensors.items()}
        beside = self._network_tensors() | self.memory | self._kept
        return model | {MEMORY + name: tensor for name, tensor in beside.items()}

    def _about(self) -> dict[str, Any]:
        """Return what it takes to build this client again without a server: the run config, the method's parameters,
        the message's scalars, and what inputs are like."""
        data = self.data
        return {
            "client": self.setting.name,
            "config": keys_of(self.config),
            "parameters": keys_of(self.parameters),
            "message": self.message,
            "inputs": {
                "shape": list(data.input_shape),
                "dtype": str(data.test.x.dtype).removeprefix("torch."),
                "classes": list(data.class_names),
            },
        }

    def _accuracies(self, when: str) -> dict[str, float]:
        """Return the accuracies on what splits there are; none where they would not leave."""
        if self.withholds:
            return {}
        splits = {"test": self.data.test, "validation": self.data.validation}
        return {f"{when}.{name}": self.accuracy(split) for name, split in splits.items() if len(split)}

    def _check_finite(self, tensors: Mapping[str, Tensor]) -> None:
        floating = {name: tensor for name, tensor in tensors.items() if tensor.is_floating_point()}
        # Looked at together, so that a GPU is waited for once; what has been spent on privacy is never there.
        finite = {name: torch.isfinite(tensor).all().to(self.device) for name, tensor in floating.items()}
        for name, fine in zip(finite, torch.stack(list(finite.values())).tolist(), strict=True):
            if not fine:
                raise FloretError(f"training diverged: {name} is not finite; lower lr (now {self.lr:g})")

    def _sizes(self, tensors: Mapping[str, Tensor]) -> dict[str, float]:
        """Return the root mean square of tensors by group."""
        if not tensors:
            return {}
        # Looked at together, so that a GPU is waited for once.
        norms = torch.stack([torch.linalg.vector_norm(tensor.detach()).to(self.device) for tensor in tensors.values()])
        squares: dict[str, float] = {}
        counts: dict[str, int] = {}
        for (name, tensor), norm in zip(tensors.items(), norms.tolist(), strict=True):
            group = group_of(name)
            squares[group] = squares.get(group, 0.0) + norm * norm
            counts[group] = counts.get(group, 0) + tensor.numel()
        return {group: math.sqrt(square / counts[group]) for group, square in squares.items()}

    def _trainable(self) -> dict[str, nn.Parameter]:
        named = dict(self.model.named_parameters())
        for network, module in self.networks.items():
            named |= {f"{network}.{name}": parameter for name, parameter in module.named_parameters()}
        return named

    def _check_grown(self, begun: Mapping[str, float], sent: Mapping[str, Tensor]) -> None:
        """Refuse to keep a model that is finite and of no use: the next round, or another run, would start from it.

        Of some methods what is ``sent`` is kept beside the model. Where that training diverged would tell of the data,
        the client goes on with zeros instead.

        Raises:
            FloretError: a group of tensors is ``GROWN`` times as large as what the round began with.
        """
        trained = self._trainable()
        others = {name: tensor for name, tensor in sent.items() if group_of(name) in begun and name in trained}
        for group, size in [*self._sizes(trained).items(), *self._sizes(others).items()]:
            if size <= GROWN * max(begun[group], 1e-2):
                continue
            if not self.withholds:
                raise FloretError(
                    f"training diverged: {group} has a root mean square of {size:.3g}, and {begun[group]:.3g} when the "
                    f"round began; lower lr (now {self.lr:g}) or weight-decay (now {self.config.weight_decay:g})"
                )
            with torch.no_grad():
                for name, parameter in trained.items():
                    if group_of(name) == group:
                        parameter.zero_()


def _thaw(parameters: Iterable[nn.Parameter], others: Iterable[nn.Parameter]) -> None:
    for frozen in others:
        frozen.requires_grad_(False)
    for parameter in parameters:
        parameter.requires_grad_(True)
