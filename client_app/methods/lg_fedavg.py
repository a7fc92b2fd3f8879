"""LG-FedAvg (Liang et al. 2020), client half: a private extractor under a shared head, trained together."""

from torch import Tensor

from client_app.client import FloretClient
from common.errors import FloretError
from strategies.lg_fedavg import LGFedAvgParameters


class LGFedAvg(FloretClient):
    """Receives and sends the model in the FedAvg rounds, the head in those after; keeps its extractor then."""

    parameters: LGFedAvgParameters

    def receive(self) -> None:
        """Take what is shared; an extractor that was trained alone in this run stays, also where a server that lost its
        reply sends FedAvg's again.

        Raises:
            FloretError: the head came alone, to a client that has no such extractor: its state was lost.
        """
        private = not self._is_fedavg()
        if private and self._has_own():
            self.received = {name: tensor for name, tensor in self.received.items() if name.startswith("head.")}
        elif private and self.parameters.fedavg_rounds and self.received.keys() < set(self.shared_names()):
            raise FloretError("the server sent the head alone, and this client has no extractor of its own in this run")
        super().receive()

    def starts_from(self) -> list[str]:
        """Return what is shared in this round: in a FedAvg round the extractor, too, or the private one would leave."""
        return self.shared_names() if self._is_fedavg() else super().starts_from()

    def upload(self) -> dict[str, Tensor]:
        """Return what is shared in this round."""
        shared = super().upload()
        if self._is_fedavg():
            return shared
        return {name: tensor for name, tensor in shared.items() if name.startswith("head.")}

    def _is_fedavg(self) -> bool:
        fedavg: bool = self.message["round"] <= self.parameters.fedavg_rounds
        return fedavg

    def _has_own(self) -> bool:
        """Return whether the client has trained an extractor alone in this run."""
        own: bool = self.is_of_this_run() and self.setting.state.round > self.parameters.fedavg_rounds
        return own
