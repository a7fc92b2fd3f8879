"""Gradients of single examples, clipped before they are summed (Abadi et al. 2016, Algorithm 1), in one pass backward.

Only imported where examples are protected: it needs the extra ``privacy``.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.nn.functional import unfold
from torch.nn.grad import conv2d_weight

from client_app.batches import Batch
from common.privacy.opacus import compute_conv_grad_sample

Losses = Callable[[Batch], Tensor]
# Norms and inputs up to here times their factors are far from what float32 cannot hold.
_MOST = 1e30


class _Linear:
    """What a linear layer contributes: each example's gradient is an outer product, which need not be computed.

    Args:
        layer: the layer.
        inputs: (batch, features).
        slopes: gradients of the losses with respect to its outputs, (batch, outputs).
    """

    def __init__(self, layer: nn.Linear, inputs: Tensor, slopes: Tensor) -> None:
        self._layer, self._inputs, self._slopes = layer, inputs, slopes

    def squares(self) -> Tensor:
        """Return the squared norms of the examples' gradients, (batch,), float64: in float32 squares may be nothing."""
        inputs, slopes = _squares(self._inputs), _squares(self._slopes)
        return slopes * (inputs * self._layer.weight.requires_grad + _trained(self._layer.bias))

    def add(self, factors: Tensor) -> None:
        """Add the sum of the examples' gradients, each times its factor, to the layer's ``grad``."""
        slopes = self._slopes * factors[:, None]
        _add(self._layer.weight, slopes.T @ self._inputs)
        _add(self._layer.bias, slopes.sum(0))


class _FewPlaces:
    """What a convolution contributes whose weights are many and whose places are few, as late in a network.

    The norm follows from products of patches and of slopes at each two places (mixed ghost clipping: Bu et al. 2022).

    Args:
        layer: the layer.
        inputs: (batch, channels, height, width).
        slopes: gradients of the losses with respect to its outputs, (batch, outputs, height, width).
    """

    def __init__(self, layer: nn.Conv2d, inputs: Tensor, slopes: Tensor) -> None:
        self._layer, self._inputs, self._slopes = layer, inputs, slopes

    @staticmethod
    def suits(layer: nn.Conv2d, slopes: Tensor) -> bool:
        """Return whether the products for each two places, of patches and of slopes, are fewer than the weights."""
        places = slopes.shape[2] * slopes.shape[3]
        return 2 * places**2 < layer.weight.numel()

    def squares(self) -> Tensor:
        """Return upper bounds of the squared norms of the examples' gradients, (batch,), float64.

        Where slopes cancel over places, the norm is small and the sum that ``add`` computes, in float32, may be little
        but rounding. So a bound of its rounding is added, from the sizes of what is summed.
        """
        layer, slopes = self._layer, self._slopes.flatten(2).double()
        found = slopes.sum(2).square().sum(1) * _trained(layer.bias)
        products = slopes.mT @ slopes
        sizes = _roots(products)
        summed = sizes.sum(1) * _trained(layer.bias)
        if layer.weight.requires_grad:
            inputs, padding = self._inputs.double().contiguous(), cast(tuple[int, int], layer.padding)
            patches = unfold(inputs, layer.kernel_size, layer.dilation, padding, layer.stride)
            of_patches = patches.mT @ patches
            found = found + (of_patches * products).sum((1, 2))
            summed = summed + (sizes * _roots(of_patches)).sum(1)
        rounding = 2.0**-18 + slopes.shape[2] * 2.0**-23
        return found.clamp(min=0) + (rounding * summed).square()

    def add(self, factors: Tensor) -> None:
        """Add the sum of the examples' gradients, each times its factor, to the layer's ``grad``."""
        layer, slopes = self._layer, self._slopes * factors[:, None, None, None]
        how = (layer.stride, layer.padding, layer.dilation, layer.groups)
        gradient = conv2d_weight(self._inputs, layer.weight.shape, slopes, *how)  # type: ignore[no-untyped-call]
        _add(layer.weight, gradient)
        _add(layer.bias, slopes.sum((0, 2, 3)))


class _FewWeights:
    """What any other convolution contributes: the gradients of its examples are kept until they are summed.

    Args:
        layer: the layer.
        inputs: (batch, channels, height, width).
        slopes: gradients of the losses with respect to its outputs, (batch, outputs, height, width).
    """

    def __init__(self, layer: nn.Conv2d, inputs: Tensor, slopes: Tensor) -> None:
        # Images that are laid out channels last in memory Opacus 1.6 would unfold in the wrong order.
        self._kept = compute_conv_grad_sample(layer, [inputs.contiguous()], slopes.contiguous())

    def squares(self) -> Tensor:
        """Return the squared norms of the examples' gradients, (batch,), float64."""
        return torch.stack([_squares(part.flatten(1)) for part in self._kept.values()]).sum(0)

    def add(self, factors: Tensor) -> None:
        """Add the sum of the examples' gradients, each times its factor, to the layer's ``grad``."""
        for parameter, part in self._kept.items():
            _add(parameter, torch.einsum("n,n...->...", factors, part))


