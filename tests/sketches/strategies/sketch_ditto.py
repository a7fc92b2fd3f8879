"""Ditto (Li et al. 2021) as a sketch: a shared model, and a personal one that stays near it."""

from dataclasses import dataclass

from common.config import between
from strategies.core import FloretStrategy


@dataclass(frozen=True)
class DittoParameters:
    """``lambda_`` weighs half the squared distance of the personal model to the received one."""

    lambda_: float = between(0)


class Ditto(FloretStrategy):
    """Down and up: the shared model. Aggregate: mean weighted by training samples."""

    shares = "model"
    Parameters = DittoParameters
