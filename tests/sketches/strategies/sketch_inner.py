"""A sketch of an inner loop and of a server that trains: pFedMe's steps on one batch, FedGH's head on prototypes."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812

from common.config import between
from common.sgd import Sgd
from common.tensors import NamedArrays, Specs
from strategies.core import Client, FloretStrategy, Setup


@dataclass(frozen=True, kw_only=True)
class InnerParameters:
    """``steps`` on each batch at the rate ``inner_lr``, near the shared weights by ``lambda_``."""

    steps: int = between(1)
    inner_lr: float = between(0, above=True)
    lambda_: float = between(0)
    server_lr: float = between(0)


class Inner(FloretStrategy):
    """Down: the model. Up: the extractor, and ``prototype.<class>`` of own classes; the head is the server's."""

    shares = "model"
    Parameters = InnerParameters
    parameters: InnerParameters

    @classmethod
    def uplink(cls, setup: Setup) -> Specs:
        """Return the extractor and prototypes."""
        return {**setup.tensors("extractor"), **setup.prototypes()}

    @classmethod
    def downlink(cls, setup: Setup) -> Specs:
        """Return the model."""
        return setup.tensors("model")

    def begin_round(self) -> None:
        """Forget the prototypes."""
        super().begin_round()
        self._prototypes: list[tuple[torch.Tensor, int]] = []

    def accumulate(self, client: Client, arrays: NamedArrays, samples: int) -> None:
        """Average the extractors; keep the prototypes."""
        extractor = {name: array for name, array in arrays.items() if name.startswith("extractor.")}
        super().accumulate(client, extractor, samples)
        for name in arrays.keys() - extractor.keys():
            self._prototypes.append((torch.from_numpy(arrays[name].copy()), int(name.removeprefix("prototype."))))

    def aggregate(self) -> NamedArrays:
        """Train the head on the prototypes, one step of each."""
        head = self.model.head
        head.load_state_dict({n: torch.tensor(self.arrays[f"head.{n}"]) for n in head.state_dict()})
        optimizer = Sgd(list(head.parameters()), lr=self.parameters.server_lr, momentum=0.0, weight_decay=0.0)
        for features, label in sorted(self._prototypes, key=lambda item: item[1]):
            optimizer.zero_grad()
            F.cross_entropy(head(features[None]), torch.tensor([label])).backward()
            optimizer.step()
        trained = {f"head.{name}": tensor.numpy().copy() for name, tensor in head.state_dict().items()}
        return {**super().aggregate(), **trained}
