"""FedAvg (McMahan et al. 2017): one global model, averaged by numbers of samples."""

from strategies.core import FloretStrategy


class FedAvg(FloretStrategy):
    """Down and up: the whole model. Aggregate: mean weighted by training samples over the sampled clients."""

    shares = "model"
    protects = frozenset({"client", "example"})
    serves_global = True
