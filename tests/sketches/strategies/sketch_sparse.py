"""A sketch of a sparse, decentralised method: each client has a mask of its own and meets two neighbours on a ring."""

from collections.abc import Mapping
from dataclasses import dataclass

from flwr.app import Array

from common.config import between
from common.tensors import NamedArrays, Specs, TensorSpec
from strategies.core import Client, FloretStrategy, Setup


@dataclass(frozen=True)
class SparseParameters:
    """``density``: the part of the weights that a client has."""

    density: float = between(0, 1, above=True)


class Sparse(FloretStrategy):
    """Up: the weights in the client's mask. Down: those of the neighbours before and after it, as ``0.`` and ``1.``."""

    relays = True
    Parameters = SparseParameters

    @classmethod
    def uplink(cls, setup: Setup) -> Specs:
        """Return the model, sparse."""
        return {name: TensorSpec(spec.shape, sparse=True) for name, spec in setup.tensors("model").items()}

    def initial_arrays(self) -> NamedArrays:
        """Return nothing: there is no global model."""
        return {}

    def payload(self, client: Client, server_round: int) -> Mapping[str, Array]:
        """Return what the neighbours sent last."""
        ring = [other.name for other in self.roster]
        place = ring.index(client.name)
        neighbours = [ring[place - 1], ring[(place + 1) % len(ring)]]
        return self.post.forward({i: (name, self._uplink) for i, name in enumerate(neighbours) if name in self.post})

    def accumulate(self, client: Client, arrays: NamedArrays, samples: int) -> None:
        """Do nothing: what a client sends is in the post."""

    def aggregate(self) -> NamedArrays:
        """Return nothing."""
        return {}
