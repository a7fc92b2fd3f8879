"""CriticalFL (Yan et al. 2023), client half: FedAvg that tells its gradient norm and leaves out what changed little."""

import math

import torch
from torch import Tensor

from client_app.client import FloretClient
from client_app.training import Phase
from common.errors import FloretError
from common.tensors import MASK
from strategies.criticalfl import LARGEST_SQUARE, NORM, CriticalFLParameters


def largest(updates: dict[str, Tensor], fraction: float) -> dict[str, Tensor]:
    """Return where the updates are among the largest ``fraction`` of all by absolute value, one at least; never where
    nothing changed. Ties with the smallest of them count.
    """
    sizes = torch.cat([update.abs().flatten() for update in updates.values()])
    least = sizes.kthvalue(len(sizes) + 1 - math.ceil(fraction * len(sizes))).values
    return {name: (update.abs() >= least) & (update != 0) for name, update in updates.items()}


class CriticalFL(FloretClient):
    """Receives and sends the model; keeps nothing that the next round would need."""

    parameters: CriticalFLParameters

    def train(self) -> float:
        """Train as FedAvg does, and take the mean of the squared gradient norm over all batches, each at most 100."""
        parameters = list(self.model.parameters())
        total, batches = torch.zeros((), device=self.device), 0

        def note() -> None:
            nonlocal batches
            square = torch.stack([p.grad.square().sum() for p in parameters if p.grad is not None]).sum()
            total.add_(square.clamp(max=LARGEST_SQUARE))
            batches += 1

        loss = self.run_alternating(self.config.local_epochs, [Phase(parameters, self.loss, after_step=note)])
        self._square = total / batches
        return loss

    def upload(self) -> dict[str, Tensor]:
        """Return the model, with masks of what travels, and the gradient norm.

        Running statistics of batch normalisation are not weights, and travel whole.
        """
        tensors = super().upload()
        masks = {name: torch.ones_like(tensor, dtype=torch.bool) for name, tensor in tensors.items()}
        critical = self.message["critical"]
        if type(critical) is not bool:
            raise FloretError(f"the server's instruction critical is {critical!r:.40}; it must be true or false")
        if critical:
            weights = [name for name, _ in self.model.named_parameters()]
            updates = {name: tensors[name] - self.received[name] for name in weights}
            masks |= largest(updates, self.parameters.upload_fraction)
        # A mean of values of at most 100 may be rounded to a little more.
        norm = self._square.clamp(max=LARGEST_SQUARE).reshape(1)
        return tensors | {MASK + name: mask for name, mask in masks.items()} | {NORM: norm}
