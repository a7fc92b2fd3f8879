"""FedDFPA (Chen et al. 2025): extractors stay private; heads are fused class by class, features follow prototypes."""

from dataclasses import dataclass

from common.config import between, choice
from common.errors import ConfigError
from common.tensors import Specs
from strategies.core import FloretStrategy, Setup


@dataclass(frozen=True, kw_only=True)
class FedDFPAParameters:
    """``fusion`` of the heads' rows, ``align_global`` and ``align_historical`` are switches; ``align_reduction`` is
    ``"mean"`` over features or ``"sum"``, ``historical_weight`` weighs the historical alignment; prototypes are those
    of the fused model (Algorithm 1, line 13), with ``prototypes_after_training`` those of the trained one (section
    4.2); with ``own_start`` every client draws its own initial model (Algorithm 1).
    """

    fusion: bool
    align_global: bool
    align_historical: bool
    align_reduction: str = choice("mean", "sum")
    historical_weight: float = between(0)
    prototypes_after_training: bool
    own_start: bool


class FedDFPA(FloretStrategy):
    """Down: the global head and the global prototypes that exist. Up: the head and ``prototype.<class>``, (features,)
    float32, of own classes.

    Aggregate: plain mean of heads, rows of classes that a client does not have included (Algorithm 1, line 19);
    ``P_c`` = plain mean over the sampled clients that have class c (line 20).
    """

    shares = "head"
    weighted = False
    Parameters = FedDFPAParameters
    parameters: FedDFPAParameters

    def check(self) -> None:
        """Refuse to fuse a head of several layers: the received last layer does not fit the own layers before it."""
        if self.parameters.fusion and self.setup.head_layers > 1:
            raise ConfigError(
                f"head-layers = {self.setup.head_layers}: feddfpa fuses the rows of one layer; use 1, or "
                "feddfpa.fusion=false"
            )

    def replaced(self) -> frozenset[str]:
        """Return the head: a client's own, into which the received one is at most fused, goes on from round to round.

        How far it is from the global one does not grow with the steps of the round.
        """
        return frozenset({"head"})

    @classmethod
    def uplink(cls, setup: Setup) -> Specs:
        """Return the head and a prototype for each class, the latter optional."""
        return {**super().uplink(setup), **setup.prototypes()}
