"""DFedAvgM (Sun et al. 2022), client half: averages the own model with those of neighbours, then momentum SGD."""

from torch import Tensor

from client_app.client import FloretClient
from client_app.training import Phase
from common.errors import FloretError
from strategies.dfedavgm import DFedAvgMParameters


def mixed(own: Tensor, others: list[Tensor], weights: list[float]) -> Tensor:
    """Return ``sum_j w_j others_j + (1 - sum_j w_j) own``; ``own`` itself if there are no others."""
    result = own * (1 - sum(weights))
    for weight, other in zip(weights, others, strict=True):
        result = result + weight * other
    return result


class DFedAvgM(FloretClient):
    """Keeps its model; in each round averages it with what its neighbours published last."""

    goes_on = True
    parameters: DFedAvgMParameters

    def receive(self) -> None:
        """Take the weighted mean of the own model and the neighbours'.

        Raises:
            FloretError: the weights are not those of a mean.
        """
        peers, weights = self.peers(self.shared_names()), self.message.get("weights", [])
        if list(peers) != list(range(len(weights))):
            raise FloretError(f"the server sent {len(weights)} weights and models of {len(peers)} peers")
        if not all(0 < weight <= 1 for weight in weights) or sum(weights) > 1 + 1e-6:
            raise FloretError("the server sent weights that are not those of a mean: each above 0, together at most 1")
        own = self.model.state_dict()
        for name in self.shared_names():
            own[name].copy_(mixed(own[name], [tensors[name] for tensors in peers.values()], weights))

    def train(self) -> float:
        """Train for ``local-epochs`` with the method's momentum, whose buffer starts empty."""
        phase = Phase(list(self.model.parameters()), self.loss, momentum=self.parameters.momentum)
        return self.run_alternating(self.config.local_epochs, [phase])
