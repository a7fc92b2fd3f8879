"""FedRep (Collins et al. 2021), client half: first the private head, then the shared extractor."""

from client_app.client import FloretClient


class FedRep(FloretClient):
    """Keeps its head; receives and sends the extractor.

    Parameters from the server: ``head-epochs`` (>= 1), with the extractor frozen; the extractor is then trained for
    ``local-epochs`` with the head frozen (Algorithm 1).
    """

    shares = "extractor"

    def train(self) -> float:
        """Train head, then extractor; return the mean loss of the extractor's epochs."""
        self.run_epochs(int(self.parameter("head-epochs")), self.model.head.parameters())
        return self.run_epochs(self.config.local_epochs, self.model.extractor.parameters())
