"""Ditto (Li et al. 2021): a shared model as in FedAvg, and a personal one that stays near it."""

from dataclasses import dataclass

from common.config import between
from strategies.core import FloretStrategy


@dataclass(frozen=True, kw_only=True)
class DittoParameters:
    """``lambda_`` weighs half the squared distance to the received model in the training of the personal one, which
    takes ``personal_epochs``.
    """

    lambda_: float = between(0)
    personal_epochs: int = between(1)


class Ditto(FloretStrategy):
    """Down and up: the shared model. Aggregate: mean weighted by training samples over the sampled clients."""

    shares = "model"
    protects = frozenset({"client", "example"})
    Parameters = DittoParameters
