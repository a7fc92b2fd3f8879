"""Batches of a client's own data: tensors in memory, index slices, normalised where they are used."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from data import Split

# With fewer rows, libraries compute a row in another order of sums, so it would depend on how many others there are:
# with fewer than 4 on AMD's CPUs, than 16 on Intel's (docs/privacy.md, "Rounding").
FEWEST = 16


@dataclass(frozen=True)
class Batch:
    """Some training samples: normalised inputs, labels, and the samples' positions in the training split.

    ``stages`` is the extractor's output and feature maps for ``x`` if they are computed already.
    """

    x: Tensor
    y: Tensor
    index: Tensor
    stages: tuple[Tensor, list[Tensor]] | None = None

    def at(self, rows: Tensor) -> "Batch":
        """Return the samples that ``rows`` says, (n,) of bool or any number of positions."""
        return Batch(self.x[rows], self.y[rows], self.index[rows])

    def padded(self) -> "Batch":
        """Return the batch, one of fewer than ``FEWEST`` samples with its first again and again at its end."""
        count = len(self.y)
        if not 0 < count < FEWEST:
            return self
        rows = torch.arange(FEWEST, device=self.y.device)
        return self.at(rows.where(rows < count, 0))


def normalise(x: Tensor) -> Tensor:
    """Return uint8 images as float32, from 0..255 to -1..1; floats and integer word ids unchanged.

    Inputs with four dimensions are laid out channels last in memory.
    """
    if x.dtype == torch.uint8:
        x = x.float().div_(127.5).sub_(1.0)
    return x.contiguous(memory_format=torch.channels_last) if x.dim() == 4 else x


def take(x: Tensor, index: Tensor) -> Tensor:
    """Return the rows ``index``, (n,), of ``x``: ``x[index]``, but images come laid out channels last in memory."""
    if x.dim() == 4:
        return x.permute(0, 2, 3, 1).index_select(0, index).permute(0, 3, 1, 2)
    return x.index_select(0, index)


def sliced(order: Tensor, batch_size: int, least: int) -> list[Tensor]:
    """Return ``order``, (n,), in slices of ``batch_size``; fewer than ``least`` at its end are part of the last one."""
    slices = list(torch.split(order, batch_size))
    if len(slices) > 1 and len(slices[-1]) < least:
        slices[-2:] = [torch.cat(slices[-2:])]
    return slices


def epoch(split: Split, batch_size: int, order: torch.Generator, *, least: int) -> Iterator[Batch]:
    """Go once through ``split`` in a new random order; the last batch may be smaller, none is dropped, none is empty.

    Args:
        split: training data, on the device where they are used.
        batch_size: samples a batch.
        order: the generator of this client and round; every epoch draws from it.
        least: a last batch of fewer samples joins the batch before it.
    """
    if not len(split):
        return
    permutation = torch.randperm(len(split), generator=order).to(split.x.device)
    for index in sliced(permutation, batch_size, least):
        yield batch_of(split, index)


def batch_of(split: Split, index: Tensor) -> Batch:
    """Return the samples of ``split`` at ``index``, (n,), which is on its device, as a batch."""
    return Batch(normalise(take(split.x, index)), split.y[index], index)


def passes(split: Split) -> Iterator[Batch]:
    """Go once through ``split`` in its own order, for evaluation or to extract features.

    On a CPU batches are small: the C library returns blocks of more than 32 MiB, such as large feature maps, to the
    system when they are freed and would allocate them anew, page by page, for every batch.
    """
    size = 512 if split.x.is_cuda else 64
    if 0 < len(split) <= size:
        yield Batch(normalise(split.x), split.y, torch.arange(len(split), device=split.x.device))
        return
    whole = (split.x, split.y, torch.arange(len(split), device=split.x.device))
    for x, y, index in zip(*(torch.split(tensor, size) for tensor in whole), strict=True):
        yield Batch(normalise(x), y, index)
