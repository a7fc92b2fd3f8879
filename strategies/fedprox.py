"""FedProx (Li et al. 2020): FedAvg whose clients stay near the global model."""

from dataclasses import dataclass

from common.config import RunConfig, between
from strategies.core import FloretStrategy


@dataclass(frozen=True)
class FedProxParameters:
    """``mu``: weight of half the squared distance to the received model."""

    mu: float = between(0)


class FedProx(FloretStrategy):
    """Down and up: the whole model. Aggregate: mean weighted by training samples over the sampled clients."""

    shares = "model"
    protects = frozenset({"client", "example"})
    serves_global = True
    Parameters = FedProxParameters

    @classmethod
    def decays(cls, config: RunConfig, parameters: FedProxParameters) -> dict[str, float]:
        """Add the pull to the global weights."""
        return super().decays(config, parameters) | {"lr times fedprox.mu": config.lr * parameters.mu}
