"""Class prototypes: ``prototype.<class>`` tensors as rows of one matrix."""

from collections.abc import Mapping

import torch
from torch import Tensor

PREFIX = "prototype."


def name_of(label: int) -> str:
    """Return the name under which the prototype of a class is sent and stored."""
    return f"{PREFIX}{label}"


def stack(tensors: Mapping[str, Tensor], classes: int, width: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return all prototypes among ``tensors`` as rows by class.

    Returns:
        (classes, width) float32, zero where a class has no prototype; and (classes,) true where it has one.
    """
    rows = torch.zeros(classes, width, device=device)
    known = torch.zeros(classes, dtype=torch.bool, device=device)
    for name, tensor in tensors.items():
        if name.startswith(PREFIX):
            label = int(name.removeprefix(PREFIX))
            rows[label], known[label] = tensor, True
    return rows, known


def alignment_loss(features: Tensor, labels: Tensor, prototypes: Tensor, known: Tensor, reduction: str) -> Tensor:
    """Return the distance between features and their class's prototype.

    Args:
        features: (batch, d).
        labels: (batch,).
        prototypes: (classes, d); rows of unknown classes are not read.
        known: (classes,) true where a prototype exists; samples of other classes add nothing, but count in the mean.
        reduction: ``"sum"``, the mean over the batch of the squared L2 norm; ``"mean"``, that divided by d.
    """
    squared = ((features - prototypes[labels]) * known[labels].unsqueeze(1)).square()
    return squared.sum(1).mean() if reduction == "sum" else squared.mean()


def class_means(features: Tensor, labels: Tensor) -> dict[str, Tensor]:
    """Return the mean feature, (width,), of each class that occurs in ``labels``, by prototype name."""
    return {name_of(c): features[labels == c].mean(0) for c in set(labels.tolist())}
