"""FedKD (Wu et al. 2022), client half: a private teacher and the shared student learn from each other."""

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from client_app.batches import Batch
from client_app.client import FloretClient
from client_app.state import checked_round
from common.errors import FloretError
from models import SplitModel
from strategies.fedkd import NOTHING, PROJECTION, STUDENT, FedKDParameters, compressed, energy_at, whole

VERSION = "version"


def divergence(own: Tensor, other: Tensor) -> Tensor:
    """Return ``KL(other || own)`` of scores, (batch, classes): the sum over classes, the mean over the batch.

    In float32: of scores that are close, bfloat16 leaves rounding alone.
    """
    answers, targets = own.float().log_softmax(1), other.float().log_softmax(1)
    return F.kl_div(answers, targets, log_target=True, reduction="batchmean")


def intensity(teacher: Tensor, student: Tensor) -> Tensor:
    """Return what the losses between teacher and student are multiplied by: 1 over the sum of their cross entropies.

    A weight, without a gradient: the more both are wrong, the less they are believed.
    """
    return 1 / (teacher + student).detach().clamp_min(1e-8)


class FedKD(FloretClient):
    """Keeps its model, the teacher, and a projection of features; receives and sends changes of the student.

    The student that it keeps from round to round is the one that it received, so that a change of it can be received.
    """

    goes_on = True
    parameters: FedKDParameters

    def receive(self) -> None:
        """Put together the global student from the one that this client has and what was sent.

        Raises:
            FloretError: it is a change of another student, absurdly large, or ``base`` or ``version`` is no round.
        """
        base = checked_round("base", self.message.get("base"), NOTHING)
        version = checked_round("version", self.message.get("version"))
        kept = self.memory.get(VERSION)
        # What is no round was kept before there was a check; then the student's round is not known.
        fine = kept is not None and kept.dtype == torch.int64 and kept.dim() == 0
        has = int(kept) if kept is not None and fine else NOTHING
        if base not in (NOTHING, has):
            raise FloretError(f"the server sent a change of the student of round {base}, this client has {has}")
        if self.received:
            student = whole(super().upload(), self.received)
            # Factors were small enough each: what they make must be, too.
            self.check_size({name: tensor.cpu().numpy() for name, tensor in student.items()})
            self.load_tensors(student)
        self.memory[VERSION] = torch.tensor(version, device=self.device)
        self._before = {name: tensor.clone() for name, tensor in super().upload().items()}

    def train(self) -> float:
        """Step teacher and student on every batch, each on its cross entropy and on what it learns from the other."""
        teacher, student, projection = self.model, self.networks[STUDENT], self.networks[PROJECTION]
        assert isinstance(student, SplitModel)
        networks = [[*network.parameters()] for network in (teacher, student, projection)]
        optimizers = [self.optimizer(parameters) for parameters in networks]
        own = self.parameters

        def step(batch: Batch) -> Tensor:
            for optimizer in optimizers:
                optimizer.zero_grad()
            with self.autocast():
                outputs = self.stages(batch)[0], student.extractor(batch.x)
                scores, answers = teacher.head(outputs[0]), student.head(outputs[1])
                losses = [F.cross_entropy(scores, batch.y), F.cross_entropy(answers, batch.y)]
                weight = intensity(*losses)
                if own.distill:
                    losses[0] = losses[0] + weight * divergence(scores, answers.detach())
                    losses[1] = losses[1] + weight * divergence(answers, scores.detach())
                if own.hidden:
                    features, projected = outputs[0].flatten(1), projection(outputs[1].flatten(1)).float()
                    losses[0] = losses[0] + weight * F.mse_loss(features, projected.detach())
                    losses[1] = losses[1] + weight * F.mse_loss(projected, features.detach())
            # Neither loss has a gradient in what the other one trains.
            (losses[0] + losses[1]).backward()  # type: ignore[no-untyped-call]
            for parameters, optimizer in zip(networks, optimizers, strict=True):
                torch.nn.utils.clip_grad_norm_(parameters, own.max_norm)
                optimizer.step()
            return losses[0]

        return self.run_steps(self.config.local_epochs, step)

    def upload(self) -> dict[str, Tensor]:
        """Return the change of the student, compressed, and go back to the student that was received."""
        energy = energy_at(self.parameters, self.message["round"], self.config.rounds)
        after = {name: tensor.clone() for name, tensor in super().upload().items()}
        self.load_tensors(self._before)
        return compressed(self._before, after, energy)
