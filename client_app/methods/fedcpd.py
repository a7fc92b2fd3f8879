"""FedCPD (Jin et al. 2025), client half: distillation from the own last extractor, prototype alignment and contrast."""

import copy

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from client_app.batches import Batch
from client_app.client import FloretClient
from client_app.prototypes import alignment_loss
from common.seeds import torch_generator
from models import CBAM, CrossLayerFusion, initialise

PREFIX = "distillation."


def contrast_loss(features: Tensor, labels: Tensor, prototypes: Tensor, known: Tensor, tau: float) -> Tensor:
    """Return the mean over the batch of ``-log softmax_c(cos(z, P_c) / tau)`` at the sample's own class.

    FedCPD section 3.4, the global prototype contrastive loss; classes without a prototype are no negatives, and a
    sample whose class has none adds nothing, but counts in the mean. Arguments as in ``alignment_loss``.
    """
    # As F.cosine_similarity has it, but without (batch, classes, d) numbers in between.
    own, others = (F.normalize(vectors, dim=1, eps=1e-8) for vectors in (features, prototypes))
    with torch.autocast(features.device.type, enabled=False):
        similarity = own @ others.T / tau
    logits = similarity.masked_fill(~known, -torch.inf)
    at_own = logits.gather(1, labels.unsqueeze(1)).squeeze(1)
    loss = torch.where(known[labels], torch.logsumexp(logits, 1) - at_own, torch.zeros_like(at_own))
    return loss.mean()


class Distillation(nn.Module):
    """The client's own blocks: CBAM for each stage, cross-layer fusion of feature and of attention maps."""

    def __init__(self, channels: list[int], width: int) -> None:
        super().__init__()
        self.attention = nn.ModuleList([CBAM(n) for n in channels])
        self.fuse_features = CrossLayerFusion(channels, width)
        self.fuse_attention = CrossLayerFusion(channels, width)

    def student(self, maps: list[Tensor]) -> list[Tensor]:
        """Return ``F^{l,*}`` and ``A^{l,*}`` of all stages, each (batch, width, height, width of the stage)."""
        return self.fuse_features(maps) + self.fuse_attention(self._attended(maps))  # type: ignore[no-any-return]

    def teacher(self, maps: list[Tensor]) -> list[Tensor]:
        """Return ``F^l`` and ``A^l`` of all stages through Cv1 alone, so that shapes meet the student's."""
        return self.fuse_features.unify(maps) + self.fuse_attention.unify(self._attended(maps))

    def _attended(self, maps: list[Tensor]) -> list[Tensor]:
        return [block(x) for block, x in zip(self.attention, maps, strict=True)]


def distillation_loss(student: list[Tensor], teacher: list[Tensor]) -> Tensor:
    """Return the sum over stages and over features and attention of the mean squared error (FedCPD section 3.3)."""
    return torch.stack([F.mse_loss(s, t) for s, t in zip(student, teacher, strict=True)]).sum()


class FedCPD(FloretClient):
    """Keeps its head, its **teacher** (own extractor after its last local training) and its distillation blocks.

    The teacher's maps go through the attention and the Cv1 that the client had when it ended that training. Receives
    and sends the extractor and ``prototype.<class>``. Parameters from the server: the switches ``distill``, ``align``,
    ``contrast``; ``alpha``, ``beta``, ``gamma`` (>= 0), ``tau`` (> 0), ``fusion-width`` (>= 1).
    """

    shares = "extractor"

    def receive(self) -> None:
        """Put the teacher aside before the received extractor takes its place."""
        self._teacher = self.historical_extractor()
        self.load_tensors({name: t for name, t in self.received.items() if name in set(self.shared_names())})

    def train(self) -> float:
        """Step the head, then extractor and blocks, on every batch (Algorithm 1, lines 5-16)."""
        self._prototypes = self.known_prototypes(self.received)
        self._any_known = bool(self._prototypes[1].any())
        extractor = list(self.model.extractor.parameters())
        self._blocks: Distillation | None = None
        if self.parameter("distill"):
            self._blocks = self._own_blocks()
            extractor += list(self._blocks.parameters())
            if self._teacher is not None:
                teacher, blocks = self._teacher, copy.deepcopy(self._blocks).requires_grad_(False)
                self._targets = self.teaching(lambda x: blocks.teacher(teacher.stages(x)[1]))
        loss = self.run_turns(
            self.config.local_epochs, [(list(self.model.head.parameters()), super().loss), (extractor, self.loss)]
        )
        if self._blocks is not None:
            self.memory = {PREFIX + name: tensor for name, tensor in self._blocks.state_dict().items()}
        return loss

    def loss(self, batch: Batch) -> Tensor:
        """Return ``CE + alpha * align + beta * contrast + gamma * distillation`` (Algorithm 1, line 12).

        The head's turn takes cross entropy alone: the other terms do not depend on the head.
        """
        output, maps = self.stages(batch)
        features = output.flatten(1)
        loss = F.cross_entropy(self.model.head(output), batch.y)
        if self.parameter("align"):
            alignment = alignment_loss(features, batch.y, *self._prototypes, "sum")
            loss = loss + float(self.parameter("alpha")) * alignment
        if self.parameter("contrast") and self._any_known:
            contrast = contrast_loss(features, batch.y, *self._prototypes, float(self.parameter("tau")))
            loss = loss + float(self.parameter("beta")) * contrast
        if self._blocks is not None and self._teacher is not None:
            distillation = distillation_loss(self._blocks.student(maps), self._targets(batch))
            loss = loss + float(self.parameter("gamma")) * distillation
        return loss

    def upload(self) -> dict[str, Tensor]:
        """Return the extractor and the mean feature of each own class after training (line 17)."""
        return super().upload() | self.local_prototypes()

    def _own_blocks(self) -> Distillation:
        """Return the blocks as the last round left them; in the first round freshly drawn."""
        blocks = Distillation(self.widths[1], int(self.parameter("fusion-width")))
        initialise(blocks, torch_generator(self.config.seed, "distillation", self.setting.name))
        kept = {n.removeprefix(PREFIX): t for n, t in self.memory.items() if n.startswith(PREFIX)}
        if kept:
            blocks.load_state_dict(kept)
        return blocks.to(self.device)
