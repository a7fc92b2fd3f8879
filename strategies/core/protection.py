"""Differential privacy on the server's side: whom it draws, the noise of its sums, and what the run has spent."""

import math
from collections.abc import Callable, Iterable, Mapping

import numpy as np

from common.config import RunConfig
from common.durable import DamagedError
from common.names import without_prefix
from common.privacy.accounting import Release
from common.privacy.calibration import (
    drawn_in_secret,
    epsilon_spent,
    noise_of_clients,
    number_drawn,
    rate_of_clients,
)
from common.privacy.ledger import Ledger, Line
from common.privacy.noise import Noise, clipped, norm_of
from common.tensors import NamedArrays
from strategies.core.roster import Client
from strategies.core.session import Session

# How fast the bound follows the wanted quantile, and how much noise the number of clients below it gets: a twentieth
# of those expected (Andrew et al. 2021, section 3.1), but never so little that nothing is left for the sum.
_PACE, _SHARE_NOISE = 0.2, 1 / 20
# In a checkpoint.
_TOLD, _BOUND = "told.", "bound"


class PrivateMean:
    """The mean of what clients send, from clipped updates and noise, over the expected number of clients.

    Args:
        before: what the updates are to, as clients received it.
        bound: what the norm of a client's whole update is clipped to.
        deviation: of the noise in each value of the sum.
        expected: the number of clients that the mean is over, drawn or not.
        noise: its source.
    """

    def __init__(self, before: NamedArrays, bound: float, deviation: float, expected: float, noise: Noise) -> None:
        self._before, self._bound, self._deviation, self._expected = before, bound, deviation, expected
        self._noise = noise
        self._sums = {name: np.zeros(array.shape) for name, array in before.items()}
        # Of each client one half if its update is below the bound, else minus one half; none if it sends back what it
        # received, so that one client moves it by one half at most.
        self.balance = 0.0

    def add(self, arrays: Mapping[str, np.ndarray], weight: float) -> None:
        """Take in the tensors of one client; all clients weigh the same."""
        update = {name: array.astype(np.float64) - self._before[name] for name, array in arrays.items()}
        norm = norm_of(update)
        self.balance += 0.0 if norm == 0 else 0.5 if norm <= self._bound else -0.5
        for name, array in clipped(update, self._bound).items():
            self._sums[name] += array

    def result(self) -> NamedArrays:
        """Return the global tensors moved by the noised mean; all of them, whoever was drawn."""
        moved = {}
        for name, total in self._sums.items():
            noised = total + self._noise.once(total.shape, self._deviation)
            moved[name] = (self._before[name] + noised / self._expected).astype(self._before[name].dtype)
        return moved


