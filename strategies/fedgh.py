"""FedGH (Yi et al. 2023): private extractors, and a head that the server trains on class means."""

import copy
from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from common.config import between
from common.prototypes import PREFIX
from common.seeds import torch_generator
from common.sgd import Sgd
from common.tensors import NamedArrays, Specs
from strategies.core import Client, FloretStrategy, Setup

# The longest gradient of a step, as in the published code: no prototype moves the head further.
CLIP = 50.0


@dataclass(frozen=True)
class FedGHParameters:
    """``server_lr``: of the head on the server; ``server_epochs``: how often it goes through a round's prototypes."""

    server_lr: float = between(0)
    server_epochs: int = between(1)


def train_head(head: nn.Module, prototypes: Iterable[tuple[Tensor, int]], lr: float) -> None:
    """Take one step of SGD with cross entropy on each prototype, in order.

    Args:
        head: from features, (1, features), to scores.
        prototypes: features, (features,), and their class.
        lr: learning rate.
    """
    parameters = list(head.parameters())
    optimizer = Sgd(parameters, lr=lr, momentum=0.0, weight_decay=0.0)
    for features, label in prototypes:
        optimizer.zero_grad()
        F.cross_entropy(head(features[None]), torch.tensor([label])).backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(parameters, CLIP)
        optimizer.step()


class FedGH(FloretStrategy):
    """Down: the head. Up: ``prototype.<class>`` of own classes, (features,) float32; no tensor of the model.

    Aggregate: the head is trained on the prototypes of the sampled clients, one at a time, in an order that is drawn.
    """

    shares = "head"
    Parameters = FedGHParameters
    parameters: FedGHParameters

    def check(self) -> None:
        """Refuse an aggregate, since nothing is averaged, and a head that takes no features.

        Raises:
            ConfigError: the config has one of them.
        """
        self.need_mean()
        self.need_vectors()

    @classmethod
    def uplink(cls, setup: Setup) -> Specs:
        """Return a prototype for each class, all optional."""
        return setup.prototypes()

    @classmethod
    def downlink(cls, setup: Setup) -> Specs:
        """Return the head."""
        return setup.tensors(cls.shares)

    def begin_round(self) -> None:
        """Forget the prototypes of the round before."""
        self._prototypes: list[tuple[Tensor, int]] = []

    def accumulate(self, client: Client, arrays: NamedArrays, samples: int) -> None:
        """Keep the prototypes until the round ends: few and small, and gone through more than once."""
        own = sorted((int(name.removeprefix(PREFIX)), array) for name, array in arrays.items())
        self._prototypes += [(torch.from_numpy(array.copy()), label) for label, array in own]

    def aggregate(self) -> NamedArrays:
        """Return the head after training."""
        head = copy.deepcopy(self.model.head)
        head.load_state_dict({n: torch.from_numpy(self.arrays[f"head.{n}"].copy()) for n in head.state_dict()})
        # In the same order every round, the last client and class would always have the last word.
        random = torch_generator(self.config.seed, "server", self.round)
        for _ in range(self.parameters.server_epochs):
            order = torch.randperm(len(self._prototypes), generator=random).tolist()
            train_head(head, (self._prototypes[place] for place in order), self.parameters.server_lr)
        return {f"head.{name}": tensor.numpy() for name, tensor in head.state_dict().items()}
