"""Batches of a client's own data: tensors in memory, index slices, normalised where they are used."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from data import Split


@dataclass(frozen=True)
class Batch:
    """Some training samples: normalised inputs, labels, and the samples' positions in the training split."""

    x: Tensor
    y: Tensor
    index: Tensor


def normalise(x: Tensor) -> Tensor:
    """Return uint8 images as float32, from 0..255 to -1..1; floats and integer word ids as they are.

    Whatever has the shape of images is laid out channels last in memory.
    """
    if x.dtype == torch.uint8:
        x = x.float().div_(127.5).sub_(1.0)
    return x.contiguous(memory_format=torch.channels_last) if x.dim() == 4 else x


def epoch(split: Split, batch_size: int, order: torch.Generator, *, no_single: bool) -> Iterator[Batch]:
    """Go once through ``split`` in a new random order; the last batch may be smaller, none is dropped.

    Args:
        split: training data, on the device where they are used.
        batch_size: samples a batch.
        order: the generator of this client and round; every epoch draws from it.
        no_single: let a last batch of one sample join the batch before it, because batch normalisation cannot learn
            from one sample.
    """
    permutation = torch.randperm(len(split), generator=order).to(split.x.device)
    slices = list(torch.split(permutation, batch_size))
    if no_single and len(slices) > 1 and len(slices[-1]) == 1:
        slices[-2:] = [torch.cat(slices[-2:])]
    for index in slices:
        yield Batch(normalise(split.x[index]), split.y[index], index)


def passes(split: Split, batch_size: int = 512) -> Iterator[Batch]:
    """Go once through ``split`` in its own order, for evaluation or to extract features."""
    for index in torch.split(torch.arange(len(split), device=split.x.device), batch_size):
        yield Batch(normalise(split.x[index]), split.y[index], index)
