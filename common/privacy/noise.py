"""Normal noise, and the norm that bounds what it hides."""

import math
import secrets
from collections.abc import Mapping
from typing import Self

import numpy as np

from common.seeds import derive_seed
from common.tensors import NamedArrays

# Bits of the operating system's randomness behind the noise of a device.
_BITS = 256


class Noise:
    """A source of normal noise, and of the draws of samples that go with it.

    On a device it is seeded by the operating system and is another one for every message: who can predict the noise,
    or is sent the same noise twice, can take it away. In a simulation, where all data are the user's own, it follows
    from the run's seed, so that a run can be made again.

    Values are drawn in float64, and what they are added to is rounded to float32 afterwards.
    """

    def __init__(self, seed: int) -> None:
        self.generator = np.random.Generator(np.random.Philox(np.random.SeedSequence(seed)))

    @classmethod
    def secret(cls) -> Self:
        """Return a source that nobody can predict."""
        return cls(secrets.randbits(_BITS))

    @classmethod
    def of(cls, seed: int, *purpose: str | int) -> Self:
        """Return the source of a simulation for ``purpose``."""
        return cls(derive_seed(seed, "noise", *purpose))

    def normal(self, shape: tuple[int, ...], deviation: float) -> np.ndarray:
        """Return float64 values of this standard deviation."""
        values = self.generator.standard_normal(shape)
        values *= deviation
        return values

    def once(self, shape: tuple[int, ...], deviation: float) -> np.ndarray:
        """Return noise for what is released as it is, and not after many more steps: each value a sum of four draws.

        A single draw of floating point leaves gaps in which no sum can lie, and they tell what the noise was added to
        (Mironov 2012); after the sum of several nobody can find them (Holohan and Braghin 2021).
        """
        return sum(self.generator.standard_normal(shape) for _ in range(4)) * (deviation / 2)  # type: ignore[return-value]


def norm_of(arrays: Mapping[str, np.ndarray]) -> float:
    """Return the Euclidean norm of all arrays as one vector; infinity if a value is not finite."""
    with np.errstate(over="ignore", invalid="ignore"):
        squares = [float(np.square(array, dtype=np.float64).sum()) for array in arrays.values()]
    return math.sqrt(sum(squares)) if all(map(math.isfinite, squares)) else math.inf


def clipped(arrays: Mapping[str, np.ndarray], bound: float) -> NamedArrays:
    """Return ``arrays`` as float64, scaled down together to the norm ``bound`` if theirs is larger; zeros if a value is
    not finite.
    """
    norm = norm_of(arrays)
    if not math.isfinite(norm):
        return {name: np.zeros(array.shape) for name, array in arrays.items()}
    factor = min(1.0, bound / norm) if norm else 1.0
    return {name: array.astype(np.float64) * factor for name, array in arrays.items()}
