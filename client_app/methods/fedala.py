"""FedALA (Zhang et al. 2023), client half: adaptive local aggregation before each local training."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from client_app.batches import Batch, batch_of, sliced
from client_app.client import FloretClient
from models import last_layers
from strategies.fedala import FedALAParameters

# Of a client's mixing weights, in its memory.
WEIGHT = "mix."
# Losses whose deviation says whether the weights have converged.
LAST = 10


def mixed(own: Tensor, received: Tensor, weight: Tensor) -> Tensor:
    """Return ``own + weight * (received - own)``, element by element; to the bit what was received where it is 1."""
    return torch.lerp(own, received, weight)


def stepped(weight: Tensor, gradient: Tensor, own: Tensor, received: Tensor, eta: float) -> Tensor:
    """Return ``weight - eta * gradient * (received - own)``, clipped to [0, 1]; ``gradient`` is the mixed tensor's."""
    return (weight - eta * gradient * (received - own)).clamp(0, 1)


def converged(losses: Sequence[float], threshold: float) -> bool:
    """Return whether the standard deviation of the last of more than ``LAST`` losses is below ``threshold``."""
    return len(losses) > LAST and float(np.std(losses[-LAST:])) < threshold


class FedALA(FloretClient):
    """Receives and sends the whole model; keeps its own, and the mixing weights ``mix.<tensor>`` of the last layers."""

    parameters: FedALAParameters

    def receive(self) -> None:
        """Start from the received model, mixed with the own one in the last layers if there is one (ALA)."""
        own = self.copy_tensors()
        super().receive()
        if self.setting.state.round:
            self._aggregate(own)

    def _aggregate(self, own: dict[str, Tensor]) -> None:
        """Learn the mixing weights and put what they make into the model, which holds the received one."""
        keys, setup = self.parameters, self.setup
        top = last_layers(self.config.model, setup.input_shape, self.model, keys.layers, "fedala.layers")
        inside = {id(parameter) for module in top for parameter in module.parameters()}
        mixes = {name: p for name, p in self.model.named_parameters() if id(p) in inside}
        received = {name: parameter.detach().clone() for name, parameter in mixes.items()}
        # Weights of an earlier run were learned against other global models.
        known = self.memory if self.is_of_this_run() else {}
        first = any(WEIGHT + name not in known for name in mixes)
        weights = {name: known.get(WEIGHT + name, torch.ones_like(p)) for name, p in received.items()}
        self.model.eval().requires_grad_(False)
        for parameter in mixes.values():
            parameter.requires_grad_(True)

        def mix() -> None:
            for name, parameter in mixes.items():
                parameter.detach().copy_(mixed(own[name], received[name], weights[name]))

        mix()
        batches = self._sampled(cached=not any(name.startswith("extractor.") for name in mixes))
        losses: list[float] = []
        while len(losses) < (keys.first_epochs if first else 1) and not converged(losses, keys.threshold):
            total, count = torch.zeros((), device=self.device), 0
            for batch in batches():
                with self.autocast():
                    loss = self.loss(batch)
                gradients = torch.autograd.grad(loss, list(mixes.values()))
                for name, gradient in zip(mixes, gradients, strict=True):
                    weights[name] = stepped(weights[name], gradient, own[name], received[name], keys.eta)
                mix()
                total, count = total + loss.detach(), count + 1
            # Once an epoch the host waits for its loss.
            losses.append(float(total) / count)
        self.model.requires_grad_(True)
        self.memory = {WEIGHT + name: weight for name, weight in weights.items()}

    def _sampled(self, *, cached: bool) -> Callable[[], Iterable[Batch]]:
        """Return what gives the batches of random ``percent`` of the training data, every time the same.

        Drawn from a generator of its own, so that the training after it has FedAvg's order of batches.

        Args:
            cached: keep the outputs of the extractor, which nothing changes meanwhile, in the place of inputs.
        """
        train = self.data.train
        count = max(self.fewest, round(self.parameters.percent / 100 * len(train)))
        drawn = torch.randperm(len(train), generator=self.generator("local aggregation"))[:count].to(self.device)
        slices = sliced(drawn, self.config.batch_size, self.fewest)
        if not cached:
            return lambda: (batch_of(train, index) for index in slices)
        kept = [self._through_extractor(batch_of(train, index)) for index in slices]
        return lambda: kept

    def _through_extractor(self, batch: Batch) -> Batch:
        with torch.no_grad(), self.autocast():
            output, _ = self.stages(batch)
        return replace(batch, x=output, stages=(output, []))
