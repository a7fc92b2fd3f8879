"""FedCAC (Wu et al. 2023), client half: train, then tell which parameters are critical."""

import torch
from torch import Tensor

from client_app.client import FloretClient
from common.tensors import MASK
from strategies.fedcac import FedCACParameters, critical_count, critical_masks


def sensitivity(before: Tensor, after: Tensor) -> Tensor:
    """Return ``|after - before| * |after|``, about how much the loss depends on each element."""
    return (after - before).abs() * after.abs()


def largest(values: Tensor, count: int) -> Tensor:
    """Return where the ``count`` largest values are, a mask of their shape; of equal ones the first."""
    flat = values.flatten()
    mask = torch.zeros_like(flat, dtype=torch.bool)
    mask[flat.sort(descending=True, stable=True).indices[:count]] = True
    return mask.reshape(values.shape)


class FedCAC(FloretClient):
    """Receives a model of its own; sends it back trained, with a mask of each parameter's critical elements."""

    parameters: FedCACParameters

    def train(self) -> float:
        """Train from the received model, which is remembered."""
        self._before = self.copy_tensors()
        return super().train()

    def upload(self) -> dict[str, Tensor]:
        """Return the model and the masks."""
        sent = super().upload()
        for name in critical_masks(self.setup):
            values = sensitivity(self._before[name], sent[name])
            sent[MASK + name] = largest(values, critical_count(values.numel(), self.parameters.tau))
        return sent
