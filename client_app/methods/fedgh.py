"""FedGH (Yi et al. 2023), client half: trains the received head with the own extractor, sends class means."""

from torch import Tensor

from client_app.client import FloretClient


class FedGH(FloretClient):
    """Keeps its whole model; the received head takes the place of its own before training."""

    def upload(self) -> dict[str, Tensor]:
        """Return the mean feature of each own class after training."""
        return self.local_prototypes()
