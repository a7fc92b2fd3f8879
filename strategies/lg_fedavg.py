"""LG-FedAvg (Liang et al. 2020): private extractors under a shared head, after some rounds of FedAvg."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
from flwr.app import Array
from flwr.serverapp import Grid

from common.config import between
from common.errors import FloretError
from common.names import without_prefix
from common.tensors import NamedArrays, Specs
from strategies.core import Client, FloretStrategy, Setup, StrategySetting

# In a checkpoint, before the name of a client.
OWN = "own."


@dataclass(frozen=True)
class LGFedAvgParameters:
    """``fedavg_rounds``: so many rounds at the start are FedAvg's; with 0 extractors never travel."""

    fedavg_rounds: int = between(0)


class LGFedAvg(FloretStrategy):
    """Down and up: in the first ``fedavg_rounds`` the whole model, then the head.

    In a client's first round after those it is sent the whole model, too: FedAvg's last extractor, from which its own
    goes on. Aggregate: mean weighted by training samples over the sampled clients.
    """

    shares = "model"
    Parameters = LGFedAvgParameters
    parameters: LGFedAvgParameters

    @classmethod
    def uplink(cls, setup: Setup) -> Specs:
        """Return the head and, if there are FedAvg rounds, the extractor, which is optional."""
        if not setup.parameters.fedavg_rounds:
            return setup.tensors("head")
        extractor = {name: replace(spec, optional=True) for name, spec in setup.tensors("extractor").items()}
        return {**extractor, **setup.tensors("head")}

    def __init__(self, setting: StrategySetting) -> None:
        super().__init__(setting)
        # Clients with an extractor of their own, as far as is known: they have trained one since the FedAvg rounds.
        self._own: set[str] = set()
        # Those of them that are in this round, and are sent the head alone.
        self._private: set[str] = set()

    def initial_arrays(self) -> NamedArrays:
        """Return what travels of the initial model."""
        travels = self.uplink(self.setup)
        return {name: array for name, array in super().initial_arrays().items() if name in travels}

    def prepare(self, server_round: int, clients: list[Client], grid: Grid) -> list[Client]:
        """Return all of them; see who has an extractor of its own."""
        self._private = self._own & {client.name for client in clients}
        # Whoever is refused may have lost its state: what it has is not known until it is accepted.
        self._own -= self._private
        return clients

    def payload(self, client: Client, server_round: int) -> Mapping[str, np.ndarray | Array]:
        """Return the model, or the head for a client that has an extractor of its own."""
        if client.name not in self._private:
            return self.arrays
        return {name: array for name, array in self.arrays.items() if name.startswith("head.")}

    def evaluation_payload(self, client: Client, server_round: int) -> Mapping[str, np.ndarray | Array]:
        """Return the model in a FedAvg round, when it is what clients use; else nothing."""
        return self.arrays if server_round <= self.parameters.fedavg_rounds else {}

    def accumulate(self, client: Client, arrays: NamedArrays, samples: int) -> None:
        """Average what clients share in this round.

        Raises:
            FloretError: an extractor came that is private in this round, or one that is shared did not.
        """
        fedavg = self.round <= self.parameters.fedavg_rounds
        for name in self.setup.tensor_names("extractor"):
            if (name in arrays) != fedavg:
                raise FloretError(f"tensor {name} " + ("is missing" if fedavg else "is private to the client now"))
        super().accumulate(client, arrays, samples)
        if not fedavg:
            self._own.add(client.name)

    def state_dict(self) -> NamedArrays:
        """Return the names of the clients that have an extractor of their own."""
        return {OWN + name: np.ones(1, np.uint8) for name in sorted(self._own)}

    def load_state_dict(self, arrays: NamedArrays) -> None:
        """Take back what ``state_dict`` returned."""
        self._own = set(without_prefix(arrays, OWN))
