"""The server half of every method: who takes part, what is sent, what may come back, how it is aggregated."""

import logging
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy

from common.config import RunConfig, key_of
from common.errors import ConfigError, FloretError, one_line
from common.seeds import numpy_generator
from common.wire import NamedArrays, empty, find_record, from_record, payload_bytes, to_record, views
from models import Head, Part, SplitModel, feature_width, tensor_names
from strategies.core.aggregate import WeightedMean
from strategies.core.roster import Client, Roster
from strategies.core.session import Session

log = logging.getLogger("flwr")

# Seconds that Flower keeps a message and its answer beyond ``round-timeout``: the answers that came in time are still
# there when the wait for one that did not is over.
LEEWAY = 60.0


@dataclass(frozen=True)
class TensorSpec:
    """What a tensor of a reply must look like; an optional one may be missing."""

    shape: tuple[int, ...]
    dtype: str = "float32"
    optional: bool = False


@dataclass(frozen=True)
class Report:
    """What the server knows of one client's part in a round.

    ``metrics`` are the client's own: accuracies ``before.test``, ``after.validation`` and so on in [0, 1], ``loss``,
    ``seconds``. ``up`` and ``down`` are bytes of tensors.
    """

    client: Client
    trained: bool
    metrics: dict[str, float]
    up: int
    down: int


@dataclass(frozen=True)
class StrategySetting:
    """What a strategy works with: the run config, the method's parameters, the initial model and where it is cut, the
    known clients, what messages say of the run.
    """

    config: RunConfig
    parameters: Any
    model: SplitModel
    head_layers: int
    input_shape: tuple[int, ...]
    roster: Roster
    session: Session


class RefusedError(FloretError):
    """A reply that the round goes on without; the message is the reason."""


