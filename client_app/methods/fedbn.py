"""FedBN (Li et al. 2021), client half: batch normalisation stays private."""

from client_app.client import FloretClient


class FedBN(FloretClient):
    """Keeps every batch-normalisation layer, weights and running statistics; shares the rest."""
