"""Build a model by name, split into extractor and head, with an explicit random generator."""

import itertools
import math
from collections.abc import Callable
from functools import lru_cache
from typing import Literal

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from common.errors import ConfigError
from models import layers
from models.split import SplitModel, Stack

Head = Literal["last", "linear"]

BUILDERS: dict[str, Callable[[tuple[int, ...], int], list[layers.Layer]]] = {
    "mlp": layers.mlp,
    "cnn2": layers.cnn2,
    "cnn2-small": layers.cnn2_small,
    "cnn3": layers.cnn3,
    "cnn5": layers.cnn5,
    "cnn5-bn": layers.cnn5_bn,
    "cnn5-wide": layers.cnn5_wide,
    "cnn5-wide-bn": layers.cnn5_wide_bn,
    "resnet18": layers.resnet18,
    "vgg11": layers.vgg11,
    "fasttext": layers.fasttext,
}
# Through eleven layers with ReLU and no normalisation, weights in +-1/sqrt(fan-in) shrink the logits' differences to
# 1e-5 and nothing is learned; the bound sqrt(6/fan-in) keeps their scale (He et al. 2015, section 2.2).
_GAINS = {"vgg11": math.sqrt(6)}
MODELS: dict[str, str] = {name: (builder.__doc__ or "").split("\n")[0] for name, builder in BUILDERS.items()}


def gain_of(name: str) -> float:
    """Return by what ``initialise`` multiplies the first weights of a model's layers."""
    return _GAINS.get(name, 1.0)


def head_layers(name: str, input_shape: tuple[int, ...], head: Head) -> int:
    """Return the number of layers in the head: 1 for ``"last"``; for ``"linear"`` all linear ones at the end.

    The first layer always belongs to the extractor.
    """
    if head == "last":
        return 1
    with torch.device("meta"):
        stack = BUILDERS[name](input_shape, 1)
    return len(list(itertools.takewhile(lambda layer: layer.linear, reversed(stack[1:]))))


def build_model(
    name: str, input_shape: tuple[int, ...], classes: int, head_layers: int, generator: torch.Generator | None
) -> SplitModel:
    """Return a freshly initialised model, or, without a generator, an uninitialised one.

    Args:
        name: a key of ``MODELS``.
        input_shape: (channels, height, width), (features,), or the length of a text, (words,).
        classes: width of the last layer.
        head_layers: how many of the last layers form the head; the layers before them are the extractor.
        generator: draws all initial weights; None leaves the tensors uninitialised.

    Raises:
        ConfigError: the split leaves no extractor, or the model cannot take such inputs.
    """
    # Built on the meta device first, so that the constructors of the layers draw nothing from the global generator.
    with torch.device("meta"):
        stack = BUILDERS[name](input_shape, classes)
        if len(stack) < 2:
            raise ConfigError(f"model = {name!r}: has one layer; it needs two, an extractor and a head")
        if not 0 < head_layers < len(stack):
            have = f"model {name!r} has {len(stack)} layers"
            raise ConfigError(f"head-layers = {head_layers}: must be from 1 to {len(stack) - 1}, {have}")
        model = SplitModel(_stack(stack[:-head_layers]), _head(stack[-head_layers:]))
    # Not to_empty: for meta tensors it imports PyTorch's compiler, which takes most of a second.
    empty = {name: torch.empty(tensor.shape, dtype=tensor.dtype) for name, tensor in model.state_dict().items()}
    model.load_state_dict(empty, assign=True)
    if generator is not None:
        initialise(model, generator, gain_of(name))
    return model


def last_layers(name: str, input_shape: tuple[int, ...], model: SplitModel, layers: int, key: str) -> list[nn.Module]:
    """Return the modules of the last ``layers`` layers of ``model``, which has that name, from input to output.

    Args:
        name, input_shape: as of ``build_model``.
        model: built so.
        layers: how many.
        key: of the run config, which says how many.

    Raises:
        ConfigError: it has fewer layers.
    """
    with torch.device("meta"):
        stack = BUILDERS[name](input_shape, 1)
    if layers > len(stack):
        raise ConfigError(f"{key} = {layers}: must be at most {len(stack)}, model {name!r} has {len(stack)} layers")
    parts = [*model.extractor.children(), *(model.head.children() if isinstance(model.head, Stack) else [model.head])]
    return parts[len(parts) - sum(len(layer.modules) for layer in stack[-layers:]) :]


@lru_cache(maxsize=64)
def count_values(name: str, input_shape: tuple[int, ...], classes: int) -> int:
    """Return how many values the tensors of a model have, without making them.

    Raises:
        ConfigError: the model cannot take such inputs.
    """
    with torch.device("meta"):
        stack = BUILDERS[name](input_shape, classes)
    modules = [module for layer in stack for _, module in layer.modules]
    return sum(tensor.numel() for module in modules for tensor in module.state_dict().values())


def initialise(model: nn.Module, generator: torch.Generator, gain: float = 1.0) -> None:
    """Draw new values for all parameters.

    Convolutions and linear layers: weights uniform in +-gain/sqrt(fan-in), biases in +-1/sqrt(fan-in). Embeddings:
    standard normal, padding at zero. Normalisation: identity.

    Raises:
        TypeError: a module has parameters of a kind that this function does not know.
    """
    for module in model.modules():
        own = list(module.parameters(recurse=False))
        if isinstance(module, nn.Linear | nn.Conv2d):
            bound = 1 / math.sqrt(module.weight[0].numel())
            nn.init.uniform_(module.weight, -gain * bound, gain * bound, generator=generator)
            if module.bias is not None:
                nn.init.uniform_(module.bias, -bound, bound, generator=generator)
        elif isinstance(module, nn.Embedding | nn.EmbeddingBag):
            nn.init.normal_(module.weight, generator=generator)
            if module.padding_idx is not None:
                nn.init.zeros_(module.weight[module.padding_idx])
        elif isinstance(module, _BatchNorm | nn.LayerNorm | nn.GroupNorm):
            module.reset_parameters()
        elif own:
            raise TypeError(f"no initialisation for {type(module).__name__}")


def _stack(parts: list[layers.Layer]) -> Stack:
    return Stack(
        [pair for layer in parts for pair in layer.modules],
        [layer.stage_end for layer in parts if layer.stage_end],
    )


def _head(parts: list[layers.Layer]) -> nn.Module:
    """Return a single linear layer without a ``Stack``, so that its tensors are ``head.weight`` and ``head.bias``."""
    modules = [pair for layer in parts for pair in layer.modules]
    return modules[0][1] if len(modules) == 1 else _stack(parts)
