"""FedPAC (Xu et al. 2023): aligned features, and for each client a head combined from all heads."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
from flwr.app import Array

from common.config import RunConfig, between
from common.errors import FloretError
from common.prototypes import PREFIX
from common.tensors import NamedArrays, Specs, TensorSpec
from strategies.core import Client, FloretStrategy, Setup, StrategySetting
from strategies.core.simplex import smallest_combination

# What a client sends besides tensors of the model and prototypes.
MEAN, ENERGY, COUNTS = "mean.", "energy", "counts"
# A weight below it is taken for zero, as in the published code.
LEAST = 1e-3
# For the combination of heads no variance counts for more than so many times what is usual.
MOST_TIMES = 1e3
# By how much the means may pass ``energy`` because they were rounded on the way.
_ROUNDING = 1.01
# More samples of a class than anybody has.
_MOST = 2**53


@dataclass(frozen=True, kw_only=True)
class FedPACParameters:
    """``align`` features to prototypes, weighed by ``lambda_``; ``combine`` heads. The head is trained first, for
    ``head_epochs`` at the rate ``head_lr``, which ``lr-decay`` lowers as it does ``lr``.
    """

    align: bool
    combine: bool
    lambda_: float = between(0)
    head_epochs: int = between(1)
    head_lr: float = between(0, above=True)


def head_variance(energy: float, moments: np.ndarray, samples: int) -> float:
    """Return ``V = (E|f|^2 - sum_c |h_c|^2) / n``: how uncertain a head is that is estimated from n samples.

    Args:
        energy: ``E|f|^2`` over the client's samples.
        moments: ``h_c = p_c mu_c``, (classes, features).
        samples: n.

    Raises:
        FloretError: no features have such moments.
    """
    squares = float(np.square(moments).sum())
    if not squares <= energy * _ROUNDING:
        raise FloretError(f"its means have the square {squares:.3g}, more than its energy of {energy:.3g} allows")
    return max(energy - squares, 0.0) / samples


def combination_weights(variances: np.ndarray, moments: np.ndarray) -> np.ndarray:
    """Return each client's weights of all heads, (clients, clients): row i minimises ``a (diag(V) + D_i) a``.

    ``D_i[j, l] = <h_i - h_j, h_i - h_l>``, ``a`` >= 0 with sum 1. Weights below ``LEAST`` are zero, the others are
    scaled to sum 1 again. The inner products of all ``h`` are taken once.

    Args:
        variances: (clients,). One counts for ``MOST_TIMES`` what is usual of variances and distances at most: larger
            ones, which a client may make up, would cost the others' combinations their digits.
        moments: ``h``, flat, (clients, classes * features).
    """
    # D is of differences alone: moved to their mean, they lose fewer digits.
    centred = moments - moments.mean(0)
    products = centred @ centred.T
    variances = np.minimum(variances, MOST_TIMES * (np.median(variances) + np.median(products.diagonal())))
    weights: np.ndarray = np.empty_like(products)
    for i, row in enumerate(products):
        distances = products - row - row[:, None] + row[i]
        found = smallest_combination(np.diag(variances) + distances, i)
        if found.max() >= LEAST:  # not so with thousands of clients that are alike
            found[found < LEAST] = 0.0
        weights[i] = found / found.sum()
    return weights


class FedPAC(FloretStrategy):
    """Up: extractor, head, ``prototype.<class>`` of own classes after training and ``mean.<class>`` under the received
    extractor, (features,), the ``energy`` of the latter, (1,), all float32; ``counts`` of samples, (classes,) int64.
    Down: extractor, the global prototypes that exist, and the head that was combined for this client.

    Aggregate: mean of extractors weighted by training samples; ``P_c`` = mean weighted by samples of class c. Heads are
    combined at the end of a round, among its clients, for each of them; until a client takes part again, its
    combination waits here. One that lacks a mean of its classes keeps its own head, and nobody gets of it. Without
    ``align`` no prototypes travel, without ``combine`` no head, means and energy.
    """

    shares = "extractor"
    # A square: it grows by far more than the features do while they are learned. ``head_variance`` checks it.
    statistics = frozenset({ENERGY})
    unclipped = frozenset({"head", MEAN.removesuffix(".")})
    Parameters = FedPACParameters
    parameters: FedPACParameters

    def __init__(self, setting: StrategySetting) -> None:
        super().__init__(setting)
        self._combined: dict[str, NamedArrays] = {}

    @classmethod
    def decays(cls, config: RunConfig, parameters: FedPACParameters) -> dict[str, float]:
        """Add that of the head."""
        return super().decays(config, parameters) | {
            "fedpac.head-lr times weight-decay": parameters.head_lr * config.weight_decay
        }

    @classmethod
    def uplink(cls, setup: Setup) -> Specs:
        """Return the extractor, and what alignment and combination need."""
        specs, own = setup.tensors(cls.shares), setup.parameters
        if own.combine:
            means = {f"{MEAN}{c}": TensorSpec((setup.features,), optional=True) for c in range(setup.classes)}
            specs |= setup.tensors("head") | means | {ENERGY: TensorSpec((1,))}
        if own.align:
            specs |= setup.prototypes()
        if own.combine or own.align:
            specs |= {COUNTS: TensorSpec((setup.classes,), "int64")}
        return specs

    @classmethod
    def downlink(cls, setup: Setup) -> Specs:
        """Return the tensors of the model that travel, and prototypes."""
        own = (MEAN, ENERGY, COUNTS)
        return {name: spec for name, spec in cls.uplink(setup).items() if not name.startswith(own)}

    def payload(self, client: Client, server_round: int) -> Mapping[str, np.ndarray | Array]:
        """Return the global tensors, and the client's combined head if it has taken part."""
        if client.name not in self._combined:
            return self.arrays
        return {**self._pack(self.arrays), **self._combined[client.name]}

    def begin_round(self) -> None:
        """Forget the heads of the round before."""
        super().begin_round()
        self._heads: dict[str, NamedArrays] = {}
        self._moments: list[np.ndarray] = []
        self._variances: list[float] = []

    def accumulate(self, client: Client, arrays: NamedArrays, samples: int) -> None:
        """Add extractor and prototypes to the aggregate; put aside head and statistics.

        Raises:
            FloretError: means or counts cannot be those of any data.
        """
        of_class = {name: array for name, array in arrays.items() if name.startswith((PREFIX, MEAN))}
        shares = class_shares(arrays[COUNTS], of_class) if COUNTS in arrays else {}
        # Without one of its means, which its policy may keep back, it would look like others that lack it, too.
        if self.parameters.combine and all(f"{MEAN}{c}" in arrays for c in np.flatnonzero(arrays[COUNTS]).tolist()):
            moments = np.zeros((self.setup.classes, self.setup.features))
            for name, mean in of_class.items():
                if name.startswith(MEAN):
                    moments[int(name.removeprefix(MEAN))] = shares[name] * mean.astype(np.float64)
            self._variances.append(head_variance(float(arrays[ENERGY][0]), moments, samples))
            self._moments.append(moments.reshape(-1))
            self._heads[client.name] = {n: np.array(a) for n, a in arrays.items() if n.startswith("head.")}
        extractor = {name: array for name, array in arrays.items() if name.startswith("extractor.")}
        super().accumulate(client, extractor, samples)
        for name, prototype in of_class.items():
            if not name.startswith(MEAN):
                self._aggregate.add({name: prototype}, shares[name] * samples)

    def aggregate(self) -> NamedArrays:
        """Return the new global tensors, and combine the heads of this round."""
        if self._heads:
            weights = combination_weights(np.array(self._variances), np.stack(self._moments))
            for name, like in next(iter(self._heads.values())).items():
                heads = np.stack([head[name].reshape(-1) for head in self._heads.values()])
                mixed = (weights @ heads).astype(like.dtype)
                for client, row in zip(self._heads, mixed, strict=True):
                    self._combined.setdefault(client, {})[name] = row.reshape(like.shape)
        return super().aggregate()

    def state_dict(self) -> NamedArrays:
        """Return the combined heads."""
        return {f"{n}@{client}": array for client, head in self._combined.items() for n, array in head.items()}

    def load_state_dict(self, arrays: NamedArrays) -> None:
        """Take back the combined heads."""
        for name, array in arrays.items():
            tensor, _, client = name.partition("@")
            self._combined.setdefault(client, {})[tensor] = array


def class_shares(counts: np.ndarray, of_class: Iterable[str]) -> dict[str, float]:
    """Return for each name that ends in a class which part of the client's samples is of that class, (0, 1].

    Raises:
        FloretError: the counts are no numbers of samples, or there is none of such a class.
    """
    if counts.min() < 0 or not 0 < counts.sum(dtype=np.float64) <= _MOST:
        raise FloretError("its counts are no numbers of samples")
    total = int(counts.sum())
    shares = {name: int(counts[int(name.rpartition(".")[2])]) / total for name in of_class}
    for name, share in shares.items():
        if not share:
            raise FloretError(f"it sent {name} and counts no sample of that class")
    return shares
