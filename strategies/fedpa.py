"""FedPA (Jiang et al. 2024): FedAvg with prototypes and a generator of features that are hard to classify."""

import copy
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from flwr.app import Array
from torch import Tensor, nn

from common.adam import Adam
from common.config import between
from common.errors import FloretError
from common.names import without_prefix
from common.prototypes import PREFIX, alignment_loss, stack
from common.seeds import torch_generator
from common.tensors import NamedArrays, Specs, TensorSpec
from strategies.core import Client, FloretStrategy, Network, Setup, StrategySetting

log = logging.getLogger("flwr")

GENERATOR, COUNTS = "generator", "counts"
# So many batches of generated features a client makes in a round at most; longer training goes through them again.
MOST_BATCHES = 256


@dataclass(frozen=True, kw_only=True)
class FedPAParameters:
    """``generator_weight`` and ``prototype_weight`` weigh what a client adds to its loss, times ``decay`` to the number
    of rounds before; the second is ``prototype_floor`` at least. The server trains the generator for
    ``generator_steps`` at the rate ``generator_lr``, which decays too, with ``generator_decay`` on its weights:
    ``adversarial_weight`` weighs the distance of features to the prototypes, ``diversity_weight`` that among them. It
    has ``generator_width`` hidden units, its input ``generator_noise`` random numbers; ``generator_batch`` features are
    drawn at a time.
    """

    generator_weight: float = between(0)
    prototype_weight: float = between(0)
    prototype_floor: float = between(0)
    decay: float = between(0, 1, above=True)
    adversarial_weight: float = between(0)
    diversity_weight: float = between(0)
    generator_lr: float = between(0, above=True)
    generator_decay: float = between(0)
    generator_steps: int = between(0)
    generator_batch: int = between(2, 4096)
    generator_width: int = between(1)
    generator_noise: int = between(1)


