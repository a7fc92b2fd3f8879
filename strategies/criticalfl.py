"""CriticalFL (Yan et al. 2023): FedAvg that asks more clients, for a part of their weights, in critical periods."""

import math
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

import numpy as np

from common.config import between
from common.errors import ConfigError, FloretError
from common.tensors import MASK, NamedArrays, Specs, TensorSpec
from strategies.core import Client, FloretStrategy, Setup, StrategySetting

NORM = "gradient-norm"
# The largest square of a batch's gradient norm that counts: gradients are clipped to 10 in the published code.
LARGEST_SQUARE = 100.0
# A client's statistic counts for so many times the median over the round's clients at most.
MOST_TIMES = 2.0


@dataclass(frozen=True, kw_only=True)
class CriticalFLParameters:
    """``delta`` is the growth of the gradient norm above which a period is critical, the norm a mean over ``window``
    checks; there is a check every ``check_every`` rounds, and the first ``initial_checks`` find a critical period
    whatever the norms. In one, up to ``max_participation`` of the clients take part, and each sends the
    ``upload_fraction`` of its weights that changed most; with 1 it sends them all.
    """

    delta: float = between(0, infinite=True)
    initial_checks: int = between(0)
    window: int = between(1)
    check_every: int = between(1)
    max_participation: float = between(0, 1)
    upload_fraction: float = between(0, 1, above=True)


def federated_norm(norms: list[float]) -> float:
    """Return the plain mean of the clients' gradient norms, none counted for more than ``MOST_TIMES`` their median."""
    most = MOST_TIMES * median(norms)
    return sum(min(norm, most) for norm in norms) / len(norms)


