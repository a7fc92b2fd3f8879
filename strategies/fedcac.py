"""FedCAC (Wu et al. 2023): what is critical to a client is averaged with clients like it, the rest with all."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from flwr.app import Array
from flwr.serverapp import Grid

from common.config import between
from common.errors import FloretError
from common.tensors import MASK, NamedArrays, Specs, TensorSpec
from strategies.core import Client, FloretStrategy, Setup, WeightedMean

# Bytes of masks that are compared at a time, so that they stay in the cache.
_BLOCK = 1 << 16


@dataclass(frozen=True)
class FedCACParameters:
    """``tau`` is the part of each tensor that is critical; ``beta`` the round from which nobody shares it."""

    tau: float = between(0, 1)
    beta: float = between(0, above=True)


def critical_count(size: int, tau: float) -> int:
    """Return how many of the ``size`` elements of a tensor are critical."""
    return round(tau * size)


def critical_masks(setup: Setup) -> dict[str, TensorSpec]:
    """Return what the masks look like, by the parameter: of those that have critical elements."""
    tau = setup.parameters.tau
    sizes = {name: tuple(p.shape) for name, p in setup.model.named_parameters() if critical_count(p.numel(), tau)}
    return {name: TensorSpec(shape, "bool") for name, shape in sizes.items()}


def overlaps(masks: list[np.ndarray]) -> np.ndarray:
    """Return which part of its elements each mask has in common with each other, (clients, clients) float64.

    The overlap of the paper, ``1 - ||m_i - m_j||_1 / (2 |m|)``, where all masks have the same number |m| of elements.

    Args:
        masks: bits, eight to a byte, of equal length.
    """
    bits = np.stack(masks)
    common = np.zeros((len(masks), len(masks)), np.int64)
    for start in range(0, bits.shape[1], _BLOCK):
        block = bits[:, start : start + _BLOCK]
        for i, row in enumerate(block):
            common[i, i:] += np.bitwise_count(block[i:] & row).sum(axis=1, dtype=np.int64)
    common = np.triu(common) + np.triu(common, 1).T
    result: np.ndarray = common / common.diagonal().max()
    return result


def collaborators(overlap: np.ndarray, progress: float) -> list[list[int]]:
    """Return for each client the others whose overlap with it is at least a threshold.

    The threshold goes from the mean over all pairs, at ``progress`` 0, to the largest one, at 1; beyond that nobody
    has collaborators.
    """
    clients = len(overlap)
    pairs = overlap[~np.eye(clients, dtype=bool)]
    if progress > 1 or not pairs.size:
        return [[] for _ in range(clients)]
    mean = pairs.mean()
    near = overlap - mean >= progress * (pairs.max() - mean)
    return [[j for j in range(clients) if j != i and near[i, j]] for i in range(clients)]


class FedCAC(FloretStrategy):
    """Up: the model, and for each of its parameters ``mask.<name>``, bits: which of its elements are critical. Down:
    one model for each client, its critical elements the plain mean of its own and its collaborators' last models, the
    others those of the global one. Aggregate: mean weighted by training samples.
    """

    relays = True
    Parameters = FedCACParameters
    parameters: FedCACParameters

    @classmethod
    def uplink(cls, setup: Setup) -> Specs:
        """Return the model and the masks."""
        return {**cls.downlink(setup), **{MASK + name: spec for name, spec in critical_masks(setup).items()}}

    @classmethod
    def downlink(cls, setup: Setup) -> Specs:
        """Return the model."""
        return setup.tensors(cls.shares)

    def prepare(self, server_round: int, clients: list[Client], grid: Grid) -> list[Client]:
        """Find the collaborators of each client that has sent a mask."""
        names = [MASK + name for name in critical_masks(self.setup)]
        senders = list(self.post) if names else []
        packed = [b"".join(a.data for a in self.post.forward({0: (name, names)}).values()) for name in senders]
        self._near: dict[str, list[str]] = {}
        if senders:
            masks = [np.frombuffer(bits, np.uint8) for bits in packed]
            found = collaborators(overlaps(masks), (server_round - 1) / self.parameters.beta)
            self._near = {name: [senders[j] for j in near] for name, near in zip(senders, found, strict=True)}
        return clients

    def payload(self, client: Client, server_round: int) -> Mapping[str, np.ndarray | Array]:
        """Return the client's model for this round; the global one if it has not sent a mask."""
        if client.name not in self._near:
            return self.arrays
        mean, masks = WeightedMean(), critical_masks(self.setup)
        for name in (client.name, *self._near[client.name]):
            mean.add(self.post.tensors(name, masks), 1.0)
        own = self.post.tensors(client.name, [MASK + name for name in masks])
        customised = {n: np.where(own[MASK + n], a, self.arrays[n]) for n, a in mean.result().items()}
        return {**self.arrays, **customised}

    def accumulate(self, client: Client, arrays: NamedArrays, samples: int) -> None:
        """Check the masks, and add the model to the mean."""
        for name in critical_masks(self.setup):
            mask = arrays[MASK + name]
            count, due = int(mask.sum()), critical_count(mask.size, self.parameters.tau)
            if count != due:
                raise FloretError(f"its mask of {name} has {count} of {mask.size} elements, tau says {due}")
        super().accumulate(client, {name: arrays[name] for name in self._downlink}, samples)
