"""FedRep (Collins et al. 2021): a shared extractor, a private head, trained in turn."""

from dataclasses import dataclass

from common.config import RunConfig, between
from strategies.core import FloretStrategy


@dataclass(frozen=True, kw_only=True)
class FedRepParameters:
    """``head_epochs``: epochs of the head before the ``local-epochs`` of the extractor. ``every_batch``: instead, head
    and extractor take turns on every batch of the ``local-epochs``, which is what FedCPD is built on.
    """

    head_epochs: int = between(1)
    every_batch: bool


class FedRep(FloretStrategy):
    """Down and up: the extractor. Aggregate: mean weighted by training samples over the sampled clients."""

    shares = "extractor"
    protects = frozenset({"client", "example"})
    Parameters = FedRepParameters

    @classmethod
    def passes(cls, config: RunConfig, parameters: FedRepParameters) -> int:
        """Return the passes of head and extractor together: the head feeds the extractor."""
        return config.local_epochs + (config.local_epochs if parameters.every_batch else parameters.head_epochs)
