"""Which tensors of a model are shared: parts by name, batch normalisation by module type."""

from typing import Literal, get_args

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from common.config import one_of

Part = Literal["model", "extractor", "head", "model-without-batch-norm", "nothing"]


def batch_norm_names(model: nn.Module, *, buffers_only: bool = False) -> set[str]:
    """Return the ``state_dict`` names of everything in batch-normalisation layers, found by type at any depth.

    With ``buffers_only``, the running statistics alone: mean, variance and the counter of batches.
    """
    names: set[str] = set()
    for path, module in model.named_modules():
        if isinstance(module, _BatchNorm):
            tensors = dict(module.named_buffers()) if buffers_only else module.state_dict()
            names.update(f"{path}.{name}" for name in tensors)
    return names


def tensor_names(model: nn.Module, part: Part, batch_norm: str = "shared") -> list[str]:
    """Return the names of the tensors that are sent when ``part`` is shared, in ``state_dict`` order.

    Args:
        model: a ``SplitModel``.
        part: what the method shares.
        batch_norm: the policy for running statistics, ``"shared"`` or ``"local"``. The counter
            ``num_batches_tracked`` is never sent: nothing in Floret reads it.

    Raises:
        ValueError: there is no such part.
    """
    wrong = one_of(part, get_args(Part))
    if wrong:
        raise ValueError(f"part = {part!r}: {wrong}")
    names = [name for name in model.state_dict() if not name.endswith("num_batches_tracked")]
    if part in ("extractor", "head"):
        names = [name for name in names if name.startswith(part + ".")]
    elif part == "nothing":
        names = []
    elif part == "model-without-batch-norm":
        names = [name for name in names if name not in batch_norm_names(model)]
    if batch_norm == "local":
        buffers = batch_norm_names(model, buffers_only=True)
        names = [name for name in names if name not in buffers]
    return names
