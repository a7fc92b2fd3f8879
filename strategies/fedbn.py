"""FedBN (Li et al. 2021): everything is shared but batch normalisation."""

from strategies.core import FloretStrategy


class FedBN(FloretStrategy):
    """Down and up: the model without its batch-normalisation layers. Aggregate: mean weighted by training samples."""

    shares = "model-without-batch-norm"
