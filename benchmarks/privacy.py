"""An audit of differential privacy, and what a private step costs: ``python -m benchmarks privacy``.

The audit plays the game that epsilon is about. There are two worlds; in one of them a canary, an example or a client
that is chosen to be the worst, is there besides. In each the real code of a client's round, or of the server's mean, is
run many times, each time with noise of its own, and a test looks at what left and says which world it was. The rates at
which it errs bound epsilon from below: a bound above the claim proves that the claim is wrong; one below it proves
nothing.

The test is fixed before it is judged: its direction from one run of either world without noise, its threshold from a
fifth of the runs. On the others its false positives and false negatives are counted, and each rate gets its upper
Clopper-Pearson bound at 97.5 %, so that both hold together at 95 %. From them follow two bounds:

* ``any_epsilon`` assumes nothing of the mechanism (Kairouz et al. 2015, theorem 2.1; as an audit Jagielski et al. 2020,
  Nasr et al. 2021). From some hundred runs it is far below the truth. Mistakes are judged by it.
* ``gaussian_epsilon`` is nearly tight if what separates the worlds is a shift under normal noise (Nasr et al. 2023,
  section 4.2; Dong et al. 2022). So it is here: the claims audited are those of single releases without sampling. What
  is as it should be is judged by it, which is harder to stay below.
"""

import itertools
import math
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch
from flwr.app import RecordDict
from opacus.grad_sample import GradSampleHooks, GradSampleHooksFastGradientClipping
from scipy.optimize import brentq
from scipy.stats import beta, norm
from torch import nn

import client_app.clipping
from benchmarks import training
from benchmarks.measure import Row, pair
from benchmarks.training import Ours
from client_app.batches import Batch
from client_app.client import FloretClient
from client_app.methods.fedper import FedPer
from client_app.protection import Budget
from client_app.setting import ClientSetting
from client_app.state import ClientState, ContextStore
from client_app.training import Losses
from common.config import RunConfig, read_keys
from common.errors import FloretError
from common.privacy.accounting import epsilon_of
from common.privacy.ledger import Ledger
from common.privacy.noise import Noise
from common.seeds import torch_generator
from common.tensors import NamedArrays
from data import ClientData, Split
from models import build_model
from strategies.core.protection import Protection
from strategies.fedper import FedPer as FedPerStrategy
from tests.harness import run_config

CLASSES, FEATURES, EXAMPLES = 3, 3, 20
HUGE = 1e6
# The statistic of a client that answers with an error: above that of any update.
ERROR = 1e30
CONFIDENCE = 0.95
DELTA = 1e-5
# Runs of each world, where the claim should hold and where a mistake should be found.
RUNS, RUNS_OF_MISTAKES = 1500, 400
KEYS: dict[str, Any] = {
    "method": "fedper",
    "model": "mlp",
    "num_classes": CLASSES,
    "rounds": 1,
    "local_epochs": 1,
    "batch_size": 1000,
    "participation": 1.0,
    "weight_decay": 0.0,
    "privacy__noise": 1.5,
    "privacy__epsilon": 0.0,
    "privacy__delta": DELTA,
    "privacy__accountant": "prv",
    "privacy__head_epochs": 0,
}


# Bounds


class Errors(NamedTuple):
    """Upper bounds of how often a test errs: ``false`` where there is no canary, ``missed`` where there is one."""

    false: float
    missed: float


def upper(count: int, runs: int, confidence: float) -> float:
    """Return what a probability is at most, of which ``count`` of ``runs`` were seen (Clopper and Pearson 1934)."""
    return 1.0 if count == runs else float(beta.ppf(confidence, count + 1, runs - count))


def errors(without: np.ndarray, having: np.ndarray, threshold: float) -> Errors:
    """Return the bounds for the test that sees a canary where the statistic is above ``threshold``."""
    one_sided = (1 + CONFIDENCE) / 2
    false, missed = int((without > threshold).sum()), int((having <= threshold).sum())
    return Errors(upper(false, len(without), one_sided), upper(missed, len(having), one_sided))


def any_epsilon(rates: Errors, delta: float) -> float:
    """Return what epsilon is at least, whatever the mechanism.

    ln((1 - missed - delta) / false), or the same for the test mirrored (Kairouz et al. 2015, theorem 2.1); at least 0.
    """
    false, missed = rates
    right = max((1 - missed - delta) / false, (1 - false - delta) / missed)
    return math.log(max(right, 1.0))


