"""DisPFL (Dai et al. 2022): decentralised; each client trains a sparse model of its own and moves its mask."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from common.config import between, choice
from common.errors import FloretError
from common.tensors import MASK, NamedArrays, Specs
from strategies.core import Client, Decentralised, GraphParameters, Setup


@dataclass(frozen=True, kw_only=True)
class DisPFLParameters(GraphParameters):
    """``density`` is the part of the parameters that a client has; ``prune_rate`` the part of them that it moves after
    the first round, less and less until the last; ``regrow`` says by what new ones are chosen; with ``own_masks`` each
    client draws its own first mask.
    """

    density: float = between(0, 1, above=True)
    prune_rate: float = between(0, 1)
    regrow: str = choice("gradient", "random")
    own_masks: bool


def kept_elements(shapes: Mapping[str, tuple[int, ...]], density: float) -> dict[str, int]:
    """Return how many elements of each tensor are kept, so that together it is the part ``density``, by ERK.

    That is, the density of a tensor is proportional to the sum of its sides divided by their product, and at most 1: a
    tensor that would have more is kept whole, and the others share the rest. One element is kept at least.
    """
    sizes = {name: math.prod(shape) for name, shape in shapes.items()}
    raw = {name: sum(shape) / sizes[name] for name, shape in shapes.items()}
    whole: set[str] = set()
    while len(whole) < len(sizes):
        others = sizes.keys() - whole
        left = density * sum(sizes.values()) - sum(sizes[name] for name in whole)
        scale = left / sum(raw[name] * sizes[name] for name in sizes if name in others)
        most = max(raw[name] for name in others)
        if scale * most < 1:
            break
        whole |= {name for name in others if raw[name] == most}
    return {name: n if name in whole else max(1, round(scale * raw[name] * n)) for name, n in sizes.items()}


def masked(setup: Setup) -> dict[str, int]:
    """Return by name the parameters that have a mask, and how many of their elements are in it; others are whole."""
    shapes = {name: tuple(parameter.shape) for name, parameter in setup.model.named_parameters()}
    kept = kept_elements(shapes, setup.parameters.density)
    return {name: count for name, count in kept.items() if count < math.prod(shapes[name])}


class DisPFL(Decentralised):
    """Up: the model ``w_i``; of each parameter with a mask only the elements in it travel, behind the mask as bits.
    Down: the neighbours' models and masks, as ``<i>.<name>``.

    The client takes ``w_i = m_i * sum_j w_j / sum_j m_j`` over itself and its neighbours, element by element, under its
    own new mask. Running statistics, and parameters that are whole, are averaged. The server averages nothing.
    """

    shares = "model"
    Parameters = DisPFLParameters
    parameters: DisPFLParameters

    @classmethod
    def uplink(cls, setup: Setup) -> Specs:
        """Return the model, sparse where it has masks."""
        sparse = masked(setup)
        return {name: replace(spec, sparse=name in sparse) for name, spec in setup.tensors(cls.shares).items()}

    def accumulate(self, client: Client, arrays: NamedArrays, samples: int) -> None:
        """Check that each mask has as many elements as ``density`` says; ``self.post`` has what a client publishes.

        Raises:
            FloretError: one has not.
        """
        for name, count in masked(self.setup).items():
            have = int(arrays[MASK + name].sum())
            if have != count:
                raise FloretError(f"its mask of {name} has {have} elements, dispfl.density asks for {count}")
