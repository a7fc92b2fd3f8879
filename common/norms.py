"""How large tensors are, by group, without a copy of them."""

import math
from collections.abc import Iterator, Mapping

import numpy as np

# Elements that are worked on at a time, so that what is written in between stays in the cache. Most tensors have fewer,
# and are not worth a loop.
CHUNK = 1 << 15


def group_of(name: str) -> str:
    """Return the group that a tensor counts in."""
    return name.partition(".")[0]


def root_mean_squares(arrays: Mapping[str, np.ndarray], known: Mapping[str, np.ndarray]) -> dict[str, float]:
    """Return the root mean square of ``arrays - known`` by group; infinite where float32 cannot hold the squares."""
    squares: dict[str, float] = {}
    counts: dict[str, int] = {}
    with np.errstate(over="ignore", invalid="ignore"):
        for name, array in arrays.items():
            if array.dtype.kind == "f" and array.size:
                group = group_of(name)
                squares[group] = squares.get(group, 0.0) + _squared_distance(array, known.get(name))
                counts[group] = counts.get(group, 0) + array.size
    return {group: math.sqrt(total / counts[group]) for group, total in squares.items()}


def _squared_distance(array: np.ndarray, other: np.ndarray | None) -> float:
    total = 0.0
    flat = array.reshape(-1)
    known = other.reshape(-1) if other is not None and other.shape == array.shape else None
    if array.size <= CHUNK:
        difference = flat if known is None else flat - known
        return float(np.dot(difference, difference))
    if known is None:
        for start in range(0, flat.size, CHUNK):
            part = flat[start : start + CHUNK]
            total += float(np.dot(part, part))
    else:
        for part, before, difference in chunks(flat, known):
            np.subtract(part, before, out=difference)
            total += float(np.dot(difference, difference))
    return total


def chunks(first: np.ndarray, second: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Yield parts of two flat arrays that fit into the cache, with room for a result of that size."""
    room = np.empty(min(CHUNK, first.size), first.dtype)
    for start in range(0, first.size, CHUNK):
        part = first[start : start + CHUNK]
        yield part, second[start : start + CHUNK], room[: part.size]
