"""What a client that may say anything counts for at most, beside the others."""

from collections.abc import Iterable
from statistics import median

# Of real nodes, none counts for more than so many times the median of what all say: each says its own.
MOST_TIMES = 100


def at_most(values: Iterable[float], *, least: float = 0.0) -> list[float]:
    """Return values, none above ``MOST_TIMES`` the median of those above 0, or ``least`` if that is less, nor as far
    below 0.
    """
    values = list(values)
    bound = MOST_TIMES * max(median([value for value in values if value > 0] or [0.0]), least)
    return [max(-bound, min(value, bound)) for value in values]
