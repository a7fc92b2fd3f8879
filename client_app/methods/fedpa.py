"""FedPA (Jiang et al. 2024), client half: features follow prototypes, the head also learns from generated features."""

import math
from typing import cast

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from client_app.batches import Batch
from client_app.client import FloretClient
from common.prototypes import PREFIX, alignment_loss
from common.seeds import torch_generator
from strategies.fedpa import COUNTS, GENERATOR, MOST_BATCHES, FedPAParameters, Generator


class FedPA(FloretClient):
    """Receives and sends the model; receives the generator, which it does not train, and the global prototypes."""

    parameters: FedPAParameters

    def train(self) -> float:
        """Train with prototypes and generated features, which stay fixed; without both in the first round."""
        own, decayed = self.parameters, self.parameters.decay ** (self.message["round"] - 1)
        self._prototypes, self._known = self.targets(self.received)
        self._classes = sorted(int(name.removeprefix(PREFIX)) for name in self.received if name.startswith(PREFIX))
        self._of_prototypes = max(own.prototype_floor, own.prototype_weight * decayed)
        self._of_generator = own.generator_weight * decayed
        self._generated: list[tuple[Tensor, Tensor]] = self._generate() if self._classes else []
        self._steps = 0
        return super().train()

    def loss(self, batch: Batch) -> Tensor:
        """Return cross entropy, plus that of generated features, plus the distance to the class's prototype."""
        output, _ = self.stages(batch)
        loss = F.cross_entropy(self.model.head(output), batch.y)
        if not self._classes:
            return loss
        if self._of_prototypes:
            aligned = alignment_loss(output.flatten(1), batch.y, self._prototypes, self._known, "mean")
            loss = loss + self._of_prototypes * aligned
        if self._of_generator:
            features, labels = self._generated[self._steps % len(self._generated)]
            self._steps += 1
            weight = self._of_generator * self.parameters.generator_batch / self.config.batch_size
            loss = loss + weight * F.cross_entropy(self.model.head(features), labels)
        return loss

    def on_batches(self) -> tuple[nn.Module, ...]:
        """Return the model: the generator is asked about noise."""
        return (self.model,)

    def upload(self) -> dict[str, Tensor]:
        """Return the model, the number of training samples of each class, and the mean feature of each own class."""
        tensors = super().upload()
        model = {name: tensors[name] for name in self.setup.tensor_names("model")}
        counts = torch.bincount(self.data.train.y, minlength=self.setup.classes).to(torch.int32)
        return model | {COUNTS: counts} | self.local_prototypes()

    def _generate(self) -> list[tuple[Tensor, Tensor]]:
        """Return features and labels for the steps of this round, in batches."""
        steps = self.config.local_epochs * math.ceil(len(self.data.train) / self.config.batch_size)
        size = self.parameters.generator_batch
        network = cast(Generator, self.networks[GENERATOR])
        random = torch_generator(self.config.seed, GENERATOR, self.setting.name, self.message["round"])
        noise, labels = network.draw(size * min(steps, MOST_BATCHES), self._classes, random)
        noise, labels = noise.to(self.device), labels.to(self.device)
        with torch.no_grad():
            features = network(noise, labels)
        places = range(0, len(labels), size)
        return [(features[place : place + size], labels[place : place + size]) for place in places]
