"""Which models have a gradient for each example of a batch."""

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from common.errors import ConfigError


def check_examples(model: nn.Module, name: str) -> None:
    """Refuse a model whose examples have no gradients of their own.

    Raises:
        ConfigError: a layer mixes the examples of a batch, or Floret does not compute its gradients for each.
    """
    for layer in model.modules():
        if next(layer.parameters(recurse=False), None) is not None and not _computed(layer):
            why = "mixes the examples of a batch" if isinstance(layer, _BatchNorm) else "has none that Floret computes"
            raise ConfigError(
                f"model = {name!r}: privacy.unit = 'example' needs the gradient of each example, and its "
                f"{type(layer).__name__} {why}; use mlp, cnn2, cnn2-small, cnn3, cnn5, cnn5-wide or vgg11, or "
                "privacy.unit = 'client'"
            )


def _computed(layer: nn.Module) -> bool:
    if isinstance(layer, nn.Conv2d):
        return layer.groups == 1 and layer.padding_mode == "zeros" and not isinstance(layer.padding, str)
    return isinstance(layer, nn.Linear)
