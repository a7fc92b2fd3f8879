"""PFPS-LWC (Liu et al. 2025), client half: recall the own last extractor, then train with a lightweight head."""

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from client_app.batches import Batch
from client_app.client import FloretClient
from client_app.training import Phase
from strategies.pfps_lwc import PFPSLWCParameters


def recall_loss(own: Tensor, historical: Tensor) -> Tensor:
    """Return ``mean(1 - cos)`` between features, (batch, d), of the moving and of the historical extractor.

    PFPS-LWC, the similarity loss of the progressive training strategy (Algorithm 1, line 6).
    """
    return (1 - F.cosine_similarity(own, historical, dim=1)).mean()


def head_norm(head: nn.Module) -> Tensor:
    """Return ``||h||_2``, the norm itself and not its square, over all parameters of the head together.

    PFPS-LWC, the penalty of the lightweight classifier. Its gradient at h = 0 is 0.
    """
    norm: Tensor = torch.linalg.vector_norm(torch.cat([parameter.flatten() for parameter in head.parameters()]))
    return norm


class PFPSLWC(FloretClient):
    """Keeps its head and its **historical extractor**: its own after the last round that it took part in.

    Receives and sends the extractor.
    """

    parameters: PFPSLWCParameters

    def receive(self) -> None:
        """Keep the historical extractor before the received one replaces it."""
        self._historical = self.historical_extractor()
        super().receive()

    def train(self) -> float:
        """Recall (Algorithm 1, lines 4-7), then train extractor and head together (lines 8-12)."""
        own = self.parameters
        if own.recall and self._historical is not None:
            self._target = self.training_features(self._historical)
            lr = self.config.decayed(own.recall_lr, self.message["round"]) if own.recall_lr else None
            phase = Phase(list(self.model.extractor.parameters()), self._recall, lr=lr)
            self.run_alternating(own.recall_epochs, [phase])
        return super().train()

    def loss(self, batch: Batch) -> Tensor:
        """Return cross entropy, and ``lambda`` times the norm of the head if the head is lightweight."""
        loss = super().loss(batch)
        if self.parameters.lightweight:
            loss = loss + self.parameters.lambda_ * head_norm(self.model.head)
        return loss

    def _recall(self, batch: Batch) -> Tensor:
        return recall_loss(self.model.features(batch.x), self._target[batch.index])
