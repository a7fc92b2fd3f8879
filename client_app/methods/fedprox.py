"""FedProx (Li et al. 2020), client half: local training that stays near the received model."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from client_app.batches import Batch
from client_app.client import FloretClient
from strategies.fedprox import FedProxParameters


class _SquaredDistance(torch.autograd.Function):
    """``||w - g||^2`` of a parameter w and a constant g, with the bits that autograd would give.

    Its backward pass, ``2 (w - g)`` times what comes, goes once through memory; autograd's makes three tensors.
    """

    @staticmethod
    def forward(ctx: Any, own: Tensor, anchor: Tensor) -> Tensor:
        ctx.apart = own - anchor
        return ctx.apart.square().sum()  # type: ignore[no-any-return]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        apart, ctx.apart = ctx.apart, None
        return apart.mul_(2 * gradient), None


def proximal_term(own: Sequence[Tensor], anchor: Sequence[Tensor], mu: float) -> Tensor:
    """Return ``mu / 2 * ||w - w_global||^2`` (the squared norm over all parameters together; FedProx, equation 2).

    Its gradient can be taken once.
    """
    return mu / 2 * torch.stack([_SquaredDistance.apply(w, g) for w, g in zip(own, anchor, strict=True)]).sum()


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
