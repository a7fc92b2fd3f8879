"""FedCPD (Jin et al. 2025): FedRep, distilled from the client's own last extractor, with prototype contrast."""

from dataclasses import dataclass

from common.config import between
from strategies.core import FloretStrategy, TensorSpec


@dataclass(frozen=True, kw_only=True)
class FedCPDParameters:
    """``distill``, ``align`` and ``contrast`` are switches; ``alpha`` weighs the alignment, ``beta`` the contrast,
    ``gamma`` the distillation; ``tau`` is the temperature of the contrast, ``fusion_width`` the channels of fused maps.
    """

    distill: bool
    align: bool
    contrast: bool
    alpha: float = between(0)
    beta: float = between(0)
    gamma: float = between(0)
    tau: float = between(0, above=True)
    fusion_width: int = between(1)


class FedCPD(FloretStrategy):
    """Down: the extractor and the global prototypes that exist. Up: the extractor and ``prototype.<class>`` of own
    classes, (features,) float32.

    Aggregate: plain mean of extractors; ``P_c`` = plain mean over the sampled clients that have class c (Algorithm 1,
    line 2).
    """

    shares = "extractor"
    weighted = False
    Parameters = FedCPDParameters

    def check(self) -> None:
        """Refuse distillation for an extractor that has no convolutional stage."""
        if self.parameters.distill:
            self.need_stages("fedcpd.distill = True")

    def expected(self) -> dict[str, TensorSpec]:
        """Return the extractor and a prototype for each class, the latter optional."""
        return super().expected() | self.prototype_specs()
