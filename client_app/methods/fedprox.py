"""FedProx (Li et al. 2020), client half: local training that stays near the received model."""

from collections.abc import Sequence

import torch
from torch import Tensor

from client_app.batches import Batch
from client_app.client import FloretClient
from strategies.fedprox import FedProxParameters


def proximal_term(own: Sequence[Tensor], anchor: Sequence[Tensor], mu: float) -> Tensor:
    """Return ``mu / 2 * ||w - w_global||^2`` (the squared norm over all parameters together; FedProx, equation 2)."""
    return mu / 2 * torch.stack([(w - g).square().sum() for w, g in zip(own, anchor, strict=True)]).sum()


class FedProx(FloretClient):
    """Receives and sends the whole model."""

    parameters: FedProxParameters

    def loss(self, batch: Batch) -> Tensor:
        """Return cross entropy plus the proximal term."""
        return super().loss(batch) + self.penalty()

    def penalty(self) -> Tensor:
        """Return the proximal term."""
        parameters = dict(self.model.named_parameters())
        anchor = [self.received[name] for name in parameters]
        return proximal_term(list(parameters.values()), anchor, self.parameters.mu)
