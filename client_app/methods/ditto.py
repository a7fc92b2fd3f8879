"""Ditto (Li et al. 2021), client half: the shared model is trained first, then the personal one."""

from torch import Tensor

from client_app.batches import Batch
from client_app.client import FloretClient
from client_app.methods.fedprox import proximal_term
from strategies.ditto import DittoParameters


class Ditto(FloretClient):
    """Keeps a model of its own, v, beside the one that it trains for the server, w.

    ``v <- v - eta (grad F(v) + lambda (v - w_t))`` (Algorithm 1), with ``w_t`` as received.
    """

    parameters: DittoParameters

    def receive(self) -> None:
        """Leave the personal model as it is."""

    def train(self) -> float:
        """Train the shared model as FedAvg does, then the personal one on the same batches; return its loss."""
        personal, order = self.copy_tensors(), self.order.get_state()
        self.load_tensors(self.received)
        self.run_epochs(self.config.local_epochs, self.model.parameters(), super().loss)
        self._shared = self.copy_tensors()
        self.load_tensors(personal)
        self.order.set_state(order)
        return self.run_epochs(self.parameters.personal_epochs, self.model.parameters(), leaves=False)

    def loss(self, batch: Batch) -> Tensor:
        """Return cross entropy of the personal model plus half its squared distance to the received one."""
        own = dict(self.model.named_parameters())
        anchor = [self.received[name] for name in own]
        return super().loss(batch) + proximal_term(list(own.values()), anchor, self.parameters.lambda_)

    def upload(self) -> dict[str, Tensor]:
        """Return the shared model."""
        return {name: self._shared[name] for name in self.shared_names()}
