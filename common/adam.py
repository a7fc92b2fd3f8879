"""Adam, by the functional form that PyTorch keeps, for a server that trains from round to round."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.optim.adam import adam

from common.tensors import NamedArrays

FIRST, SECOND, STEPS = "first.", "second.", "steps"


class Adam:
    """Adam with the numbers of ``torch.optim.Adam`` and its usual betas; see ``common.sgd`` on why not that one.

    Args:
        parameters: what is trained, by name; all have gradients when ``step`` is called.
        lr: learning rate.
        weight_decay: added to the gradient, times the parameter.
        state: what ``state_dict`` returned before; empty for the first steps.
    """

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], *, lr: float, weight_decay: float, state: NamedArrays
    ) -> None:
        def moments(prefix: str) -> dict[str, Tensor]:
            return {
                name: torch.from_numpy(state[prefix + name].copy()) if state else torch.zeros_like(p.data)
                for name, p in parameters.items()
            }

        self._parameters = parameters
        self._first, self._second = moments(FIRST), moments(SECOND)
        done = float(state[STEPS]) if state else 0.0
        self._steps = {name: torch.tensor(done) for name in parameters}
        self._lr, self._weight_decay = lr, weight_decay

    def zero_grad(self) -> None:
        """Forget the gradients."""
        for parameter in self._parameters.values():
            parameter.grad = None

    @torch.no_grad()
    def step(self) -> None:
        """Take one step along the gradients."""
        adam(
            list(self._parameters.values()),
            [p.grad for p in self._parameters.values() if p.grad is not None],
            list(self._first.values()),
            list(self._second.values()),
            [],
            list(self._steps.values()),
            amsgrad=False,
            beta1=0.9,
            beta2=0.999,
            lr=self._lr,
            weight_decay=self._weight_decay,
            eps=1e-8,
            maximize=False,
        )

    def state_dict(self) -> NamedArrays:
        """Return the moments by name, and the number of steps."""
        moments = {FIRST + name: t.numpy() for name, t in self._first.items()}
        moments |= {SECOND + name: t.numpy() for name, t in self._second.items()}
        return moments | {STEPS: next(iter(self._steps.values())).numpy()}
