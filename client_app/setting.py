"""What a client's round needs besides the message, and what both halves of a method know of a run."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch import Tensor

from client_app.protection import Budget
from client_app.state import ClientState
from common.accuracies import EXACT
from common.config import RunConfig
from common.filters import ClientFilters
from common.privacy.ledger import Ledger
from common.tensors import Specs
from data import ClientData
from strategies.core import Method, Setup


@dataclass(frozen=True)
class ClientSetting:
    """What a client's round needs besides the message.

    Attributes:
        name: the client's.
        config: the run config.
        method: what the client half shares with its server half.
        parameters: the method's own, an instance of ``method.Parameters``.
        data, state: the client's.
        device: where it computes.
        filters: what passes them is what it sends and what it receives.
        seed: orders its batches; None for the run's.
        resident: the model of the client before, in a process that serves many in turn; None where a client has one of
            its own.
        ledger: of what the client spends on privacy, and what its node permits; None in a simulation.
        min_class_samples: a class of the client's with fewer training samples is drawn to nothing that the server sent.
        min_batch_size: a last batch of fewer samples is part of the batch before it.
        hidden_below, accuracies: over fewer samples an accuracy is in nothing that leaves, and in it is as exact as one
            that is told.
    """

    name: str
    config: RunConfig
    method: type[Method]
    parameters: Any
    data: ClientData
    state: ClientState
    device: torch.device
    filters: ClientFilters = field(default_factory=ClientFilters)
    seed: int | None = None
    resident: "Resident | None" = None
    ledger: tuple[Ledger, Budget] | None = None
    min_class_samples: int = 1
    min_batch_size: int = 1
    hidden_below: int = 0
    accuracies: str = EXACT


@dataclass(frozen=True)
class Agreed:
    """What both halves know of a run, and what follows from it.

    Attributes:
        setup: with the model.
        tensors: those of the model by name; they change with it.
        uplink, downlink: what travels, as the method declares it.
        shared: names of the tensors of model and networks that travel.
    """

    setup: Setup
    tensors: dict[str, Tensor]
    uplink: Specs
    downlink: Specs
    shared: list[str]

    @classmethod
    def of(cls, setup: Setup, method: type[Method]) -> Self:
        """Return what follows from ``setup``."""
        shared = [*setup.tensor_names(method.shares), *method.shared_networks(setup)]
        return cls(setup, setup.model.state_dict(), method.uplink(setup), method.downlink(setup), shared)


class Resident:
    """Keeps a model and what follows from it for the next client that has the same one, in a process with many clients.

    To build them takes longer than a small client's round. Only one client at a time may have them.
    """

    def __init__(self) -> None:
        self._key: tuple[Any, ...] = ()
        self._agreed: Agreed | None = None

    def get(self, key: tuple[Any, ...], make: Callable[[], Agreed]) -> Agreed:
        """Return what was made for ``key``, with a model whose values are those of another client."""
        if self._agreed is None or self._key != key:
            self._key, self._agreed = key, make()
        self._agreed.setup.model.requires_grad_(True).zero_grad()
        return self._agreed
