"""Differential privacy on the client's side: what a round releases, who pays for it, and how it is trained.

With ``privacy.unit = "example"`` everything that feeds the shared part is trained on clipped and noised gradients; with
``"client"`` it is trained as ever, and what leaves is clipped as a whole, and noised if nobody else does it.
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from common.config import RunConfig
from common.errors import FloretError
from common.privacy.accounting import Release
from common.privacy.calibration import (
    calibrated_noise,
    drawn_in_secret,
    epsilon_spent,
    noise_of_clients,
    rate_of_clients,
)
from common.privacy.ledger import Ledger, Line, spent_by_client, spent_by_example
from common.privacy.noise import Noise, clipped
from common.starts import Start, starts_of
from data import ClientData, Split

# In the client's memory in a simulation: what this run has spent, and its noised number of examples.
SPENT, COUNTED = "privacy.spent", "privacy.count"
# Noise of the number of examples, which says how examples are drawn; one example changes that number by 1.
COUNT = Release(20.0, 1.0, 1)
# Each is a line of the ledger, flushed to the disk.
_MOST_STARTS = 100


class BudgetError(FloretError):
    """What a round would cost is more than is left."""


class Account(Protocol):
    """Who pays for what a client releases."""

    def run(self) -> tuple[Release, ...]:
        """Return what this run has released."""

    def count(self) -> float | None:
        """Return the noised number of examples that this run has released, None if it has not."""

    def in_advance(self, release: Release, rounds: int) -> list[tuple[int, Release]]:
        """Return by attempt what has to be paid for so many rounds if the server draws its clients in secret."""

    def pay(self, releases: Sequence[Release], attempts: Sequence[int] = (), count: float | None = None) -> None:
        """Note what is released, of these attempts at the run, by default the present one; then it counts.

        Args:
            releases, attempts: equally many, or no attempts.
            count: the noised number of examples, if it is what is released.

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

    def count(self) -> float | None:
        """Return the noised number of examples that this run has released."""
        return float(self._memory[COUNTED]) if COUNTED in self._memory else None

    def in_advance(self, release: Release, rounds: int) -> list[tuple[int, Release]]:
        """Return nothing: the user's own server keeps the account."""
        return []

    def pay(self, releases: Sequence[Release], attempts: Sequence[int] = (), count: float | None = None) -> None:
        """Note what is released."""
        rows = [*self.run(), *releases]
        self._memory[SPENT] = torch.tensor(rows, dtype=torch.float64)
        if count is not None:
            self._memory[COUNTED] = torch.tensor(count, dtype=torch.float64)


@dataclass(frozen=True)
class Budget:
    """What a node permits: over all runs together ``epsilon``, 0 for no limit; in each ``noise`` at least."""

    epsilon: float
    delta: float
    noise: float = 0.0

    def check_noise(self, noise: float) -> None:
        """Check the noise that a run adds on the node, in units of its ``privacy.clip``.

        Raises:
            BudgetError: it is less than the node permits.
        """
        if noise < self.noise:
            raise BudgetError(
                f"this node's policy has min-noise = {self.noise:g}, and this run adds {noise:.3g} times its "
                "privacy.clip; it needs more privacy.noise, or with privacy.noise = 0 a smaller privacy.epsilon"
            )