def gaussian_epsilon(rates: Errors, delta: float) -> float:
    """Return what epsilon is at least, if the worlds differ by a shift of mu standard deviations of normal noise.

    mu is at least the quantile of 1 - false minus that of missed (Dong et al. 2022, definition 2.6), and epsilon that
    with which delta is Phi(mu/2 - epsilon/mu) - e^epsilon Phi(-mu/2 - epsilon/mu) (Balle and Wang 2018, theorem 8).
    """
    mu = float(norm.ppf(1 - rates.false) - norm.ppf(rates.missed))
    if mu <= 0:
        return 0.0

    def above(epsilon: float) -> float:
        second = math.exp(epsilon + norm.logcdf(-mu / 2 - epsilon / mu))
        return float(norm.cdf(mu / 2 - epsilon / mu)) - second - delta

    return float(brentq(above, 0.0, mu * mu / 2 + 10 * mu)) if above(0.0) > 0 else 0.0


Bound = Callable[[Errors, float], float]


def bounded(without: np.ndarray, having: np.ndarray, delta: float, bound: Bound) -> float:
    """Return the bound of a threshold midway between the medians of a fifth of the runs, as the others give it.

    Args:
        without, having: the statistic of each run without and with the canary.
        delta: of the claim.
        bound: ``any_epsilon`` or ``gaussian_epsilon``.
    """
    threshold = float(np.median(without[::5]) + np.median(having[::5])) / 2
    without, having = (np.delete(runs, slice(None, None, 5)) for runs in (without, having))
    return bound(errors(without, having, threshold), delta)


# Worlds


class Silent(Noise):
    """No noise: for the one run of each world that says where to look."""

    def normal(self, shape: tuple[int, ...], deviation: float) -> np.ndarray:
        """Return zeros."""
        return np.zeros(shape)

    once = normal


# What left in one run, as one vector, and what was paid for it. The canary is there or not; who makes the noise.
Run = Callable[[bool, Noise], tuple[np.ndarray, float]]


@dataclass(frozen=True)
class Case:
    """An audit.

    Attributes:
        name: what is audited.
        run: makes one run.
        runs: how many of each world.
        sizes: by what the client divides without noise, in the world without and in that with the canary.
        mistake: breaks the mechanism while it lasts.
        bound: by what it is judged.
        above: the bound must be above the claim.
    """

    name: str
    run: Run
    runs: int = RUNS
    sizes: tuple[int, int] = (1, 1)
    mistake: Callable[[], AbstractContextManager[Any]] = nullcontext
    bound: Bound = gaussian_epsilon
    above: bool = False


@dataclass(frozen=True)
class Audit:
    """What came of one."""

    claim: float
    bound: float


def audit(case: Case, delta: float, seed: int = 0) -> Audit:
    """Run a case; ``seed`` is that of all its noise."""
    with case.mistake():
        origin, moved = (case.sizes[canary] * case.run(canary, Silent(0))[0] for canary in (False, True))
        direction = np.nan_to_num(moved - origin, nan=0.0, posinf=0.0)
        direction /= np.linalg.norm(direction) or 1.0
        # In an order in which neither world comes first.
        found: dict[bool, list[float]] = {False: [], True: []}
        claims = []
        for i in range(case.runs):
            for canary in (False, True):
                sent, claim = case.run(canary, Noise.of(seed, case.name, i, int(canary)))
                found[canary].append(statistic(sent, direction))
                claims.append(claim)
    without, having = np.array(found[False]), np.array(found[True])
    return Audit(max(claims), bounded(without, having, delta, case.bound))


def statistic(sent: np.ndarray, direction: np.ndarray) -> float:
    """Return how far what was sent lies along a direction, in units of the deviation of its other values.

    That unit takes away the size of the noisy count of examples, by which the client divides.
    """
    if not np.isfinite(sent).all():
        return ERROR
    along = float(sent @ direction)
    return along / math.sqrt(max(float(sent @ sent) - along**2, 1e-300) / len(sent))


