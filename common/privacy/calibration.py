"""The noise of a run and what it spends, from its config: both halves compute the same."""

import math
from collections.abc import Iterable

from common.config import Privacy, RunConfig
from common.errors import ConfigError
from common.privacy.accounting import LARGEST_EPSILON, Release, calibrated, check_accountant, epsilon_of


def epsilon_spent(privacy: Privacy, releases: Iterable[Release]) -> float:
    """Return the epsilon of ``releases`` as a run tells it, at most ``LARGEST_EPSILON``; errors: ``epsilon_of``."""
    return min(epsilon_of(releases, privacy.delta, privacy.accountant), LARGEST_EPSILON)


def drawn_in_secret(privacy: Privacy) -> bool:
    """Return whether nobody but the server knows whom it draws, each client with the same probability."""
    return privacy.by_server and privacy.sampling == "poisson"


def number_drawn(config: RunConfig, clients: int) -> int:
    """Return how many of so many ``clients`` are to be drawn where that is no secret; it may be more than there are."""
    return max(1, round(config.participation * clients), config.min_replies)


def rate_of_clients(config: RunConfig) -> float:
    """Return the probability of a client to be in a round that amplifies its privacy; 1 where nothing does."""
    return config.participation if drawn_in_secret(config.privacy) else 1.0


def noise_of_clients(config: RunConfig) -> float:
    """Return the noise with which whole clients are protected in every round; errors as of ``calibrated_noise``."""
    return calibrated_noise(config, rate_of_clients(config), config.rounds)


def check_first_round(config: RunConfig) -> None:
    """Check that a run that protects whole clients has enough for its first round.

    Raises:
        ConfigError: as of ``calibrated_noise``, or a round costs more than ``privacy.epsilon``.
    """
    privacy = config.privacy
    cost = epsilon_spent(privacy, [Release(noise_of_clients(config), rate_of_clients(config), 1)])
    if privacy.epsilon and cost > privacy.epsilon:
        raise ConfigError(
            f"privacy.epsilon = {privacy.epsilon:g}: with privacy.noise = {privacy.noise:g} a round costs {cost:.4g}; "
            "take a larger one, more noise, or privacy.noise = 0, which calibrates it"
        )


def calibrated_noise(config: RunConfig, rate: float, steps: int, *beside: Release) -> float:
    """Return ``privacy.noise``, or if that is 0 the noise with which a whole run costs ``privacy.epsilon``.

    Args:
        config: of the run.
        rate, steps: as of ``Release``.
        beside: what the run releases besides.

    Raises:
        ConfigError: no noise is enough for the target, or the accountant cannot compute what the run costs.
    """
    privacy = config.privacy
    if privacy.noise:
        if not privacy.epsilon:  # else the run ends when that is spent
            check_accountant((Release(privacy.noise, rate, steps), *beside), privacy.delta, privacy.accountant)
        return privacy.noise
    noise = calibrated(privacy.epsilon, privacy.delta, rate, steps, privacy.accountant, beside)
    if math.isinf(noise):
        raise ConfigError(
            f"privacy.epsilon = {privacy.epsilon:g}: no noise is enough for it in {config.rounds} rounds; take "
            "a larger one, or fewer rounds"
        )
    return noise
