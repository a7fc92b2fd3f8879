"""The life of one client's round, the same for every method; a method overrides the steps in which it differs.

``fit``: receive, measure accuracy before, train, measure accuracy after, commit the private state, send.
"""

import logging
import math
import re
import time
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - the name that every PyTorch program gives it
from flwr.app import ArrayRecord
from flwr.client import NumPyClient
from torch import Tensor, nn

from client_app.batches import Batch, passes
from client_app.protection import MemoryAccount, Protection, account_on_node
from client_app.setting import Agreed, ClientSetting
from client_app.training import LocalTraining
from common.config import keys_of
from common.errors import FloretError
from common.filters import Payload, filtered
from common.names import without_prefix
from common.norms import group_of, root_mean_squares
from common.privacy.noise import Noise
from common.seeds import torch_generator
from common.tensors import NamedArrays, Specs
from common.wire import check_sendable, unpack
from data import Split
from models import SplitModel, Stack, build_model, check_examples
from strategies.core import Setup

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


class FloretClient(LocalTraining, NumPyClient):
    """A client whose personal model is everything received, trained on its own data.

    A method's client half derives from this class and overrides steps: ``receive``, ``train`` or only its ``loss``,
    ``upload``, ``serving``. Which tensors may leave the client and which may come, and which networks it has beside the
    model, its strategy says (``strategies.core.Method``). An object lives for one message: ``begin``, then ``fit``,
    ``evaluate`` or ``plan``.

    Attributes:
        parameters: the method's own.
        memory: tensors that the method keeps in the client's state besides, by name.
        received: the tensors of this round's message, by name, on ``device``; empty during evaluation without any.
        goes_on: whether a round goes on from what the client has itself, not from what the server sends.
        serves_with: how the names of the tensors of memory and networks begin that ``serving`` needs beside the model.
    """

    goes_on: ClassVar[bool] = False
    serves_with: ClassVar[tuple[str, ...]] = ()
    parameters: Any

    def __init__(self, setting: ClientSetting) -> None:
        super().__init__(setting)
        self.parameters = setting.parameters
        self.memory: dict[str, Tensor] = {}
        self.received: dict[str, Tensor] = {}
        self._agreed: Agreed
        # What privacy remembers, apart from what the method does.
        self._kept: dict[str, Tensor] = {}

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

    def is_of_this_run(self) -> bool:
        """Return whether the personal model is of this run, not of an earlier one of the same federation."""
        kept = self.setting.state.version
        return kept is not None and kept.lineage == self.message.get("session.lineage")

    def historical_extractor(self) -> Stack | None:
        """Return the client's own extractor after the last round that it took part in, frozen; None before its first.

        To be called in ``receive``, before what arrived takes its place.
        """
        return self.frozen_extractor() if self.setting.state.round else None

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
        for name, tensor in sorted(tensors.items()):
            if name not in own:
                raise FloretError(f"the model has no tensor {name}")
            if own[name].shape != tensor.shape:
                have = f"{tuple(tensor.shape)}, that of the model {tuple(own[name].shape)}"
                raise FloretError(f"tensor {name} has shape {have}")
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

    # Inside a message

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
                    f"training diverged: {group} is more than {GROWN:g} times as large as when the round began; lower "
                    f"lr (now {self.lr:g}) or weight-decay (now {self.config.weight_decay:g})"
                )
            with torch.no_grad():
                for name, parameter in trained.items():
                    if group_of(name) == group:
                        parameter.zero_()
