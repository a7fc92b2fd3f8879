"""Per-FedAvg (Fallah et al. 2020): a shared model from which one step on a client's own data is a good one."""

from dataclasses import dataclass

from common.config import between, choice
from strategies.core import FloretStrategy


@dataclass(frozen=True, kw_only=True)
class PerFedAvgParameters:
    """``inner_lr``: rate of the adaptation step (the paper's alpha; beta is the key ``lr``); ``variant``: what is done
    about the Hessian in the gradient through that step; ``delta``: step of the difference in its place; ``adapt``: the
    personal model is one step from the client's model after its training, or from the one that it received.
    """

    inner_lr: float = between(0)
    variant: str = choice("hessian-free", "first-order")
    delta: float = between(0, above=True)
    adapt: str = choice("trained", "received")


class PerFedAvg(FloretStrategy):
    """Down and up: the whole model, before adaptation. Aggregate: plain mean over the sampled clients."""

    shares = "model"
    weighted = False
    Parameters = PerFedAvgParameters
