"""APFL (Deng et al. 2020): each client uses a mixture of a private and the shared model, in parts that it learns."""

from dataclasses import dataclass

from common.config import between, choice
from strategies.core import FloretStrategy


@dataclass(frozen=True, kw_only=True)
class APFLParameters:
    """``alpha`` is the private model's part of the mixture, before a client's first round; ``adapt`` says how often it
    is adapted, ``"round"``, ``"batch"`` or ``"never"``, and ``alpha_lr`` is the rate of that.
    """

    alpha: float = between(0, 1)
    adapt: str = choice("round", "batch", "never")
    alpha_lr: float = between(0, above=True)


class APFL(FloretStrategy):
    """Down and up: the shared model. Aggregate: plain mean over the sampled clients."""

    shares = "model"
    weighted = False
    Parameters = APFLParameters
