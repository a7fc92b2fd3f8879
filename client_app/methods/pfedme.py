"""pFedMe (T. Dinh et al. 2020), client half: several steps of the personal model on a batch, then the copy follows."""

import torch
from torch import Tensor

from client_app.batches import Batch
from client_app.client import FloretClient
from client_app.methods.fedprox import proximal_term
from strategies.pfedme import PFedMeParameters


class PFedMe(FloretClient):
    """Uses and keeps the personal model theta, which begins a round at the received w; sends w_i, which follows it.

    On each batch, K steps on ``f(theta) + lambda / 2 ||theta - w_i||^2`` (equation 7), then
    ``w_i <- w_i - eta lambda (w_i - theta)`` (Algorithm 1, line 8).
    """

    parameters: PFedMeParameters

    def train(self) -> float:
        """Train the personal model, and let the copy of the shared one follow; return the mean of the last losses."""
        own, theta = self.parameters, list(self.model.parameters())
        self._local = {name: parameter.detach().clone() for name, parameter in self.model.named_parameters()}
        local, optimizer = list(self._local.values()), self.optimizer(theta)

        def step(batch: Batch) -> Tensor:
            for _ in range(own.inner_steps):
                optimizer.zero_grad()
                with self.autocast():
                    loss = self.loss(batch) + proximal_term(theta, local, own.lambda_)
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
            with torch.no_grad():
                for w, personal in zip(local, theta, strict=True):
                    w.lerp_(personal, own.local_lr * own.lambda_)
            return loss

        return self.run_steps(self.config.local_epochs, step)

    def upload(self) -> dict[str, Tensor]:
        """Return the copy of the shared model; running statistics are the personal model's, the only ones there are."""
        tensors = self.copy_tensors() | self._local
        return {name: tensors[name] for name in self.shared_names()}
