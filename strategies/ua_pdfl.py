"""UA-PDFL (Zhu et al. 2024): decentralised; clients ask similar peers for models, the server only relays."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from flwr.app import Array
from flwr.serverapp import Grid

from common.config import between, choice
from common.seeds import numpy_generator
from common.tensors import Specs, TensorSpec
from strategies.core import Client, RefusedError, Relay, Setup

UNIT, AUXILIARY = "unit", "auxiliary"


@dataclass(frozen=True, kw_only=True)
class UAPDFLParameters:
    """``n_com`` peers a client and round; ``th`` is the threshold of the divergence, ``mu`` weighs the auxiliary term;
    ``divergence`` is ``"symmetric-kl"`` (equation 6) or ``"jensen-shannon"``, ``aux_reduction`` is ``"sum"`` over
    features (equation 12) or ``"mean"``; ``client_dropout`` and ``layer_personalization`` are switches, the latter with
    the auxiliary term; with ``own_start`` every client draws its own initial model (Algorithm 2, line 1).
    """

    n_com: int = between(1)
    th: float = between(float("-inf"), infinite=True)
    mu: float = between(0)
    divergence: str = choice("symmetric-kl", "jensen-shannon")
    aux_reduction: str = choice("sum", "mean")
    client_dropout: bool
    layer_personalization: bool
    own_start: bool


@dataclass(frozen=True)
class PeerRequest:
    """A client's request after it received its peers' representations: indices into its queue of peers.

    ``replace`` is the peer whose whole model is requested, or -1; ``extractors`` and ``heads`` are the peers whose
    extractor, and whose head, are requested.
    """

    replace: int
    extractors: tuple[int, ...]
    heads: tuple[int, ...]

    @classmethod
    def read(cls, answer: Mapping[str, Any], peers: int) -> "PeerRequest":
        """Return the request in a client's answer.

        Raises:
            RefusedError: it is malformed, or names a peer that is not in the queue of ``peers``.
        """
        replace, extractors, heads = (answer.get(key) for key in ("replace", "extractors", "heads"))
        if not isinstance(extractors, list) or not isinstance(heads, list):
            raise RefusedError("the client's plan must have the lists extractors and heads")
        indices = [replace, *extractors, *heads]
        known = all(type(index) is int and -1 <= index < peers for index in indices)
        if not known or max(len(extractors), len(heads)) > peers:
            raise RefusedError(f"the client asked for a peer that is not among its {peers}")
        return cls(indices[0], tuple(extractors), tuple(heads))


class UAPDFL(Relay):
    """Keeps each client's last upload and forwards the requested tensors; it never averages.

    Up: the whole model; ``unit``, (classes,), logarithms of probabilities, and ``auxiliary``, (features,), float32.
    Down, for each peer ``i`` in the client's queue: ``i.unit``, which the client answers with its request; then
    ``i.auxiliary`` and the requested tensors, ``i.<name>``. All of them are from earlier rounds, so that the order of
    clients does not matter.
    """

    shares = "model"
    head = "linear"
    # Outputs for an input that no sample is like: with batch normalisation they are a hundred times as large after few
    # steps as after many; how sure a softmax is of it, differs by the root of the number of classes.
    statistics = frozenset({UNIT, AUXILIARY})
    Parameters = UAPDFLParameters
    parameters: UAPDFLParameters

    @classmethod
    def uplink(cls, setup: Setup) -> Specs:
        """Return the whole model and the two representations."""
        representations = {UNIT: TensorSpec((setup.classes,)), AUXILIARY: TensorSpec((setup.features,))}
        return {**super().uplink(setup), **representations}

    def prepare(self, server_round: int, clients: list[Client], grid: Grid) -> list[Client]:
        """Draw each client's peers, and get the request of each client that has any (Algorithm 2, lines 6-8)."""
        self._queues = {client.name: self._queue(client, server_round) for client in clients}
        self.peers = {name: tuple(peer.name for peer in peers) for name, peers in self._queues.items()}
        self._requests = {name: PeerRequest(-1, (), ()) for name, peers in self._queues.items() if not peers}
        questions = {
            name: self.post.forward({i: (peer.name, [UNIT]) for i, peer in enumerate(peers)})
            for name, peers in self._queues.items()
            if peers
        }
        for client, answer in self.ask(questions, server_round, grid):
            try:
                self._requests[client.name] = PeerRequest.read(answer, len(self._queues[client.name]))
            except RefusedError as reason:
                self.refuse(client, str(reason))
        return [client for client in clients if client.name in self._requests]

    def payload(self, client: Client, server_round: int) -> Mapping[str, Array]:
        """Return the tensors that the client requested, and its peers' auxiliary representations."""
        request, peers = self._requests[client.name], self._queues[client.name]
        wanted = {}
        for i, peer in enumerate(peers):
            names = [AUXILIARY] if self.parameters.layer_personalization else []
            for name in self.setup.tensor_names(self.shares):
                asked = request.heads if name.startswith("head.") else request.extractors
                if i == request.replace or i in asked:
                    names.append(name)
            wanted[i] = (peer.name, names)
        return self.post.forward(wanted)

    def instructions(self, client: Client, server_round: int) -> dict[str, Any]:
        """Return the peer whose model replaces the client's, or -1, and the peers' numbers of training samples."""
        samples = [self.roster.counted(peer.train) for peer in self._queues[client.name]]
        return {"replace": self._requests[client.name].replace, "samples": samples}

    def _queue(self, client: Client, server_round: int) -> list[Client]:
        """Draw ``n-com`` of the other clients that have published (Algorithm 2, line 6)."""
        others = [other for other in self.roster if other.name in self.post and other.name != client.name]
        generator = numpy_generator(self.config.seed, "peers", client.name, server_round)
        drawn = generator.choice(len(others), size=min(self.parameters.n_com, len(others)), replace=False)
        return [others[place] for place in sorted(drawn)]