@dataclass
class Periods:
    """What the server knows of critical periods.

    Attributes:
        norms: federated norms of the last checks, at most ``window`` + 1.
        checks: how many there were.
        clients: how many shall take part; 0 for as many as ``participation`` says.
        reached: there were as many clients as there may be, and from then on their number is not doubled.
        critical: what the last check found.
    """

    norms: list[float] = field(default_factory=list)
    checks: int = 0
    clients: int = 0
    reached: bool = False
    critical: bool = True

    def check(self, norm: float, own: CriticalFLParameters, least: int, most: int) -> None:
        """Take in a federated norm, and change the number of clients between ``least`` and ``most``.

        The period is critical if (New - Old) / Old > delta, New the mean over the last ``window`` norms with this one,
        Old that over those before this one.
        """
        before = self.norms[-own.window :]
        self.norms = [*before, norm]
        self.checks += 1
        new = float(np.mean(self.norms[-own.window :]))
        old = max(float(np.mean(before)), 1e-7) if before else math.inf
        self.critical = new - old > own.delta * old or self.checks <= own.initial_checks
        clients = max(self.clients, least)
        self.reached = self.reached or clients >= most
        if self.critical and not self.reached:
            clients = min(most, 2 * clients)
        elif not self.critical:
            clients -= max(clients // 2, 1)
        self.clients = max(least, clients)

    def state_dict(self) -> NamedArrays:
        """Return all of it as arrays."""
        numbers = [self.checks, self.clients, self.reached, self.critical]
        return {"norms": np.array(self.norms, np.float64), "numbers": np.array(numbers, np.int64)}

    def load_state_dict(self, arrays: NamedArrays) -> None:
        """Take back what ``state_dict`` returned."""
        self.norms = arrays["norms"].tolist()
        self.checks, self.clients, reached, critical = arrays["numbers"].tolist()
        self.reached, self.critical = bool(reached), bool(critical)


class SparseMean:
    """The weighted mean of each element over those who sent it; one that nobody sent stays as it was.

    Folded in one reply at a time, so it takes the memory of two models.
    """

    def __init__(self, before: NamedArrays) -> None:
        self._means = {name: array.copy() for name, array in before.items()}
        self._weights = {name: np.zeros(array.shape) for name, array in before.items()}

    def add(self, arrays: NamedArrays, weight: float) -> None:
        """Fold in the tensors of one client, each with its mask."""
        for name, mean in self._means.items():
            mask, weights = arrays[MASK + name], self._weights[name]
            weights += weight * mask
            share = np.divide(weight, weights, out=np.zeros(mask.shape), where=mask)
            mean += (arrays[name] - mean) * share.astype(mean.dtype)

    def result(self) -> NamedArrays:
        """Return the means."""
        return self._means


class CriticalFL(FloretStrategy):
    """Down: the model. Up: the model, float32, of which in a critical period only those elements travel that changed
    most; and ``gradient-norm``, (1,) float32 in [0, 100].

    Aggregate: mean weighted by training samples, of each element over those who sent it. The number of clients follows
    the federated gradient norm (``Periods``).
    """

    shares = "model"
    serves_global = True
    statistics = frozenset({NORM})
    Parameters = CriticalFLParameters
    parameters: CriticalFLParameters

    def __init__(self, setting: StrategySetting) -> None:
        super().__init__(setting)
        self._periods = Periods(critical=self.parameters.initial_checks > 0)
        # The federated norm of the last round in which there was one, or NaN if a check has taken it in.
        self._norm = math.nan

    def check(self) -> None:
        """Refuse an aggregate that needs each element from every client."""
        if self.parameters.upload_fraction < 1 and self.config.aggregation not in ("mean", "clipped-mean"):
            raise ConfigError(
                f"aggregation = {self.config.aggregation!r}: clients of criticalfl do not send all weights; "
                "use mean or clipped-mean, or criticalfl.upload-fraction=1"
            )

    @classmethod
    def uplink(cls, setup: Setup) -> Specs:
        """Return the model, sparse, and the gradient norm."""
        model = {name: replace(spec, sparse=True) for name, spec in setup.tensors("model").items()}
        return {**model, NORM: TensorSpec((1,))}

    @classmethod
    def downlink(cls, setup: Setup) -> Specs:
        """Return the model."""
        return setup.tensors("model")

    def wanted(self, clients: list[Client]) -> int:
        """Return as many as the last check said, between what ``participation`` says and ``max-participation``."""
        return max(super().wanted(clients), min(self._periods.clients, self._most(clients)))

    def sample(self, server_round: int) -> list[Client]:
        """Check for a critical period if it is time, then draw."""
        if server_round % self.parameters.check_every == 0 and not math.isnan(self._norm):
            present = self.roster.present()
            least = super().wanted(present)
            self._periods.check(self._norm, self.parameters, least, max(least, self._most(present)))
            self._norm = math.nan
        return super().sample(server_round)

    def instructions(self, client: Client, server_round: int) -> dict[str, Any]:
        """Return whether the client shall send the weights that changed most, alone."""
        return {"critical": self._sparse}

    def begin_round(self) -> None:
        """Forget the norms."""
        super().begin_round()
        self._norms: list[float] = []
        self._mean = SparseMean(self.arrays) if self._sparse else None

    def decoded(self, client: Client, arrays: NamedArrays) -> NamedArrays:
        """Return the model with the weights that were left out as they were: they count as no change.

        Raises:
            FloretError: it left some out, and should not.
        """
        if self._mean is None:
            if not all(arrays[MASK + name].all() for name in self.arrays):
                raise FloretError("it left out weights, and was not asked to")
            return arrays
        filled = {name: np.where(arrays[MASK + name], arrays[name], before) for name, before in self.arrays.items()}
        return {**arrays, **filled}

    def accumulate(self, client: Client, arrays: NamedArrays, samples: int) -> None:
        """Add the model to the mean, and take down the gradient norm."""
        square = float(arrays[NORM][0])
        if not 0 <= square <= LARGEST_SQUARE:
            raise FloretError(f"its {NORM} is {square:g}; it must be from 0 to {LARGEST_SQUARE:g}")
        if self._mean is None:
            super().accumulate(client, {name: arrays[name] for name in self.arrays}, samples)
        else:
            self._mean.add(arrays, self.weight(samples))
        steps = math.ceil(samples / self.config.batch_size)
        self._norms.append(self.config.decayed(self.config.lr, self.round) * steps * square)

    def aggregate(self) -> NamedArrays:
        """Return the new model."""
        self._norm = federated_norm(self._norms)
        return super().aggregate() if self._mean is None else self._mean.result()

    def state_dict(self) -> NamedArrays:
        """Return what is known of critical periods, and the norm of the last round."""
        return {**self._periods.state_dict(), "norm": np.array([self._norm])}

    def load_state_dict(self, arrays: NamedArrays) -> None:
        """Take back what ``state_dict`` returned."""
        self._periods.load_state_dict(arrays)
        (self._norm,) = arrays["norm"].tolist()

    @property
    def _sparse(self) -> bool:
        return self._periods.critical and self.parameters.upload_fraction < 1

    def _most(self, clients: list[Client]) -> int:
        return int(self.parameters.max_participation * len(clients))
