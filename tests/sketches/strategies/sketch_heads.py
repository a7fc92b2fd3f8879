"""A sketch of an aggregate for each client: everybody's extractor, and a head between its own and the others'."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from flwr.serverapp import Grid

from common.config import between
from strategies.core import Client, FloretStrategy, WeightedMean


@dataclass(frozen=True)
class HeadsParameters:
    """``share`` of the others in the head that a client is sent."""

    share: float = between(0, 1)


class Heads(FloretStrategy):
    """Down: the extractor, and a head for this client. Up: the whole model."""

    shares = "model"
    relays = True
    Parameters = HeadsParameters
    parameters: HeadsParameters

    def prepare(self, server_round: int, clients: list[Client], grid: Grid) -> list[Client]:
        """Read all heads once."""
        names = self.setup.tensor_names("head")
        self._heads = {client: {name: tensors[name] for name in names} for client, tensors in self.post.items()}
        return clients

    def payload(self, client: Client, server_round: int) -> Mapping[str, np.ndarray]:
        """Return the mean extractor and the client's own head, moved towards the mean of the others'."""
        if client.name not in self._heads:
            return self.arrays
        others = WeightedMean()
        for name, head in self._heads.items():
            if name != client.name:
                others.add(head, 1.0)
        share, own, theirs = np.float32(self.parameters.share), self._heads[client.name], others.result()
        return {**self.arrays, **{name: (1 - share) * own[name] + share * theirs[name] for name in own}}

    def evaluation_payload(self, client: Client, server_round: int) -> Mapping[str, np.ndarray]:
        """Return the same as for training."""
        return self.payload(client, server_round)
