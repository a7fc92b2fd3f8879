"""A sketch with two networks, client half: model and student learn from the labels and from each other."""

import torch
import torch.nn.functional as F  # noqa: N812
from strategies.sketch_student import STUDENT, StudentParameters  # type: ignore[import-not-found]
from torch import Tensor

from client_app.batches import Batch
from client_app.client import FloretClient, Phase


class Student(FloretClient):
    """Keeps its model; shares the student."""

    parameters: StudentParameters

    def train(self) -> float:
        """Step the student, then the model, on every batch."""
        student, model = self.networks[STUDENT], self.model

        def teach(batch: Batch) -> Tensor:
            return self._both(student(batch.x), model(batch.x).detach(), batch)

        def learn(batch: Batch) -> Tensor:
            return self._both(model(batch.x), student(batch.x).detach(), batch)

        phases = [Phase(list(student.parameters()), teach, lr=0.05), Phase(list(model.parameters()), learn)]
        return self.run_alternating(self.config.local_epochs, phases)

    def upload(self) -> dict[str, Tensor]:
        """Return the factors of the student's matrices that keep the largest singular values."""
        sent: dict[str, Tensor] = {}
        for name, tensor in super().upload().items():
            if tensor.dim() == 2:
                u, s, v = torch.linalg.svd(tensor, full_matrices=False)
                rank = min(self.parameters.rank, len(s))
                sent |= {f"{name}.u": u[:, :rank] * s[:rank], f"{name}.v": v[:rank]}
            else:
                sent[name] = tensor
        return sent

    @staticmethod
    def _both(own: Tensor, other: Tensor, batch: Batch) -> Tensor:
        apart = F.kl_div(own.log_softmax(1), other.log_softmax(1), log_target=True, reduction="batchmean")
        return F.cross_entropy(own, batch.y) + apart
