"""GPFL (Zhang et al. 2023): FedPer whose features are led apart into a global and a personal route."""

from dataclasses import dataclass

from torch import Tensor, nn

from common.config import RunConfig, between, choice
from strategies.core import FloretStrategy, Network, Setup

# The names of the networks beside the model.
VALVE, EMBEDDINGS = "valve", "embeddings"


@dataclass(frozen=True, kw_only=True)
class GPFLParameters:
    """``valve``, ``angle`` and ``magnitude`` are switches: the two routes, and the two terms that lead the global one
    to the embeddings. ``lambda_`` weighs the magnitude, whose norm is over the ``"batch"`` or the mean over each
    ``"sample"``; ``mu`` is the weight decay of valve and embeddings.
    """

    valve: bool
    angle: bool
    magnitude: bool
    magnitude_reduction: str = choice("batch", "sample")
    lambda_: float = between(0)
    mu: float = between(0)


class ConditionalValve(nn.Module):
    """Scales and shifts features as a context says (CoV)."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.gamma, self.beta = (
            nn.Sequential(nn.Linear(features, features), nn.ReLU(), nn.LayerNorm(features)) for _ in range(2)
        )

    def forward(self, features: Tensor, context: Tensor) -> Tensor:
        """Return ``ReLU((gamma(context) + 1) * features + beta(context))``, (batch, d), float32.

        Args:
            features: (batch, d).
            context: (d,).
        """
        moved: Tensor = (self.gamma(context) + 1) * features + self.beta(context)
        return moved.relu().float()


class GPFL(FloretStrategy):
    """Down and up: the extractor, the conditional valve and the embeddings of all classes, (classes, features).

    Aggregate: mean weighted by training samples over the sampled clients.
    """

    shares = "extractor"
    Parameters = GPFLParameters
    parameters: GPFLParameters

    @classmethod
    def decays(cls, config: RunConfig, parameters: GPFLParameters) -> dict[str, float]:
        """Add the decay of the networks."""
        return super().decays(config, parameters) | {"lr times gpfl.mu": config.lr * parameters.mu}

    def check(self) -> None:
        """Refuse a head that takes no features."""
        self.need_vectors()

    @classmethod
    def networks(cls, setup: Setup) -> dict[str, Network]:
        """Return those that the switches use, all shared."""
        own: GPFLParameters = setup.parameters
        networks = {}
        if own.valve:
            networks[VALVE] = Network(lambda: ConditionalValve(setup.features), shared=True)
        if own.valve or own.angle or own.magnitude:
            networks[EMBEDDINGS] = Network(lambda: nn.Embedding(setup.classes, setup.features), shared=True)
        return networks