class LedgerAccount:
    """On a node: the ledger of the client, over all its runs.

    Args:
        ledger: the client's.
        line: what is said of a release of this message; its noise, rate and steps are replaced.
        starts: all starts of the run's server, the present one last; needed for what is paid in advance.
        budget: the node's own.
    """

    def __init__(self, ledger: Ledger, line: Line, starts: tuple[Start, ...], budget: Budget) -> None:
        self._ledger, self._line, self._starts, self._budget = ledger, line, starts, budget
        self._resumed = tuple(start.after for start in starts[1:])

    def run(self) -> tuple[Release, ...]:
        """Return what this run has released, resumed and repeated rounds included."""
        return tuple(line.release for line in self._ledger.lines() if line.run == self._line.run)

    def count(self) -> float | None:
        """Return the noised number of examples that this run has released, whatever became of the client's state."""
        counts = [line.count for line in self._ledger.lines() if line.run == self._line.run]
        return next((count for count in counts if count is not None), None)

    def in_advance(self, release: Release, rounds: int) -> list[tuple[int, Release]]:
        """Return what is not paid for yet of a run, by attempt: all of its rounds, and after each resume the rest.

        Rounds in which this client is not drawn tell of it, too, and it never hears of them; those that a resumed
        server makes once more are paid once more.
        """
        due = []
        paid: Counter[str] = Counter()
        for line in self._ledger.lines():
            same = (line.noise, line.rate) == (release.noise, release.rate)
            if same and line.run == self._line.run and line.by_server:
                paid[line.start] += line.steps
        for attempt, start in enumerate((0, *self._resumed)):
            # Two starts after the same round are two: what was paid for one of them is not paid for the other.
            name, steps = self._starts[attempt].name, max(rounds - start, 0)
            covered = min(steps, paid[name])
            paid[name] -= covered
            if covered < steps:
                due.append((attempt, release._replace(steps=steps - covered)))
        return due

    def pay(self, releases: Sequence[Release], attempts: Sequence[int] = (), count: float | None = None) -> None:
        """Write what is released into the ledger; it is on the disk when this returns."""
        # Where the server adds the noise, it is trusted with it; that of the count does not follow the run.
        self._budget.check_noise(
            min((r.noise for r in releases if r != COUNT and not self._line.by_server), default=math.inf)
        )
        with self._ledger.open() as ledger:
            if self._budget.epsilon:
                if self._line.unit == "client" and any(line.unit == "example" for line in ledger.lines):
                    raise BudgetError(
                        f"this node's policy has max-epsilon = {self._budget.epsilon:g}, and it has taken part in runs "
                        "with privacy.unit = 'example', which do not protect it as a client"
                    )
                epsilon = self._spent(ledger.lines, releases)
                if not epsilon <= self._budget.epsilon:
                    raise BudgetError(
                        f"this node's policy has max-epsilon = {self._budget.epsilon:g} with delta = "
                        f"{self._budget.delta:g}; it has spent {self._spent(ledger.lines):.4g}, and this round would "
                        f"make it {epsilon:.4g}"
                    )
            for release, attempt in zip(releases, attempts or [self._line.attempt] * len(releases), strict=True):
                start = self._starts[attempt].name if attempts else ""
                ledger.add(replace(self._line, attempt=attempt, count=count, start=start, **release._asdict()))

    def _spent(self, lines: Sequence[Line], releases: Sequence[Release] = ()) -> float:
        """Return what ``lines``, and ``releases`` of this run, cost whom the run protects."""
        spent = spent_by_client if self._line.unit == "client" else spent_by_example
        return spent(lines, self._budget.delta, releases)


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
        # So few would make the noise of a step that of a batch of one; what is noise already may be bounded.
        count = max(count, COUNT.noise)
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

    def pay(self, samples: int) -> dict[str, float]:
        """Pay for a round before it is trained.

        The number of examples is paid for on its own, before anything depends on it: what a round costs, and so
        whether it is refused, tells of that number.

        Args:
            samples: in the training split.

        Returns:
            ``epsilon``, what the run has spent with this round, and ``epsilon-next``, what it would have with another;
            nothing where the server keeps the account.

        Raises:
            BudgetError: it is more than the run or the node permits.
            ConfigError: no noise is enough for the target.
        """
        if drawn_in_secret(self.keys):
            pay_in_advance(self.config, self._account)
            return {}
        if self.keys.unit == "example":
            count = self._account.count()
            if count is None:
                self._after(COUNT)
                count = samples + float(self.noise.once((), COUNT.noise))
                self._account.pay([COUNT], count=count)
            self._plan = Plan.of(self.config, count, self._passes)
        release = self._of_examples() if self.keys.unit == "example" else _of_client(self.config)
        if self.keys.by_server:
            self._account.pay([release])
            return {}
        epsilon, after = self._after(release), epsilon_spent(self.keys, [*self._account.run(), release, release])
        self._account.pay([release])
        return {"epsilon": epsilon, "epsilon-next": after}

    def _after(self, release: Release) -> float:
        """Return what the run has spent after a release.

        Raises:
            BudgetError: it is more than the run permits.
        """
        spent = self._account.run()
        epsilon = epsilon_spent(self.keys, [*spent, release])
        if self.keys.epsilon and not epsilon <= self.keys.epsilon:
            raise BudgetError(
                f"privacy.epsilon = {self.keys.epsilon:g}: this client has spent {epsilon_spent(self.keys, spent):.4g} "
                f"in this run, and another round would make it {epsilon:.4g}"
            )
        return epsilon

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
        # A single step is released as it is; with several passes each may be of other tensors.
        draw = self.noise.once if self._plan.steps == 1 else self.noise.normal
        noise = torch.from_numpy(draw(tuple(gradient.shape), self._plan.noise * self.keys.clip))
        return noise.to(gradient.device).add_(gradient).div_(self._plan.batch).to(gradient.dtype)

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

    def _of_examples(self) -> Release:
        assert self._plan is not None
        return Release(self._plan.noise, 1 / self._plan.steps, self._passes * self._plan.steps)


