"""FedProto (Tan et al. 2022), client half: only class prototypes travel."""

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from client_app.batches import Batch
from client_app.client import FloretClient
from client_app.prototypes import alignment_loss


class FedProto(FloretClient):
    """Keeps its whole model; receives and sends ``prototype.<class>``, each (features,) float32.

    Parameters from the server: ``lambda`` (>= 0), the weight of the alignment; ``inference``, ``"prototype"`` (the
    class of the nearest global prototype, equation 9) or ``"head"``.
    """

    shares = "nothing"

    def receive(self) -> None:
        """Remember the global prototypes; they are part of the personal model."""
        self.memory.update(self.received)

    def train(self) -> float:
        """Train with the prototypes as they arrived."""
        self._prototypes, self._known = self.known_prototypes(self.memory)
        return super().train()

    def loss(self, batch: Batch) -> Tensor:
        """Return cross entropy plus the alignment of features to the global prototypes (equation 7)."""
        output = self.model.extractor(batch.x)
        loss = F.cross_entropy(self.model.head(output), batch.y)
        weight = float(self.parameter("lambda"))
        return loss + weight * alignment_loss(output.flatten(1), batch.y, self._prototypes, self._known, "mean")

    def upload(self) -> dict[str, Tensor]:
        """Return the mean feature of each own class after training."""
        return self.local_prototypes()

    def predict(self, x: Tensor) -> Tensor:
        """Return the class of the nearest global prototype; the head's answer while there are no prototypes."""
        prototypes, known = self.known_prototypes(self.memory)
        if self.parameter("inference") == "head" or not known.any():
            return super().predict(x)
        distances = torch.cdist(self.model.features(x), prototypes)
        return distances.masked_fill(~known, torch.inf).argmin(1)
