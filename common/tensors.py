"""What a tensor that travels looks like: declared once for both halves of a method, checked on both sides."""

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from common.errors import FloretError

NamedArrays = dict[str, np.ndarray]

# Beside a sparse tensor ``w`` stands the boolean tensor ``mask.w``: which of its elements there are.
MASK = "mask."
# A tensor of the i-th peer is called ``<i>.<name>``.
_OF_PEER = re.compile(r"([0-9]{1,6})\.(.+)", re.DOTALL)


class TensorError(FloretError):
    """A tensor that travels is not what was declared; the message names it."""


@dataclass(frozen=True)
class Free:
    """A side that the sender chooses, from ``least`` to ``most``.

    Free sides of the same ``name`` are equal within a message, as the rank is in both factors of a matrix.
    """

    most: int
    name: str = ""
    least: int = 1

    def __str__(self) -> str:
        return f"{self.least}..{self.most}"


@dataclass(frozen=True)
class TensorSpec:
    """What a tensor that travels must look like.

    Attributes:
        shape: its sides, fixed or free.
        dtype: in which methods see it. ``"float32"`` travels as the key ``wire`` says, ``"bool"`` as bits, anything
            else as it is.
        optional: it may be missing.
        sparse: only the elements in ``mask.<name>`` travel, behind the mask as bits; without such a mask, those that
            are not zero; all of them without the bits if none is left out. Who receives it finds zeros elsewhere, and
            the mask beside it.
        negative: it may have values below zero; a variance may not.
    """

    shape: tuple[int | Free, ...]
    dtype: str = "float32"
    optional: bool = False
    sparse: bool = False
    negative: bool = True

    def __post_init__(self) -> None:
        """Check what makes sense.

        Raises:
            ValueError: a sparse tensor has a free side, or is not of floating point.
        """
        if self.sparse and (self.dtype != "float32" or any(isinstance(side, Free) for side in self.shape)):
            raise ValueError("a sparse tensor is float32 and has fixed sides")

    def fits(self, shape: tuple[int, ...]) -> bool:
        """Return whether a tensor may have this shape."""
        return shape == self.shape or (
            len(shape) == len(self.shape)
            and all(
                side.least <= have <= side.most if isinstance(side, Free) else side == have
                for side, have in zip(self.shape, shape, strict=True)
            )
        )

    @property
    def most_bytes(self) -> int:
        """The size of the largest tensor that fits, as methods see it."""
        sides = (side.most if isinstance(side, Free) else side for side in self.shape)
        return math.prod(sides) * np.dtype(self.dtype).itemsize

    def __str__(self) -> str:
        sides = ", ".join(map(str, self.shape)) + ("," if len(self.shape) == 1 else "")
        return f"{self.dtype} ({sides})"


Specs = Mapping[str, TensorSpec]


def spec_of(name: str, specs: Specs, *, peers: bool = False) -> TensorSpec:
    """Return what ``name`` must look like; with ``peers``, ``<number>.<name>`` must look like ``<name>``.

    Raises:
        TensorError: it is not declared.
    """
    if name not in specs and peers and (match := _OF_PEER.fullmatch(name)):
        name = match[2]
    if name not in specs:
        raise TensorError(f"tensor {name} is unknown")
    return specs[name]


def check_tensor(name: str, spec: TensorSpec, dtype: object, shape: tuple[int, ...]) -> None:
    """Check type and sides.

    Raises:
        TensorError: they are not those of ``spec``.
    """
    if str(dtype) != spec.dtype or not spec.fits(shape):
        raise TensorError(f"tensor {name} is {dtype} {shape}, it must be {spec}")


def check_missing(names: Iterable[str], specs: Specs) -> None:
    """Check that every tensor that is not optional is there.

    Raises:
        TensorError: one is missing.
    """
    there = set(names)
    for name, spec in specs.items():
        if name not in there and not spec.optional:
            raise TensorError(f"tensor {name} is missing")


def check_free_sides(shapes: Mapping[str, tuple[int, ...]], specs: Specs, *, peers: bool = False) -> None:
    """Check that free sides of the same name are equal; those of different peers need not be.

    Raises:
        TensorError: two are not.
    """
    chosen: dict[tuple[str, str], tuple[str, int]] = {}
    for name, shape in shapes.items():
        if name in specs and specs[name].shape == shape:
            continue
        match = _OF_PEER.fullmatch(name) if peers and name not in specs else None
        for side, have in zip(spec_of(name, specs, peers=peers).shape, shape, strict=True):
            if isinstance(side, Free) and side.name:
                first, length = chosen.setdefault((match[1] if match else "", side.name), (name, have))
                if length != have:
                    raise TensorError(f"tensor {name} has {have} for the side {side.name}, {first} has {length}")