def account_on_node(
    ledger: Ledger, budget: Budget, config: RunConfig, message: Mapping[str, Any], server_round: int
) -> LedgerAccount:
    """Return who pays on a node for what a message asks.

    Args:
        ledger, budget: of the client, and of its node.
        config: of the run.
        message: its scalars; the run is ``session.lineage``.
        server_round: the message's round, 0 before the first one.

    Raises:
        FloretError: the message does not name the starts of the run's server as it must where they count.
    """
    line = Line(
        run=message["session.lineage"],
        attempt=len(message["session.resumed"]),
        federation=config.federation,
        method=config.method,
        round=server_round,
        unit=config.privacy.unit,
        by_server=config.privacy.by_server,
        noise=0.0,
        rate=1.0,
        steps=0,
    )
    starts = starts_of(message) if drawn_in_secret(config.privacy) else ()
    return LedgerAccount(ledger, line, starts, budget)


def pay_in_advance(config: RunConfig, account: Account, permit: Callable[[], None] = lambda: None) -> None:
    """Pay for all rounds of a run whose server draws its clients in secret, as far as it is not done.

    Args:
        config: of the run.
        account: who pays.
        permit: is asked before anything is paid; what it raises goes on.

    Raises:
        BudgetError: it is more than the node permits, or of more starts of the server than can be paid at once.
        ConfigError: no noise is enough for the target.
    """
    due = account.in_advance(_of_client(config), config.rounds)
    if len(due) > _MOST_STARTS:
        raise BudgetError(
            f"the server was started {len(due)} times for which this client has not paid; it pays for at most "
            f"{_MOST_STARTS} at once"
        )
    if due:
        permit()
    account.pay([release for _, release in due], [attempt for attempt, _ in due])


def _of_client(config: RunConfig) -> Release:
    return Release(noise_of_clients(config), rate_of_clients(config), 1)


def within(data: ClientData, classes: int) -> ClientData:
    """Return ``data`` without the samples of other classes than the first ``classes``."""

    def kept(split: Split) -> Split:
        fits = split.y < classes
        return split if fits.all() else Split(split.x[fits], split.y[fits])

    parts = (kept(data.train), kept(data.validation), kept(data.test))
    return ClientData(*parts, classes, data.input_shape, data.class_names[:classes])