_Share = _Linear | _FewPlaces | _FewWeights


class Clipping:
    """Sums the clipped gradients of the examples of a batch, of those parameters of a model that are trained now.

    One pass backward gives what went into each layer and the gradients of what came out of it. Norms and the sum follow
    from these, layer by layer (book-keeping: Bu et al. 2023); only some layers need the gradients of single examples.

    Args:
        module: the model; its layers have passed ``models.check_examples``.
        bound: what the norm of an example's gradient is clipped to, over all trained parameters together.
    """

    def __init__(self, module: nn.Module, bound: float) -> None:
        self._bound = bound
        self._seen: dict[nn.Module, tuple[Tensor, GradientEdge]] = {}
        layers = [m for m in module.modules() if any(p.requires_grad for p in m.parameters(recurse=False))]
        self._hooks = [layer.register_forward_hook(self._see) for layer in layers]

    def close(self) -> None:
        """Take the hooks from the model."""
        for hook in self._hooks:
            hook.remove()

    def sum_gradients(self, parameters: Sequence[nn.Parameter], losses: Losses, batch: Batch) -> float:
        """Leave the sum in the parameters' ``grad`` and return the sum of the losses.

        An example whose gradient is not finite, or larger than can be clipped in float32, counts as zero, and the rest
        of the batch is computed again; an empty batch gives zeros.

        Args:
            parameters: those that require gradients, all of them.
            losses: from a batch to the loss of each of its examples, (examples,); each depends on that example alone.
            batch: any number of examples.
        """
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)
        total = 0.0
        while count := len(batch.y):
            values = losses(batch.padded())
            slopes = torch.autograd.grad(values.sum(), [edge for _, edge in self._seen.values()])
            shares = [
                _share(layer, inputs, slope)
                for (layer, (inputs, _)), slope in zip(self._seen.items(), slopes, strict=True)
            ]
            norms = torch.stack([share.squares() for share in shares]).sum(0).sqrt()[:count]
            inputs = torch.stack([_largest(inputs) for inputs, _ in self._seen.values()]).amax(0)[:count]
            self._seen.clear()
            fine = (norms <= _MOST) & (inputs <= _MOST)
            if fine.all():
                factors = torch.zeros_like(values)
                factors[:count] = (self._bound / (norms + 1e-6)).clamp(max=1.0)
                for share in shares:
                    share.add(factors)
                total = float(values[:count].detach().sum())
                break
            batch = batch.at(fine)
        return total

    def _see(self, layer: nn.Module, inputs: tuple[Tensor], output: Tensor) -> None:
        if not torch.is_grad_enabled():
            return
        if layer in self._seen:
            raise RuntimeError(f"{layer} is used twice for one batch: the gradients of its examples are not computed")
        self._seen[layer] = inputs[0].detach(), get_gradient_edge(output)


@contextmanager
def clipping(module: nn.Module, bound: float) -> Iterator[Clipping]:
    """Give a ``Clipping`` of a model, whose hooks are taken away afterwards."""
    made = Clipping(module, bound)
    try:
        yield made
    finally:
        made.close()


def _share(layer: nn.Module, inputs: Tensor, slopes: Tensor) -> _Share:
    if isinstance(layer, nn.Linear) and inputs.dim() == 2:
        return _Linear(layer, inputs, slopes)
    if isinstance(layer, nn.Conv2d):
        return (_FewPlaces if _FewPlaces.suits(layer, slopes) else _FewWeights)(layer, inputs, slopes)
    raise TypeError(f"{layer} with inputs {tuple(inputs.shape)}: the gradients of its examples are not computed")


def _largest(inputs: Tensor) -> Tensor:
    return inputs.flatten(1).abs().amax(1)


def _roots(products: Tensor) -> Tensor:
    return products.diagonal(dim1=1, dim2=2).sqrt()


def _squares(rows: Tensor) -> Tensor:
    return rows.double().square().sum(1)


def _trained(bias: Tensor | None) -> bool:
    return bias is not None and bias.requires_grad


def _add(parameter: Tensor | None, gradient: Tensor) -> None:
    if parameter is not None and parameter.requires_grad:
        assert parameter.grad is not None
        parameter.grad += gradient