class Client:
    """Rounds of a client of FedPer as a node makes them, each from the beginning with an empty state and ledger.

    Args:
        folder: for ledgers.
        start: the extractor that the server sends.
        without, having: training data without and with the canary.
        cls: the client half.
        keys: of the run.
    """

    def __init__(
        self,
        folder: Path,
        start: NamedArrays,
        without: Split,
        having: Split,
        *,
        cls: type[FloretClient] = FedPer,
        **keys: Any,
    ) -> None:
        self.config = read_keys(RunConfig, run_config(folder, **(KEYS | keys)))
        self._start, self._cls = start, cls
        own = Path(tempfile.mkdtemp(dir=folder))
        self._ledgers = (Ledger(own / f"{number}.jsonl") for number in itertools.count())
        one = Split(torch.zeros(1, FEATURES), torch.zeros(1, dtype=torch.int64))
        self._data = [ClientData(train, one, one, CLASSES, (FEATURES,)) for train in (without, having)]

    def __call__(self, canary: bool, noise: Noise) -> tuple[np.ndarray, float]:
        """Make one round; return what was sent, less what was received, and the epsilon of the ledger.

        What is sent instead of an update, an error, is infinite.
        """
        ledger = next(self._ledgers)
        setting = ClientSetting(
            name="site",
            config=self.config,
            method=FedPerStrategy,
            parameters=None,
            data=self._data[canary],
            state=ClientState(ContextStore(RecordDict())),
            device=torch.device("cpu"),
            ledger=(ledger, Budget(0.0, self.config.privacy.delta)),
        )
        client = self._cls(setting)
        message: dict[str, Any] = {"round": 1, "num-classes": CLASSES, "head-layers": 1}
        message |= {"session.lineage": "audit", "session.resumed": []}
        # Each run waits for the disk else, several times.
        with mock.patch.object(Noise, "secret", return_value=noise), mock.patch("os.fsync"):
            client.begin(message)
            try:
                arrays, _, metrics = client.fit(list(self._start.values()), message | {"names": [*self._start]})
                sent = flat(dict(zip(metrics["names"], arrays, strict=True))) - flat(self._start)
            except FloretError:
                sent = np.full_like(flat(self._start), math.inf)
        spent = [line.release for line in ledger.lines()]
        return sent, epsilon_of(spent, self.config.privacy.delta, self.config.privacy.accountant)


class HeadWithoutNoise(FedPer):
    """The mistake: the head is trained first, without noise as nobody else sees it, and the extractor below it."""

    def train(self) -> float:
        """Train the head as ever, then the extractor by clipped and noised gradients."""
        self.run_epochs(self.config.local_epochs, self.model.head.parameters(), leaves=False)
        return self.run_epochs(self.config.local_epochs, self.model.extractor.parameters())


class Server:
    """Rounds of a server that adds the noise; two clients send, or three."""

    def __init__(self, folder: Path, before: NamedArrays, **keys: Any) -> None:
        values = run_config(folder, **(KEYS | {"privacy__unit": "client", "privacy__where": "server"} | keys))
        self.config = read_keys(RunConfig, values)
        self._before = before
        draws = np.random.default_rng(0)
        # The canary does not clip what it sends: the server has to.
        self._sent = [
            {name: (array + size * draws.standard_normal(array.shape)).astype(np.float32) for name, array in b4.items()}
            for b4, size in ((before, 1e-3), (before, 1e-2), (before, HUGE))
        ]

    def __call__(self, canary: bool, noise: Noise) -> tuple[np.ndarray, float]:
        """Make one round; return what is known of the sum, and the epsilon of the server's account."""
        protection = Protection(self.config, simulated=False)
        with mock.patch.object(Noise, "secret", return_value=noise):
            mean = protection.mean(self._before, len(self._sent), 1)
            for arrays in self._sent[: 3 if canary else 2]:
                mean.add(arrays, 1.0)
            protection.pay(1)
        assert protection.epsilon is not None
        return flat(mean.result()) - flat(self._before), protection.epsilon


def flat(arrays: NamedArrays) -> np.ndarray:
    """Return all tensors as one vector of float64, in the order of their names."""
    return np.concatenate([arrays[name].astype(np.float64).ravel() for name in sorted(arrays)])


# Cases


def extractor(**values: float | Sequence[float]) -> NamedArrays:
    """Return the extractor that a server sends: the first one, but for the tensors given, ``fc1_bias`` for one.

    A sequence is the values of a tensor's columns.
    """
    model = build_model("mlp", (FEATURES,), CLASSES, 1, torch_generator(0, "model"))
    tensors = {name: t.numpy().copy() for name, t in model.state_dict().items() if name.startswith("extractor.")}
    for name, value in values.items():
        tensors[f"extractor.{name.replace('_', '.')}"][:] = value
    return tensors


def examples(row: Sequence[float], label: int = 0, count: int = 1) -> Split:
    """Return ``count`` examples that are all the same."""
    return Split(torch.tensor([row] * count, dtype=torch.float32), torch.full((count,), label))


