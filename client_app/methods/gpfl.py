"""GPFL (Zhang et al. 2023), client half: a global route to class embeddings, a personal one to the head."""

from typing import cast

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from client_app.batches import Batch
from client_app.client import FloretClient
from client_app.methods.fedcpd import contrast_loss
from models import SplitModel
from strategies.gpfl import EMBEDDINGS, VALVE, ConditionalValve, GPFLParameters

# What is kept of the client's own context.
CONTEXT = "context"


def personal_context(embeddings: Tensor, labels: Tensor) -> Tensor:
    """Return ``sum_c p_c e_c``, (d,), with p the part that each class has in ``labels``, (samples,)."""
    prior = torch.bincount(labels, minlength=len(embeddings)).to(embeddings.dtype) / len(labels)
    context: Tensor = prior @ embeddings
    return context


def magnitude_loss(features: Tensor, embeddings: Tensor, drawn: Tensor, reduction: str) -> Tensor:
    """Return how far features, (batch, d), are from their class's embedding, (batch, d).

    Where ``drawn``, (batch,), is false they are at no distance.

    ``"batch"``: the norm of all differences together, as in the published code; ``"sample"``: the mean over the batch
    of the norm for each sample.
    """
    difference = (features - embeddings) * drawn.unsqueeze(1)
    norms: Tensor = torch.linalg.vector_norm(difference, dim=None if reduction == "batch" else 1)
    return norms.mean()


class GPFL(FloretClient):
    """Keeps its head and its context, the mean of the received embeddings by its own classes, which never leave.

    Receives and sends extractor, conditional valve and embeddings. The context of the global route is the plain mean of
    the received embeddings. Both contexts, and the embeddings of the magnitude, stay as received during a round.
    """

    serves_with = (f"{VALVE}.", CONTEXT)
    parameters: GPFLParameters

    def receive(self) -> None:
        """Take extractor and networks, and from the embeddings the client's own context."""
        super().receive()
        if self.parameters.valve:
            self.memory[CONTEXT] = self._context()

    def train(self) -> float:
        """Train model and networks together, the latter without momentum and with a weight decay of their own."""
        networks = [parameter for network in self.networks.values() for parameter in network.parameters()]
        optimizers = [self.optimizer(self.model.parameters())]
        if networks:
            self._frozen = self._embeddings().detach().clone()
            self._drawn = ~self.rare()
            self._global = self._frozen.mean(0)
            optimizers.append(self.optimizer(networks, momentum=0.0, weight_decay=self.parameters.mu))

        def step(batch: Batch) -> Tensor:
            for optimizer in optimizers:
                optimizer.zero_grad()
            with self.autocast():
                value = self.loss(batch)
            value.backward()  # type: ignore[no-untyped-call]
            for optimizer in optimizers:
                optimizer.step()
            return value

        return self.run_steps(self.config.local_epochs, step)

    def loss(self, batch: Batch) -> Tensor:
        """Return cross entropy by the personal route, plus the terms that are on by the global one."""
        own, (output, _) = self.parameters, self.stages(batch)
        personal = general = output
        if own.valve:
            features, valve = output.flatten(1), self.networks[VALVE]
            personal, general = valve(features, self.memory[CONTEXT]), valve(features, self._global)
        loss = F.cross_entropy(self.model.head(personal), batch.y)
        if own.angle:
            loss = loss + contrast_loss(general.flatten(1), batch.y, self._embeddings(), self._drawn, 1.0)
        if own.magnitude:
            embeddings, drawn = self._frozen[batch.y], self._drawn[batch.y]
            distance = magnitude_loss(general.flatten(1), embeddings, drawn, own.magnitude_reduction)
            loss = loss + own.lambda_ * distance
        return loss

    def serving(self) -> nn.Module:
        """Return the model with the personal route."""
        if not self.parameters.valve:
            return super().serving()
        context = self.memory[CONTEXT] if CONTEXT in self.memory else self._context()
        return PersonalRoute(self.model, cast(ConditionalValve, self.networks[VALVE]), context)

    def _embeddings(self) -> Tensor:
        return cast(nn.Embedding, self.networks[EMBEDDINGS]).weight

    def _context(self) -> Tensor:
        return personal_context(self._embeddings().detach(), self.data.train.y)


class PersonalRoute(nn.Module):
    """Predicts with a head from features that passed the valve in the client's own context, (features,)."""

    context: Tensor

    def __init__(self, model: SplitModel, valve: ConditionalValve, context: Tensor) -> None:
        super().__init__()
        self.model, self.valve = model, valve
        self.register_buffer("context", context)

    def forward(self, x: Tensor) -> Tensor:
        """Return scores, (batch, classes), of normalised inputs."""
        return self.model.head(self.valve(self.model.features(x), self.context))  # type: ignore[no-any-return]