class FloretStrategy(Strategy):
    """A Flower Strategy for methods that share a part of the model.

    A method's server half derives from this class and says how it differs: by the class attributes alone, or by
    overriding ``initial_arrays``, ``expected``, ``weight``, ``check``, ``fold`` and its two neighbours, or
    ``configure_train``.

    Attributes:
        shares: the part of the model that travels; the client half has the same attribute.
        head: where the model is cut while ``head-layers`` is 0: the head is the ``"last"`` layer, or all the
            ``"linear"`` layers at the end.
        weighted: whether a client counts by its number of training samples in the aggregate, or all count the same.
        serves_global: whether the global model itself is what a client uses; then clients that did not take part are
            sent it for evaluation.
        Parameters: a frozen dataclass of the method's own keys, or None.
        reports: what each client did in this round, by name, in roster order.
        refused: client and reason of each reply that this round went on without.
        notes: client and line of whatever clients reported besides, such as a damaged file.
    """

    shares: ClassVar[Part] = "model"
    head: ClassVar[Head] = "last"
    weighted: ClassVar[bool] = True
    serves_global: ClassVar[bool] = False
    Parameters: ClassVar[type | None] = None

    def __init__(self, setting: StrategySetting) -> None:
        self.config = setting.config
        self.head_layers = setting.head_layers
        self.parameters = setting.parameters
        self.model = setting.model
        self.input_shape = setting.input_shape
        self.roster = setting.roster
        self.session = setting.session
        self.reports: dict[str, Report] = {}
        self.refused: list[tuple[str, str]] = []
        self.notes: list[tuple[str, str]] = []
        self._asked: dict[str, int] = {}
        self._silent: set[str] = set()
        self._arrays: NamedArrays = {}
        self._mean = WeightedMean()
        self.check()
        self._expected = self.expected()

    # What a method may override

    def check(self) -> None:
        """Check what no single key can tell, such as whether the method works with this model.

        Raises:
            ConfigError: it does not.
        """

    def initial_arrays(self) -> NamedArrays:
        """Return what the first round sends: the shared part of the initial model."""
        tensors = self.model.state_dict()
        return {name: tensors[name].numpy() for name in self.shared_names()}

    def expected(self) -> dict[str, TensorSpec]:
        """Return what a client sends, by name: the shared part of the model."""
        tensors = self.model.state_dict()
        return {name: TensorSpec(tuple(tensors[name].shape)) for name in self.shared_names()}

    def weight(self, samples: int) -> float:
        """Return the weight of a client with ``samples`` training samples in the aggregate."""
        return float(samples) if self.weighted else 1.0

    def begin_round(self) -> None:
        """Forget what was folded; called before the first reply of a round."""
        self._mean = WeightedMean()

    def fold(self, client: Client, arrays: NamedArrays, samples: int) -> None:
        """Take in what a client sent, after it was checked against ``expected``: add it to the mean."""
        self._mean.add(arrays, self.weight(samples))

    def finish_round(self) -> NamedArrays:
        """Return the new global arrays; called if there were enough good replies.

        A tensor that no client sent this round stays as it was.
        """
        return self._arrays | self._mean.result()

    def kept(self) -> NamedArrays:
        """Return what this strategy remembers from round to round besides the global arrays, for a checkpoint."""
        return {}

    def restore(self, arrays: NamedArrays) -> None:
        """Take back what ``kept`` returned."""

    def shared_names(self) -> list[str]:
        """Return the names of the model's tensors that travel."""
        return tensor_names(self.model, self.shares, self.config.batch_norm)

    # Flower's Strategy

    def summary(self) -> None:
        """Log what is run."""
        arrays = self.initial_arrays()
        size = sum(array.nbytes for array in arrays.values()) / 1e6
        log.info(
            "%s: %d clients, %d tensors (%.3f MB) to each", self.config.method, len(self.roster), len(arrays), size
        )

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Draw this round's clients and return a message for each, with the same arrays.

        The config carries ``round``, ``lr`` of this round, ``num-classes`` and the method's parameters.
        """
        self.start_round(from_record(arrays))
        return [
            self.message(client, MessageType.TRAIN, arrays, server_round, config)
            for client in self.sample(server_round)
        ]

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Check replies one by one and fold the good ones into the aggregate as they come.

        With fewer than ``min-replies`` good replies nothing changes.

        Returns:
            The new global arrays, or None if nothing changed; and the means over clients of what they measured.
        """
        self.begin_round()
        for client, message in self.answered(replies):
            try:
                record, arrays, samples, metrics = self._read(message)
            except RefusedError as reason:
                self.refuse(client, str(reason))
                continue
            up = sum(array.nbytes for array in arrays.values())
            self.reports[client.name] = Report(client, True, metrics, up, self._asked.pop(client.name))
            self.fold(client, arrays, samples)
            # Gone before the next one comes: Flower's records refer to themselves, so the garbage collector would let
            # several replies pile up.
            empty(record)
            del message, record, arrays
        self.refuse_silent()
        if len(self.reports) < self.config.min_replies:
            log.warning(
                "Round %d changes nothing: %d good replies, min-replies = %d",
                server_round,
                len(self.reports),
                self.config.min_replies,
            )
            return None, self._means()
        return to_record(self.finish_round()), self._means()

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Return a message for each client that did not take part in this round, but for those that were asked and did
        not answer; without arrays, unless they are the model that clients use.
        """
        sent = arrays if self.serves_global else ArrayRecord()
        known = self.reports.keys() | self._silent
        absent = [client for client in self.roster.present() if client.name not in known]
        return [self.message(client, MessageType.EVALUATE, sent, server_round, config) for client in absent]

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Take down what clients measured; return the means over all that measured anything this round.

        A client that has no model to measure yet is not in the reports.
        """
        for client, message in self.answered(replies):
            try:
                metrics = self._metrics(message)
            except RefusedError as reason:
                self.refuse(client, str(reason))
                continue
            down = self._asked.pop(client.name)
            if any(name.startswith(("before.", "after.")) for name in metrics):
                self.reports[client.name] = Report(client, False, metrics, 0, down)
        self.refuse_silent()
        order = {client.name: place for place, client in enumerate(self.roster)}
        self.reports = dict(sorted(self.reports.items(), key=lambda item: order[item[0]]))
        return self._means()

    # What methods use

    def start_round(self, arrays: NamedArrays) -> None:
        """Begin a round with the global ``arrays``: nobody was asked, nobody refused."""
        self.reports, self.refused, self.notes, self._asked, self._silent = {}, [], [], {}, set()
        self._arrays = arrays

    def is_asked(self, name: str) -> bool:
        """Return whether the client of this name was asked in this round and did not answer yet."""
        return name in self._asked

    def feature_width(self) -> int:
        """Return the number of features that the extractor gives."""
        return feature_width(self.model, self.input_shape)

    def prototype_specs(self) -> dict[str, TensorSpec]:
        """Return ``prototype.<class>``, (features,), for every class, all optional."""
        width = self.feature_width()
        classes = self.model.classifier.out_features
        return {f"prototype.{c}": TensorSpec((width,), optional=True) for c in range(classes)}

    def need_stages(self, setting: str) -> None:
        """Refuse ``setting`` for an extractor without convolutional stages.

        Raises:
            ConfigError: it has none.
        """
        if not self.model.extractor.stage_ends:
            raise ConfigError(
                f"{setting}: the extractor of model {self.config.model!r} has no convolutional stage; "
                "use a convolutional model, or switch it off"
            )

    def sample(self, server_round: int) -> list[Client]:
        """Draw round(participation * clients), at least one and ``min-replies``, without replacement, of those that are
        there; roster order.
        """
        clients = self.roster.present()
        wanted = max(1, round(self.config.participation * len(clients)), self.config.min_replies)
        generator = numpy_generator(self.config.seed, "sampling", server_round)
        drawn = generator.choice(len(clients), size=min(wanted, len(clients)), replace=False)
        return [clients[place] for place in sorted(drawn)]

    def message(
        self, client: Client, kind: str, arrays: ArrayRecord, server_round: int, config: ConfigRecord
    ) -> Message:
        """Return a message to ``client`` that expects an answer, and count its bytes as sent in this round.

        The config gets ``round``, ``lr`` of this round, ``num-classes``, ``head-layers``, what the session says and the
        method's parameters.
        """
        own = {}
        if self.parameters is not None:
            own = {
                f"{self.config.method}.{key_of(item.name)}": getattr(self.parameters, item.name)
                for item in fields(self.parameters)
            }
        scalars = ConfigRecord(
            {
                **config,
                "round": server_round,
                "lr": self.config.lr * self.config.lr_decay ** (server_round - 1),
                "num-classes": self.model.classifier.out_features,
                "head-layers": self.head_layers,
                **self.session.scalars(),
                **own,
            }
        )
        self._asked[client.name] = self._asked.get(client.name, 0) + payload_bytes(arrays)
        content = RecordDict({"arrays": arrays, "config": scalars})
        ttl = self.config.round_timeout + LEEWAY
        return Message(content, client.node_id, kind, ttl=ttl, group_id=str(server_round))

    def answered(self, replies: Iterable[Message]) -> Iterable[tuple[Client, Message]]:
        """Yield the replies of clients that were asked, each with its client."""
        for message in replies:
            client = self.roster.at(message.metadata.src_node_id)
            if client.name in self._asked:
                if message.has_error():
                    self._silent.add(client.name)
                self._take_notes(client, message)
                yield client, message
            del message

    def refuse(self, client: Client, reason: str) -> None:
        """Go on without ``client`` in this round, and say why in log and history."""
        self._asked.pop(client.name)
        self.refused.append((client.name, reason))
        log.warning("Client %s refused: %s", client.name, reason)

    def refuse_silent(self) -> None:
        """Refuse those that were asked and did not answer."""
        for name in list(self._asked):
            self._silent.add(name)
            self.refuse(self.roster[name], f"no answer within round-timeout = {self.config.round_timeout:g} s")

    def said(self, message: Message, name: str) -> Mapping[str, Any]:
        """Return the config record ``name`` of a reply.

        Raises:
            RefusedError: the client failed, or there is none.
        """
        self._check_answer(message)
        record = find_record(message.content, name, ConfigRecord)
        if record is None:
            raise RefusedError(f"the reply has no {name}")
        return record

    # The house

    def _take_notes(self, client: Client, message: Message) -> None:
        record = None if message.has_error() else find_record(message.content, "notes", ConfigRecord)
        lines = record.get("lines") if record else None
        for line in lines if isinstance(lines, list) else []:
            self.notes.append((client.name, str(line)))
            log.warning("Client %s: %s", client.name, line)

    def _check_answer(self, message: Message) -> None:
        if message.has_error():
            raise RefusedError(one_line(message.error.reason))
        error = find_record(message.content, "error", ConfigRecord)
        if error is not None:
            raise RefusedError(str(error.get("reason", "an error without a reason")))

    def _metrics(self, message: Message) -> dict[str, float]:
        """Return a reply's metrics.

        Raises:
            RefusedError: the client failed, or a metric is not a finite number.
        """
        self._check_answer(message)
        record = find_record(message.content, "metrics", MetricRecord)
        if record is None:
            raise RefusedError("the reply has no metrics")
        metrics = dict(record.items())
        for name, value in metrics.items():
            if not isinstance(value, (int, float)) or not math.isfinite(value):
                raise RefusedError(f"metric {name} is {value}, not a finite number")
        return metrics  # type: ignore[return-value]

    def _read(self, message: Message) -> tuple[ArrayRecord, NamedArrays, int, dict[str, float]]:
        """Return a reply's arrays, as they came and to read in place, its number of samples and its metrics.

        Raises:
            RefusedError: the client failed, or the reply is not what ``expected`` says.
        """
        metrics = self._metrics(message)
        samples = metrics.get("num-examples")
        if type(samples) is not int or samples < 1:
            raise RefusedError(f"num-examples is {samples}, not a positive whole number")
        record = find_record(message.content, "arrays", ArrayRecord)
        if record is None:
            raise RefusedError("the reply has no arrays")
        try:
            arrays = views(record)
        except (ValueError, TypeError, EOFError) as error:
            raise RefusedError(f"an array cannot be read: {error}") from error
        for name, spec in self._expected.items():
            if name not in arrays and not spec.optional:
                raise RefusedError(f"tensor {name} is missing")
        for name, array in arrays.items():
            if name not in self._expected:
                raise RefusedError(f"tensor {name} is unknown")
            spec = self._expected[name]
            if array.shape != spec.shape or array.dtype != spec.dtype:
                raise RefusedError(
                    f"tensor {name} is {array.dtype} {array.shape}, it must be {spec.dtype} {spec.shape}"
                )
            if not np.isfinite(array).all():
                raise RefusedError(f"tensor {name} is not finite")
        return record, arrays, samples, metrics

    def _means(self) -> MetricRecord:
        names = sorted({name for report in self.reports.values() for name in report.metrics} - {"num-examples"})
        values = {name: [r.metrics[name] for r in self.reports.values() if name in r.metrics] for name in names}
        return MetricRecord({name: float(np.mean(column)) for name, column in values.items()})