def both(one: Split, other: Split) -> Split:
    """Return the examples of both."""
    return Split(torch.cat([one.x, other.x]), torch.cat([one.y, other.y]))


def unclipped_gradients() -> AbstractContextManager[Any]:
    """Take the bound from the gradients of examples; the noise stays as it was."""
    real = client_app.clipping.clipping
    return mock.patch("client_app.clipping.clipping", lambda module, bound: real(module, math.inf))


def unclipped_by_node() -> AbstractContextManager[Any]:
    """Take the bound from whole updates where they leave; the noise stays as it was."""
    return mock.patch("client_app.protection.clipped", lambda update, bound: update)


def unclipped_by_server() -> AbstractContextManager[Any]:
    """Take the bound from whole updates where they are added up; the noise stays as it was."""
    return mock.patch("strategies.core.protection.clipped", lambda update, bound: update)


def cases(folder: Path, scale: float = 1.0) -> list[Case]:
    """Return all audits, with ``scale`` times the runs that the benchmark makes.

    *Examples.* The server sends a first layer that hears the first feature alone. The canary is the only example that
    has it: its features, and with them the gradient of an unprotected head, are far larger than those of the others.
    Each example has a feature besides that is not heard and is so large that nearly all of its gradient is that of one
    column of the first layer: what is clipped to the bound leaves in full. That of the others is the second column; in
    which direction it moves depends on the head.

    *Clients.* The server sends layers that are silent unless the third feature is large. A client without it sends an
    update of zero, as one that is not there; the canary a huge one. One of the audits has instead two clients whose
    updates are opposite: that is another neighbourhood than the claim's, at twice the distance.
    """
    right, wrong = (max(int(runs * scale), 2) for runs in (RUNS, RUNS_OF_MISTAKES))
    heard = extractor(fc1_weight=(1.0, 0.0, 0.0), fc1_bias=0.1)
    others = examples((0.0, HUGE, 0.0), count=EXAMPLES)
    everybody = both(others, examples((1e3, 0.0, 1e3 * HUGE), label=1))
    sizes = (len(others), len(everybody))
    example = Client(folder, heard, others, everybody, privacy__unit="example")
    spoilt = Client(folder, heard, others, everybody, cls=HeadWithoutNoise, privacy__unit="example")

    silent = extractor(fc1_weight=(0.0, 0.0, 1.0), fc1_bias=-1.0, fc2_bias=-1.0)
    absent, huge = examples((0.0, 0.0, 0.0)), examples((0.0, 0.0, HUGE))
    node = Client(folder, silent, absent, huge, privacy__unit="client")
    # So large that weights are no numbers any more after a few steps.
    endless = examples((0.0, 0.0, 1e30))
    diverging = Client(folder, silent, absent, endless, privacy__unit="client", local_epochs=5)
    # All layers hear, so that two clients move the same column, one up and one down.
    loud = extractor(fc1_weight=0.0, fc1_bias=0.1)
    opposite = Client(folder, loud, examples((0.0, 0.0, -HUGE)), huge, privacy__unit="client")
    server = Server(folder, extractor())
    found: dict[str, Any] = {"runs": wrong, "bound": any_epsilon, "above": True}
    return [
        Case("example", example, right, sizes),
        Case("example, head without noise", spoilt, sizes=sizes, **found),
        Case("example, no clipping", example, sizes=sizes, mistake=unclipped_gradients, **found),
        Case("client, noise by the node", node, right),
        Case("client, noise by the node, training diverges", diverging, wrong, bound=any_epsilon),
        Case("client, noise by the node, no clipping", node, mistake=unclipped_by_node, **found),
        Case("client, noise by the node, one in the place of another", opposite, wrong, above=True),
        Case("client, noise by the server", server, right),
        Case("client, noise by the server, no clipping", server, mistake=unclipped_by_server, **found),
    ]


def judged(case: Case, found: Audit) -> Row:
    """Return the row of an audit."""
    meaning = f"of the claim, must be {'above' if case.above else 'below'} 1"
    return pair(f"privacy: {case.name}; claim", "epsilon", [(found.bound, found.claim)], meaning)


# The cost of a step


class Private(Ours):
    """A client whose examples are protected, at the beginning of a round that is paid for."""

    def __init__(self, case: training.Case, folder: Path) -> None:
        super().__init__(case, folder, privacy__unit="example", privacy__epsilon=0.0, privacy__noise=1.0)

    def prepare(self) -> None:
        """Do the part of a client's round that precedes local training."""
        super().prepare()
        self.client._pay()


