"""FedDFPA (Chen et al. 2025), client half: dynamic fusion of the head, prototype alignment."""

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from client_app.batches import Batch, passes
from client_app.client import FloretClient
from common.accuracies import NONE, ROUNDED, STEP
from common.prototypes import alignment_loss
from data import Split
from strategies.feddfpa import FedDFPAParameters


def fusion_coefficients(own: Tensor, received: Tensor, measured: Tensor) -> Tensor:
    """Return the weight of the own row for each class, in [0.269, 0.731] (FedDFPA, Algorithm 1, line 9).

    ``sigmoid((own - received) / (own + received + 1e-8))``.

    Args:
        own: accuracy per class with the own head, (classes,) in [0, 1].
        received: the same with the received head.
        measured: (classes,) false where there is no sample to measure on; there the weight is 0.5.
    """
    ratio = (own - received) / (own + received + 1e-8)
    return torch.where(measured, torch.sigmoid(ratio), torch.full_like(ratio, 0.5))


def fuse_rows(own: Tensor, received: Tensor, coefficients: Tensor, has: Tensor) -> Tensor:
    """Return ``a * own + (1 - a) * received`` in the rows of own classes, ``own`` in the others (line 10 and 11).

    Args:
        own: weight (classes, d) or bias (classes,) of the own head.
        received: the same of the received head.
        coefficients: (classes,).
        has: (classes,) true for the classes that the client has.
    """
    weight = torch.where(has, coefficients, torch.ones_like(coefficients)).reshape(-1, *[1] * (own.dim() - 1))
    return weight * own + (1 - weight) * received


def direction_loss(features: Tensor, labels: Tensor, prototypes: Tensor, known: Tensor) -> Tensor:
    """Return the mean over the batch of ``1 - cos`` to the class's prototype; arguments as in ``alignment_loss``."""
    cosine = F.cosine_similarity(features, prototypes[labels], dim=1)
    return ((1 - cosine) * known[labels]).mean()


class FedDFPA(FloretClient):
    """Keeps its whole model, and its own prototypes of the last round that it took part in (historical prototypes).

    Receives and sends the head and ``prototype.<class>``.
    """

    parameters: FedDFPAParameters

    def receive(self) -> None:
        """Fuse the rows of own classes of the received head into the own one."""
        if self.parameters.fusion:
            self._fuse()

    def train(self) -> float:
        """Train the whole model; compute the prototypes of the fused model before (line 13), or of the trained one."""
        self._global = self.targets(self.received)
        self._historical = self.known_prototypes(self.memory)
        if self.parameters.prototypes_after_training:
            loss = super().train()
            self.memory = self.local_prototypes()
            return loss
        self.memory = self.local_prototypes()
        return super().train()

    def loss(self, batch: Batch) -> Tensor:
        """Return cross entropy plus the alignments that are on; classes without a prototype are not aligned."""
        output, _ = self.stages(batch)
        features = output.flatten(1)
        loss = F.cross_entropy(self.model.head(output), batch.y)
        if self.parameters.align_global:
            loss = loss + alignment_loss(features, batch.y, *self._global, self.parameters.align_reduction)
        if self.parameters.align_historical:
            direction = direction_loss(features, batch.y, *self._historical)
            loss = loss + self.parameters.historical_weight * direction
        return loss

    def upload(self) -> dict[str, Tensor]:
        """Return the trained head and this round's prototypes (line 17)."""
        return super().upload() | self.memory

    def _fuse(self) -> None:
        classifier = self.model.classifier
        prefix = next(name for name, module in self.model.named_modules() if module is classifier)
        has = torch.zeros(classifier.out_features, dtype=torch.bool, device=self.device)
        has[self.data.train.y] = True
        own_accuracy, measured = self._accuracy_per_class(self.data.validation)
        kept = self.copy_tensors()
        self.load_tensors({name: t for name, t in self.received.items() if name in kept})
        received_accuracy, _ = self._accuracy_per_class(self.data.validation)
        self.load_tensors(kept)
        coefficients = fusion_coefficients(own_accuracy, received_accuracy, measured)
        rows = [f"{prefix}.{name}" for name, _ in classifier.named_parameters()]
        self.load_tensors({name: fuse_rows(kept[name], self.received[name], coefficients, has) for name in rows})

    def _accuracy_per_class(self, split: Split) -> tuple[Tensor, Tensor]:
        """Return the accuracy on the samples of each class, (classes,), and which classes have any.

        On a node they are as exact as it tells them, of so many samples as it demands.
        """
        classes = self.model.classifier.out_features
        right = torch.zeros(classes, device=self.device)
        count = torch.zeros(classes, device=self.device)
        self.model.eval()
        with torch.no_grad():
            for batch in passes(split):
                hit = (self.model(batch.x).argmax(1) == batch.y).float()
                right.index_add_(0, batch.y, hit)
                count.index_add_(0, batch.y, torch.ones_like(hit))
        accuracy, measured = right / count.clamp(min=1), count >= max(1, self.setting.hidden_below)
        # The fused head leaves, and tells them.
        if self.setting.accuracies == ROUNDED:
            accuracy = (accuracy / STEP).round() * STEP
        return accuracy, measured & (self.setting.accuracies != NONE)
