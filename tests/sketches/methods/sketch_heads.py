"""A sketch of an aggregate for each client, client half."""

from client_app.client import FloretClient


class Heads(FloretClient):
    """Trains what it receives."""
