"""What releases cost: epsilon of a composition of sampled Gaussian mechanisms, by Opacus's accountants.

Neighbours differ by one item of the sum: by one example more or less, or by a client that sends an update or none.
"""

import math
import warnings
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from common.errors import ConfigError
from common.extras import require

# Beyond it a target says nothing.
LARGEST_EPSILON = 1e4
# How near to the target noise is calibrated: its epsilon is at most the target.
_PRECISION = 1e-3
_MOST_LOG_NOISE = 10.0
# The least delta that is computed with.
_LEAST_DELTA = 1e-100
# The error of ``"prv"`` in epsilon, and in delta as a part of it; and how many values its grids may have together, of
# which each takes about 90 bytes and 2 microseconds.
_PRV_ERROR, _PRV_DELTA_ERROR = 0.01, 1e-3
_MOST_VALUES = 2**24


class Release(NamedTuple):
    """So many times something was released: a sum of vectors of norm at most C over a sample of the data, each item in
    it with probability ``rate``, plus normal noise of standard deviation ``noise`` C in every value.
    """

    noise: float
    rate: float
    steps: int


def composed(releases: Iterable[Release]) -> tuple[Release, ...]:
    """Return the same releases in order of noise and rate, those of the same kind as one."""
    steps: dict[tuple[float, float], int] = {}
    for release in releases:
        kind = (release.noise, release.rate)
        steps[kind] = steps.get(kind, 0) + release.steps
    return tuple(Release(*kind, count) for kind, count in sorted(steps.items()) if count)


def epsilon_of(releases: Iterable[Release], delta: float, accountant: str = "rdp") -> float:
    """Return the epsilon of all ``releases`` together at ``delta``; 0 for none, infinity for one without noise.

    Args:
        releases: in any order.
        delta: above 0 and below 1.
        accountant: ``"rdp"``, Renyi divergences (Mironov et al. 2019); or ``"prv"``, which is tighter and slower:
            privacy loss random variables (Gopi et al. 2021), the upper end of their interval.

    Raises:
        FloretError: the extra ``privacy`` is not installed.
        ConfigError: ``"prv"`` would need more memory than it may have.
    """
    # An accountant may say less than 0 where delta alone is more than it takes.
    return max(0.0, _epsilon_of(composed(releases), delta, accountant))


def epsilon_of_example(examples: Sequence[Release], clients: Sequence[Release], delta: float) -> float:
    """Return the epsilon of one example of a client, of releases that protect examples and of those of whole updates.

    With one example more a clipped update may point the other way: both are within the bound, so up to two bounds
    apart, where ``clients`` counts with one, the distance of an update to none. Of two upper bounds the lower one is
    taken: half the noise, in every round, since what drawing in secret gives is for neighbours of which one sends none;
    or two steps by way of a client that sends none, whose epsilons add up, at ``delta / 2`` and ``delta / 2`` times
    e^-epsilon of the first.

    Args:
        examples, clients: what protects each example, and the whole client, in any order.
        delta: as of ``epsilon_of``; errors, too.
    """
    apart = [Release(release.noise / 2, 1.0, release.steps) for release in clients]
    least = epsilon_of([*examples, *apart], delta)
    first = epsilon_of([*examples, *clients], delta / 2)
    rest = delta / 2 * math.exp(-first)
    return min(least, first + epsilon_of(clients, rest)) if rest > _LEAST_DELTA else least


def check_accountant(releases: Iterable[Release], delta: float, accountant: str) -> None:
    """Check that the epsilon of all ``releases`` together can be computed, without computing it.

    Raises:
        FloretError, ConfigError: as ``epsilon_of``.
    """
    made = composed(releases)
    if accountant == "prv" and made and all(release.noise for release in made):
        require("opacus", "privacy", "privacy.unit")
        values = _grid_values(made, delta)
        if not values <= _MOST_VALUES:
            least, steps = min(release.noise for release in made), sum(release.steps for release in made)
            raise ConfigError(
                f"privacy.accountant = 'prv': {steps} steps with a noise of {least:.3g} need grids of {values:.3g} "
                f"values, and at most {_MOST_VALUES} are permitted; take privacy.accountant = 'rdp', or more "
                "privacy.noise (a smaller privacy.epsilon, where that is calibrated)"
            )


