"""The server half of every method: who takes part, what is sent, what may come back, how it is aggregated."""

import logging
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy
from torch.nn.modules.batchnorm import _BatchNorm

from common.accuracies import NONE
from common.errors import ConfigError, FloretError, printable
from common.filters import Filter, Payload, filtered
from common.norms import group_of, root_mean_squares
from common.privacy.calibration import drawn_in_secret, number_drawn
from common.seeds import numpy_generator
from common.tensors import NamedArrays
from common.wire import check_finite, find_record, pack, packed_again, payload_bytes, to_record, unpack, views
from models import check_examples
from strategies.core.aggregate import MakeAggregate, WeightedMean
from strategies.core.exchange import send_and_receive
from strategies.core.method import Method, Setup
from strategies.core.post_office import PostOffice
from strategies.core.protection import Protection
from strategies.core.replies import EvaluateReply, OutdatedError, PlanAnswer, TrainReply, discard, notes_in
from strategies.core.roster import Client, Roster
from strategies.core.session import Session, Watcher
from strategies.core.spool import spooled
from strategies.core.update_norms import EXPLAINED, HELD, UpdateNorms, clipped

log = logging.getLogger("flwr")

# Seconds that Flower keeps a message and its answer beyond ``round-timeout``: the answers that came in time are still
# there when the wait for one that did not is over.
LEEWAY = 60.0


@dataclass(frozen=True)
class ClientResult:
    """What the server knows of one client's part in a round.

    ``metrics`` are the client's own: accuracies ``before.test``, ``after.validation`` and so on in [0, 1], ``loss``,
    ``seconds``. ``peers`` are the clients whose tensors it was sent.
    """

    client: Client
    trained: bool
    metrics: dict[str, float]
    peers: tuple[str, ...] = ()


@dataclass(frozen=True)
class StrategySetting:
    """What a strategy works with.

    Attributes:
        setup: config, parameters and the initial model, as its clients have them.
        roster: the known clients.
        session: what messages say of the run.
        aggregate: makes the aggregate of a round.
        filters: what a client sent passes them, in order, before it is aggregated.
    """

    setup: Setup
    roster: Roster
    session: Session
    aggregate: MakeAggregate = WeightedMean
    filters: tuple[Filter, ...] = ()


@dataclass(frozen=True)
class _Reply:
    """What a client sent after training: ``packed`` are its tensors as they came, if they are kept for others and no
    filter changed them; ``sizes`` are those of its update by group.
    """

    client: Client
    payload: Payload
    packed: Mapping[str, Array] | None
    metrics: dict[str, float]
    sizes: dict[str, float]


