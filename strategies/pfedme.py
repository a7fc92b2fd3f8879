"""pFedMe (T. Dinh et al. 2020): personal models solve a problem near the shared one, which then follows them."""

from dataclasses import dataclass

from common.config import RunConfig, between
from common.tensors import NamedArrays
from strategies.core import FloretStrategy


@dataclass(frozen=True, kw_only=True)
class PFedMeParameters:
    """``inner_steps`` (K) of the personal model on each batch, near the client's copy of the shared one by ``lambda_``;
    the copy follows at ``local_lr`` (eta), the server's model the clients' by ``beta``.
    """

    inner_steps: int = between(1)
    lambda_: float = between(0, above=True)
    local_lr: float = between(0, above=True)
    beta: float = between(0, above=True)


class PFedMe(FloretStrategy):
    """Down: the shared model w. Up: the client's copy of it, w_i, when it has followed the personal model.

    Aggregate: ``w <- (1 - beta) w + beta mean(w_i)``, the plain mean over the sampled clients (Algorithm 1).
    """

    shares = "model"
    weighted = False
    Parameters = PFedMeParameters
    parameters: PFedMeParameters

    @classmethod
    def mixtures(cls, config: RunConfig, parameters: PFedMeParameters) -> dict[str, float]:
        """Return how far the personal model goes to the shared one, and the shared one to it."""
        pull = parameters.lambda_
        return {
            "lr times pfedme.lambda": config.lr * pull,
            "pfedme.local-lr times pfedme.lambda": parameters.local_lr * pull,
        }

    def aggregate(self) -> NamedArrays:
        """Move the weights by ``beta``; running statistics, of which that could make a negative variance, are means."""
        beta, mean = self.parameters.beta, super().aggregate()
        weights = {name for name, _ in self.model.named_parameters()}
        return {n: (1 - beta) * self.arrays[n] + beta * mean[n] if n in weights else mean[n] for n in mean}
