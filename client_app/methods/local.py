"""Local, client half: trains alone; nothing is received or sent."""

from client_app.client import FloretClient


class Local(FloretClient):
    """Keeps its whole model."""
