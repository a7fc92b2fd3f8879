"""Local: trains alone; nothing arrives and nothing leaves."""

from client_app.client import FloretClient


class Local(FloretClient):
    """Keeps its whole model."""
