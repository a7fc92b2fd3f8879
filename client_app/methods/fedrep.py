"""FedRep (Collins et al. 2021), client half: first the private head, then the shared extractor."""

from client_app.client import FloretClient
from client_app.training import Phase
from strategies.fedrep import FedRepParameters


class FedRep(FloretClient):
    """Keeps its head; receives and sends the extractor.

    The head is trained for ``head-epochs`` with the extractor frozen, then the extractor for ``local-epochs`` with the
    head frozen (Algorithm 1). With ``every-batch`` they take turns on every batch instead.
    """

    parameters: FedRepParameters

    def train(self) -> float:
        """Train head, then extractor; return the mean loss of the extractor's steps."""
        if self.parameters.every_batch:
            parts = [Phase(list(part.parameters()), self.loss) for part in (self.model.head, self.model.extractor)]
            return self.run_alternating(self.config.local_epochs, parts)
        self.run_epochs(self.parameters.head_epochs, self.model.head.parameters())
        return self.run_epochs(self.config.local_epochs, self.model.extractor.parameters())
