"""Gradients of single examples, clipped before they are summed (Abadi et al. 2016, Algorithm 1), by Opacus's hooks.

Only imported where examples are protected: it needs the extra ``privacy``.
"""

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from opacus.grad_sample import GradSampleHooksFastGradientClipping
from torch import Tensor, nn

from client_app.batches import Batch

Losses = Callable[[Batch], Tensor]


def _linear_norms(layer: nn.Linear, activations: list[Tensor], backprops: Tensor) -> dict[Any, Tensor]:
    """Return the norm of each example's gradient, for inputs and gradients of outputs, (batch, width).

    In float64, and a product of roots: of a large and a tiny factor Opacus's squares are nothing in float32.
    """
    outer = backprops.double().norm(dim=1)
    norms: list[tuple[Any, Tensor]] = [
        (layer.weight, outer * activations[0].double().norm(dim=1)),
        (layer.bias, outer),
    ]
    return {parameter: norm.float() for parameter, norm in norms if parameter.requires_grad}


class _Hooks(GradSampleHooksFastGradientClipping):  # type: ignore[misc]
    """Opacus's, with exact norms of linear layers, and for images that are laid out channels last in memory: its
    unfolding reads them in the wrong order.
    """

    NORM_SAMPLERS: ClassVar = {**GradSampleHooksFastGradientClipping.NORM_SAMPLERS, nn.Linear: _linear_norms}

    def rearrange_grad_samples(self, **arguments: Any) -> tuple[list[Tensor], Tensor]:
        activations, backprops = super().rearrange_grad_samples(**arguments)
        return [part.contiguous() for part in activations], backprops


class Clipping:
    """Sums the clipped gradients of the examples of a batch, of those parameters of a model that are trained now.

    The norms are computed without the gradients themselves (ghost clipping: Goodfellow 2015; Li et al. 2022), in a
    first pass backward; a second one gives the sum.

    Args:
        module: the model, in training mode; its layers have passed ``models.check_examples``.
        bound: what the norm of an example's gradient is clipped to, over all trained parameters together.
    """

    def __init__(self, module: nn.Module, bound: float) -> None:
        self._hooks = _Hooks(module, max_grad_norm=bound, loss_reduction="sum")
        self._bound = bound

    def close(self) -> None:
        """Take the hooks from the model."""
        self._hooks.remove_hooks()

    def sum_gradients(self, parameters: Sequence[nn.Parameter], losses: Losses, batch: Batch) -> float:
        """Leave the sum in the parameters' ``grad`` and return the sum of the losses.

        An example whose gradient is not finite counts as zero; an empty batch gives zeros.

        Args:
            parameters: those that require gradients, all of them.
            losses: from a batch to the loss of each of its examples, (examples,); each depends on that example alone.
            batch: any number of examples.
        """
        with warnings.catch_warnings():
            # The first layer's inputs are data, and need no gradients.
            warnings.filterwarnings("ignore", message="Full backward hook is firing")
            while len(batch.y):
                self._hooks.enable_hooks()
                values = losses(batch)
                torch.autograd.backward([values.sum()], retain_graph=True)
                norms = self._hooks.get_norm_sample()
                _forget(parameters)
                self._hooks.disable_hooks()
                fine = torch.isfinite(norms)
                if fine.all():
                    torch.autograd.backward([(values * (self._bound / (norms + 1e-6)).clamp(max=1.0)).sum()])
                    return float(values.detach().sum())
                batch = batch.at(fine)
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)
        return 0.0


@contextmanager
def clipping(module: nn.Module, bound: float) -> Iterator[Clipping]:
    """Give a ``Clipping`` of a model, whose hooks are taken away afterwards."""
    made = Clipping(module, bound)
    try:
        yield made
    finally:
        made.close()


def _forget(parameters: Sequence[nn.Parameter]) -> None:
    for parameter in parameters:
        parameter.grad = None
