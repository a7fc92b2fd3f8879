"""UA-PDFL (Zhu et al. 2024): decentralised; clients ask similar peers for models, the server only relays."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType
from flwr.serverapp import Grid

from common.config import between, choice
from common.errors import FloretError
from common.seeds import numpy_generator
from common.wire import NamedArrays, to_record
from strategies.core import Client, FloretStrategy, StrategySetting, TensorSpec, exchange

UNIT, AUXILIARY = "unit", "auxiliary"


@dataclass(frozen=True, kw_only=True)
class UAPDFLParameters:
    """``n_com`` peers a client and round; ``th`` is the threshold of the divergence, ``mu`` weighs the auxiliary term;
    ``divergence`` is ``"symmetric-kl"`` (equation 6) or ``"jensen-shannon"``, ``aux_reduction`` is ``"sum"`` over
    features (equation 12) or ``"mean"``; ``client_dropout`` and ``layer_personalization`` are switches, the latter with
    the auxiliary term; with ``own_start`` every client draws its own initial model (Algorithm 2, line 1).
    """

    n_com: int = between(1)
    th: float = between(float("-inf"))
    mu: float = between(0)
    divergence: str = choice("symmetric-kl", "jensen-shannon")
    aux_reduction: str = choice("sum", "mean")
    client_dropout: bool
    layer_personalization: bool
    own_start: bool


@dataclass(frozen=True)
class Wish:
    """What a client asked for after it saw its peers' representations: indices into its queue of peers."""

    replace: int
    extractors: tuple[int, ...]
    heads: tuple[int, ...]

    @classmethod
    def read(cls, said: Mapping[str, Any], peers: int) -> "Wish":
        """Return the wish in a reply.

        Raises:
            FloretError: it names a peer that is not in the queue of ``peers``.
        """
        wish = cls(int(said["replace"]), tuple(said["extractors"]), tuple(said["heads"]))
        if not all(-1 <= index < peers for index in (wish.replace, *wish.extractors, *wish.heads)):
            raise FloretError(f"the client asked for a peer that is not among its {peers}")
        return wish


class UAPDFL(FloretStrategy):
    """A mailbox: it keeps what each client published last and forwards what was asked for; it never averages.

    Up: the whole model; ``unit``, (classes,), and ``auxiliary``, (features,), float32. Down, for each peer ``i`` in the
    client's queue: ``i.unit`` with the question what it wants; then ``i.auxiliary`` and the tensors that it asked for,
    ``i.<name>``. All of them are from rounds before the present one, so that the order of clients does not matter.
    """

    shares = "model"
    head = "linear"
    Parameters = UAPDFLParameters

    def __init__(self, setting: StrategySetting) -> None:
        super().__init__(setting)
        # What each client published last, by name.
        self.mailbox: dict[str, NamedArrays] = {}

    def begin_round(self) -> None:
        """Collect what is published in this round apart from what was published before."""
        self._published: dict[str, NamedArrays] = {}

    def fold(self, client: Client, arrays: NamedArrays, samples: int) -> None:
        """Take down what a client publishes."""
        self._published[client.name] = arrays

    def finish_round(self) -> NamedArrays:
        """Open the mailbox for the next round; there are no global arrays."""
        self.mailbox = self.mailbox | self._published
        return {}

    def kept(self) -> NamedArrays:
        """Return the mailbox: ``<client>/<tensor>``."""
        return {f"{client}/{name}": array for client, box in self.mailbox.items() for name, array in box.items()}

    def restore(self, arrays: NamedArrays) -> None:
        """Take the mailbox back."""
        self.mailbox = {}
        for key, array in arrays.items():
            client, _, name = key.rpartition("/")
            self.mailbox.setdefault(client, {})[name] = array

    def initial_arrays(self) -> NamedArrays:
        """Return nothing: there is no global model."""
        return {}

    def expected(self) -> dict[str, TensorSpec]:
        """Return the whole model and the two representations."""
        width = self.feature_width()
        representations = {UNIT: TensorSpec((self.model.classifier.out_features,)), AUXILIARY: TensorSpec((width,))}
        return super().expected() | representations

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Ask each sampled client what it wants of its peers, then return a message to each with just that."""
        self.start_round({})
        queues = {client.name: self._queue(client, server_round) for client in self.sample(server_round)}
        wishes = self._ask(queues, server_round, config, grid)
        return [
            self._answer(self.roster[name], queues[name], wish, server_round, config) for name, wish in wishes.items()
        ]

    def _queue(self, client: Client, server_round: int) -> list[Client]:
        """Draw ``n-com`` of the other clients that have published (Algorithm 2, line 6)."""
        others = [other for other in self.roster if other.name in self.mailbox and other.name != client.name]
        generator = numpy_generator(self.config.seed, "peers", client.name, server_round)
        drawn = generator.choice(len(others), size=min(self.parameters.n_com, len(others)), replace=False)
        return [others[place] for place in sorted(drawn)]

    def _ask(
        self, queues: Mapping[str, list[Client]], server_round: int, config: ConfigRecord, grid: Grid
    ) -> dict[str, Wish]:
        """Send each client its peers' unit representations and return what it wants; who has no peers is not asked."""
        wishes = {name: Wish(-1, (), ()) for name, peers in queues.items() if not peers}
        messages = []
        for name, peers in queues.items():
            if peers:
                units = {f"{i}.{UNIT}": self.mailbox[peer.name][UNIT] for i, peer in enumerate(peers)}
                query = f"{MessageType.QUERY}.plan"
                messages.append(self.message(self.roster[name], query, to_record(units), server_round, config))
        for client, reply in self.answered(exchange(grid, messages, self.config.round_timeout)):
            try:
                wishes[client.name] = Wish.read(self.said(reply, "plan"), len(queues[client.name]))
            except FloretError as reason:
                self.refuse(client, str(reason))
        for name in queues:
            if name not in wishes and self.is_asked(name):
                self.refuse(self.roster[name], f"no plan within round-timeout = {self.config.round_timeout:g} s")
        return {name: wishes[name] for name in queues if name in wishes}

    def _answer(
        self, client: Client, peers: list[Client], wish: Wish, server_round: int, config: ConfigRecord
    ) -> Message:
        arrays: NamedArrays = {}
        for i, peer in enumerate(peers):
            published = self.mailbox[peer.name]
            if self.parameters.layer_personalization:
                arrays[f"{i}.{AUXILIARY}"] = published[AUXILIARY]
            for name in self.shared_names():
                in_head = name.startswith("head.")
                if i == wish.replace or i in (wish.heads if in_head else wish.extractors):
                    arrays[f"{i}.{name}"] = published[name]
        told = ConfigRecord({**config, "replace": wish.replace, "samples": [peer.train for peer in peers]})
        return self.message(client, MessageType.TRAIN, to_record(arrays), server_round, told)
