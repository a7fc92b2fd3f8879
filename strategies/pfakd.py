"""PFAKD (Qi et al. 2024): FedPer whose clients keep their features near those of the received extractor."""

from dataclasses import dataclass

from common.config import between, choice
from strategies.core import FloretStrategy


@dataclass(frozen=True, kw_only=True)
class PFAKDParameters:
    """``beta`` weighs the distillation (equation 2), ``distill_reduction`` is ``"mean"`` over features or ``"sum"``;
    ``attention_transfer`` adds the paper's "+AT" in our reading, weighed by ``attention_weight``.
    """

    beta: float = between(0)
    distill_reduction: str = choice("mean", "sum")
    attention_transfer: bool
    attention_weight: float = between(0)


class PFAKD(FloretStrategy):
    """Down and up: the extractor. Aggregate: plain mean over the sampled clients (Algorithm 1, line 16)."""

    shares = "extractor"
    protects = frozenset({"client", "example"})
    weighted = False
    Parameters = PFAKDParameters
    parameters: PFAKDParameters

    def check(self) -> None:
        """Refuse attention transfer for an extractor that has no convolutional stage."""
        if self.parameters.attention_transfer:
            self.need_stages("pfakd.attention-transfer")
