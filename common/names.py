"""Names: sorted as people count, and grouped by what they begin with."""

import re
from collections.abc import Mapping
from typing import TypeVar

T = TypeVar("T")
NaturalKey = tuple[list[tuple[int, int, str]], str]


def natural_key(name: str) -> NaturalKey:
    """Return a sort key under which client 2 comes before client 10 and ``site-2`` before ``site-10``.

    Numbers are compared by value without being converted: a name may have digits that ``int`` does not take. No two
    names have the same key, so that the order depends on the names alone.
    """
    parts = re.split(r"([0-9]+)", name)
    numbers = {part: part.lstrip("0") for part in parts[1::2]}
    key = [(0, len(numbers[part]), numbers[part]) if part in numbers else (1, 0, part) for part in parts if part]
    return key, name


def without_prefix(items: Mapping[str, T], prefix: str) -> dict[str, T]:
    """Return the items whose names begin with ``prefix``, under the rest of their names."""
    return {name.removeprefix(prefix): item for name, item in items.items() if name.startswith(prefix)}
