"""Stochastic gradient descent, by the functional form that PyTorch keeps."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.optim.sgd import sgd


class Sgd:
    """SGD with momentum and weight decay: the numbers of ``torch.optim.SGD``, from the same kernels, to the bit.

    The first ``torch.optim.Optimizer`` of a process imports PyTorch's compiler, which takes about two seconds and more
    than a hundred megabytes; a client has no use for it.

    Args:
        parameters: what is trained; one without a gradient is left as it is.
        lr: learning rate.
        momentum: 0 for none; without dampening.
        weight_decay: added to the gradient, times the parameter.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], *, lr: float, momentum: float, weight_decay: float) -> None:
        self._parameters = list(parameters)
        self._buffers: list[Tensor | None] = [None] * len(self._parameters)
        self._lr = lr
        self._momentum = momentum
        self._weight_decay = weight_decay
        self._fused = all(parameter.device.type in ("cpu", "cuda") for parameter in self._parameters)

    def zero_grad(self) -> None:
        """Forget the gradients."""
        for parameter in self._parameters:
            parameter.grad = None

    @torch.no_grad()
    def step(self) -> None:
        """Take one step along the gradients."""
        places = [i for i, parameter in enumerate(self._parameters) if parameter.grad is not None]
        buffers = [self._buffers[i] for i in places]
        sgd(
            [self._parameters[i] for i in places],
            [_laid_out(self._parameters[i]) for i in places],
            buffers,
            fused=self._fused,
            weight_decay=self._weight_decay,
            momentum=self._momentum,
            lr=self._lr,
            dampening=0.0,
            nesterov=False,
            maximize=False,
        )
        for i, buffer in zip(places, buffers, strict=True):
            self._buffers[i] = buffer


def _laid_out(parameter: nn.Parameter) -> Tensor:
    """Return the gradient in the memory layout of its parameter.

    The fused kernels pair their values by the place in memory. Backward gives a gradient its parameter's layout, other
    ways to one, such as ``autograd.grad`` or noise that is added, need not.
    """
    gradient = parameter.grad
    assert gradient is not None
    if gradient.stride() == parameter.stride():
        return gradient
    return torch.empty_like(parameter).copy_(gradient)
