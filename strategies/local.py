"""Local: every client trains alone; the baseline that a federation has to beat."""

from strategies.core import FloretStrategy


class Local(FloretStrategy):
    """Sends and receives nothing but the round's number."""

    shares = "nothing"
