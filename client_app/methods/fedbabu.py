"""FedBABU (Oh et al. 2022), client half: the extractor is trained under the common head, the personal model beside."""

from torch import Tensor

from client_app.client import FloretClient
from strategies.fedbabu import FedBABUParameters


class FedBABU(FloretClient):
    """Receives and sends the extractor; its personal model is the received one, fine-tuned.

    The head of the federated part is that of the initial model, which is the same for all, in every round.
    """

    parameters: FedBABUParameters

    def receive(self) -> None:
        """Put the received extractor under the common head; the fine-tuned model of the last round is dropped."""
        common = self.initial_model().head.state_dict()
        self.load_tensors({f"head.{name}": tensor for name, tensor in common.items()})
        super().receive()

    def train(self) -> float:
        """Train the extractor under the common head, then fine-tune what was received; return the former's loss."""
        start = self.copy_tensors()
        loss = self.run_epochs(self.config.local_epochs, self.model.extractor.parameters())
        trained = self.copy_tensors()
        self._shared = {name: trained[name] for name in self.shared_names()}
        self.load_tensors(start)
        part = {"model": self.model, "head": self.model.head, "extractor": self.model.extractor}
        self.run_epochs(self.parameters.fine_tune_epochs, part[self.parameters.fine_tune].parameters(), leaves=False)
        return loss

    def feeding(self) -> list[str]:
        """Return nothing: the common head is everybody's, and the fine-tuned one is dropped."""
        return []

    def upload(self) -> dict[str, Tensor]:
        """Return the extractor that was trained under the common head."""
        return self._shared