def _grid_values(releases: Sequence[Release], delta: float) -> float:
    """Return how many values the grids have together on which ``"prv"`` composes, one grid for each kind of release.

    As Opacus lays them out: over twice the bound of remark 5.6 of Gopi et al. 2021, in steps that keep the error.
    """
    from common.privacy.opacus import PoissonSubsampledGaussianPRV, compute_safe_domain_size

    error, steps = delta * _PRV_DELTA_ERROR, [release.steps for release in releases]
    losses = [PoissonSubsampledGaussianPRV(release.rate, release.noise) for release in releases]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            bound = float(compute_safe_domain_size(losses, steps, _PRV_ERROR, error))
        except (ArithmeticError, ValueError):
            return math.inf
    return len(releases) * 2 * bound * math.sqrt(sum(steps) * math.log(12 / error) / 2) / _PRV_ERROR


@lru_cache(maxsize=4096)
def _epsilon_of(releases: Sequence[Release], delta: float, accountant: str) -> float:
    if not releases:
        return 0.0
    if any(not release.noise for release in releases):
        return math.inf
    require("opacus", "privacy", "privacy.unit")
    check_accountant(releases, delta, accountant)
    from common.privacy.opacus import PRVAccountant, get_privacy_spent

    # They tell of orders at the end of their range, and divide by zero on the way to a right result.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if accountant == "prv":
            made = PRVAccountant()
            made.history = [tuple(release) for release in releases]
            return float(made.get_epsilon(delta, eps_error=_PRV_ERROR, delta_error=delta * _PRV_DELTA_ERROR))
        # Near one half the series of a fractional order hardly converges; an order less is a bound all the same.
        whole = any(0.45 < release.rate < 0.55 for release in releases)
        divergences = sum(_divergences(release.noise, release.rate, whole) * release.steps for release in releases)
        return float(get_privacy_spent(orders=_orders(whole), rdp=divergences, delta=delta)[0])


def _orders(whole: bool) -> list[float]:
    from common.privacy.opacus import RDPAccountant

    return [*range(2, 64), *range(64, 513, 32)] if whole else RDPAccountant.DEFAULT_ALPHAS


@lru_cache(maxsize=1024)
def _divergences(noise: float, rate: float, whole: bool) -> Any:
    """Return the Renyi divergences of one step: a run asks for the same in every round, and each takes 0.1 s."""
    from common.privacy.opacus import compute_rdp

    return compute_rdp(q=rate, noise_multiplier=noise, steps=1, orders=_orders(whole))


@lru_cache(maxsize=256)
def calibrated(
    epsilon: float, delta: float, rate: float, steps: int, accountant: str = "rdp", beside: tuple[Release, ...] = ()
) -> float:
    """Return the least noise with which ``steps`` releases of ``rate``, and those ``beside`` them, cost ``epsilon``.

    It is the least to a thousandth, and what it costs is at most ``epsilon``; infinity if no noise is enough.

    Raises:
        FloretError, ConfigError: as ``epsilon_of``.
    """

    require("opacus", "privacy", "privacy.unit")
    from scipy.optimize import brentq

    def above(log_noise: float) -> float:
        releases = (Release(math.exp(log_noise), rate, steps), *beside)
        try:
            cost = epsilon_of(releases, delta, accountant)
        except ConfigError:
            # On the way to more noise: never less than what it costs.
            cost = epsilon_of(releases, delta)
        return math.log(max(cost, 1e-9)) - math.log(epsilon)

    low, high = -1.0, 1.0
    while above(high) > 0:
        high += 1.0
        if high > _MOST_LOG_NOISE:
            return math.inf
    while above(low) < 0:
        low -= 1.0
    found = float(brentq(above, low, high, xtol=_PRECISION / 2))
    while above(found) > 0:
        found += _PRECISION / 2
    check_accountant((Release(math.exp(found), rate, steps), *beside), delta, accountant)
    return math.exp(found)
