"""Methods without a global model: the server keeps what clients publish and hands it on; it averages nothing."""

from collections.abc import Mapping

from flwr.app import Array
from flwr.serverapp import Grid

from common.tensors import NamedArrays
from strategies.core.base import FloretStrategy
from strategies.core.graph import GraphParameters, draw_graph
from strategies.core.roster import Client


class Relay(FloretStrategy):
    """Keeps each client's last upload for others. A method says what it hands on by ``payload``."""

    relays = True

    def check(self) -> None:
        """Refuse an aggregate: there is none."""
        self.need_mean()

    def initial_arrays(self) -> NamedArrays:
        """Return nothing: there is no global model."""
        return {}

    def accumulate(self, client: Client, arrays: NamedArrays, samples: int) -> None:
        """Do nothing: ``self.post`` has what a client publishes."""

    def aggregate(self) -> NamedArrays:
        """Return nothing: there is no global model."""
        return {}


class Decentralised(Relay):
    """Hands each client what its neighbours on a graph published last, whole: the i-th one's as ``i.<name>``.

    A neighbour that has not published yet is passed over; one that is away has, as it was then.

    Attributes:
        graph: of this round, over all known clients.
    """

    parameters: GraphParameters

    def prepare(self, server_round: int, clients: list[Client], grid: Grid) -> list[Client]:
        """Draw the graph of this round."""
        names = [client.name for client in self.roster]
        self.graph = draw_graph(names, self.parameters, self.config.seed, server_round)
        self.peers = {
            client.name: tuple(peer for peer in self.graph[client.name] if peer in self.post) for client in clients
        }
        return clients

    def payload(self, client: Client, server_round: int) -> Mapping[str, Array]:
        """Return what the client's neighbours published last."""
        return self.post.forward({i: (peer, self._uplink) for i, peer in enumerate(self.peers[client.name])})
