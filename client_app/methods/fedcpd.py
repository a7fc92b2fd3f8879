"""FedCPD (Jin et al. 2025), client half: distillation from the own last extractor, prototype alignment and contrast."""

import copy
from typing import cast

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from client_app.batches import Batch
from client_app.client import FloretClient
from client_app.training import Phase
from common.prototypes import alignment_loss
from strategies.fedcpd import BLOCKS, Distillation, FedCPDParameters


def contrast_loss(features: Tensor, labels: Tensor, prototypes: Tensor, known: Tensor, tau: float) -> Tensor:
    """Return the mean over the batch of ``-log softmax_c(cos(z, P_c) / tau)`` at the sample's own class.

    FedCPD section 3.4, the global prototype contrastive loss; classes without a prototype are no negatives, and a
    sample whose class has none adds nothing, but counts in the mean. Arguments as in ``alignment_loss``.
    """
    # Equal to F.cosine_similarity, but without an intermediate tensor (batch, classes, d).
    own, others = (F.normalize(vectors, dim=1, eps=1e-8) for vectors in (features, prototypes))
    with torch.autocast(features.device.type, enabled=False):
        similarity = own @ others.T / tau
    logits = similarity.masked_fill(~known, -torch.inf)
    at_own = logits.gather(1, labels.unsqueeze(1)).squeeze(1)
    loss = torch.where(known[labels], torch.logsumexp(logits, 1) - at_own, torch.zeros_like(at_own))
    return loss.mean()


def distillation_loss(student: list[Tensor], teacher: list[Tensor]) -> Tensor:
    """Return the sum over stages and over features and attention of the mean squared error (FedCPD section 3.3)."""
    return torch.stack([F.mse_loss(s, t) for s, t in zip(student, teacher, strict=True)]).sum()


class FedCPD(FloretClient):
    """Keeps its head, its **teacher** (own extractor after its last local training) and its distillation blocks.

    The teacher's maps go through the attention and the Cv1 that the client had when it ended that training. Receives
    and sends the extractor and ``prototype.<class>``.
    """

    parameters: FedCPDParameters

    def receive(self) -> None:
        """Keep the teacher before the received extractor replaces it."""
        self._teacher = self.historical_extractor()
        super().receive()

    def train(self) -> float:
        """Train head, then extractor and blocks, in turns on every batch or of epochs (Algorithm 1, lines 5-16)."""
        self._prototypes = self.targets(self.received)
        # Asked once a round: in the loss it would make every batch wait for a GPU.
        self._any_known = bool(self._prototypes[1].any())
        head, extractor = list(self.model.head.parameters()), list(self.model.extractor.parameters())
        self._blocks: Distillation | None = None
        if self.parameters.distill:
            self._blocks = cast(Distillation, self.networks[BLOCKS])
            extractor += list(self._blocks.parameters())
            if self._teacher is not None:
                teacher, blocks = self._teacher, copy.deepcopy(self._blocks).requires_grad_(False)
                self._targets = self.cached_teacher(lambda x: blocks.teacher(teacher.stages(x)[1]))
        epochs = self.config.local_epochs
        if self.parameters.every_batch:
            return self.run_alternating(epochs, [Phase(head, super().loss), Phase(extractor, self.loss)])
        self.run_epochs(epochs, head, super().loss)
        return self.run_epochs(epochs, extractor)

    def loss(self, batch: Batch) -> Tensor:
        """Return ``CE + alpha * align + beta * contrast + gamma * distillation`` (Algorithm 1, line 12).

        The head is trained with cross entropy alone: the other terms do not depend on it.
        """
        output, maps = self.stages(batch)
        features = output.flatten(1)
        loss = F.cross_entropy(self.model.head(output), batch.y)
        own = self.parameters
        if own.align:
            loss = loss + own.alpha * alignment_loss(features, batch.y, *self._prototypes, "sum")
        if own.contrast and self._any_known:
            loss = loss + own.beta * contrast_loss(features, batch.y, *self._prototypes, own.tau)
        if self._blocks is not None and self._teacher is not None:
            loss = loss + own.gamma * distillation_loss(self._blocks.student(maps), self._targets(batch))
        return loss

    def upload(self) -> dict[str, Tensor]:
        """Return the extractor and the mean feature of each own class after training (line 17)."""
        return super().upload() | self.local_prototypes()
