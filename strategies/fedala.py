"""FedALA (Zhang et al. 2023): FedAvg whose clients mix the global model into their own, element by element."""

from dataclasses import dataclass

from common.config import between
from models import last_layers
from strategies.core import FloretStrategy


@dataclass(frozen=True, kw_only=True)
class FedALAParameters:
    """``eta``: rate of the mixing weights; ``layers``: so many of the last layers are mixed, the others taken from the
    global model; ``percent`` of the training samples are used for it. The first time weights are learned until the
    deviation of the last losses is below ``threshold``, at most for ``first_epochs``; later for one epoch.
    """

    eta: float = between(0)
    layers: int = between(1)
    percent: int = between(1, 100)
    first_epochs: int = between(1)
    threshold: float = between(0)


class FedALA(FloretStrategy):
    """Down and up: the whole model. Aggregate: mean weighted by training samples over the sampled clients.

    The mixing weights stay with the client.
    """

    shares = "model"
    Parameters = FedALAParameters
    parameters: FedALAParameters

    def check(self) -> None:
        """Refuse more layers than the model has."""
        last_layers(self.config.model, self.setup.input_shape, self.model, self.parameters.layers, "fedala.layers")