class WithoutNoise(Private):
    """The same, without the drawing of noise: what is left is clipping."""

    def train(self) -> float:
        """Train; return the mean loss."""
        with mock.patch.object(Noise, "normal", Silent.normal):
            return super().train()


class GradientsKept(WithoutNoise):
    """The same, with all gradients of a batch in memory, from which norms and sum follow, by Opacus."""

    def train(self) -> float:
        """Train; return the mean loss."""
        with mock.patch("client_app.clipping.clipping", _keeping):
            return super().train()


class TwoPasses(WithoutNoise):
    """The same by Opacus's ghost clipping: norms from one pass backward, the sum from another."""

    def train(self) -> float:
        """Train; return the mean loss."""
        with mock.patch("client_app.clipping.clipping", _twice):
            return super().train()


class _Keeping:
    """In the place of ``Clipping``."""

    def __init__(self, hooks: GradSampleHooks, bound: float) -> None:
        self._hooks, self._bound = hooks, bound

    def sum_gradients(self, parameters: Sequence[Any], losses: Losses, batch: Batch) -> float:
        """Leave the sum in the parameters' ``grad`` and return the sum of the losses."""
        total = losses(batch).sum()
        torch.autograd.backward([total])
        norms = torch.stack([p.grad_sample.flatten(1).norm(dim=1) for p in parameters]).norm(dim=0)
        factors = (self._bound / (norms + 1e-6)).clamp(max=1.0)
        for parameter in parameters:
            parameter.grad = torch.einsum("i,i...", factors, parameter.grad_sample)
            parameter.grad_sample = None
        return float(total.detach())


class _Twice:
    """In the place of ``Clipping``."""

    def __init__(self, hooks: GradSampleHooksFastGradientClipping) -> None:
        self._hooks = hooks

    def sum_gradients(self, parameters: Sequence[Any], losses: Losses, batch: Batch) -> float:
        """Leave the sum in the parameters' ``grad`` and return the sum of the losses."""
        self._hooks.enable_hooks()
        values = losses(batch)
        torch.autograd.backward([values.sum()], retain_graph=True)
        factors = self._hooks.get_clipping_coef()
        for parameter in parameters:
            parameter.grad = None
        self._hooks.disable_hooks()
        torch.autograd.backward([(values * factors).sum()])
        return float(values.detach().sum())


@contextmanager
def _keeping(module: nn.Module, bound: float) -> Iterator[_Keeping]:
    hooks = GradSampleHooks(module, loss_reduction="sum")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield _Keeping(hooks, bound)
    hooks.remove_hooks()


@contextmanager
def _twice(module: nn.Module, bound: float) -> Iterator[_Twice]:
    hooks = GradSampleHooksFastGradientClipping(module, max_grad_norm=bound, loss_reduction="sum")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield _Twice(hooks)
    hooks.remove_hooks()


def steps(repeats: int) -> Iterator[Row]:
    """Give what a private step costs beside one without privacy, in milliseconds of CPU for 64 samples."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for model in ("mlp", "cnn2", "cnn3", "cnn5"):
            case = training.Case("fedper", model, 64, 640)
            sides = [
                Ours(case, folder),
                *(cls(case, folder) for cls in (Private, WithoutNoise, TwoPasses, GradientsKept)),
            ]
            samples = [[_milliseconds(side, case) for side in sides] for _ in range(max(repeats, 7))]
            for place, how in enumerate(
                ("", *(f", without noise{how}" for how in ("", ", two passes", ", gradients kept"))), 1
            ):
                title = f"privacy: a step of {model}, batch 64{how}; no privacy"
                yield pair(title, "ms", [(own[place], own[0]) for own in samples], "times as long")


def _milliseconds(side: Ours, case: training.Case) -> float:
    side.prepare()
    started = time.process_time()
    side.train()
    return 1e3 * (time.process_time() - started) * case.batch_size / (training.EPOCHS * case.samples)


def run(repeats: int) -> list[Row]:
    """Return the rows of this benchmark."""
    torch.set_num_threads(1)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for case in cases(Path(folder)):
            rows.append(judged(case, audit(case, DELTA)))
            _tell(rows[-1])
    for row in steps(repeats):
        rows.append(row)
        _tell(row)
    return rows


def _tell(row: Row) -> None:
    print(f"  {row.name}: {row.ours:.3g} {row.unit}, {row.ratio:.3g}", file=sys.stderr, flush=True)
