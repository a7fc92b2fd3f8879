"""FedAvg (McMahan et al. 2017), client half: trains the received model."""

from client_app.client import FloretClient


class FedAvg(FloretClient):
    """Receives and sends the whole model; the last one that it trained is its personal model."""
