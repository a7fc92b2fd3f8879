"""LG-FedAvg (Liang et al. 2020), client half: a private extractor under a shared head, trained together."""

from torch import Tensor

from client_app.client import FloretClient
from strategies.lg_fedavg import LGFedAvgParameters


class LGFedAvg(FloretClient):
    """Receives and sends the model in the FedAvg rounds, the head in those after; keeps its extractor then."""

    parameters: LGFedAvgParameters

    def receive(self) -> None:
        """Take what is shared; an own extractor stays, also where a server that lost its reply sends FedAvg's again."""
        if self.setting.state.round > self.parameters.fedavg_rounds:
            self.received = {name: tensor for name, tensor in self.received.items() if name.startswith("head.")}
        super().receive()

    def upload(self) -> dict[str, Tensor]:
        """Return what is shared in this round."""
        shared = super().upload()
        if self.message["round"] <= self.parameters.fedavg_rounds:
            return shared
        return {name: tensor for name, tensor in shared.items() if name.startswith("head.")}
