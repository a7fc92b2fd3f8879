"""FedRep (Collins et al. 2021), client half: first the private head, then the shared extractor."""

from client_app.client import FloretClient


class FedRep(FloretClient):
    """Keeps its head; receives and sends the extractor.

    Parameters from the server: ``head-epochs`` (>= 1), with the extractor frozen; the extractor is then trained for
    ``local-epochs`` with the head frozen (Algorithm 1). With ``every-batch`` they take turns on every batch instead.
    """

    shares = "extractor"

    def train(self) -> float:
        """Train head, then extractor; return the mean loss of the extractor's steps."""
        if self.parameter("every-batch"):
            head, extractor = (list(part.parameters()) for part in (self.model.head, self.model.extractor))
            return self.run_turns(self.config.local_epochs, [(head, self.loss), (extractor, self.loss)])
        self.run_epochs(int(self.parameter("head-epochs")), self.model.head.parameters())
        return self.run_epochs(self.config.local_epochs, self.model.extractor.parameters())
