"""APFL (Deng et al. 2020), client half: on each batch shared and private model take a step, and are mixed anew."""

import copy
from collections.abc import Sequence

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from client_app.batches import Batch
from client_app.client import FloretClient
from strategies.apfl import APFLParameters

# Names in the client's state.
ALPHA, PRIVATE = "alpha", "private."


def mixture(private: Tensor, shared: Tensor, alpha: Tensor) -> Tensor:
    """Return ``alpha v + (1 - alpha) w``; with ``alpha``, (), at 0 or 1 it is one of them to the bit."""
    return torch.lerp(shared, private, alpha)


def adapted(
    alpha: Tensor, gradients: Sequence[Tensor], private: Sequence[Tensor], shared: Sequence[Tensor], lr: float
) -> Tensor:
    """Return ``alpha - lr <g, v - w>``, clipped to [0, 1]; ``gradients`` are those of the mixture's loss."""
    products = [(g * (v - w)).sum() for g, v, w in zip(gradients, private, shared, strict=True)]
    return (alpha - lr * torch.stack(products).sum()).clamp(0, 1)


class APFL(FloretClient):
    """Keeps a private model v and alpha; what it uses is the mixture ``m = alpha v + (1 - alpha) w``.

    A step is ``w <- w - eta grad f(w)``, ``v <- v - eta alpha grad f(m)`` and
    ``alpha <- alpha - eta_a <grad f(m), v - w>``, all three from the values before it. Running statistics belong to w
    and to m; v is never asked by itself.
    """

    parameters: APFLParameters

    def receive(self) -> None:
        """Mix the received model with the private one."""
        own = self.copy_tensors()
        self._private = {n: self.memory.get(PRIVATE + n, own[n]) for n, _ in self.model.named_parameters()}
        self._alpha = self.memory.get(ALPHA, torch.tensor(self.parameters.alpha, device=self.device))
        own |= self._private
        self.load_tensors({n: mixture(own[n], w, self._alpha) for n, w in self.received.items()})

    def train(self) -> float:
        """Train the shared model as FedAvg does, and the private one in the mixture; return the mixture's mean loss."""
        model = copy.deepcopy(self.model).train()
        mixed, shared = list(model.parameters()), list(self.model.parameters())
        # In the memory layout of the gradients, which SGD's kernels rely on.
        private = [nn.Parameter(torch.empty_like(m).copy_(self._private[n])) for n, m in model.named_parameters()]
        optimizers = self.optimizer(shared), self.optimizer(private)
        self.load_tensors(self.received)
        adapts = self.parameters.adapt != "never"

        def step(batch: Batch) -> Tensor:
            nonlocal adapts
            optimizers[0].zero_grad()
            model.zero_grad()
            with self.autocast():
                own_loss, loss = self.loss(batch), F.cross_entropy(model(batch.x), batch.y)
            (own_loss + loss).backward()  # type: ignore[no-untyped-call]
            gradients = [m.grad for m in mixed if m.grad is not None]
            for v, gradient in zip(private, gradients, strict=True):
                v.grad = self._alpha * gradient
            with torch.no_grad():
                if adapts:
                    self._alpha = adapted(self._alpha, gradients, private, shared, self.parameters.alpha_lr)
                    adapts = self.parameters.adapt == "batch"
                for optimizer in optimizers:
                    optimizer.step()
                for m, v, w in zip(mixed, private, shared, strict=True):
                    m.copy_(mixture(v, w, self._alpha))
            return loss

        loss = self.run_steps(self.config.local_epochs, step)
        self._shared = self.copy_tensors()
        self.load_tensors(model.state_dict())
        self.memory = {PRIVATE + n: v.detach() for n, v in zip(self._private, private, strict=True)}
        self.memory[ALPHA] = self._alpha
        return loss

    def upload(self) -> dict[str, Tensor]:
        """Return the shared model."""
        return {name: self._shared[name] for name in self.shared_names()}
