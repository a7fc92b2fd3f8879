"""PFAKD (Qi et al. 2024), client half: the extractor learns from the one it received (Algorithm 1, lines 6-15)."""

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from client_app.batches import Batch
from client_app.client import FloretClient
from strategies.pfakd import PFAKDParameters


def distillation_loss(own: Tensor, received: Tensor, reduction: str) -> Tensor:
    """Return the distance between features, (batch, d), of the trained and of the received extractor.

    ``"sum"``: the mean over the batch of the squared L2 norm (PFAKD, equation 3). ``"mean"``: that divided by d, which
    is what the authors' code computes.
    """
    squared = (own - received).square()
    return squared.sum(1).mean() if reduction == "sum" else squared.mean()


def attention_map(feature_map: Tensor) -> Tensor:
    """Return a stage's attention: the sum over channels of squares, flattened and scaled to norm 1, (batch, pixels).

    Zagoruyko and Komodakis 2017, section 3.1, the map ``F_sum^2``.
    """
    return F.normalize(feature_map.float().square().sum(1).flatten(1), dim=1)


def attention_loss(own: list[Tensor], received: list[Tensor]) -> Tensor:
    """Return the squared distance of attention maps, mean over the batch, summed over stages.

    Zagoruyko and Komodakis 2017, equation 2, with the square of the norm: at the start of a round both extractors are
    equal, and the norm itself has no gradient there.

    Args:
        own: a feature map, (batch, channels, height, width), for each stage of the trained extractor.
        received: attention maps, (batch, pixels), of the received one.
    """
    distances = [(attention_map(o) - r).square().sum(1).mean() for o, r in zip(own, received, strict=True)]
    return torch.stack(distances).sum()


class PFAKD(FloretClient):
    """Keeps its head; receives and sends the extractor. Extractor and head are trained together."""

    parameters: PFAKDParameters

    def train(self) -> float:
        """Train against the outputs of the received, frozen extractor.

        They are computed once a round, but where examples are protected for every batch, as ``cached_teacher`` says.
        """
        own = self.parameters
        teacher = self.frozen_extractor() if own.attention_transfer or self.trains_examples else self.model.extractor
        if own.beta and self.trains_examples:
            self._received = self.cached_teacher(lambda x: [teacher(x).flatten(1)])
        elif own.beta:
            features = self.training_features(teacher)
            self._received = lambda batch: [features[batch.index]]
        if own.attention_transfer:
            self._attended = self.cached_teacher(lambda x: [attention_map(m) for m in teacher.stages(x)[1]])
        return super().train()

    def loss(self, batch: Batch) -> Tensor:
        """Return cross entropy + beta * distillation (equation 2), and the attention transfer if it is on."""
        output, maps = self.stages(batch)
        loss = F.cross_entropy(self.model.head(output), batch.y)
        own = self.parameters
        if own.beta:
            (received,) = self._received(batch)
            loss = loss + own.beta * distillation_loss(output.flatten(1), received, own.distill_reduction)
        if own.attention_transfer:
            loss = loss + own.attention_weight * attention_loss(maps, self._attended(batch))
        return loss

    def losses(self, batch: Batch) -> Tensor:
        """Return what ``loss`` is the mean of."""
        output, maps = self.stages(batch)
        losses = F.cross_entropy(self.model.head(output), batch.y, reduction="none")
        own = self.parameters
        if own.beta:
            (received,) = self._received(batch)
            squared = (output.flatten(1) - received).square()
            losses = losses + own.beta * (squared.sum(1) if own.distill_reduction == "sum" else squared.mean(1))
        if own.attention_transfer:
            pairs = zip(maps, self._attended(batch), strict=True)
            losses = losses + own.attention_weight * sum((attention_map(o) - r).square().sum(1) for o, r in pairs)
        return losses
