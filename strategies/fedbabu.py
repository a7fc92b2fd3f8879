"""FedBABU (Oh et al. 2022): a shared extractor under a head that is never trained, then fine-tuned."""

from dataclasses import dataclass

from common.config import between, choice
from strategies.core import FloretStrategy


@dataclass(frozen=True, kw_only=True)
class FedBABUParameters:
    """``fine_tune``: the part of the received model that ``fine_tune_epochs`` make the personal one of."""

    fine_tune: str = choice("model", "head", "extractor")
    fine_tune_epochs: int = between(1)


class FedBABU(FloretStrategy):
    """Down and up: the extractor. Aggregate: mean weighted by training samples over the sampled clients.

    The head does not travel: every client draws the same one from the run's seed. What is fine-tuned does not, either.
    """

    shares = "extractor"
    protects = frozenset({"client", "example"})
    Parameters = FedBABUParameters
