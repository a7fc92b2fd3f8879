"""Per-FedAvg (Fallah et al. 2020), client half: steps for the model before its adaptation, then the adaptation."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from client_app.batches import Batch
from client_app.client import FloretClient
from strategies.per_fedavg import PerFedAvgParameters

Gradient = Callable[[], Sequence[Tensor]]


@torch.no_grad()
def moved(weights: Sequence[Tensor], start: Sequence[Tensor], direction: Sequence[Tensor], factor: float) -> None:
    """Let ``weights`` be ``start + factor * direction``, in place."""
    for weight, origin, step in zip(weights, start, direction, strict=True):
        weight.copy_(origin).add_(step, alpha=factor)


def hessian_product(
    weights: Sequence[Tensor], start: Sequence[Tensor], direction: Sequence[Tensor], delta: float, gradient: Gradient
) -> list[Tensor]:
    """Return the Hessian at ``start`` times d, (g(start + delta d) - g(start - delta d)) / (2 delta).

    Args:
        weights: what ``gradient`` is computed at; moved, and not brought back.
        start: where the Hessian is taken.
        direction: d.
        delta: > 0.
        gradient: returns g at ``weights``.
    """
    moved(weights, start, direction, delta)
    ahead = gradient()
    moved(weights, start, direction, -delta)
    return [(a - b) / (2 * delta) for a, b in zip(ahead, gradient(), strict=True)]


class PerFedAvg(FloretClient):
    """Receives and sends the meta model w; its personal model is one adaptation step on its own data from there."""

    parameters: PerFedAvgParameters

    def train(self) -> float:
        """Take the steps on w, w <- w - lr (I - a H(w; D'')) g(w - a g(w; D); D'), with a = ``inner-lr``; then adapt.

        D' are the batches of FedAvg's training, in its order; D is the batch before, D'' the one before that. In the
        round's second step D'' is D, in its first both are D'. Return the mean loss after the inner step.
        """
        own, weights, received = self.parameters, list(self.model.parameters()), self.copy_tensors()
        optimizer = self.optimizer(weights)
        before: list[Batch] = []

        def step(batch: Batch) -> Tensor:
            inner, outer = before[-1] if before else batch, before[0] if before else batch
            start = [weight.detach().clone() for weight in weights]
            with self.still_statistics():
                _, gradient = self._gradient(inner)
            moved(weights, start, gradient, -own.inner_lr)
            loss, gradient = self._gradient(batch)
            if own.variant == "hessian-free":
                with self.still_statistics():
                    product = hessian_product(
                        weights, start, gradient, own.delta, lambda: self._gradient(outer, precise=True)[1]
                    )
                gradient = [g - own.inner_lr * h for g, h in zip(gradient, product, strict=True)]
            for weight, origin, g in zip(weights, start, gradient, strict=True):
                weight.detach().copy_(origin)
                weight.grad = g
            optimizer.step()
            before[:] = [*before[-1:], batch]
            return loss

        loss = self.run_steps(self.config.local_epochs, step)
        trained = self.copy_tensors()
        self._shared = {name: trained[name] for name in self.shared_names()}
        if own.adapt == "received":
            # What stays with the client, such as running statistics, goes on from the training.
            self.load_tensors({name: received[name] for name in self.shared_names()})
        self._adapt(weights)
        return loss

    def upload(self) -> dict[str, Tensor]:
        """Return the meta model."""
        return self._shared

    def _gradient(self, batch: Batch, *, precise: bool = False) -> tuple[Tensor, Sequence[Tensor]]:
        """Return the loss of a batch and its gradient; ``precise`` in float32, whatever the key ``precision`` says.

        In bfloat16 two weights that differ by ``delta`` times a gradient are mostly one.
        """
        with torch.autocast(self.device.type, enabled=False) if precise else self.autocast():
            loss = self.loss(batch)
        return loss.detach(), torch.autograd.grad(loss, list(self.model.parameters()))

    def _adapt(self, weights: Sequence[Tensor]) -> None:
        """Take one step of ``inner-lr`` along the gradient over all training data."""
        total = [torch.zeros_like(weight) for weight in weights]
        with self.still_statistics():
            for batch in self.training_batches():
                share = len(batch.y) / len(self.data.train)
                moved(total, total, self._gradient(batch)[1], share)
        moved(weights, [weight.detach().clone() for weight in weights], total, -self.parameters.inner_lr)
