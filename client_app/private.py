"""Differential privacy on the client's side: what a round releases, who pays for it, and how it is trained.

With ``privacy.unit = "example"`` everything that feeds the shared part is trained on clipped and noised gradients; with
``"client"`` it is trained as ever, and what leaves is clipped as a whole, and noised if nobody else does it.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from common.config import RunConfig
from common.errors import ConfigError, FloretError
from common.privacy.accounting import LARGEST_EPSILON, Release, epsilon_of
from common.privacy.calibration import calibrated_noise, drawn_in_secret, noise_of_clients, rate_of_clients
from common.privacy.ledger import Ledger, Line
from common.privacy.noise import Noise, clipped
from data import ClientData
from strategies.core import Method

# In the client's memory: what this run has spent in a simulation, and how its examples are drawn.
SPENT, PLAN = "privacy.spent", "privacy.plan"
# Noise of the number of examples, which says how examples are drawn; one example changes that number by 1.
COUNT = Release(20.0, 1.0, 1)


class BudgetError(FloretError):
    """What a round would cost is more than is left."""


class Account(Protocol):
    """Who pays for what a client releases."""

    def run(self) -> tuple[Release, ...]:
        """Return what this run has released."""

    def unpaid(self, rounds: int) -> int:
        """Return how many of the ``rounds`` of a run have to be paid for if the server draws its clients in secret."""

    def pay(self, releases: Sequence[Release]) -> None:
        """Note what is released; when this returns it counts.

        Raises:
            BudgetError: it is more than the node permits.
        """


class MemoryAccount:
    """In a simulation: what the run has spent stays with the client's state."""

    def __init__(self, memory: dict[str, Tensor]) -> None:
        self._memory = memory

    def run(self) -> tuple[Release, ...]:
        """Return what this run has released."""
        rows = self._memory[SPENT].tolist() if SPENT in self._memory else []
        return tuple(Release(noise, rate, int(steps)) for noise, rate, steps in rows)

    def unpaid(self, rounds: int) -> int:
        """Return 0: the user's own server keeps the account."""
        return 0

    def pay(self, releases: Sequence[Release]) -> None:
        """Note what is released."""
        rows = [*self.run(), *releases]
        self._memory[SPENT] = torch.tensor(rows, dtype=torch.float64)


@dataclass(frozen=True)
class Budget:
    """What a node permits over all runs together; ``epsilon`` 0 for no limit."""

    epsilon: float
    delta: float


class LedgerAccount:
    """On a node: the ledger of the client, over all its runs.

    Args:
        ledger: the client's.
        line: what is said of a release of this message; its noise, rate and steps are replaced.
        resumed: the round after which the server goes on from a checkpoint; 0 if it does not.
        budget: the node's own.
    """

    def __init__(self, ledger: Ledger, line: Line, resumed: int, budget: Budget) -> None:
        self._ledger, self._line, self._resumed, self._budget = ledger, line, resumed, budget

    def run(self) -> tuple[Release, ...]:
        """Return what this run has released, resumed and repeated rounds included."""
        return tuple(line.release for line in self._ledger.lines() if line.run == self._line.run)

    def unpaid(self, rounds: int) -> int:
        """Return the rounds that are left, in the first message of a run and in the first one after it was resumed.

        Rounds in which this client is not drawn tell of it, too, and it never hears of them; those that a resumed
        server makes once more are paid once more.
        """
        here = (self._line.run, self._line.attempt)
        paid = any((line.run, line.attempt) == here for line in self._ledger.lines())
        return 0 if paid else max(rounds - self._resumed, 0)

    def pay(self, releases: Sequence[Release]) -> None:
        """Write what is released into the ledger; it is on the disk when this returns."""
        with self._ledger.open() as ledger:
            if self._budget.epsilon:
                # Who is protected as a client is protected in each example, not the reverse.
                before = [line.release for line in ledger.lines if self._counts(line)]
                epsilon = epsilon_of([*before, *releases], self._budget.delta)
                if epsilon > self._budget.epsilon:
                    raise BudgetError(
                        f"this node's policy has max-epsilon = {self._budget.epsilon:g} with delta = "
                        f"{self._budget.delta:g}; it has spent {epsilon_of(before, self._budget.delta):.4g}, and this "
                        f"round would make it {epsilon:.4g}"
                    )
            for release in releases:
                ledger.add(replace(self._line, noise=release.noise, rate=release.rate, steps=release.steps))

    def _counts(self, line: Line) -> bool:
        return self._line.unit == "example" or line.unit == "client"


@dataclass(frozen=True)
class Plan:
    """How the examples of a run are drawn.

    Attributes:
        noise: of each step.
        steps: of one pass through the training data; an example is in each with probability 1 / steps.
        batch: the number of examples that a batch has on average, or nearly so.
    """

    noise: float
    steps: int
    batch: float

    @classmethod
    def of(cls, config: RunConfig, count: float, passes: int) -> "Plan":
        """Return the plan for about ``count`` examples and ``passes`` through them a round.

        Raises:
            ConfigError: no noise is enough for the target.
        """
        count = max(count, 1.0)
        steps = max(1, round(count / config.batch_size))
        noise = calibrated_noise(config, 1 / steps, steps * passes * config.rounds, COUNT)
        return cls(noise, steps, count / steps)


