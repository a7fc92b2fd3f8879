"""FedProto (Tan et al. 2022), client half: only class prototypes travel."""

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from client_app.batches import Batch
from client_app.client import FloretClient
from common.prototypes import PREFIX, alignment_loss
from models import SplitModel
from strategies.fedproto import FedProtoParameters

# Values of prototypes that a sample's features are compared with at a time.
VALUES = 2**18
# The classes of the training split, (classes,) bool, in the client's memory.
CLASSES = "classes"


class FedProto(FloretClient):
    """Keeps its whole model; receives and sends ``prototype.<class>``, each (features,) float32.

    It predicts the class of the nearest global prototype (equation 4), of all classes or, as the authors' code does, of
    those that it trains on, or with the head: ``inference``.
    """

    serves_with = (PREFIX, CLASSES)
    parameters: FedProtoParameters

    def receive(self) -> None:
        """Store the global prototypes, and the own classes if they count; both are part of the personal model."""
        self.memory.update(self.received)
        if self.parameters.inference == "own-prototype":
            self.memory[CLASSES] = self.data.train.y.bincount(minlength=self.setup.classes) > 0

    def train(self) -> float:
        """Train with the global prototypes, which stay fixed."""
        self._prototypes, self._known = self.targets(self.memory)
        return super().train()

    def loss(self, batch: Batch) -> Tensor:
        """Return cross entropy plus the alignment of features to the global prototypes.

        Of each sample's features, as in the authors' code; equations 7 and 8 have the client's prototypes instead.
        """
        output, _ = self.stages(batch)
        loss = F.cross_entropy(self.model.head(output), batch.y)
        alignment = alignment_loss(output.flatten(1), batch.y, self._prototypes, self._known, "mean")
        return loss + self.parameters.lambda_ * alignment

    def upload(self) -> dict[str, Tensor]:
        """Return the mean feature of each own class after training."""
        return self.local_prototypes()

    def serving(self) -> nn.Module:
        """Return the model that predicts by the nearest prototype, or by the head while there are no prototypes."""
        prototypes, known = self.known_prototypes(self.memory)
        if self.parameters.inference == "own-prototype" and CLASSES in self.memory:
            known = known & self.memory[CLASSES]
        # ``any`` waits for a GPU; this is called once for each split that is measured, not for its batches.
        if self.parameters.inference == "head" or not known.any():
            return super().serving()
        return NearestPrototype(self.model, prototypes, known)


class NearestPrototype(nn.Module):
    """Scores a class by the negative distance of the features to its prototype; without a prototype by ``-inf``.

    Args:
        model: its extractor computes the features.
        prototypes: (classes, features).
        known: (classes,), true where a prototype exists.
    """

    prototypes: Tensor
    known: Tensor

    def __init__(self, model: SplitModel, prototypes: Tensor, known: Tensor) -> None:
        super().__init__()
        self.model = model
        self.register_buffer("prototypes", prototypes)
        self.register_buffer("known", known)

    def forward(self, x: Tensor) -> Tensor:
        """Return scores, (batch, classes), of normalised inputs."""
        # Not torch.cdist: it computes in another way, and less exactly, from 26 rows on, and it cannot be exported.
        # By groups of classes: a value for each sample, class and feature is too many with 10,000 classes.
        features = self.model.features(x).unsqueeze(1)
        groups = torch.split(self.prototypes, max(1, VALUES // self.prototypes.shape[1]))
        distances = torch.cat([torch.linalg.vector_norm(features - group, dim=2) for group in groups], dim=1)
        return distances.neg().masked_fill(~self.known, -torch.inf)
