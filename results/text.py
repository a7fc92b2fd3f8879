"""Figures and names as text."""

import math
from collections.abc import Callable, Sequence
from statistics import mean, pstdev
from typing import Any

from common.errors import printable
from results.history import Spread

MISSING = "\N{EN DASH}"
# Characters of a cell of a table: a claim may tell of many columns.
_LONGEST_CELL = 100_000


def percent(value: float | None) -> str:
    """Return 0.9731 as ``"97.3 %"`` (the space does not break), None as a dash."""
    return MISSING if value is None else f"{100 * value:.1f}\u00a0%"


def percent_over_clients(spread: Spread) -> str:
    """Return mean and standard deviation over clients as ``"97.3 ± 1.2 %"`` (the space before % does not break)."""
    if spread.mean is None or spread.std is None:
        return percent(spread.mean)
    return f"{100 * spread.mean:.1f} ± {100 * spread.std:.1f}\u00a0%"


def percent_over_runs(values: Sequence[float | None], digits: int = 1) -> str:
    """Return accuracies in [0, 1] of several runs as ``"97.3 ± 1.2"``, mean and standard deviation (population).

    Without the sign, which the heading of a column has. One value has no deviation; ``-`` stands for none.
    """
    measured = [100 * value for value in values if value is not None]
    if not measured:
        return "-"
    return f"{mean(measured):.{digits}f}" + (f" ± {pstdev(measured):.{digits}f}" if len(measured) > 1 else "")


def megabytes(count: float | None) -> str:
    """Return bytes as MB (10^6), with three figures below 100 MB, without the unit."""
    if count is None:
        return MISSING
    amount = count / 1e6
    if amount == 0:
        return "0"
    digits = 0 if amount >= 100 else min(4, max(0, 2 - math.floor(math.log10(amount))))
    return f"{amount:,.{digits}f}"


def duration(seconds: float | None) -> str:
    """Return seconds as ``"4.2 s"``, ``"4 min 12 s"`` or ``"2 h 05 min"``."""
    if seconds is None:
        return MISSING
    if seconds < 59.95:
        return f"{seconds:.2g} s" if seconds < 1 else f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def countdown(seconds: float) -> str:
    """Return seconds as ``"4:12"`` or ``"2:05:00"``."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"


def plain(value: Any) -> str:
    """Return the value of a key of the run config as printable text: ``true`` for True, ``1`` for 1.0."""
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value).removesuffix(".0") if isinstance(value, float) else printable(value)


def cells(texts: Sequence[str]) -> str:
    """Return a row of a Markdown table: a ``|`` in a text divides no cells, and codes of a terminal do nothing."""
    return "| " + " | ".join(printable(text, _LONGEST_CELL).replace("|", r"\|") for text in texts) + " |"


def short(name: str, length: int = 28) -> str:
    """Return a client's name on one line, cut to ``length`` in the middle: names often differ only at their end."""
    name = printable(name)
    if len(name) <= length:
        return name
    end = (length - 1) // 2
    return f"{name[: length - 1 - end]}…{name[-end:]}"


def cut(names: Sequence[str], length: int) -> list[str]:
    """Return names of runs, such as ``"fedper, seed 0"``, of at most ``length`` characters.

    Their last parts are left out, so that no key loses its value. Where several would be the same they are whole.
    """

    def shortened(name: str) -> str:
        name = printable(name)
        if len(name) <= length or ", " not in name[: length - 2]:
            return short(name, length)
        return f"{name[: length - 1].rpartition(', ')[0]}, …"

    cuts = [shortened(name) for name in names]
    return [short(name, len(name)) if cuts.count(one) > 1 else one for name, one in zip(names, cuts, strict=True)]


# Of the templates.
FILTERS: dict[str, Callable[[Any], str]] = {
    "percent": percent,
    "megabytes": megabytes,
    "duration": duration,
    "plain": plain,
}