class Generator(nn.Module):
    """Makes features of a class from noise; batch normalisation takes the statistics of the batch, always."""

    def __init__(self, classes: int, noise: int, width: int, features: int) -> None:
        super().__init__()
        self.classes, self.noise = classes, noise
        self.layers = nn.Sequential(
            nn.Linear(noise + classes, width),
            nn.BatchNorm1d(width, track_running_stats=False),
            nn.ReLU(),
            nn.Linear(width, features),
        )

    def forward(self, noise: Tensor, labels: Tensor) -> Tensor:
        """Return features, (n, features), for noise, (n, noise), and labels, (n,)."""
        return self.layers(torch.cat([noise, F.one_hot(labels, self.classes).float()], 1))  # type: ignore[no-any-return]

    def draw(self, count: int, classes: Sequence[int], generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Return uniform noise and labels, uniform in ``classes``, for so many features; on the CPU."""
        noise = torch.rand(count, self.noise, generator=generator)
        places = torch.randint(len(classes), (count,), generator=generator)
        return noise, torch.tensor(classes)[places]


def fidelity_loss(logits: Tensor, labels: Tensor, shares: Tensor) -> Tensor:
    """Return the mean of one client's cross entropy, each feature weighed by the client's share of its class.

    Args:
        logits: (n, classes), of the client's head.
        labels: (n,).
        shares: (classes,) the client's samples of a class among those of all clients of the round.
    """
    return (F.cross_entropy(logits, labels, reduction="none") * shares[labels]).mean()


def diversity_loss(noise: Tensor, features: Tensor, labels: Tensor) -> Tensor:
    """Return exp(-mean of |noise_i - noise_j|^2 |features_i - features_j|), over pairs, each distance a mean over
    dimensions; pairs of one class count as 0.
    """
    others = labels.unsqueeze(0) != labels.unsqueeze(1)
    apart = (noise.unsqueeze(0) - noise.unsqueeze(1)).square().mean(2)
    result = (features.unsqueeze(0) - features.unsqueeze(1)).abs().mean(2)
    return (-(apart * result * others).mean()).exp()


class FedPA(FloretStrategy):
    """Down: the model, the generator, the global prototypes that exist. Up: the model, ``counts``, (classes,) int32, of
    training samples by class, and ``prototype.<class>``, (features,) float32, of own classes.

    Aggregate: mean of models weighted by training samples; ``P_c`` = mean weighted by samples of class c. Then the
    server trains the generator on the heads that came and the prototypes that it sent.
    """

    shares = "model"
    serves_global = True
    Parameters = FedPAParameters
    parameters: FedPAParameters

    def check(self) -> None:
        """Refuse a head that takes no features: they are what is generated."""
        self.need_vectors()

    def __init__(self, setting: StrategySetting) -> None:
        super().__init__(setting)
        self._moments: NamedArrays = {}

    @classmethod
    def networks(cls, setup: Setup) -> dict[str, Network]:
        """Return the generator."""
        own: FedPAParameters = setup.parameters
        sides = (setup.classes, own.generator_noise, own.generator_width)
        return {GENERATOR: Network(lambda: Generator(*sides, setup.features), shared=True)}

    @classmethod
    def made_values(cls, setup: Setup) -> int:
        """Return how many values the features of a round have, with what the generator makes them of."""
        own: FedPAParameters = setup.parameters
        widths = own.generator_noise + setup.classes + own.generator_width + setup.features
        return MOST_BATCHES * own.generator_batch * widths

    @classmethod
    def uplink(cls, setup: Setup) -> Specs:
        """Return the model, counts, and a prototype for each class, optional."""
        counts = {COUNTS: TensorSpec((setup.classes,), "int32")}
        return {**setup.tensors("model"), **counts, **setup.prototypes()}

    @classmethod
    def downlink(cls, setup: Setup) -> Specs:
        """Return the model, the generator, and a prototype for each class, optional."""
        return {**setup.tensors("model"), **cls.shared_networks(setup), **setup.prototypes()}

    def evaluation_payload(self, client: Client, server_round: int) -> Mapping[str, np.ndarray | Array]:
        """Return the model alone."""
        return {name: self.arrays[name] for name in self.setup.tensor_names("model")}

    def begin_round(self) -> None:
        """Forget the heads."""
        super().begin_round()
        self._heads: list[tuple[nn.Module, Tensor]] = []

    def accumulate(self, client: Client, arrays: NamedArrays, samples: int) -> None:
        """Add model and prototypes to the aggregate, and keep the head and the counts for this round."""
        counts = arrays[COUNTS].astype(np.int64)
        prototypes = {name: int(name.removeprefix(PREFIX)) for name in arrays if name.startswith(PREFIX)}
        if counts.min() < 0 or not 1 <= counts.sum() <= client.train:
            raise FloretError(f"its counts must be of 1 to {client.train} samples")
        for name, label in prototypes.items():
            if not counts[label]:
                raise FloretError(f"it sent {name}, and has no sample of the class")
        super().accumulate(client, {name: arrays[name] for name in self.setup.tensor_names("model")}, samples)
        for name, label in prototypes.items():
            self._aggregate.add({name: arrays[name]}, self.weight(samples) * int(counts[label]) / int(counts.sum()))
        head = copy.deepcopy(self.model.head).eval().requires_grad_(False)
        own = without_prefix(arrays, "head.")
        head.load_state_dict({name: torch.from_numpy(array.copy()) for name, array in own.items()}, strict=False)
        # In all no more than what its samples count for: each client declares its own.
        self._heads.append((head, torch.from_numpy(counts * min(1.0, samples / int(counts.sum())))))

    def aggregate(self) -> NamedArrays:
        """Return the new model and prototypes, and the generator after its training."""
        return super().aggregate() | self._trained_generator()

    def state_dict(self) -> NamedArrays:
        """Return what Adam remembers of the generator."""
        return self._moments

    def load_state_dict(self, arrays: NamedArrays) -> None:
        """Take back what ``state_dict`` returned."""
        self._moments = arrays

    def _trained_generator(self) -> NamedArrays:
        own, decayed = self.parameters, self.parameters.decay ** (self.round - 1)
        network = self.networks(self.setup)[GENERATOR].bare()
        assert isinstance(network, Generator)
        tensors = without_prefix(self.arrays, f"{GENERATOR}.")
        network.load_state_dict({name: torch.from_numpy(array.copy()) for name, array in tensors.items()})
        parameters = dict(network.named_parameters())
        rate = own.generator_lr * decayed
        optimizer = Adam(parameters, lr=rate, weight_decay=own.generator_decay, state=self._moments)
        counts = torch.stack([counts for _, counts in self._heads]).float()
        classes = counts.sum(0).nonzero().flatten().tolist()
        shares = counts / counts.sum(0).clamp(min=1)
        prototypes, known = self._known_prototypes()
        random = torch_generator(self.config.seed, GENERATOR, self.round)
        for _ in range(own.generator_steps):
            noise, labels = network.draw(own.generator_batch, classes, random)
            optimizer.zero_grad()
            features = network(noise, labels)
            pairs = zip(self._heads, shares, strict=True)
            fidelity = torch.stack([fidelity_loss(head(features), labels, share) for (head, _), share in pairs]).sum()
            loss = own.generator_weight * decayed * fidelity
            loss = loss - own.adversarial_weight * alignment_loss(features, labels, prototypes, known, "mean")
            loss = loss + own.diversity_weight * diversity_loss(noise, features, labels)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        trained = {f"{GENERATOR}.{name}": t.numpy().copy() for name, t in network.state_dict().items()}
        if not all(np.isfinite(array).all() for array in trained.values()):
            log.warning("Round %d: the generator diverged and stays as it was", self.round)
            return {}
        self._moments = optimizer.state_dict()
        return trained

    def _known_prototypes(self) -> tuple[Tensor, Tensor]:
        """Return the prototypes of the round before, (classes, features), and (classes,) true where there is one."""
        sent = {name: torch.from_numpy(array.copy()) for name, array in self.arrays.items() if name.startswith(PREFIX)}
        return stack(sent, self.setup.classes, self.setup.features, torch.device("cpu"))
