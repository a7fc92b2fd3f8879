"""FedPAC (Xu et al. 2023), client half: first the combined head, then the extractor, near the prototypes."""

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from client_app.batches import Batch
from client_app.client import FloretClient
from client_app.training import Phase
from common.prototypes import PREFIX, alignment_loss, class_means
from strategies.fedpac import COUNTS, ENERGY, MEAN, FedPACParameters


class FedPAC(FloretClient):
    """Keeps its whole model, whose head the server combines with others' between its rounds.

    Receives the extractor, its head, and the global prototypes; sends extractor, head, own prototypes, and the
    statistics that the combination goes by, which are taken of the received extractor before training.
    """

    parameters: FedPACParameters

    def receive(self) -> None:
        """Take the extractor, and the head if one was combined for this client."""
        super().receive()
        self.load_tensors({name: tensor for name, tensor in self.received.items() if name.startswith("head.")})

    def train(self) -> float:
        """Train the head at its own rate, then the extractor; return the mean loss of the extractor's steps."""
        own, train = self.parameters, self.data.train
        self._statistics: dict[str, Tensor] = {}
        self._targets: tuple[Tensor, Tensor] | None = None
        if own.align or own.combine:
            features = self.training_features(self.model.extractor)
            means = class_means(features, train.y)
            self._statistics = {COUNTS: torch.bincount(train.y, minlength=self.setup.classes)}
            if own.combine:
                self._statistics |= {name.replace(PREFIX, MEAN): mean for name, mean in means.items()}
                self._statistics[ENERGY] = features.square().sum(1).mean(0, keepdim=True)
            if own.align:
                self._targets = self._prototypes(means)
        head_lr = self.config.decayed(own.head_lr, self.message["round"])
        head = Phase(list(self.model.head.parameters()), super().loss, lr=head_lr)
        self.run_alternating(own.head_epochs, [head])
        return self.run_epochs(self.config.local_epochs, self.model.extractor.parameters())

    def loss(self, batch: Batch) -> Tensor:
        """Return cross entropy plus the alignment of features to prototypes, once there are global ones."""
        output, _ = self.stages(batch)
        loss = F.cross_entropy(self.model.head(output), batch.y)
        if self._targets is None:
            return loss
        return loss + self.parameters.lambda_ * alignment_loss(output.flatten(1), batch.y, *self._targets, "mean")

    def upload(self) -> dict[str, Tensor]:
        """Return the extractor, and what alignment and combination need."""
        sent = super().upload() | self._statistics
        if self.parameters.combine:
            sent |= {name: tensor for name, tensor in self.copy_tensors().items() if name.startswith("head.")}
        if self.parameters.align:
            sent |= self.local_prototypes()
        return sent

    def _prototypes(self, means: dict[str, Tensor]) -> tuple[Tensor, Tensor] | None:
        """Return what features are aligned to: the global prototypes, own means for classes that have none.

        None before the first global ones.
        """
        prototypes, known = self.targets(self.received)
        if not known.any():
            return None
        own, has = self.known_prototypes(means)
        return torch.where(known.unsqueeze(1), prototypes, own), known | has