class Protection:
    """What is private about one message to a client.

    Args:
        config: of the run.
        passes: through the training data in a round, as the method declares.
        account: who pays.
        noise: of this message alone.
    """

    def __init__(self, config: RunConfig, passes: int, account: Account, noise: Noise) -> None:
        self.config, self.keys, self.noise = config, config.privacy, noise
        self._passes, self._account = passes, account
        self._plan: Plan | None = None
        self._steps = 0

    def pay(self, memory: dict[str, Tensor], samples: int, run: str) -> dict[str, float]:
        """Pay for a round before it is trained.

        Args:
            memory: the client's; it keeps the plan of the run.
            samples: in the training split.
            run: names the run.

        Returns:
            ``epsilon``, what the run has spent with this round, and ``epsilon-next``, what it would have with another;
            nothing where the server keeps the account.

        Raises:
            BudgetError: it is more than the run or the node permits.
            ConfigError: no noise is enough for the target.
        """
        releases = self._releases(memory, samples, run)
        if self.keys.by_server:
            self._account.pay(releases)
            return {}
        spent = [*self._account.run(), *releases]
        again = [release for release in releases if release != COUNT]
        epsilon, after = (
            min(epsilon_of(all_, self.keys.delta, self.keys.accountant), LARGEST_EPSILON)
            for all_ in (spent, [*spent, *again])
        )
        if self.keys.epsilon and epsilon > self.keys.epsilon:
            before = epsilon_of(self._account.run(), self.keys.delta, self.keys.accountant)
            raise BudgetError(
                f"privacy.epsilon = {self.keys.epsilon:g}: this client has spent {before:.4g} in this run, and another "
                f"round would make it {epsilon:.4g}"
            )
        self._account.pay(releases)
        return {"epsilon": epsilon, "epsilon-next": after}

    def batches(self, samples: int) -> list[np.ndarray]:
        """Return the positions of the examples of each batch of one pass: each example is in a batch with the same
        probability, whatever the others are (Poisson sampling).

        Raises:
            FloretError: it is more than was paid for.
        """
        assert self._plan is not None
        self._steps += self._plan.steps
        if self._steps > self._passes * self._plan.steps:
            raise FloretError(f"method = {self.config.method!r}: more passes than the {self._passes} that it declares")
        draws = self.noise.generator
        return [np.flatnonzero(draws.random(samples) < 1 / self._plan.steps) for _ in range(self._plan.steps)]

    def noised(self, gradient: Tensor) -> Tensor:
        """Return a summed gradient with noise, divided by the expected size of a batch."""
        assert self._plan is not None
        noise = torch.from_numpy(self.noise.normal(tuple(gradient.shape), self._plan.noise * self.keys.clip))
        return ((gradient.double() + noise.to(gradient.device)) / self._plan.batch).to(gradient.dtype)

    def update(self, sent: dict[str, Tensor], received: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return what leaves if a whole client is protected: the received tensors plus the clipped, noised update.

        Raises:
            FloretError: a tensor is sent that did not come: there is nothing that its update would be to.
        """
        lacking = sent.keys() - received.keys()
        if lacking:
            raise FloretError(f"privacy.unit = 'client': {min(lacking)} is sent, which did not come; it has no update")
        before = {name: received[name].double().cpu().numpy() for name in sent}
        update = {name: tensor.detach().double().cpu().numpy() - before[name] for name, tensor in sent.items()}
        if not self.keys.clip_quantile:
            update = clipped(update, self.keys.clip)
        if not self.keys.by_server:
            deviation = noise_of_clients(self.config) * self.keys.clip
            update = {name: array + self.noise.once(array.shape, deviation) for name, array in update.items()}
        return {
            name: torch.from_numpy(before[name] + update[name]).to(tensor.dtype).to(tensor.device)
            for name, tensor in sent.items()
        }

    def _releases(self, memory: dict[str, Tensor], samples: int, run: str) -> list[Release]:
        config = self.config
        if self.keys.unit == "client":
            rounds = self._account.unpaid(config.rounds) if drawn_in_secret(self.keys) else 1
            return [Release(noise_of_clients(config), rate_of_clients(config), rounds)] if rounds else []
        said = repr((run, self.keys, config.batch_size, config.rounds, self._passes)).encode()
        mark = int.from_bytes(hashlib.sha256(said).digest()[:6], "big")
        kept = memory[PLAN].tolist() if PLAN in memory else []
        releases = []
        if not kept or kept[0] != mark:
            count = samples + float(self.noise.once((), COUNT.noise))
            plan = Plan.of(config, count, self._passes)
            kept = [mark, plan.noise, plan.steps, plan.batch]
            memory[PLAN] = torch.tensor(kept, dtype=torch.float64)
            releases.append(COUNT)
        self._plan = plan = Plan(kept[1], int(kept[2]), kept[3])
        return [*releases, Release(plan.noise, 1 / plan.steps, self._passes * plan.steps)]


def check_protected(config: RunConfig, method: type[Method], data: ClientData) -> None:
    """Check on a node what a run that protects it must have, whatever the server has checked.

    Raises:
        ConfigError: names the key.
    """
    privacy = config.privacy
    method.check_protects(config)
    if data.num_classes > config.num_classes:
        raise ConfigError(
            f"num-classes = {config.num_classes}: with privacy.unit = {privacy.unit!r} no client tells its classes; "
            "the run config must have a number that is enough for all, and here it is not"
        )
