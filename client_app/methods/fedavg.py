"""FedAvg (McMahan et al. 2017), client half: trains the received model."""

from client_app.client import FloretClient


class FedAvg(FloretClient):
    """Receives and sends the whole model; what it trained last is its personal model."""
