"""How a client tells its accuracies, as its node's policy says."""

from collections import Counter
from collections.abc import Iterable

EXACT, ROUNDED, NONE = "exact", "rounded", "none"
TELLING = (EXACT, ROUNDED, NONE)
# Rounded ones are multiples of this.
STEP = 0.05


def not_exact(telling: Iterable[str]) -> str:
    """Return such as ``"2 of 3 clients tell their accuracies in steps of 5 points, 1 none"``, if not all are exact.

    Args:
        telling: one of ``TELLING`` for each client.
    """
    counts = Counter(telling)
    of = f"of {counts.total()} clients"
    steps = f"tell their accuracies in steps of {100 * STEP:g} points"
    if counts[ROUNDED] and counts[NONE]:
        return f"{counts[ROUNDED]} {of} {steps}, {counts[NONE]} none"
    if counts[NONE]:
        return f"{counts[NONE]} {of} tell no accuracies"
    return f"{counts[ROUNDED]} {of} {steps}" if counts[ROUNDED] else ""
