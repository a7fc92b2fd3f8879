"""A sketch with two networks: a private model learns with a small shared one, which travels as factors of low rank."""

import math
from dataclasses import dataclass

import numpy as np
from torch import nn

from common.config import between
from common.tensors import Free, NamedArrays, Specs, TensorSpec
from strategies.core import Client, FloretStrategy, Network, Setup

STUDENT = "student"


@dataclass(frozen=True)
class StudentParameters:
    """``width`` of the student's hidden layer; at most ``rank`` columns and rows of a matrix travel."""

    width: int = between(1)
    rank: int = between(1)


class Student(FloretStrategy):
    """Down: the student. Up: of each of its matrices ``<name>.u`` (rows, rank) and ``<name>.v`` (rank, columns), else
    the tensor itself. Aggregate: mean weighted by training samples of the products.
    """

    shares = "nothing"
    Parameters = StudentParameters

    @classmethod
    def networks(cls, setup: Setup) -> dict[str, Network]:
        """Return the student."""
        inputs, width = math.prod(setup.input_shape), setup.parameters.width
        return {
            STUDENT: Network(
                lambda: nn.Sequential(
                    nn.Flatten(), nn.Linear(inputs, width), nn.ReLU(), nn.Linear(width, setup.classes)
                ),
                shared=True,
            )
        }

    @classmethod
    def uplink(cls, setup: Setup) -> Specs:
        """Return the factors of each matrix."""
        specs: dict[str, TensorSpec] = {}
        for name, spec in cls.shared_networks(setup).items():
            if len(spec.shape) == 2:
                rank = Free(setup.parameters.rank, f"rank of {name}")
                specs |= {
                    f"{name}.u": TensorSpec((spec.shape[0], rank)),
                    f"{name}.v": TensorSpec((rank, spec.shape[1])),
                }
            else:
                specs[name] = spec
        return specs

    @classmethod
    def downlink(cls, setup: Setup) -> Specs:
        """Return the student itself."""
        return cls.shared_networks(setup)

    def accumulate(self, client: Client, arrays: NamedArrays, samples: int) -> None:
        """Multiply the factors, and add to the mean."""
        whole = {name: array for name, array in arrays.items() if not name.endswith((".u", ".v"))}
        for name in (name.removesuffix(".u") for name in arrays if name.endswith(".u")):
            whole[name] = np.asarray(arrays[f"{name}.u"] @ arrays[f"{name}.v"])
        super().accumulate(client, whole, samples)