class Protection:
    """What the server does for privacy in a run.

    Where it adds the noise it keeps the account: every round costs every client the same, drawn or not. Elsewhere each
    client keeps its own and says what it has spent.

    Args:
        config: of the run.
        simulated: draws and noise follow from the run's seed; else nobody can predict them.
    """

    def __init__(self, config: RunConfig, *, simulated: bool) -> None:
        self.config, self.keys = config, config.privacy
        self._simulated = simulated
        self._bound = self.keys.clip
        # By client: what it has spent, and what it would have after another round.
        self._told: dict[str, tuple[float, float]] = {}
        self._account: list[Release] = []
        self._note: Callable[[int, Release], None] = lambda server_round, release: None
        self._mean: PrivateMean | None = None
        # Over how many clients, drawn or not, the mean of this round is.
        self._mean_over = 1.0

    def keep(self, ledger: Ledger, session: Session, checkpointed: int) -> None:
        """Keep the account in a file of the run's directory, and go on from what it has.

        A simulation makes the rounds after the one that is ``checkpointed`` again with the same draws, and unless its
        config says otherwise now with the same noise: then they release the same once more, and are not paid twice.

        Raises:
            DamagedError: it lacks a round of the checkpoint, each of which was paid for before.
        """
        config = self.config
        paid, again = [(line.round, line.release) for line in ledger.lines()], set[tuple[int, Release]]()
        lacking = set(range(1, checkpointed + 1)) - {n for n, _ in paid}
        if lacking:
            raise DamagedError(
                f"{ledger.path}: does not have round {min(lacking)}, and the checkpoint is of round {checkpointed}: "
                "what the run has spent would count for less; put back the newest copy of it and of its .json"
            )
        if self._simulated:
            again = {(n, release) for n, release in paid if n > checkpointed and release == self._release()}
            paid = list(dict.fromkeys(paid))
        self._account = [release for n, release in paid if (n, release) not in again]

        def note(server_round: int, release: Release) -> None:
            if (server_round, release) in again:
                return
            with ledger.open() as opened:
                opened.add(
                    Line(
                        run=session.lineage,
                        attempt=len(session.resumed),
                        federation=config.federation,
                        method=config.method,
                        round=server_round,
                        unit=self.keys.unit,
                        by_server=True,
                        **release._asdict(),
                    )
                )

        self._note = note

    def draw(self, clients: list[Client], server_round: int) -> list[Client]:
        """Return those of the ``clients`` that are drawn, each with probability ``participation``, perhaps none."""
        draws = self._source("draw", server_round).generator.random(len(clients))
        return [client for client, draw in zip(clients, draws, strict=True) if draw < self.config.participation]

    def able(self, clients: list[Client]) -> list[Client]:
        """Return those of the ``clients`` that have enough left for another round."""
        return [client for client in clients if not self._exhausted(client.name)]

    def over(self, clients: Iterable[Client]) -> bool:
        """Return whether another round is more than is left to any of the ``clients``."""
        if not self.keys.epsilon:
            return False
        if self.keys.by_server:
            return epsilon_spent(self.keys, [*self._account, self._release()]) > self.keys.epsilon
        names = [client.name for client in clients]
        return bool(names) and all(map(self._exhausted, names))

    def mean(self, before: NamedArrays, clients: int, server_round: int) -> PrivateMean:
        """Return the aggregate of a round in which each of so many ``clients`` can be drawn."""
        noise, expected = noise_of_clients(self.config), self._expected(clients)
        if self.keys.clip_quantile:
            # The share of clients below the bound is released, too; together they cost what the sum alone would. To its
            # balance one client adds one half, so that of its noise twice the multiple counts.
            noise = (noise**-2 - (2 * self._share_noise(expected)) ** -2) ** -0.5
        self._mean_over = expected
        self._mean = PrivateMean(before, self._bound, noise * self._bound, expected, self._source("sum", server_round))
        return self._mean

    def pay(self, server_round: int) -> None:
        """Count a round before its sum is released; then the bound follows the sizes of updates, if it does.

        Andrew et al. 2021, algorithm 1. The number of clients is that of ``mean``, whoever is there by now: the sum got
        its noise for a share of so many.
        """
        self._account.append(self._release())
        self._note(server_round, self._release())
        if self.keys.clip_quantile and self._mean is not None:
            expected = self._mean_over
            noise = float(self._source("share", server_round).once((), self._share_noise(expected)))
            share = 0.5 + (self._mean.balance + noise) / expected
            self._bound *= math.exp(-_PACE * (share - self.keys.clip_quantile))

    def hear(self, client: str, metrics: Mapping[str, float]) -> None:
        """Take down what a client says that it has spent."""
        if "epsilon" in metrics:
            self._told[client] = (metrics["epsilon"], metrics.get("epsilon-next", math.inf))

    @property
    def epsilon(self) -> float | None:
        """What the client that has spent most has spent; None before anybody has."""
        if self.keys.by_server:
            return epsilon_spent(self.keys, self._account) if self._account else None
        return max((spent for spent, _ in self._told.values()), default=None)

    def state_dict(self) -> NamedArrays:
        """Return what a checkpoint has to keep."""
        told = {_TOLD + client: np.array(said) for client, said in self._told.items()}
        return {_BOUND: np.array([self._bound]), **told}

    def load_state_dict(self, arrays: NamedArrays) -> None:
        """Take back what ``state_dict`` returned."""
        self._bound = float(arrays[_BOUND][0])
        self._told = {client: (said[0], said[1]) for client, said in without_prefix(arrays, _TOLD).items()}

    def _source(self, purpose: str, server_round: int) -> Noise:
        return Noise.of(self.config.seed, purpose, server_round) if self._simulated else Noise.secret()

    def _exhausted(self, client: str) -> bool:
        return bool(self.keys.epsilon) and self._told.get(client, (0.0, 0.0))[1] > self.keys.epsilon

    def _release(self) -> Release:
        return Release(noise_of_clients(self.config), rate_of_clients(self.config), 1)

    def _expected(self, clients: int) -> float:
        if drawn_in_secret(self.keys):
            return max(self.config.participation * clients, 1.0)
        return float(max(1, min(number_drawn(self.config, clients), clients)))

    def _share_noise(self, expected: float) -> float:
        return max(expected * _SHARE_NOISE, noise_of_clients(self.config))
