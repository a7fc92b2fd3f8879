"""FedProto (Tan et al. 2022): whole models stay private, class prototypes are averaged."""

from dataclasses import dataclass

from common.config import between, choice
from common.tensors import NamedArrays, Specs
from strategies.core import FloretStrategy, Setup


@dataclass(frozen=True)
class FedProtoParameters:
    """``lambda_``: weight of the alignment; ``inference``: what a client predicts with."""

    lambda_: float = between(0)
    inference: str = choice("prototype", "own-prototype", "head")


class FedProto(FloretStrategy):
    """Down: the global prototypes that exist. Up: own classes' prototypes, ``prototype.<class>``, (features,) float32.

    Aggregate: ``P_c`` = plain mean over the sampled clients that have class c (equation 6 without the weights by
    counts, which no published code has either: counts are not sent); a class that no client sent keeps its ``P_c``.
    """

    shares = "nothing"
    weighted = False
    Parameters = FedProtoParameters

    def initial_arrays(self) -> NamedArrays:
        """Return nothing: there are no prototypes before the first round."""
        return {}

    @classmethod
    def uplink(cls, setup: Setup) -> Specs:
        """Return a prototype for each class, all optional."""
        return setup.prototypes()
