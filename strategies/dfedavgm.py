"""DFedAvgM (Sun et al. 2022): no server model; momentum SGD, then averages with neighbours on a graph."""

from dataclasses import dataclass
from typing import Any

from common.config import between
from strategies.core import Client, Decentralised, GraphParameters, metropolis_weights


@dataclass(frozen=True, kw_only=True)
class DFedAvgMParameters(GraphParameters):
    """``momentum`` of local training, theta in the paper, in the place of the run's key of that name."""

    momentum: float = between(0, 0.9999)


class DFedAvgM(Decentralised):
    """Up: the model ``z_i`` that local training ends with. Down: those of the neighbours, whole, as ``<i>.<name>``.

    The client takes ``x_i = sum_j W_ij z_j`` over itself and its neighbours (Algorithm 1, the step of communication),
    with Metropolis' weights: ``W_ij = 1 / (1 + max(deg_i, deg_j))``, and ``W_ii`` the rest. A neighbour that has not
    published yet leaves its weight to the client itself. The server averages nothing.
    """

    shares = "model"
    Parameters = DFedAvgMParameters
    parameters: DFedAvgMParameters

    def instructions(self, client: Client, server_round: int) -> dict[str, Any]:
        """Return the weights of the neighbours whose models are sent, in the order of these."""
        weights = metropolis_weights(self.graph, client.name)
        return {"weights": [weights[peer] for peer in self.peers[client.name]]}
