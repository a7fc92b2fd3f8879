"""PFPS-LWC (Liu et al. 2025): FedPer whose clients first recall their own last extractor, with a lightweight head."""

from dataclasses import dataclass

from common.config import RunConfig, between
from strategies.core import FloretStrategy


@dataclass(frozen=True, kw_only=True)
class PFPSLWCParameters:
    """``recall`` moves the received extractor towards the client's own last one for ``recall_epochs``, at the rate
    ``recall_lr``, which ``lr-decay`` lowers as it does ``lr``, or if it is 0 at that of the round; ``lightweight`` adds
    ``lambda_`` times the norm of the head to the loss. With both off this is FedPer.
    """

    recall: bool
    recall_epochs: int = between(1)
    recall_lr: float = between(0)
    lightweight: bool
    lambda_: float = between(0)


class PFPSLWC(FloretStrategy):
    """Down and up: the extractor. Aggregate: mean weighted by training samples (Algorithm 1, lines 20 and 21)."""

    shares = "extractor"
    Parameters = PFPSLWCParameters

    @classmethod
    def decays(cls, config: RunConfig, parameters: PFPSLWCParameters) -> dict[str, float]:
        """Add that of recall."""
        return super().decays(config, parameters) | {
            "pfps-lwc.recall-lr times weight-decay": parameters.recall_lr * config.weight_decay
        }