class FloretStrategy(Method, Strategy):
    """A Flower Strategy for methods that share a part of the model.

    A method's server half derives from this class and says how it differs: by the class attributes alone, by the class
    methods of ``Method``, which its client half uses as well, or by overriding the methods below.

    Attributes:
        weighted: whether a client counts by its number of training samples in the aggregate, or all count the same.
        serves_global: whether the global model itself is what a client uses; then clients that did not take part are
            sent it for evaluation.
        relays: whether what clients send is kept in ``post`` for others.
        statistics: groups of tensors whose size says little of an update, since honest ones differ by large factors:
            they are not judged by it, but for what ``relays`` hands on, and not shortened; ``accumulate`` checks their
            range itself.
        unclipped: groups of tensors that go into no mean, which ``aggregation="clipped-mean"`` leaves as they came.
        parameters: the method's own.
        arrays: the global tensors that this round began with, to read.
        round: the round that clients train in, from 1.
        post: what each client sent last, before this round.
        peers: by name, the clients whose tensors out of ``post`` a client is sent in this round; for the history.
        norms: how large updates usually are.
        results: what each client did in this round, by name, in roster order.
        sent, received: bytes of the tensors that travelled in this round to each client and from it, by name, whatever
            became of them.
        refused: client and reason of each reply that this round went on without.
        notes: client and line of whatever is told besides: what a client reported, such as a damaged file; that it
            is away.
        watcher: is told who is asked and who has answered, if there is one.
        protection: what the server does for privacy; None if nothing is protected.
    """

    weighted: ClassVar[bool] = True
    serves_global: ClassVar[bool] = False
    relays: ClassVar[bool] = False
    statistics: ClassVar[frozenset[str]] = frozenset()
    unclipped: ClassVar[frozenset[str]] = frozenset()

    def __init__(self, setting: StrategySetting) -> None:
        self.setup = setting.setup
        self.config = setting.setup.config
        self.parameters = setting.setup.parameters
        self.model = setting.setup.model
        self.roster = setting.roster
        self.session = setting.session
        self.watcher: Watcher | None = None
        self.arrays: NamedArrays = {}
        self.round = 0
        self.results: dict[str, ClientResult] = {}
        self.refused: list[tuple[str, str]] = []
        self.notes: list[tuple[str, str]] = []
        self._new_aggregate, self._filters = setting.aggregate, setting.filters
        self._aggregate = self._new_aggregate()
        self.sent: Counter[str] = Counter()
        self.received: Counter[str] = Counter()
        self._asked: set[str] = set()
        self._silent: set[str] = set()
        self.peers: dict[str, tuple[str, ...]] = {}
        self._record, self._packed = ArrayRecord(), ArrayRecord()
        self.protection = self._protect() if self.config.privacy.on else None
        self.check()
        self._uplink, self._downlink = self.uplink(self.setup), self.downlink(self.setup)
        self.post = PostOffice(self._uplink, self.config.wire)
        self.norms = UpdateNorms()
        self._trained = {group_of(name) for name in self.initial_arrays()} | {"extractor", "head"}
        # Replies of the first round that wait to be judged; None when there is something to judge by.
        self._held: list[_Reply] | None = None

    # What a method may override

    def check(self) -> None:
        """Check what no single key can tell, such as whether the method works with this model.

        Raises:
            ConfigError: it does not.
        """

    def initial_arrays(self) -> NamedArrays:
        """Return the global tensors before the first round: the shared part of the initial model and networks."""
        tensors = self.model.state_dict()
        arrays = {name: tensors[name].numpy() for name in self.setup.tensor_names(self.shares)}
        for name, network in self.networks(self.setup).items():
            if network.shared:
                own = network.new(self.config.seed, name).state_dict()
                arrays |= {f"{name}.{n}": t.numpy() for n, t in own.items() if f"{name}.{n}" in self._downlink}
        return arrays

    def wanted(self, clients: list[Client]) -> int:
        """Return how many of the ``clients`` that are there take part: round(participation * clients), at least one and
        ``min-replies``.
        """
        return number_drawn(self.config, len(clients))

    def sample(self, server_round: int) -> list[Client]:
        """Draw as many clients as are ``wanted``, without replacement, of those that are there; roster order.

        Drawn in secret each takes part by chance, so that they may be any number, none among them.
        """
        clients = self.roster.present()
        if self.protection:
            clients = self.protection.able(clients)
            if drawn_in_secret(self.config.privacy):
                return self.protection.draw(clients, server_round)
        generator = numpy_generator(self.config.seed, "sampling", server_round)
        drawn = generator.choice(len(clients), size=min(self.wanted(clients), len(clients)), replace=False)
        return [clients[place] for place in sorted(drawn)]

    def prepare(self, server_round: int, clients: list[Client], grid: Grid) -> list[Client]:
        """Make ready what the sampled ``clients`` are sent, perhaps after asking them; return those that are."""
        return clients

    def payload(self, client: Client, server_round: int) -> Mapping[str, np.ndarray | Array]:
        """Return the tensors that ``client`` is sent for training: the global ones.

        What ``self.post.forward`` returns may be among them.
        """
        return self.arrays

    def evaluation_payload(self, client: Client, server_round: int) -> Mapping[str, np.ndarray | Array]:
        """Return the tensors that ``client``, which did not take part in this round, is sent for evaluation.

        The global ones, as the round began with them, if they are the model that clients use, else nothing: it measures
        its own.
        """
        return self.arrays if self.serves_global else {}

    def instructions(self, client: Client, server_round: int) -> dict[str, Any]:
        """Return scalars and lists of scalars that ``client`` is sent beside the tensors for training."""
        return {}

    def weight(self, samples: int) -> float:
        """Return the weight of a client with ``samples`` training samples in the aggregate.

        All weigh the same where something is protected: the number of samples would tell of them.
        """
        return float(samples) if self.weighted and not self.protection else 1.0

    def begin_round(self) -> None:
        """Make ready to take in what clients send; called before the first reply of a round."""
        if self.protection and self.config.privacy.by_server:
            # As clients receive them: the update of one that sends them back must be none.
            before = unpack(self._pack(self.arrays), self._downlink, self.config.wire)
            self._aggregate = self.protection.mean(before, len(self.roster.present()), self.round)
        else:
            self._aggregate = self._new_aggregate()

    def decoded(self, client: Client, arrays: NamedArrays) -> NamedArrays:
        """Return what a client sent as it is measured and aggregated: what it sent, unless it travels in another form.

        Not for what ``relays`` keeps, which is as it came.

        Raises:
            FloretError: it cannot be; the client is refused.
        """
        return arrays

    def replaced(self) -> frozenset[str]:
        """Return the groups of global tensors that clients do not train from: what they send of them is no update, and
        is judged as it is.
        """
        return frozenset()

    def accumulate(self, client: Client, arrays: NamedArrays, samples: int) -> None:
        """Take in what a client sent, after it was checked against ``uplink``: add it to the aggregate."""
        self._aggregate.add(arrays, self.weight(samples))

    def aggregate(self) -> NamedArrays:
        """Return the new global tensors; called if there were enough good replies.

        A tensor that no client sent this round stays as it was.
        """
        return self.arrays | self._aggregate.result()

    def state_dict(self) -> NamedArrays:
        """Return what this strategy remembers from round to round besides ``arrays`` and ``post``, for a checkpoint."""
        return {}

    def load_state_dict(self, arrays: NamedArrays) -> None:
        """Take back what ``state_dict`` returned."""

    # Flower's Strategy

    def summary(self) -> None:
        """Log what is run."""
        arrays = self.initial_arrays()
        size = payload_bytes(pack(arrays, self._downlink, self.config.wire)) / 1e6
        sent = f"{len(arrays)} tensors ({size:.3f} MB) to each"
        if self.relays and not arrays:
            sent = "each is sent what others have published"
        log.info("%s: %d clients, %s", self.config.method, len(self.roster), sent)
        log.info("Accuracies are means over clients ± their standard deviation")

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Draw this round's clients and return a message for each, made when it is asked for.

        The config carries ``round``, ``lr`` of this round, ``num-classes``, ``head-layers``, what the session says and
        the method's ``instructions``.
        """
        self.start_round(arrays)
        self.round = server_round
        clients = self.prepare(server_round, self.sample(server_round), grid)
        self._asked.update(client.name for client in clients)
        return self._messages(clients, MessageType.TRAIN, server_round, config)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Check replies one by one and take the good ones into the aggregate as they come.

        With fewer than ``min-replies`` good replies nothing changes.

        Returns:
            The new global arrays, or None if nothing changed; and the means over clients of what they measured.
        """
        self.begin_round()
        self.post.forget_round()
        self.norms.forget_round()
        self._held = None if self.norms.known or not self._judges else []
        for client, message in self.answered(replies):
            try:
                self._offer(self._read(client, message, server_round))
            except FloretError as reason:
                self._doubt(client, reason)
                self.refuse(client, str(reason))
            discard(message)
            del message
        self._judge_held()
        self.refuse_silent()
        by_server = self.config.privacy.by_server
        if not by_server and len(self.results) < self.config.min_replies:
            log.warning(
                "Round %d changes nothing: %d good replies, min-replies = %d",
                server_round,
                len(self.results),
                self.config.min_replies,
            )
            self.norms.end_round(changed=False)
            return None, self._means()
        if self.protection and by_server:
            # Also if nobody was drawn: that the model stays as it is would tell of it.
            self.protection.pay(server_round)
        self.post.end_round()
        self.norms.end_round()
        return to_record(self.aggregate()), self._means()

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Return a message for each client that did not take part in this round, but for those that were asked and did
        not answer, and those that tell no accuracies.

        A global model is sent as the round began with it, not the new ``arrays``: so all clients measure the same one
        *before*.
        """
        known = self.results.keys() | self._silent
        absent = [client for client in self.roster.present() if client.name not in known and self._tells(client)]
        self._asked.update(client.name for client in absent)
        return self._messages(absent, MessageType.EVALUATE, server_round, config)

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Take down what clients measured; return the means over all that measured anything this round.

        A client that has no model to measure yet is not in the results.
        """
        for client, message in self.answered(replies):
            try:
                metrics = EvaluateReply.read(message, client).metrics
            except FloretError as reason:
                self._doubt(client, reason)
                self.refuse(client, str(reason))
                continue
            self._asked.discard(client.name)
            if any(name.startswith(("before.", "after.")) for name in metrics):
                self.results[client.name] = ClientResult(client, False, metrics)
        self.refuse_silent()
        order = {client.name: place for place, client in enumerate(self.roster)}
        self.results = dict(sorted(self.results.items(), key=lambda item: order[item[0]]))
        return self._means()

    # What methods use

    def ask(
        self,
        questions: Mapping[str, Mapping[str, np.ndarray | Array]],
        server_round: int,
        grid: Grid,
        told: Mapping[str, Any] | None = None,
    ) -> Iterator[tuple[Client, Mapping[str, Any]]]:
        """Send clients a question, to be called in ``prepare``, and yield each with what its ``plan`` returned.

        Who fails, or does not answer within ``round-timeout``, is refused for this round.

        Args:
            questions: by the client's name, the tensors that it is sent.
            server_round: the present round.
            grid: what messages go through.
            told: scalars and lists of scalars that all of them are sent beside the tensors.
        """
        kind = f"{MessageType.QUERY}.plan"
        self._asked.update(questions)
        messages = (
            self._message(self.roster[name], kind, self._pack(tensors), server_round, ConfigRecord({**(told or {})}))
            for name, tensors in questions.items()
        )
        waiting = set(questions)
        for client, reply in self.answered(send_and_receive(grid, messages, self.config.round_timeout)):
            waiting.discard(client.name)
            try:
                yield client, PlanAnswer.read(reply).values
            except FloretError as reason:
                self.refuse(client, str(reason))
        for name in questions:
            if name in waiting:
                self.refuse(self.roster[name], f"no plan within round-timeout = {self.config.round_timeout:g} s")

    def start_round(self, arrays: ArrayRecord) -> None:
        """Begin a round with the global ``arrays``: nobody was asked, nobody refused."""
        self.results, self.refused, self.notes, self._asked, self._silent = {}, [], [], set(), set()
        self.peers, self.sent, self.received = {}, Counter(), Counter()
        self._set_arrays(arrays)

    def need_stages(self, switch: str) -> None:
        """Refuse that the key ``switch`` is on for an extractor without convolutional stages.

        Raises:
            ConfigError: it has none.
        """
        if not self.model.extractor.stage_ends:
            raise ConfigError(
                f"{switch} = true: the extractor of model {self.config.model!r} has no convolutional stage; "
                f"use a convolutional model, or {switch}=false"
            )

    def need_mean(self) -> None:
        """Refuse another aggregate for a method that averages nothing on the server.

        Raises:
            ConfigError: the config has one.
        """
        if self.config.aggregation != "mean":
            raise ConfigError(
                f"aggregation = {self.config.aggregation!r}: {self.config.method} averages nothing on the server; "
                "use mean"
            )

    def need_vectors(self) -> None:
        """Refuse a head that takes feature maps, not vectors of features.

        Raises:
            ConfigError: it does.
        """
        try:
            with torch.no_grad():
                self.model.eval().head(torch.zeros(1, self.setup.features))
        except RuntimeError as error:
            raise ConfigError(
                f"head-layers = {self.setup.head_layers}: the head of model {self.config.model!r} takes feature maps, "
                f"{self.config.method} needs one of linear layers; use fewer"
            ) from error

    @property
    def awaited(self) -> int:
        """How many of the clients that are asked in this round have not been taken down nor refused."""
        return len(self._asked)

    def answered(self, replies: Iterable[Message]) -> Iterable[tuple[Client, Message]]:
        """Yield the replies of clients that were asked, each with its client."""
        for message in replies:
            node = message.metadata.src_node_id
            client = self.roster.at(node) if self.roster.known(node) else None
            if client is not None and client.name in self._asked:
                if message.has_error():
                    self._silent.add(client.name)
                elif message.has_content() and (record := find_record(message.content, "arrays", ArrayRecord)):
                    self.received[client.name] += payload_bytes(record)
                for line in notes_in(message):
                    self.notes.append((client.name, line))
                    log.warning("Client %s: %s", client.name, line)
                if self.watcher:
                    self.watcher.answered(client.name)
                yield client, message
            del message

    def refuse(self, client: Client, reason: str) -> None:
        """Go on without ``client`` in this round, and say why in log and history."""
        self._asked.discard(client.name)
        # A filter or a method may quote what the client sent.
        line = printable(reason)
        self.refused.append((client.name, line))
        log.warning("Client %s refused: %s", client.name, line)

    def _tells(self, client: Client) -> bool:
        """Return whether a client tells accuracies: on a node no protected one does."""
        return client.accuracies != NONE and (self.protection is None or self.roster.trusted)

    def _doubt(self, client: Client, reason: FloretError) -> None:
        """Have a client asked again who it is, if it was refused because it has other samples than it said."""
        if isinstance(reason, OutdatedError):
            self.roster.doubt(client.name)

    def refuse_silent(self) -> None:
        """Refuse those that were asked and did not answer."""
        # In the order of the roster: that of a set is another one in every process.
        for name in [client.name for client in self.roster if client.name in self._asked]:
            self._silent.add(name)
            self.refuse(self.roster[name], f"no answer within round-timeout = {self.config.round_timeout:g} s")

    # Messages and replies

    def _set_arrays(self, record: ArrayRecord) -> None:
        """Take the global tensors; what is sent of them is packed when the first client is sent them."""
        self.arrays = views(record)
        # What an update is the difference to.
        trained = self._trained - self.replaced()
        self._before = {name: array for name, array in self.arrays.items() if group_of(name) in trained}
        # Groups of which differences are measured. Without global tensors to differ from, as in a relay, it is weights.
        self._moved = {group_of(name) for name in self._before}
        self._floors = root_mean_squares(self.arrays, {})
        self._record, self._packed = record, ArrayRecord()

    def _pack(self, tensors: Mapping[str, np.ndarray | Array]) -> ArrayRecord:
        """Return tensors as they travel; the global ones are packed once a round, for all."""
        if tensors is not self.arrays:
            return pack(tensors, self._downlink, self.config.wire)
        if len(self._packed) != len(self._record):
            self._packed = packed_again(self._record, self.arrays, self._downlink, self.config.wire)
        return self._packed

    def _messages(self, clients: list[Client], kind: str, server_round: int, config: ConfigRecord) -> Iterator[Message]:
        for client in clients:
            train = kind == MessageType.TRAIN
            tensors = self.payload(client, server_round) if train else self.evaluation_payload(client, server_round)
            own = self.instructions(client, server_round) if train else {}
            yield self._message(client, kind, self._pack(tensors), server_round, ConfigRecord({**config, **own}))

    def _message(
        self, client: Client, kind: str, arrays: ArrayRecord, server_round: int, config: ConfigRecord
    ) -> Message:
        """Return a message to ``client`` that expects an answer, and count its bytes as sent in this round."""
        scalars = ConfigRecord(
            {
                **config,
                "round": server_round,
                "num-classes": self.setup.classes,
                "head-layers": self.setup.head_layers,
                **self.session.scalars(),
            }
        )
        self.sent[client.name] += payload_bytes(arrays)
        if self.watcher:
            self.watcher.asked(client.name)
        content = RecordDict({"arrays": arrays, "config": scalars})
        ttl = self.config.round_timeout + LEEWAY
        return Message(content, client.node_id, kind, ttl=ttl, group_id=str(server_round))

    def _read(self, client: Client, message: Message, server_round: int) -> "_Reply":
        """Return a reply to a training message, after it passed the filters.

        Raises:
            FloretError: the client failed, the reply is not what ``uplink`` says, or a filter refuses it.
        """
        # A finite size says that all values are: only a filter needs to know it before.
        reply = TrainReply.read(message, client, self._uplink, self.config.wire, finite=bool(self._filters))
        arrays = reply.arrays
        payload = filtered(
            Payload(MessageType.TRAIN, client.name, server_round, arrays, reply.samples, reply.metrics), self._filters
        )
        payload = replace(payload, tensors=self.decoded(client, payload.tensors))
        sizes = self._sizes(payload)
        as_it_came = dict(reply.record) if self.relays and payload.tensors is arrays else None
        return _Reply(client, payload, as_it_came, reply.metrics, sizes)

    def _sizes(self, payload: Payload) -> dict[str, float]:
        """Return the size of what a client sent by group, as ``UpdateNorms`` has it.

        Raises:
            TensorError: a tensor is not finite.
            FloretError: a tensor is finite, but its size is not; no client's data explain values like that.
        """
        batches = math.ceil(self.roster.counted(payload.samples) / self.config.batch_size)
        steps = math.sqrt(self.config.local_epochs * batches)
        found = root_mean_squares(payload.tensors, self._before)
        # Of weights, steps do not add up.
        sizes = {group: size / steps if group in self._moved else size for group, size in found.items()}
        for group, size in sizes.items():
            if not math.isfinite(size):
                for name, array in payload.tensors.items():
                    check_finite(name, array)
                raise FloretError(f"its update of {group} is too large to be measured; it is refused")
        return sizes

    def _without_excess(self, payload: Payload, sizes: Mapping[str, float]) -> NamedArrays:
        """Return what a client sent, for the aggregate, its update shortened to ``EXPLAINED`` times the usual size of
        the median number of training samples if it has more of them.

        More samples explain a larger update, and count for more in the mean. But a client declares its own: with both
        together one client could move the global tensors by a thousand times what is usual.
        """
        more = self.roster.counted(payload.samples) / max(1, self.roster.counted(payload.samples, 1))
        if not more > 1:
            return payload.tensors
        beside_median = {group: size * math.sqrt(more) for group, size in sizes.items() if group in self._moved}
        most = {group: self.norms.most(group, self._floors.get(group, 0.0), EXPLAINED) for group in beside_median}
        return clipped(payload.tensors, self._before, beside_median, most)

    def _offer(self, reply: "_Reply") -> None:
        """Accept a reply, or hold it until there is something to judge it by.

        Raises:
            FloretError: its update is absurd.
        """
        if self._held is None:
            self._note(reply)
            self._accept(reply)
            return
        # On the disk: of what is held, one reply at a time is in memory.
        tensors = spooled(reply.payload.tensors, self.session.run_directory)
        self._held.append(replace(reply, payload=replace(reply.payload, tensors=tensors)))
        if len(self._held) == HELD:
            self._judge_held()

    def _judge_held(self) -> None:
        """Accept the replies that are held, but for those that are absurd beside the others."""
        held, self._held = self._held or [], None
        for reply in held:
            self._note(reply)
        held.reverse()
        while held:
            # Out of the list, so that what was read of it goes before the next one is read.
            reply = held.pop()
            try:
                self._accept(reply)
            except FloretError as reason:
                self.refuse(reply.client, str(reason))

    def _accept(self, reply: "_Reply") -> None:
        """Take a reply that was noted into the aggregate, and into the post for others.

        Raises:
            FloretError: its update is absurd.
        """
        client, payload, tensors = reply.client, reply.payload, reply.payload.tensors
        if self.protection:
            # Whatever becomes of the update, it is spent.
            self.protection.hear(client.name, reply.metrics)
        try:
            if self._judges:
                judged = {group: size for group, size in reply.sizes.items() if group not in self.statistics}
                self.norms.check(judged, self._floors)
                # What goes to other clients, alone or in a mean: they refuse a tensor of a thousand times their own.
                handed_on = {n: t for n, t in tensors.items() if self.relays or group_of(n) in self._moved}
                self.norms.check_tensors(handed_on, self._floors, in_mean=not self.relays)
                tensors = self._without_excess(payload, reply.sizes)
            if self.config.aggregation == "clipped-mean":
                usual = {
                    group: value
                    for group in reply.sizes.keys() - self.unclipped - self.statistics
                    if (value := self.norms.usual(group)) is not None
                }
                tensors = clipped(tensors, self._before, reply.sizes, usual)
            self.accumulate(client, tensors, self.roster.counted(payload.samples))
        except FloretError:
            self.norms.refuse(client.name)
            raise
        # From here on nothing is refused, so that a refused client leaves nothing behind.
        self.norms.accept(client.name)
        if self.relays:
            as_it_came = reply.packed if tensors is payload.tensors else None
            kept = pack(tensors, self._uplink, self.config.wire) if as_it_came is None else as_it_came
            self.post.put(client.name, payload.round, kept)
        self._asked.discard(client.name)
        peers = self.peers.get(client.name, ())
        self.results[client.name] = ClientResult(client, True, reply.metrics, peers)

    def _note(self, reply: "_Reply") -> None:
        """Let an update count for what is usual, where updates are judged."""
        if self._judges:
            self.norms.note(reply.client.name, reply.sizes, reply.sizes.keys() - self._moved)

    @property
    def _judges(self) -> bool:
        """Whether updates are judged by the sizes of others.

        Not where the server adds the noise: that would tell of them. What nodes have noised may be looked at.
        """
        return not self.config.privacy.by_server

    def _protect(self) -> Protection:
        """Return what the server does for privacy.

        Raises:
            ConfigError: the method, the model or another key does not go with it.
        """
        config = self.config
        self.check_protects(config)
        if config.aggregation != "mean":
            raise ConfigError(
                f"aggregation = {config.aggregation!r}: with privacy.unit = {config.privacy.unit!r} only the mean has "
                "a mechanism; use mean"
            )
        if config.privacy.unit == "example":
            check_examples(self.model, config.model)
        elif any(isinstance(layer, _BatchNorm) for layer in self.model.modules()) and config.batch_norm == "shared":
            raise ConfigError(
                "batch-norm = 'shared': with privacy.unit = 'client' running statistics would be noised, and there is "
                'no variance below zero; use batch-norm="local"'
            )
        return Protection(config, simulated=self.roster.trusted)

    def _means(self) -> MetricRecord:
        names = sorted({name for result in self.results.values() for name in result.metrics} - {"num-examples"})
        values = {name: [r.metrics[name] for r in self.results.values() if name in r.metrics] for name in names}
        return MetricRecord({name: float(np.mean(column)) for name, column in values.items()})
