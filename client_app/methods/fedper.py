"""FedPer (Arivazhagan et al. 2019), client half: a private head on a shared extractor, trained together."""

from client_app.client import FloretClient


class FedPer(FloretClient):
    """Keeps its head; receives and sends the extractor."""
