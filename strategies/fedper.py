"""FedPer (Arivazhagan et al. 2019): a shared extractor, a private head, trained together."""

from strategies.core import FloretStrategy


class FedPer(FloretStrategy):
    """Down and up: the extractor. Aggregate: mean weighted by training samples over the sampled clients."""

    shares = "extractor"
    protects = frozenset({"client", "example"})
