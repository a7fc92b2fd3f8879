"""Ditto as a sketch, client half: the shared model is trained first, then the personal one."""

from strategies.sketch_ditto import DittoParameters  # type: ignore[import-not-found]
from torch import Tensor

from client_app.batches import Batch
from client_app.client import FloretClient
from client_app.methods.fedprox import proximal_term


class Ditto(FloretClient):
    """Keeps a model of its own, beside the one that it trains for the server."""

    parameters: DittoParameters

    def receive(self) -> None:
        """Leave the personal model as it is."""

    def train(self) -> float:
        """Train the shared model as FedAvg does, then the personal one near what was received."""
        personal = self.copy_tensors()
        self.load_tensors(self.received)
        self.run_epochs(self.config.local_epochs, self.model.parameters(), super().loss)
        self._shared = self.copy_tensors()
        self.load_tensors(personal)
        return self.run_epochs(self.config.local_epochs, self.model.parameters())

    def loss(self, batch: Batch) -> Tensor:
        """Return the personal model's loss."""
        own = dict(self.model.named_parameters())
        anchor = [self.received[name] for name in own]
        return super().loss(batch) + proximal_term(list(own.values()), anchor, self.parameters.lambda_)

    def upload(self) -> dict[str, Tensor]:
        """Return the shared model."""
        return {name: self._shared[name] for name in self.shared_names()}
