"""A sketch of a sparse, decentralised method, client half."""

import torch
from strategies.sketch_sparse import SparseParameters  # type: ignore[import-not-found]
from torch import Tensor

from client_app.client import FloretClient, Phase
from common.seeds import torch_generator
from common.tensors import MASK


class Sparse(FloretClient):
    """Keeps a sparse model and its mask."""

    parameters: SparseParameters

    def receive(self) -> None:
        """Average each weight over the neighbours that have it, where the own mask is."""
        own, peers = self.model.state_dict(), self.peers()
        for name, tensor in own.items():
            mask = self._mask(name, tensor)
            weights = [tensor * mask, *(theirs[name] for theirs in peers.values())]
            counts = [mask, *(theirs[MASK + name] for theirs in peers.values())]
            tensor.copy_(mask * torch.stack(weights).sum(0) / torch.stack(counts).sum(0).clamp(min=1))

    def train(self) -> float:
        """Train; after each step the weights outside the mask are zero again."""
        parameters = dict(self.model.named_parameters())
        masks = [(parameter, self.memory[MASK + name]) for name, parameter in parameters.items()]

        def apply() -> None:
            with torch.no_grad():
                for parameter, mask in masks:
                    parameter.mul_(mask)

        return self.run_alternating(
            self.config.local_epochs, [Phase(list(parameters.values()), self.loss, after_step=apply)]
        )

    def upload(self) -> dict[str, Tensor]:
        """Return the model and its masks."""
        return {**super().upload(), **self.memory}

    def _mask(self, name: str, tensor: Tensor) -> Tensor:
        """Return the mask of a tensor, drawn when it is first needed."""
        if MASK + name not in self.memory:
            drawn = torch.rand(tensor.shape, generator=torch_generator(self.config.seed, "mask", name))
            self.memory[MASK + name] = (drawn < self.parameters.density).to(self.device)
        return self.memory[MASK + name]
